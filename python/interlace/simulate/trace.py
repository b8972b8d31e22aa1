"""A timeline as a trace in the Chrome trace event format, which Perfetto and chrome://tracing open.

One process per rank with two threads: compute, and communication (a RECV lasts while the rank waits). Arrows lead
from each SEND to its RECV, and a counter shows the forwards in flight. Times are in microseconds.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from interlace.schedule.actions import COMPUTE, Action, Op
from interlace.schedule.memory import held_after
from interlace.simulate.timeline import Timeline

COMPUTE_THREAD, COMMUNICATION_THREAD = 0, 1
_SHORTEST = 0.002  # microseconds (Perfetto counts whole nanoseconds): an arrow needs a slice to be bound to


def write_trace(timeline: Timeline, path: str | Path) -> None:
    """Writes the trace as JSON, one event per line."""
    with open(path, "w", encoding="utf-8") as file:
        file.write('{"displayTimeUnit": "ms", "traceEvents": [\n')
        separator = ""
        for event in trace_events(timeline):
            file.write(separator + json.dumps(event, separators=(",", ":")))
            separator = ",\n"
        file.write("\n]}\n")


def trace_events(timeline: Timeline) -> Iterator[dict[str, Any]]:
    """The events of the trace, as the format defines them."""
    # Arrows: the n-th SEND from one rank to another belongs to the n-th RECV there.
    sent: dict[tuple[int, int], deque[int]] = {}
    number = 0
    for rank, actions in enumerate(timeline.actions):
        for action in actions:
            if action.op is Op.SEND:
                number += 1
                sent.setdefault((rank, action.peer), deque()).append(number)
    leaving = {pair: deque(numbers) for pair, numbers in sent.items()}

    for rank, actions in enumerate(timeline.actions):
        stages = dict.fromkeys(f"{a.module}/{a.stage}" for a in actions if a.op in COMPUTE)
        yield _named("process_name", rank, 0, f"rank {rank}: {', '.join(stages) or 'idle'}")
        yield {"name": "process_sort_index", "ph": "M", "pid": rank, "tid": 0, "args": {"sort_index": rank}}
        yield _named("thread_name", rank, COMPUTE_THREAD, "compute")
        yield _named("thread_name", rank, COMMUNICATION_THREAD, "communication")
        free = 0.0  # from when on the communication thread has room: slices of one thread must not overlap
        for action, start, finish in zip(actions, timeline.start[rank], timeline.finish[rank]):
            begin, length = (start - timeline.begin) * 1e6, (finish - start) * 1e6
            if action.op in COMPUTE:
                yield _slice(rank, COMPUTE_THREAD, action, begin, length)
                continue
            end = max(begin + length, max(begin, free) + _SHORTEST)
            begin = max(begin, free)
            free = end
            yield _slice(rank, COMMUNICATION_THREAD, action, begin, end - begin)
            if action.op is Op.SEND:
                yield _arrow("s", rank, leaving[rank, action.peer].popleft(), begin)
            elif action.op is Op.RECV and sent.get((action.peer, rank)):
                yield _arrow("f", rank, sent[action.peer, rank].popleft(), end - _SHORTEST / 2)
        for place, count, _ in held_after(actions):
            moment = timeline.start[rank][place] if actions[place].op is Op.FORWARD else timeline.finish[rank][place]
            yield {
                "name": "forwards in flight",
                "ph": "C",
                "pid": rank,
                "tid": 0,
                "ts": (moment - timeline.begin) * 1e6,
                "args": {"in flight": count},
            }


def _named(what: str, rank: int, thread: int, name: str) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": rank, "tid": thread, "args": {"name": name}}


def _slice(rank: int, thread: int, action: Action, begin: float, length: float) -> dict[str, Any]:
    args: dict[str, Any] = {"module": action.module, "stage": action.stage, "microbatch": action.microbatch}
    if action.part:
        args["part"] = action.part
    if action.peer >= 0:
        args["peer"] = action.peer
    return {
        "name": str(action),
        "cat": action.op.name.lower() + ("_grad" if action.grad else ""),
        "ph": "X",
        "pid": rank,
        "tid": thread,
        "ts": begin,
        "dur": length,
        "args": args,
    }


def _arrow(phase: str, rank: int, number: int, moment: float) -> dict[str, Any]:
    event = {
        "name": "message",
        "cat": "message",
        "ph": phase,
        "id": number,
        "pid": rank,
        "tid": COMMUNICATION_THREAD,
        "ts": moment,
    }
    return event | {"bp": "e"} if phase == "f" else event
