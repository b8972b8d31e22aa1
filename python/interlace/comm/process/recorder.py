"""Flight recorder: the last events of a rank in a ring, written to a file when the run fails.

    token = recorder.begin("receive", tag, (peer,))      # 0.4 us including its end: always on
    ...
    recorder.end(token)

An event without an end is the one the rank was waiting in (or computing). `dump` writes one JSON file per rank;
`interlace doctor crash RUN` reads all of them and reports which rank waited for which. In an elastic run the same
events go to the rank's progress page, from which its supervisor detects hangs.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence
from pathlib import Path
from time import time_ns
from typing import Any, Protocol

from interlace._files import write_whole

VERSION = 1
LONGEST = 500  # characters of a text
_NO_RANKS: tuple[int, ...] = ()
_WAITS = frozenset({"receive", "wait", "finish"})  # kinds in which the rank only waits


class Page(Protocol):
    """Live progress of a rank: `interlace.resilience.supervisor.progress.ProgressPage`."""

    def tick(self) -> None: ...
    def computing(self, lane: Sequence[int] = ()) -> None: ...
    def waiting(self, ranks: Sequence[int]) -> None: ...
    def idle(self, what: str, seconds: float) -> None: ...


_page: Page | None = None


def use_page(page: Page | None) -> None:
    """Sets the page of this process; the process's single rank updates it when it works or waits. None: no page."""
    global _page
    _page = page


def page_in_use() -> Page | None:
    """The page of this process; None outside of an elastic run."""
    return _page


class FlightRecorder:
    """The last ``capacity`` events of one rank. The rank's thread writes; `dump` may be called by another thread.

    Args:
        rank: this rank.
        capacity: number of events that are kept.
        world: number of ranks, if known, so that a reader can detect missing files.
    """

    def __init__(self, rank: int, capacity: int = 1000, world: int = 0) -> None:
        if capacity < 1:
            raise ValueError(f"capacity must be at least 1, got {capacity}")
        self.rank, self.capacity, self.world = rank, capacity, world
        self.begun = 0  # events so far; the next one's token
        self._events: list[tuple[int, str, object, Sequence[int], int]] = [(-1, "", "", _NO_RANKS, 0)] * capacity
        self._ends = [0] * capacity
        self._page = page_in_use()
        self._lane: Sequence[int] = _NO_RANKS  # ranks of the lane whose work is in progress

    def begin(self, kind: str, operation: object, ranks: Sequence[int] = _NO_RANKS) -> int:
        """An event begins; returns its token.

        kind: such as "receive"; "compute" for work, of this rank alone or of a lane; "wait" and "finish" for waits for
        earlier events.
        operation: converted to text in `dump`, so it must not change.
        ranks: participants: the peer of a send or receive, all ranks of a collective, the ranks of a lane for its work.
        """
        token = self.begun
        self.begun = token + 1
        slot = token % self.capacity
        self._ends[slot] = 0
        self._events[slot] = token, kind, operation, ranks, time_ns()
        if self._page is not None:
            if kind in _WAITS:
                self._page.waiting(ranks)
            elif kind == "compute" and ranks:
                self._lane = ranks
                self._page.computing(ranks)
            else:
                self._page.tick()
        return token

    def end(self, token: int) -> None:
        """The event has ended. No-op if it is no longer in the ring."""
        slot = token % self.capacity
        if self._events[slot][0] == token:
            self._ends[slot] = time_ns()
            kind = self._events[slot][1]
            if self._page is not None and kind in _WAITS:
                self._page.computing(self._lane)
            elif self._page is not None and kind == "compute" and self._lane:
                self._lane = _NO_RANKS
                self._page.computing()

    def events(self) -> list[dict[str, Any]]:
        """The events in the ring, oldest first: id, kind, what, ranks, begin, end (wall clock in seconds), state."""
        pairs = sorted(zip(self._events, self._ends, strict=True), key=lambda pair: pair[0][0])
        return [
            {
                "id": token, "kind": kind, "what": str(operation)[:LONGEST], "ranks": [int(rank) for rank in ranks],
                "begin": begin / 1e9, "end": end / 1e9 if end else None, "state": "done" if end else "waiting",
            }
            for (token, kind, operation, ranks, begin), end in pairs
            if token >= 0
        ]  # fmt: skip

    def dump(self, folder: Path, error: str) -> Path:
        """Writes rank-N.json into ``folder`` (created if needed) and returns its path. error: shown to the user.

        Raises OSError.
        """
        table = {
            "version": VERSION, "rank": self.rank, "world": self.world, "host": platform.node(), "pid": os.getpid(),
            "time": time_ns() / 1e9, "error": error[: 10 * LONGEST], "events": self.events(),
        }  # fmt: skip
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"rank-{self.rank}.json"
        write_whole(path, json.dumps(table))
        return path
