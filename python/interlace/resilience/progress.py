"""The progress page: what a rank's own thread does just now, in a small shared file that its supervisor watches.

Written by the thread that trains, at every action and around every wait: a thread beside it would live on in a process
that hangs. A write is a few stores into shared memory (about a microsecond), no system call and no lock; readers take
it again when it changes under them.

No time is written: whoever watches notes on its own clock when the counter last moved, and knows how long it was kept
from looking itself.
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
MOST_RANKS = 64  # of those that a rank waits for; of more, the first ones
LONGEST = 80  # bytes of a text
_FIXED = struct.Struct("<QQQQQdQ")  # sequence, counter, state, thread, generation, seconds allowed, ranks waited for
_RANKS = struct.Struct(f"<{MOST_RANKS}q")
_TEXT_AT = _FIXED.size + _RANKS.size
SIZE = _TEXT_AT + LONGEST
_SEQUENCE, _COUNTER, _STATE, _THREAD, _GENERATION, _ALLOWED, _COUNT, _FIRST = range(8)  # in 8-byte words


@dataclass(frozen=True)
class Progress:
    """What a page says.

    counter: grows with everything that the rank does. state: its present activity. thread: its id in /proc, 0 before it
    has begun. generation: number of the rank's. allowed: seconds that `what`, the idle state's occasion, may take.
    ranks: those that it waits for; when computing in a lane, those of the lane, for which collectives may wait.
    """

    counter: int
    state: State
    thread: int
    generation: int
    allowed: float
    ranks: tuple[int, ...]
    what: str


class ProgressPage:
    """The page of this rank, which the thread that makes it writes. `path` is made if need be."""

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
        """Something was done."""
        self._counter += 1
        self._words[_COUNTER] = self._counter

    def computing(self, lane: Sequence[int] = ()) -> None:
        """Marks this rank as computing.

        lane: ranks of its lane, by their numbers in the generation; collectives inside of the work may wait for them.
        """
        if lane:
            self._set(4, lane)
            return
        # Two stores, each whole: a reader that comes between them sees a rank that moves.
        self._words[_STATE] = 2
        self.tick()

    def waiting(self, ranks: Sequence[int]) -> None:
        """From here on this rank waits for others, by their numbers in the generation."""
        self._set(3, ranks)

    def idle(self, what: str, seconds: float) -> None:
        """From here on this rank does something outside of a step that may take `seconds`, such as a checkpoint."""
        self._set(1, (), what, seconds)

    @contextlib.contextmanager
    def idle_for(self, what: str, seconds: float) -> Iterator[None]:
        """`idle` within the block; after it the page says what it said before."""
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
        """From here on the ranks that this one waits for are numbered as in a generation."""
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
    """A rank's page as its supervisor reads it. Makes the page, so that the rank finds it."""

    def __init__(self, path: Path) -> None:
        with open(path, "a+b") as file:
            file.truncate(SIZE)
            self._map = mmap.mmap(file.fileno(), SIZE, access=mmap.ACCESS_READ)

    def read(self) -> Progress:
        """What the page says. Where a rank stopped amid a write, some of it may be what was there before."""
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
    """Says on this process's page, if it has one, that what the block does may take so many seconds."""
    from interlace.comm.recorder import page_in_use  # here: supervisors, which read pages, start without torch

    page = page_in_use()
    if page is not None:
        page.idle(what, seconds)
    yield
    if page is not None:
        page.computing()
