"""Sampled trace: a trace of thousands of ranks with bounded size.

Some groups of ranks are included in full; the others only with their utilisation. A group is one process of the trace.
Each rank of a full group has the same threads as in `trace`. Every group has a counter, the share of its ranks that
compute. The full groups are the busiest one, the least busy one, and others evenly spaced between. The name of each
process gives its kind.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from interlace.schedule import Schedule
from interlace.schedule.actions import action_of
from interlace.simulate.arrays import Simulated
from interlace.simulate.groups import RankGroups, Utilisation, spread_over
from interlace.simulate.timeline import Timeline
from interlace.simulate.trace import Event, event, named, sort_index, trace_events, write_events

MOST_ROWS = 40_000
"""Most actions in full, about 400 bytes each with arrows and counters: a trace of about 15 MB."""
_THREADS = 256  # thread numbers per rank


def write_sampled_trace(
    schedule: Schedule,
    simulated: Simulated,
    groups: RankGroups,
    used: Utilisation,
    path: str | Path,
    *,
    most_rows: int = MOST_ROWS,
) -> list[str]:
    """Writes the trace as JSON, one event per line; returns the names of the full groups."""
    lengths = np.bincount(groups.of_rank, weights=np.diff(schedule.first), minlength=len(groups.names))
    count = max(int(most_rows / max(lengths.max(), 1)), 1)
    full = spread_over(used.mean, count)
    write_events(_events(schedule, simulated, groups, used, full), path)
    return [groups.names[group] for group in full]


def _events(
    schedule: Schedule, simulated: Simulated, groups: RankGroups, used: Utilisation, full: Sequence[int]
) -> Iterator[Event]:
    full_groups = set(full)
    for group, name in enumerate(groups.names):
        size = int(groups.sizes[group])
        detail = "in full" if group in full_groups else "summed up"
        label = f"{name}: {size} rank{'s' * (size != 1)}, {detail}, busy {used.mean[group]:.0%}"
        yield named("process_name", group, 0, label)
        yield sort_index(group, full.index(group) if group in full_groups else len(full) + group)
        shares = used.over_time[group].sum(axis=0)
        width = used.makespan / len(shares) * 1e6
        for number, share in enumerate(shares.tolist()):
            yield event("C", "ranks computing", group, 0, ts=number * width, args={"share": round(share, 4)})
    ranks = [rank for group in full for rank in groups.ranks(group).tolist()]
    timeline = timeline_of(schedule, simulated, ranks)
    for each in trace_events(timeline):
        if each["name"] in ("process_name", "process_sort_index"):
            continue
        rank = ranks[each["pid"]]
        each["pid"] = int(groups.of_rank[rank])
        if each["ph"] == "C":
            each["name"] = f"rank {rank}: {each['name']}"
        each["tid"] += 1 + _THREADS * rank
        if each["name"] == "thread_name":
            each["args"] = {"name": f"rank {rank}: {each['args']['name']}"}
        if "ts" in each:
            each["ts"] += timeline.begin * 1e6
        yield each


def timeline_of(schedule: Schedule, simulated: Simulated, ranks: Sequence[int]) -> Timeline:
    """Timeline of some ranks of a simulated step: rank i of the timeline is `ranks[i]`."""
    modules = schedule.graph.modules
    parts = [slice(int(schedule.first[rank]), int(schedule.first[rank + 1])) for rank in ranks]
    actions = [[action_of(row, modules) for row in schedule.rows[part].tolist()] for part in parts]
    start, finish = ([times[part].tolist() for part in parts] for times in (simulated.start, simulated.finish))
    return Timeline(actions, start, finish, schedule.name, schedule.table)
