"""What supervisors and the coordinator tell each other: tables in JSON, one to a line. Nothing is ever executed.

A supervisor says hello (who it is, and of which run, if a coordinator that is gone has taken it in already), alive,
exited (a rank of its ended), done (all of them ended well), leaving (it was asked to go) and stalled (which ranks stand
still). The coordinator says welcome (where the store is, and whether the coordinator may be started again), alive, and
goodbye (why the supervisor has to end its ranks and itself), which also says that exited or done has been heard.
"""

from __future__ import annotations

import contextlib
import json
import socket
from typing import Any

VERSION = 3
LONGEST = 1 << 18  # bytes of a line
FOREIGN = "the other end does not speak this protocol"
AHEAD = 5.0  # signs of life in each heartbeat


class Line:
    """One end of a connection. Sends do not block: what the other end does not take is lost with the connection."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        connection.setblocking(False)
        with contextlib.suppress(OSError):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._read = b""
        self.closed = ""  # why, once it is

    def say(self, kind: str, **values: Any) -> None:
        """Sends a table. Where that fails, `closed` says why."""
        if self.closed:
            return
        raw = json.dumps({"kind": kind, **values}).encode() + b"\n"
        try:
            if self.socket.send(raw) < len(raw):
                self.closed = "the other end takes nothing more"
        except OSError as error:
            self.closed = error.strerror or str(error)

    def hear(self) -> list[dict[str, Any]]:
        """The tables that have come. Where the connection has ended, `closed` says why."""
        try:
            while raw := self.socket.recv(1 << 16):
                self._read += raw
                if len(self._read) > LONGEST and b"\n" not in self._read:
                    self.closed = FOREIGN
                    return []
            self.closed = self.closed or "the connection was closed"
        except BlockingIOError:
            pass
        except OSError as error:
            self.closed = error.strerror or str(error)
        *lines, self._read = self._read.split(b"\n")
        found: list[dict[str, Any]] = []
        for line in lines:
            try:
                table = json.loads(line)
            except (ValueError, RecursionError):
                table = None
            if not isinstance(table, dict) or not isinstance(table.get("kind"), str):
                self.closed = FOREIGN
                return found
            found.append(table)
        return found

    def close(self) -> None:
        self.closed = self.closed or "closed here"
        with contextlib.suppress(OSError):
            self.socket.close()
