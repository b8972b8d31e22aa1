"""Timeline as a trace in the Chrome trace event format, for Perfetto and chrome://tracing.

Each rank is one process. It has threads for compute and for communication (a RECV lasts while the rank waits). Gradient
reductions and the exchange of items overlap both, on as many further threads as run at once. Another thread shows the
planning of later steps. Arrows lead from each SEND to its RECV, and a counter shows the forwards in flight. Times are
in microseconds.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from interlace.schedule.actions import COMPUTE, Action, Op
from interlace.schedule.memory import held_after

if TYPE_CHECKING:
    from interlace.simulate.timeline import Timeline

Event = dict[str, Any]
"""An event of the trace, JSON-compatible."""
PLANNING_THREAD = 1000
COMPUTE_THREAD, COMMUNICATION_THREAD, REDUCE_THREAD = 0, 1, 2  # overlapping reductions use the threads after it
BESIDE = (Op.REDUCE_GRAD, Op.DISPATCH)
_SHORTEST = 0.002  # microseconds (Perfetto counts whole nanoseconds): an arrow must be bound to a slice


def write_events(events: Iterable[Event], path: str | Path) -> None:
    """Writes a trace as JSON, one event per line."""
    with open(path, "w", encoding="utf-8") as file:
        file.write('{"displayTimeUnit": "ms", "traceEvents": [\n')
        separator = ""
        encode = json.JSONEncoder(separators=(",", ":"), check_circular=False).encode  # json.dumps makes one per event
        for each in events:
            file.write(separator + encode(each))
            separator = ",\n"
        file.write("\n]}\n")


def trace_events(timeline: Timeline) -> Iterator[Event]:
    """The events of the trace, as the format defines them."""
    arrows = _arrows(timeline)
    for rank, actions in enumerate(timeline.actions):
        stages = dict.fromkeys(f"{a.module}/{a.stage}" for a in actions if a.op in COMPUTE)
        yield named("process_name", rank, 0, f"rank {rank}: {', '.join(stages) or 'idle'}")
        yield sort_index(rank, rank)
        yield named("thread_name", rank, COMPUTE_THREAD, "compute")
        yield named("thread_name", rank, COMMUNICATION_THREAD, "communication")
        free = 0.0  # time at which the communication thread is free: slices of one thread must not overlap
        reducing: list[float] = []  # likewise for the threads for reductions
        for index, (action, start, finish) in enumerate(
            zip(actions, timeline.start[rank], timeline.finish[rank], strict=True)
        ):
            begin, length = (start - timeline.begin) * 1e6, (finish - start) * 1e6
            if action.op in COMPUTE:
                yield _slice(timeline, rank, COMPUTE_THREAD, action, begin, length)
                continue
            if action.op in BESIDE:
                number = next((n for n, end in enumerate(reducing) if end <= begin), len(reducing))
                if number == len(reducing):
                    reducing.append(0.0)
                    yield named("thread_name", rank, REDUCE_THREAD + number, "reductions")
                reducing[number] = begin + length
                yield _slice(timeline, rank, REDUCE_THREAD + number, action, begin, length)
                continue
            end = max(begin + length, max(begin, free) + _SHORTEST)
            begin = max(begin, free)
            free = end
            yield _slice(timeline, rank, COMMUNICATION_THREAD, action, begin, end - begin)
            for number in arrows.get((rank, index), ()):
                if action.op is Op.SEND:
                    yield _arrow("s", rank, number, begin)
                else:
                    yield _arrow("f", rank, number, end - _SHORTEST / 2)
        planned = timeline.planning[rank] if timeline.planning else []
        if planned:
            yield named("thread_name", rank, PLANNING_THREAD, "planning later steps")
        for start, finish in planned:
            times = {"ts": (start - timeline.begin) * 1e6, "dur": (finish - start) * 1e6}
            yield event("X", "table of a later step", rank, PLANNING_THREAD, cat="planning", **times)
        for index, count, _ in held_after(actions):
            moment = timeline.start[rank][index] if actions[index].op is Op.FORWARD else timeline.finish[rank][index]
            moment = (moment - timeline.begin) * 1e6
            yield event("C", "forwards in flight", rank, 0, ts=moment, args={"in flight": count})


def _arrows(timeline: Timeline) -> dict[tuple[int, int], list[int]]:
    """(rank, index in its list) -> numbers of the arrows that leave a SEND or reach a RECV.

    A message is identified by its content. Between lanes of several ranks it has several senders and receivers; each
    gets at least one arrow.
    """
    ends: dict[tuple[object, ...], tuple[list[tuple[int, int]], list[tuple[int, int]]]] = {}
    for rank, actions in enumerate(timeline.actions):
        for place, a in enumerate(actions):
            if a.op is Op.SEND or a.op is Op.RECV:
                content = (a.module, a.stage, a.chunk, a.other, a.grad)
                ends.setdefault(content, ([], []))[a.op is Op.RECV].append((rank, place))
    events: dict[tuple[int, int], list[int]] = {}
    number = 0
    for senders, receivers in ends.values():
        for i in range(max(len(senders), len(receivers)) if senders and receivers else 0):
            number += 1
            for side in (senders, receivers):
                events.setdefault(side[i % len(side)], []).append(number)
    return events


_NUMBERED = {Op.REDUCE_GRAD: "reduction", Op.UNSHARD: "shard", Op.UNSHARD_LAYERS: "shard", Op.RESHARD: "shard"}


def event(phase: str, name: str, process: int, thread: int, **more: object) -> Event:
    """An event with the keys that all have, and `more`."""
    return {"name": name, "ph": phase, "pid": process, "tid": thread, **more}


def named(kind: str, process: int, thread: int, name: str) -> Event:
    """Event that names a process or a thread."""
    return event("M", kind, process, thread, args={"name": name})


def sort_index(process: int, index: int) -> Event:
    """Event that places a process among the others."""
    return event("M", "process_sort_index", process, 0, args={"sort_index": index})


def _slice(timeline: Timeline, rank: int, thread: int, action: Action, begin: float, length: float) -> Event:
    args: Event = {"module": action.module, "stage": action.stage}
    if action.chunk >= 0:
        args["chunk"] = action.chunk
        if timeline.table is not None:
            args |= {"microbatch": timeline.number(action.chunk)}
            args |= {"samples": timeline.table.chunks[action.chunk].samples.tolist()}
    if action.other >= 0 and action.other != action.chunk:
        args[_NUMBERED.get(action.op, "other")] = action.other
    if action.peer >= 0:
        args["lane"] = action.peer
    kind = action.op.name.lower() + ("_grad" if action.grad else "")
    return event("X", str(action), rank, thread, cat=kind, ts=begin, dur=length, args=args)


def _arrow(phase: str, rank: int, number: int, moment: float) -> Event:
    more = {"bp": "e"} if phase == "f" else {}
    return event(phase, "message", rank, COMMUNICATION_THREAD, cat="message", id=number, ts=moment, **more)
