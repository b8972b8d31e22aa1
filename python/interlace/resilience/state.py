"""What a coordinator writes down, so that one that is started again takes up its run: `interlace coordinator --state`.

Everything but votes changes seldom and is written anew as a whole, into a draft that then takes the file's place. A
decided vote is a line more, for which the file is not written anew. Either is on the disk before anybody hears of it:
what was told to some and is not here cannot be. A last line that was cut short told nobody anything, and is left out.
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
PASSING = 5.0  # seconds in which a coordinator that is being ended may still have the file
MOST_LINES = 4096  # decided votes after which the file is written anew, with the last one alone


class StateFile:
    """The file of one run, which this process alone may write as long as it lives.

    run: what tells this run from others. starts: how often a coordinator of it was started, this one included.
    store_port: where ranks connect, 0 before that is known. table: what the authority keeps, None before
    the first node comes. decided: the last vote.

    Raises OSError; ResilienceError when the file is no state of a run, or another coordinator has it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.run, self.starts, self.store_port = uuid4().hex[:12], 1, 0
        self.table: Mapping[str, Any] | None = None
        self.decided: Decision | None = None
        self._file, self._lines = -1, 0
        self._lock = os.open(path.with_name(f"{path.name}.lock"), os.O_RDWR | os.O_CREAT, 0o644)
        try:
            self._take()
            if path.exists():
                self._read()
        except BaseException:
            os.close(self._lock)
            raise

    def save(self, table: Mapping[str, Any] | None) -> None:
        """Writes all down: it is on the disk when this returns."""
        self.table = table
        whole = {
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
            _write(file, whole)
            os.replace(draft, self.path)
        except BaseException:
            os.close(file)
            raise
        self._let_go()
        self._file, self._lines = file, 0
        folder = os.open(self.path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def decide(self, decided: Decision) -> None:
        """Writes a decided vote down: it is on the disk when this returns."""
        self.decided = decided
        if self._file < 0 or self._lines >= MOST_LINES:
            self.save(self.table)
        else:
            _write(self._file, decided)
            self._lines += 1

    def close(self) -> None:
        self._let_go()
        os.close(self._lock)

    def _take(self) -> None:
        deadline = time.monotonic() + PASSING
        while True:
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise ResilienceError(
                        f"{self.path} belongs to a coordinator that runs: end that one first"
                    ) from None
            time.sleep(0.1)

    def _let_go(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _read(self) -> None:
        first, *lines = self.path.read_bytes().split(b"\n")
        if not lines:
            raise self._broken("its first line was cut short")
        try:
            whole = json.loads(first)
            number = whole["interlace coordinator"]
            if number != FORMAT:
                raise self._broken(f"it is of format {number!r:.20}, this Interlace writes {FORMAT}")
            self.run, self.starts, self.store_port = (
                str(whole["run"]),
                int(whole["starts"]) + 1,
                int(whole["store_port"]),
            )
            self.table, found = whole["state"], whole["decided"]
            if self.table is not None and not isinstance(self.table, dict):
                raise ValueError("its state is no table")
            *lines, _cut_short = lines  # behind the last line feed is nothing, or a line that nobody was told
            for line in lines:
                found = json.loads(line)
            self.decided = None if found is None else Decision.from_table(found)
        except (ValueError, TypeError, KeyError) as error:
            raise self._broken(f"{type(error).__name__}: {error}") from error

    def _broken(self, why: str) -> ResilienceError:
        return ResilienceError(
            f"{self.path} is no state of a run that can be taken up ({why}): give another file, or remove this one and "
            "resume the run from its last checkpoint"
        )


def _write(file: int, what: Any) -> None:
    raw = json.dumps(what).encode() + b"\n"
    while raw:
        raw = raw[os.write(file, raw) :]
    os.fsync(file)
