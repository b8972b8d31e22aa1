"""What a rank did last, for the case that it is the last: a ring of events, written to a file when the run fails.

    token = recorder.begin("receive", tag, (peer,))      # 0.4 us with its end: always on
    ...
    recorder.end(token)

An event that was begun and not ended is what the rank was waiting for (or computing). `dump` writes one JSON file per
rank; `interlace doctor --crash FOLDER` reads all of them and says who waited for whom. In an elastic run the same
events go to the rank's progress page, by which its supervisor finds it hanging.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence
from pathlib import Path
from time import time_ns
from typing import Any, Protocol

VERSION = 1
LONGEST = 500  # characters of a text
_NOBODY: tuple[int, ...] = ()
_WAITS = frozenset({"receive", "wait", "finish"})  # kinds in which the rank does nothing but wait


class Page(Protocol):
    """Where a rank shows at once what it does: `interlace.resilience.progress.ProgressPage`."""

    def tick(self) -> None: ...
    def computing(self, lane: Sequence[int] = ()) -> None: ...
    def waiting(self, ranks: Sequence[int]) -> None: ...
    def idle(self, what: str, seconds: float) -> None: ...


_page: Page | None = None


def use_page(page: Page | None) -> None:
    """Makes a page the one of this process, whose one rank writes it wherever it works or waits; None: none."""
    global _page
    _page = page


def page_in_use() -> Page | None:
    """The page of this process; None outside of an elastic run."""
    return _page


class FlightRecorder:
    """The last ``capacity`` events of one rank. Written by the rank's thread; `dump` may be called by another.

    Args:
        rank: this one.
        capacity: events that are kept.
        world: how many ranks there are, where it is known: so that a reader misses those that left no file.
    """

    def __init__(self, rank: int, capacity: int = 1000, world: int = 0) -> None:
        if capacity < 1:
            raise ValueError(f"capacity must be at least 1, got {capacity}")
        self.rank, self.capacity, self.world = rank, capacity, world
        self.begun = 0  # events so far; the next one's token
        self._events: list[tuple[int, str, object, Sequence[int], int]] = [(-1, "", "", _NOBODY, 0)] * capacity
        self._ends = [0] * capacity
        self._page = page_in_use()
        self._lane: Sequence[int] = _NOBODY  # ranks of the lane whose work is in progress

    def begin(self, kind: str, what: object, ranks: Sequence[int] = _NOBODY) -> int:
        """An event begins; returns its token.

        kind: such as "receive"; "compute" for work, of this rank alone or of a lane; "wait" and "finish" where it waits
        for what it began before. what: becomes text in `dump`, so it must not change. ranks: who takes part: of a send
        or receive the peer, of a collective all of its ranks, of a lane's work those of the lane.
        """
        token = self.begun
        self.begun = token + 1
        place = token % self.capacity
        self._ends[place] = 0
        self._events[place] = token, kind, what, ranks, time_ns()
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
        """The event is over; nothing happens if it has left the ring."""
        place = token % self.capacity
        if self._events[place][0] == token:
            self._ends[place] = time_ns()
            kind = self._events[place][1]
            if self._page is not None and kind in _WAITS:
                self._page.computing(self._lane)
            elif self._page is not None and kind == "compute" and self._lane:
                self._lane = _NOBODY
                self._page.computing()

    def events(self) -> list[dict[str, Any]]:
        """What the ring holds, oldest first: id, kind, what, ranks, begin, end (wall clock in seconds), state."""
        found = sorted(zip(self._events, self._ends, strict=True), key=lambda pair: pair[0][0])
        return [
            {
                "id": token, "kind": kind, "what": str(what)[:LONGEST], "ranks": [int(rank) for rank in ranks],
                "begin": begin / 1e9, "end": end / 1e9 if end else None, "state": "done" if end else "waiting",
            }
            for (token, kind, what, ranks, begin), end in found
            if token >= 0
        ]  # fmt: skip

    def dump(self, folder: Path, error: str) -> Path:
        """Writes rank-N.json into ``folder`` (made if need be) and returns its path. error: why, as the user sees it.

        Raises OSError.
        """
        table = {
            "version": VERSION, "rank": self.rank, "world": self.world, "host": platform.node(), "pid": os.getpid(),
            "time": time_ns() / 1e9, "error": error[: 10 * LONGEST], "events": self.events(),
        }  # fmt: skip
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"rank-{self.rank}.json"
        draft = folder / f".rank-{self.rank}.{os.getpid()}.tmp"
        draft.write_text(json.dumps(table))
        os.replace(draft, path)  # a reader finds a whole file or none
        return path
