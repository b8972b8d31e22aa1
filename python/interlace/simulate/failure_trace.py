"""Failure traces: node failures and joins as CSV for `interlace simulate failures`, and traces of spot instances.

A file has the columns time, node, event and, optionally, warning:

    time,node,event,warning
    512.4,17,fail,120
    1210.0,17,join,

time: seconds from the start, in ascending order; several nodes may change at one time. node: any name. event: fail or
join. warning: seconds of advance notice of the failure by the cloud; empty or 0: no notice. Empty lines and lines that
begin with # are skipped. A node whose first event is fail is present from the start.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, cast

import numpy as np

COLUMNS = ("time", "node", "event", "warning")
REQUIRED = COLUMNS[:3]
SPOT = {"ec2": (7.7 * 60, 120.0), "gcp": (10.3 * 60, 30.0)}
"""Seconds between preemptions (dissertation 2.7.3: EC2 P3, GCP a2-highgpu-1g), and the clouds' seconds of warning."""


class TraceError(ValueError):
    """An unreadable or contradictory trace. The message names the line."""


@dataclass(frozen=True)
class Change:
    """A node fails or joins `time` seconds after the start. warning: seconds of advance notice, 0: none."""

    time: float
    node: str
    event: Literal["fail", "join"]
    warning: float = 0.0


def read_trace(lines: Iterable[str], source: str) -> list[Change]:
    """The changes in the lines of a file, in order.

    Raises TraceError with `source` and the line for a format other than that of the module's docstring. Also raises it
    for a failure of an absent node, and for a join of a present one.
    """
    header: list[str] | None = None
    changes: list[Change] = []
    last_event: dict[str, tuple[str, int]] = {}  # node -> its last event and its line
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        position = f"{source}:{number}"
        cells = [cell.strip() for cell in next(csv.reader([line]))]
        if header is None:
            if sorted(cells) not in (sorted(REQUIRED), sorted(COLUMNS)):
                raise TraceError(
                    f"{position}: the columns are {','.join(cells)}: they must be {','.join(REQUIRED)}, optionally "
                    f"with {COLUMNS[-1]}"
                )
            header = cells
            continue
        change = _change(cells, header, position)
        if changes and change.time < changes[-1].time:
            raise TraceError(
                f"{position}: time {change.time:g} is before that of the previous line: sort the lines by time"
            )
        event, earlier_line = last_event.get(change.node, ("", 0))
        if event == change.event:
            raise TraceError(
                f"{position}: node {change.node!r} has two {change.event} events in a row (line {earlier_line}): "
                f"remove one, or add the {'join' if event == 'fail' else 'fail'} event between them"
            )
        last_event[change.node] = change.event, number
        changes.append(change)
    if header is None:
        raise TraceError(f"{source}:1: no header: the first line must be {','.join(REQUIRED)}")
    return changes


def _change(cells: list[str], header: list[str], position: str) -> Change:
    if len(cells) != len(header):
        raise TraceError(f"{position}: {len(cells)} cells, but the columns are {','.join(header)}")
    row = dict(zip(header, cells, strict=True))
    time, warning = (_seconds(row.get(name) or "0", name, position) for name in ("time", "warning"))
    if not row["time"]:
        raise TraceError(f"{position}: no time: give the seconds since the start")
    if not row["node"]:
        raise TraceError(f"{position}: no node: give its name")
    if row["event"] not in ("fail", "join"):
        raise TraceError(f"{position}: event {row['event']!r}: it must be fail or join")
    return Change(time, row["node"], cast(Literal["fail", "join"], row["event"]), warning)


def _seconds(text: str, name: str, position: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0.0 <= value < math.inf:
        raise TraceError(f"{position}: {name} {text!r}: it must be a number of seconds >= 0")
    return value


def at_once(changes: Iterable[Change]) -> Iterator[list[Change]]:
    """Groups changes by time. A second change of a node at the same time starts a new group."""
    group: list[Change] = []
    for change in changes:
        if group and (change.time != group[0].time or any(change.node == other.node for other in group)):
            yield group
            group = []
        group.append(change)
    if group:
        yield group


def trace_lines(changes: Iterable[Change]) -> list[str]:
    """Lines of a trace file, the inverse of `read_trace`."""
    rows = (f"{change.time!r},{change.node},{change.event},{change.warning:g}" for change in changes)
    return [",".join(COLUMNS), *rows]


def nodes_at_start(changes: Sequence[Change], nodes: int) -> list[str]:
    """Names of the `nodes` nodes present at the start.

    These are the nodes whose first event is fail, and numbered nodes that are not in the trace. Numbers are sorted as
    numbers, before other names. Raises ValueError if the first event of more than `nodes` nodes is fail.
    """
    first_event = {change.node: change.event for change in reversed(changes)}
    names = [node for node, event in first_event.items() if event == "fail"]
    if len(names) > nodes:
        raise ValueError(f"{len(names)} nodes of the trace are present at the start, more than {nodes}")
    number = 0
    while len(names) < nodes:
        if str(number) not in first_event:
            names.append(str(number))
        number += 1
    return sorted(names, key=lambda node: (0, int(node), node) if node.isdecimal() else (1, 0, node))


def spot_trace(nodes: int, every: float, hours: float, seed: int, *, warning: float = 0.0) -> list[Change]:
    """Random preemptions and additions of single nodes, equally often, with half to all of `nodes` nodes present.

    every: mean seconds between preemptions, the only known property of the traces of dissertation 2.7.3. Events that
    would leave this range are dropped, while time advances: with 30 nodes, preemptions are 7 % less frequent than
    `every`. The preempted node is random; the node absent for longest joins.

    Raises ValueError for fewer than 2 nodes, and for `every` or `hours` that are not positive.
    """
    if nodes < 2:
        raise ValueError(f"nodes is {nodes}: it must be at least 2")
    if not 0 < every < math.inf or not 0 < hours < math.inf:
        raise ValueError(f"a preemption every {every:g} seconds for {hours:g} hours: both must be above 0")
    time_rng, node_rng = np.random.default_rng(seed), np.random.default_rng([seed, 1])
    present, absent = [str(node) for node in range(nodes)], []
    changes: list[Change] = []
    now = 0.0
    while (now := now + float(time_rng.exponential(every / 2))) < hours * 3600:
        step = int(time_rng.choice((-1, 1)))
        if not nodes // 2 <= len(present) + step <= nodes:
            continue
        if step < 0:
            absent.append(present.pop(int(node_rng.integers(len(present)))))
            changes.append(Change(now, absent[-1], "fail", warning))
        else:
            present.append(absent.pop(0))
            changes.append(Change(now, present[-1], "join"))
    return changes
