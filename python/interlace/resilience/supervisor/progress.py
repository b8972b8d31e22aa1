"""Progress page: current activity of a rank, in a small shared file that its supervisor reads.

The training thread writes it at every action and around every wait. (A helper thread would keep running in a process
that hangs.) A write is a few stores into shared memory, about a microsecond, without system calls or locks. Readers
retry if the page changes while they read.

The page has no timestamps. The reader notes on its own clock when the counter last changed, and subtracts time in which
it was suspended itself.
"""

from __future__ import annotations

import contextlib
import mmap
import struct
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

State = Literal["starting", "idle", "computing", "waiting", "computing in a lane"]
STATES: tuple[State, ...] = get_args(State)
MOST_RANKS = 64  # most ranks listed as waited for; only the first ones if there are more
LONGEST = 80  # most bytes of a text
_FIXED = struct.Struct("<QQQQQdQ")  # sequence, counter, state, thread, generation, seconds allowed, ranks waited for
_RANKS = struct.Struct(f"<{MOST_RANKS}q")
_TEXT_AT = _FIXED.size + _RANKS.size
SIZE = _TEXT_AT + LONGEST
_SEQUENCE, _COUNTER, _STATE, _THREAD, _GENERATION, _ALLOWED, _COUNT, _FIRST = range(8)  # in 8-byte words


@dataclass(frozen=True)
class Progress:
    """Contents of a progress page.

    counter: incremented by every activity of the rank. state: current activity; collectives inside "computing in a
    lane" wait for `ranks`, the ranks of the lane. thread: thread id in /proc, 0 before the thread has begun.
    generation: number of the rank's generation. allowed: seconds that `what`, the reason for the idle state, may take.
    ranks: ranks that it waits for.
    """

    counter: int
    state: State
    thread: int
    generation: int
    allowed: float
    ranks: tuple[int, ...]
    what: str


class ProgressPage:
    """Page of this rank, written by the thread that creates it. `path` is created if missing."""

    def __init__(self, path: Path) -> None:
        with open(path, "a+b") as file:
            file.truncate(SIZE)
            self._map = mmap.mmap(file.fileno(), SIZE)
        self._words = memoryview(self._map).cast("Q")
        self._seconds = memoryview(self._map).cast("d")
        self._ranks = memoryview(self._map).cast("q")
        self._counter = self._words[_COUNTER]
        self._words[_THREAD] = threading.get_native_id()

    def tick(self) -> None:
        """Records progress."""
        self._counter += 1
        self._words[_COUNTER] = self._counter

    def computing(self, lane: Sequence[int] = ()) -> None:
        """Marks the rank as computing: it waits for no other rank, except for its lane's ranks inside the computation.

        lane: ranks of the lane, by their numbers in the generation.
        """
        if lane:
            self._set(4, lane)
            return
        # Two atomic stores: a reader between them sees a rank that makes progress.
        self._words[_STATE] = 2
        self.tick()

    def waiting(self, ranks: Sequence[int]) -> None:
        """Marks the rank as waiting for others, by their numbers in the generation."""
        self._set(3, ranks)

    def idle(self, what: str, seconds: float) -> None:
        """Marks the rank as busy outside of a step, such as with a checkpoint, for at most `seconds`."""
        self._set(1, (), what, seconds)

    @contextlib.contextmanager
    def idle_for(self, what: str, seconds: float) -> Iterator[None]:
        """`idle` within the block; afterwards the page has its previous contents."""
        words = self._words
        state, allowed = words[_STATE], self._seconds[_ALLOWED]
        ranks = [self._ranks[_FIRST + place] for place in range(words[_COUNT])]
        before = self._map[_TEXT_AT:SIZE].rstrip(b"\0").decode(errors="replace")
        self.idle(what, seconds)
        try:
            yield
        finally:
            self._set(state, ranks, before, allowed)

    def enter(self, generation: int) -> None:
        """Sets the generation to which rank numbers refer from here on."""
        self._words[_GENERATION] = generation
        self._set(2)

    def close(self) -> None:
        for view in (self._words, self._seconds, self._ranks):
            view.release()
        self._map.close()

    def _set(self, state: int, ranks: Sequence[int] = (), what: str = "", seconds: float = 0.0) -> None:
        words = self._words
        words[_SEQUENCE] += 1  # odd: being written
        words[_STATE] = state
        count = min(len(ranks), MOST_RANKS)
        words[_COUNT] = count
        for place in range(count):
            self._ranks[_FIRST + place] = ranks[place]
        if state == 1:
            self._seconds[_ALLOWED] = seconds
            raw = what.encode()[:LONGEST]
            self._map[_TEXT_AT:SIZE] = raw.ljust(LONGEST, b"\0")
        self._counter += 1
        words[_COUNTER] = self._counter
        words[_SEQUENCE] += 1


class ProgressReader:
    """Supervisor's view of a rank's page. Creates the page for the rank."""

    def __init__(self, path: Path) -> None:
        with open(path, "a+b") as file:
            file.truncate(SIZE)
            self._map = mmap.mmap(file.fileno(), SIZE, access=mmap.ACCESS_READ)

    def read(self) -> Progress:
        """Contents of the page. If the rank stopped during a write, some of them may be outdated."""
        raw = b""
        for _ in range(10):
            before, raw = raw, self._map[:]
            if raw == before or (raw[0] % 2 == 0 and self._map[:8] == raw[:8]):
                break
        _, counter, state, thread, generation, allowed, count = _FIXED.unpack_from(raw)
        ranks = _RANKS.unpack_from(raw, _FIXED.size)[: min(count, MOST_RANKS)]
        what = raw[_TEXT_AT:].rstrip(b"\0").decode(errors="replace")
        return Progress(counter, STATES[min(state, len(STATES) - 1)], thread, generation, allowed, ranks, what)

    def close(self) -> None:
        self._map.close()


@contextlib.contextmanager
def allowing(what: str, seconds: float) -> Iterator[None]:
    """Marks this process's page, if it has one, as idle for at most `seconds` within the block."""
    from interlace.comm.process.recorder import page_in_use  # here, so that supervisors start without torch

    page = page_in_use()
    if page is not None:
        page.idle(what, seconds)
    yield
    if page is not None:
        page.computing()
