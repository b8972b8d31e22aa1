"""Timelines made of records."""

from __future__ import annotations

from collections.abc import Iterable

from interlace.schedule import Action, StepTable
from interlace.simulate import Record, Timeline


def timeline_of(
    records: Iterable[Record | tuple[int, Action, float, float]], *, ranks: int = 0, table: StepTable | None = None
) -> Timeline:
    """Timeline of (rank, action, start, finish), in any order. ranks: at least so many."""
    ordered = sorted((Record(*record) for record in records), key=lambda r: (r.rank, r.start, r.finish))
    count = max([ranks, *(record.rank + 1 for record in ordered)])
    timeline = Timeline(*([[] for _ in range(count)] for _ in range(3)), table=table)
    for rank, action, start, finish in ordered:
        timeline.actions[rank].append(action)
        timeline.start[rank].append(start)
        timeline.finish[rank].append(finish)
    return timeline
