"""The connections that a process makes, so that another of its threads can cut them.

A wait of gloo ends when its connection does, or its time is up, and torch has no way to end it from outside:
`abort` of a gloo group returns at once and wakes nobody (torch 2.13). So who learns that a peer is gone, whose
machine closes no connection any more, shuts the sockets of the groups down: every wait on them fails within
milliseconds, here and at the peers. Linux only; elsewhere nothing is found, and waits last for their timeout.
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
        """All have been made: others that come later are not these."""
        self._noted = set(_sockets().values()) - self._before

    def cut(self) -> int:
        """Shuts them down; returns how many there were. From any thread, and more than once."""
        count = 0
        for number, inode in _sockets().items():
            if inode not in self._before and (self._noted is None or inode in self._noted):
                count += _shut(number, inode)
        return count


def cut_to(host: str, port: int) -> int:
    """Shuts down the connections of this process to an address; returns how many there were."""
    with contextlib.suppress(OSError):
        there = {str(address[0]) for *_, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)}
        found = [each for each in _sockets().items() if _is_to(each[0], there, port)]
        return sum(_shut(*each) for each in found)
    return 0


def _is_to(number: int, hosts: set[str], port: int) -> bool:
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(number)) as own:
        host, to = own.getpeername()[:2]
        return to == port and host.removeprefix("::ffff:") in hosts  # IPv4 as IPv6 has it
    return False


def _sockets() -> dict[int, int]:
    """File descriptors of connected TCP sockets -> their inodes, which no two sockets share."""
    found = {}
    with contextlib.suppress(OSError):
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                status = os.fstat(int(name))
                if stat.S_ISSOCK(status.st_mode) and _is_connection(int(name)):
                    found[int(name)] = status.st_ino
    return found


def _is_connection(number: int) -> bool:
    with socket.socket(fileno=os.dup(number)) as own:
        own.getpeername()  # raises for one that listens
        return own.family in (socket.AF_INET, socket.AF_INET6) and own.type == socket.SOCK_STREAM


def _shut(number: int, inode: int) -> bool:
    """Whether `number` is still that socket: whoever owns it may have closed it meanwhile."""
    try:
        with socket.socket(fileno=os.dup(number)) as own:
            if os.fstat(own.fileno()).st_ino != inode:
                return False
            own.shutdown(socket.SHUT_RDWR)
            return True
    except OSError:
        return False
