"""Trace of a transport and its operations, for tests of the order and for plots of the overlap."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from interlace.comm.transports.base import Transport


class Span(NamedTuple):
    """One event on one rank. Times are seconds of `time.perf_counter`.

    kind: "issue" (a batch of copies was passed to the transport: start == finish), "copy" (the transport moved it),
    "compute" (a matrix product or attention, including related work), "write" and "read" (from the first to the last
    moment at which a reused buffer is filled or used).
    """

    kind: str
    label: str
    start: float
    finish: float


class Trace:
    """Spans of one rank, in the order in which they ended. Called by the rank's thread and the transport's thread."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.spans: list[Span] = []
        self._lock = threading.Lock()

    def add(self, kind: str, label: str, start: float, finish: float) -> None:
        with self._lock:
            self.spans.append(Span(kind, label, start, finish))

    def mark(self, kind: str, label: str) -> None:
        now = time.perf_counter()
        self.add(kind, label, now, now)

    def of(self, kind: str) -> list[Span]:
        """The spans of one kind, sorted by start."""
        return sorted((span for span in self.spans if span.kind == kind), key=lambda span: span.start)


@contextmanager
def traced(group: Transport) -> Iterator[Trace]:
    """Records the activity of this rank on `group` inside the block."""
    before, group.trace = group.trace, Trace(group.rank)
    try:
        yield group.trace
    finally:
        group.trace = before


@contextmanager
def computing(group: Transport, label: str) -> Iterator[None]:
    """Records the block as computation if tracing is on. On CUDA this is the host time to enqueue it."""
    if group.trace is None:
        yield
        return
    start = time.perf_counter()
    yield
    group.trace.add("compute", label, start, time.perf_counter())
