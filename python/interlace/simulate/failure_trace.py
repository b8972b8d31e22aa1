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
    found: list[Change] = []
    last: dict[str, tuple[str, int]] = {}  # node -> its last event and its line
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        where = f"{source}:{number}"
        cells = [cell.strip() for cell in next(csv.reader([line]))]
        if header is None:
            header = _header(cells, where)
            continue
        change = _change(cells, header, where)
        if found and change.time < found[-1].time:
            raise TraceError(f"{where}: time {change.time:g} is before that of the line above: sort the lines by time")
        event, before = last.get(change.node, ("", 0))
        if event == change.event:
            raise TraceError(
                f"{where}: node {change.node!r} is to {change.event}, but it did so in line {before} already and "
                f"nothing else since: leave one of them out, or say when it {'came' if event == 'fail' else 'failed'}"
            )
        last[change.node] = change.event, number
        found.append(change)
    if header is None:
        raise TraceError(f"{source}:1: no header: the first line is {','.join(REQUIRED)}")
    return found


def _header(cells: list[str], where: str) -> list[str]:
    if sorted(cells) not in (sorted(REQUIRED), sorted(COLUMNS)):
        raise TraceError(
            f"{where}: the columns are {','.join(cells)}: the first line is {','.join(REQUIRED)}, and may have "
            f"{COLUMNS[-1]}, too"
        )
    return cells


def _change(cells: list[str], header: list[str], where: str) -> Change:
    if len(cells) != len(header):
        raise TraceError(f"{where}: {len(cells)} cells, but the columns are {','.join(header)}")
    row = dict(zip(header, cells, strict=True))
    time, warning = (_seconds(row.get(name) or "0", name, where) for name in ("time", "warning"))
    if not row["time"]:
        raise TraceError(f"{where}: no time: give seconds from the start")
    if not row["node"]:
        raise TraceError(f"{where}: no node: give its name")
    if row["event"] not in ("fail", "join"):
        raise TraceError(f"{where}: event {row['event']!r}: it is fail or join")
    return Change(time, row["node"], cast(Literal["fail", "join"], row["event"]), warning)


def _seconds(text: str, name: str, where: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0.0 <= value < math.inf:
        raise TraceError(f"{where}: {name} {text!r}: a number of seconds, 0 or more")
    return value


def at_once(changes: Iterable[Change]) -> Iterator[list[Change]]:
    """Groups changes by time. A second change of a node at the same time starts a new group."""
    found: list[Change] = []
    for change in changes:
        if found and (change.time != found[0].time or any(change.node == other.node for other in found)):
            yield found
            found = []
        found.append(change)
    if found:
        yield found


def trace_lines(changes: Iterable[Change]) -> list[str]:
    """Lines of a trace file, the inverse of `read_trace`."""
    rows = (f"{each.time!r},{each.node},{each.event},{each.warning:g}" for each in changes)
    return [",".join(COLUMNS), *rows]


def nodes_at_start(changes: Sequence[Change], nodes: int) -> list[str]:
    """Names of the `nodes` nodes present at the start.

    These are the nodes whose first event is fail, and numbered nodes that are not in the trace. Numbers are sorted as
    numbers, before other names. Raises ValueError if the first event of more than `nodes` nodes is fail.
    """
    first = {change.node: change.event for change in reversed(changes)}
    found = [node for node, event in first.items() if event == "fail"]
    if len(found) > nodes:
        raise ValueError(f"{len(found)} nodes of the trace are there from the start, more than {nodes}")
    number = 0
    while len(found) < nodes:
        if str(number) not in first:
            found.append(str(number))
        number += 1
    return sorted(found, key=lambda node: (0, int(node), node) if node.isdecimal() else (1, 0, node))


def spot_trace(
    nodes: int, every: float, hours: float, seed: int, *, warning: float = 0.0, least: int | None = None
) -> list[Change]:
    """Random preemptions and additions of single nodes, equally often, with between `least` and `nodes` nodes present.

    every: mean seconds between preemptions, the only known property of the traces of dissertation 2.7.3. least:
    by default half of the nodes. Events that would leave this range are dropped, while time advances: with 30 nodes,
    preemptions are 7 % less frequent than `every`. The preempted node is random; the node absent for longest joins.

    Raises ValueError for fewer than 2 nodes, and for `every` or `hours` that are not positive.
    """
    least = nodes // 2 if least is None else least
    if nodes < 2 or not 0 <= least < nodes:
        raise ValueError(f"{nodes} nodes, at least {least}: give 2 nodes or more, and a least number below that")
    if not 0 < every < math.inf or not 0 < hours < math.inf:
        raise ValueError(f"a preemption every {every:g} seconds for {hours:g} hours: both are more than 0")
    when, who = np.random.default_rng(seed), np.random.default_rng([seed, 1])
    there, gone = [str(node) for node in range(nodes)], []
    found: list[Change] = []
    now = 0.0
    while (now := now + float(when.exponential(every / 2))) < hours * 3600:
        change = int(when.choice((-1, 1)))
        if not least <= len(there) + change <= nodes:
            continue
        if change < 0:
            gone.append(there.pop(int(who.integers(len(there)))))
            found.append(Change(now, gone[-1], "fail", warning))
        else:
            there.append(gone.pop(0))
            found.append(Change(now, there[-1], "join"))
    return found
