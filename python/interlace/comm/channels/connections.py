"""Tracks the TCP connections of a process, so that another thread can cut them.

A gloo wait ends only when its connection closes or its timeout expires. Torch cannot end it from outside: `abort` of a
gloo group returns at once and has no effect on waits (torch 2.13). A dead machine closes no connections. So after
learning that a peer is gone, a thread shuts down the sockets of the groups. Every wait on them then fails within
milliseconds, here and at the peers. Linux only; elsewhere no sockets are found, and waits last until their timeout.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat


class Connections:
    """The TCP connections that this process makes from here on, until `note` is called."""

    def __init__(self) -> None:
        self._before = set(_sockets().values())
        self._noted: set[int] | None = None

    def note(self) -> None:
        """Ends recording: later connections are not included."""
        self._noted = set(_sockets().values()) - self._before

    def cut(self) -> int:
        """Shuts the connections down; returns their number. Callable from any thread, repeatedly."""
        count = 0
        for number, inode in _sockets().items():
            if inode not in self._before and (self._noted is None or inode in self._noted):
                count += _shut(number, inode)
        return count


def cut_to(host: str, port: int) -> None:
    """Shuts down the connections of this process to an address."""
    with contextlib.suppress(OSError):
        addresses = {str(address[0]) for *_, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)}
        for number, inode in _sockets().items():
            if _is_to(number, addresses, port):
                _shut(number, inode)


def _is_to(number: int, hosts: set[str], port: int) -> bool:
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(number)) as own:
        host, to = own.getpeername()[:2]
        return to == port and host.removeprefix("::ffff:") in hosts  # IPv4-mapped IPv6 address
    return False


def _sockets() -> dict[int, int]:
    """File descriptors of connected TCP sockets -> their inodes, which are unique."""
    sockets = {}
    with contextlib.suppress(OSError):
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                status = os.fstat(int(name))
                if stat.S_ISSOCK(status.st_mode) and _is_connection(int(name)):
                    sockets[int(name)] = status.st_ino
    return sockets


def _is_connection(number: int) -> bool:
    with socket.socket(fileno=os.dup(number)) as own:
        own.getpeername()  # raises for a listening socket
        return own.family in (socket.AF_INET, socket.AF_INET6) and own.type == socket.SOCK_STREAM


def _shut(number: int, inode: int) -> bool:
    """Shuts down `number` if it is still that socket; returns whether it was (its owner may have closed it)."""
    try:
        with socket.socket(fileno=os.dup(number)) as own:
            if os.fstat(own.fileno()).st_ino != inode:
                return False
            own.shutdown(socket.SHUT_RDWR)
            return True
    except OSError:
        return False
