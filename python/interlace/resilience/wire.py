"""Messages between supervisors and coordinator: JSON tables, one per line. Received data is never executed.

From a supervisor:

- hello: its identity, and its run if a previous coordinator has admitted it
- alive: heartbeat
- exited: a rank has failed
- done: all ranks have ended successfully
- leaving: the node was asked to leave
- stalled: list of stalled ranks

From the coordinator:

- welcome: port of the store, and the identity of the run if the coordinator can be restarted
- alive: heartbeat
- goodbye: reason why the supervisor must end its ranks and itself; also acknowledges exited and done
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import socket
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

VERSION = 3
LONGEST = 1 << 18  # largest line, bytes
FOREIGN = "the peer does not use this protocol"
AHEAD = 5.0  # alive messages per heartbeat
T = TypeVar("T")


def from_table(kind: type[T], table: object) -> T:
    """A dataclass from a received table with exactly its fields, of its types. Raises ValueError."""
    types = get_type_hints(kind)
    try:
        if not isinstance(table, dict) or table.keys() != types.keys():
            raise ValueError(f"expected the keys {', '.join(types)}, got {table!r:.200}")
        return kind(**{key: _typed(types[key], value) for key, value in table.items()})
    except ValueError as error:
        raise ValueError(f"invalid {kind.__name__.lower()} ({error})") from error


def _typed(kind: Any, value: Any) -> Any:
    """A value of JSON as `kind`: a number, text, Literal, tuple or dataclass; of another kind as it is."""
    if get_origin(kind) is Literal:
        return one_of(kind, value)
    if get_origin(kind) is tuple:
        return tuple(_typed(get_args(kind)[0], each) for each in _typed(list, value))
    if dataclasses.is_dataclass(kind):
        return from_table(kind, value)  # type: ignore[arg-type]
    if kind is float and type(value) is int:
        return float(value)
    if kind in (bool, int, float, str, list) and type(value) is not kind:
        raise ValueError(f"expected {kind.__name__}, got {value!r:.100}")
    return value


def one_of(kind: Any, value: Any) -> Any:
    """`value`, one of a Literal. Raises ValueError."""
    if value not in get_args(kind):
        raise ValueError(f"expected one of {', '.join(get_args(kind))}, got {value!r:.100}")
    return value


class Line:
    """One end of a connection. Sends do not block; a failed send closes the connection."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        connection.setblocking(False)
        with contextlib.suppress(OSError):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._read = b""
        self.closed = ""  # reason, once closed

    def say(self, kind: str, **values: Any) -> None:
        """Sends a table. On failure, `closed` has the reason."""
        if self.closed:
            return
        raw = json.dumps({"kind": kind, **values}).encode() + b"\n"
        try:
            if self.socket.send(raw) < len(raw):
                self.closed = "the peer no longer reads"
        except OSError as error:
            self.closed = error.strerror or str(error)

    def hear(self) -> list[dict[str, Any]]:
        """Received tables. If the connection has ended, `closed` has the reason."""
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
        tables: list[dict[str, Any]] = []
        for line in lines:
            try:
                table = json.loads(line)
            except (ValueError, RecursionError):
                table = None
            if not isinstance(table, dict) or not isinstance(table.get("kind"), str):
                self.closed = FOREIGN
                return tables
            tables.append(table)
        return tables

    def close(self) -> None:
        self.closed = self.closed or "closed here"
        with contextlib.suppress(OSError):
            self.socket.close()
