"""Cache of tables of later steps, made while earlier steps run.

The thread that reads ahead makes them, because it needs them to choose the media to decode. A step takes its table from
this cache, or makes one if there is none.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import Any

from interlace.run.tables.batch import GlobalBatch
from interlace.schedule import StepTable

_KEPT = 1040  # batches that are planned but have not run: more than any loader reads ahead (data.prefetch)
_SPANS = 64


class TablesAhead:
    """Tables by batch: by identity of the samples, and by the options of the cut. Weak references; thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tables: dict[Hashable, tuple[list[weakref.ref[Any]], StepTable]] = {}
        self._spans: deque[tuple[float, float]] = deque(maxlen=_SPANS)

    def prepare(self, batch: GlobalBatch, make: Callable[[], StepTable]) -> StepTable:
        """Make the table of a batch with `make` and cache it for its step."""
        begin = time.monotonic()
        table = make()
        samples = [weakref.ref(sample) for sample in batch.samples]
        with self._lock:
            for key in [key for key, (of, _) in self._tables.items() if of[0]() is None]:  # can no longer run
                del self._tables[key]
            self._tables[_key(batch)] = samples, table
            while len(self._tables) > _KEPT:
                self._tables.pop(next(iter(self._tables)))
            self._spans.append((begin, time.monotonic()))
        return table

    def take(self, batch: GlobalBatch) -> StepTable | None:
        """Remove and return the table of a batch, with the place of its step; None if it is not cached."""
        with self._lock:
            samples, table = self._tables.pop(_key(batch), ([], None))
        if table is None or any(ref() is not sample for ref, sample in zip(samples, batch.samples, strict=True)):
            return None
        return replace(table, place=batch.place)

    def within(self, times: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
        """Intervals in which tables were made during the actions of `times` (start, finish): `time.monotonic` [s]."""
        if not times:
            return []
        begin, finish = min(start for start, _ in times), max(end for _, end in times)
        with self._lock:
            return [span for span in self._spans if span[1] > begin and span[0] < finish]


def _key(batch: GlobalBatch) -> Hashable:
    groups = None if batch.groups is None else tuple(map(len, batch.groups))
    chunks = tuple(sorted((batch.chunks or {}).items()))
    return tuple(map(id, batch.samples)), groups, batch.microbatches, chunks
