"""State of a coordinator on disk, for restarts: `interlace coordinator --state`.

All state except votes changes rarely; it is written as a whole to a draft, which then replaces the file. A decided vote
is appended as one line. Both are on disk before they are published, so every published decision is in the file. A
truncated last line was never published and is ignored.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from uuid import uuid4

from interlace.resilience.errors import ResilienceError
from interlace.resilience.generation import Decision

FORMAT = 1
PASSING = 5.0  # seconds to wait for an ending coordinator to release the file
MOST_LINES = 4096  # decided votes after which the file is rewritten, with the last one only


class StateFile:
    """State file of one run, locked by this process for its lifetime.

    run: unique id of the run. starts: number of coordinator starts of the run, including this one.
    store_port: port of the store, 0 if unknown. table: state of the authority, None before the first node.
    decided: the last decided vote.

    Raises OSError; ResilienceError if the file is not the state of a run, or another coordinator has locked it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.run, self.starts, self.store_port = uuid4().hex[:12], 1, 0
        self.table: Mapping[str, Any] | None = None
        self.decided: Decision | None = None
        self._file, self._lines = -1, 0
        self._lock = os.open(path.with_name(f"{path.name}.lock"), os.O_RDWR | os.O_CREAT, 0o644)
        try:
            self._lock_state()
            if path.exists():
                self._read()
        except BaseException:
            os.close(self._lock)
            raise

    def save(self, table: Mapping[str, Any] | None) -> None:
        """Writes the whole state; it is on disk when this returns."""
        self.table = table
        contents = {
            "interlace coordinator": FORMAT,
            "run": self.run,
            "starts": self.starts,
            "store_port": self.store_port,
            "state": table,
            "decided": self.decided,
        }
        draft = self.path.with_name(f"{self.path.name}.draft")
        file = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o644)
        try:
            _write(file, contents)
            os.replace(draft, self.path)
        except BaseException:
            os.close(file)
            raise
        self._close_file()
        self._file, self._lines = file, 0
        folder = os.open(self.path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def decide(self, decided: Decision) -> None:
        """Writes a decided vote; it is on disk when this returns."""
        self.decided = decided
        if self._file < 0 or self._lines >= MOST_LINES:
            self.save(self.table)
        else:
            _write(self._file, decided)
            self._lines += 1

    def close(self) -> None:
        self._close_file()
        os.close(self._lock)

    def _lock_state(self) -> None:
        deadline = time.monotonic() + PASSING
        while True:
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise ResilienceError(
                        f"{self.path} is in use by a running coordinator: stop that one first"
                    ) from None
            time.sleep(0.1)

    def _close_file(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _read(self) -> None:
        first, *lines = self.path.read_bytes().split(b"\n")
        if not lines:
            raise self._broken("its first line is truncated")
        try:
            contents = json.loads(first)
            number = contents["interlace coordinator"]
            if number != FORMAT:
                raise self._broken(f"its format is {number!r:.20}, this version of Interlace uses {FORMAT}")
            self.run, self.store_port = str(contents["run"]), int(contents["store_port"])
            self.starts = int(contents["starts"]) + 1
            self.table, decided = contents["state"], contents["decided"]
            if self.table is not None and not isinstance(self.table, dict):
                raise ValueError("its state is not a table")
            *lines, _cut_short = lines  # after the last line feed: nothing, or a truncated line, never published
            for line in lines:
                decided = json.loads(line)
            self.decided = None if decided is None else Decision.from_table(decided)
        except (ValueError, TypeError, KeyError) as error:
            raise self._broken(f"{type(error).__name__}: {error}") from error

    def _broken(self, cause: str) -> ResilienceError:
        return ResilienceError(
            f"{self.path}: invalid coordinator state ({cause}): use another file, or remove this one and resume the "
            "run from its last checkpoint"
        )


def _write(file: int, what: Any) -> None:
    raw = json.dumps(what).encode() + b"\n"
    while raw:
        raw = raw[os.write(file, raw) :]
    os.fsync(file)
