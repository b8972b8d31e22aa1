"""TCP socket state from the kernel (Linux): listening addresses of this process, and unread bytes."""

from __future__ import annotations

import os
from pathlib import Path

LOOPBACK = "0100007F"  # 127.0.0.1 as /proc writes it


def listens_on() -> set[tuple[str, int]]:
    """(address as /proc writes it, port) of every listening TCP socket of this process."""
    sockets = set()
    for number in os.listdir("/proc/self/fd"):
        try:
            sockets.add(os.readlink(f"/proc/self/fd/{number}").removeprefix("socket:[").rstrip("]"))
        except OSError:
            continue
    result = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in sockets:
                address, port = fields[1].split(":")
                result.add((address, int(port, 16)))
    return result


def unread(port: int) -> int:
    """Unread bytes in the receive queue of this port, sent from this machine."""
    result = 0
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            _, own, _, _, queues, *_ = line.split()
            if int(own.rpartition(":")[2], 16) == port:
                result += int(queues.rpartition(":")[2], 16)
    return result
