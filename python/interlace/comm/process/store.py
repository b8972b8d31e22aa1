"""TCPStore of the processes, bound to the given address only.

A TCPStore that torch opens by itself listens on every interface of the machine. Anyone who can reach it could read and
write the ranks' messages.
"""

from __future__ import annotations

import ipaddress
import socket
from datetime import timedelta
from typing import Any

import torch.distributed as dist


def tcp_store(host: str, port: int, rank: int, world: int, timeout: float, wait: bool = True) -> dist.TCPStore:
    """The store of `world` ranks: rank 0 serves it at `host`:`port`, the others connect.

    wait: return when all ranks have connected; False: when this one has.

    Raises:
        OSError: on rank 0, `host` is no address of this machine, or the port is taken. RuntimeError (torch's own): a
            rank did not connect within `timeout` seconds.
    """
    seconds = timedelta(seconds=timeout)
    if rank > 0:
        return dist.TCPStore(host, port, world, False, timeout=seconds, wait_for_workers=wait)
    listening = listen_on(host, port)
    # Detached: the store now owns it and closes it, also if it fails to start.
    descriptor = listening.detach()
    return dist.TCPStore(host, port, world, True, seconds, wait_for_workers=wait, master_listen_fd=descriptor)


def is_loopback(host: str) -> bool:
    """True if the address of `host` can be reached from this machine only."""
    return ipaddress.ip_address(_addresses(host, 0)[0][1][0]).is_loopback


def listen_on(host: str, port: int) -> socket.socket:
    """Listens on one address of this machine; port 0: any free port. Raises OSError with the address."""
    failure = OSError(f"{host} has no address")
    for family, address in _addresses(host, port):
        listening = socket.socket(family, socket.SOCK_STREAM)
        try:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind(address)
            listening.listen(socket.SOMAXCONN)
            return listening
        except OSError as error:
            listening.close()
            failure = OSError(f"cannot listen on {address[0]} port {port} ({error.strerror})")
    raise failure


def _addresses(host: str, port: int) -> list[tuple[int, Any]]:
    """(family, address) pairs of a host name or number, IPv4 first, which every rank can reach."""
    infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return sorted(((family, address) for family, _, _, _, address in infos), key=lambda pair: pair[0] != socket.AF_INET)
