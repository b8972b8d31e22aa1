"""Tables of steps to come, made while earlier steps run.

The thread that reads ahead makes them, as it needs them to know what to decode. A step finds its own here, and makes
one where nobody has planned it.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import Any

from interlace.run.batch import GlobalBatch
from interlace.schedule import StepTable

_KEPT = 1040  # batches that were planned and not yet run: more than any loader reads ahead (data.prefetch)
_SPANS = 64


class TablesAhead:
    """Tables by batch: by the very samples, and how they are to be cut. Keeps no sample alive. For several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tables: dict[Hashable, tuple[list[weakref.ref[Any]], StepTable]] = {}
        self._spans: deque[tuple[float, float]] = deque(maxlen=_SPANS)

    def plan(self, batch: GlobalBatch, make: Callable[[], StepTable]) -> StepTable:
        """The table that `make` makes of a batch, kept for its step."""
        begin = time.monotonic()
        table = make()
        samples = [weakref.ref(sample) for sample in batch.samples]
        with self._lock:
            for key in [key for key, (of, _) in self._tables.items() if of[0]() is None]:  # nobody can run it any more
                del self._tables[key]
            self._tables[_key(batch)] = samples, table
            while len(self._tables) > _KEPT:
                self._tables.pop(next(iter(self._tables)))
            self._spans.append((begin, time.monotonic()))
        return table

    def take(self, batch: GlobalBatch) -> StepTable | None:
        """The table of a batch, once, with the place of its step; None where nobody has made it."""
        with self._lock:
            samples, table = self._tables.pop(_key(batch), ([], None))
        if table is None or any(ref() is not sample for ref, sample in zip(samples, batch.samples, strict=True)):
            return None
        return replace(table, place=batch.place)

    def within(self, times: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
        """When tables were made while the actions of `times` (start, finish) ran, in seconds of `time.monotonic`."""
        if not times:
            return []
        begin, finish = min(start for start, _ in times), max(end for _, end in times)
        with self._lock:
            return [span for span in self._spans if span[1] > begin and span[0] < finish]


def _key(batch: GlobalBatch) -> Hashable:
    groups = None if batch.groups is None else tuple(map(len, batch.groups))
    chunks = tuple(sorted((batch.chunks or {}).items()))
    return tuple(map(id, batch.samples)), groups, batch.microbatches, chunks
