"""Event simulation of a schedule: simulated execution of the executor's action lists.

Each rank runs its list in order. Timing of the actions:

- Compute: `durations`. The ranks of a lane start together, when the last of them has reached the action.
- SEND: does not block the rank. The message takes `transfer` seconds. Messages of one rank from one lane to another are
  sequential (one link per pair, no contention between pairs).
- RECV: lasts until the message has arrived, from all ranks of the sending lane.
- REDUCE_GRAD: does not block the rank and overlaps compute. It ends its duration after all of its ranks have reached
  it. It follows earlier reductions of the same ranks, which share links. The reduction of a tied weight follows all
  other reductions of its ranks.
- DISPATCH: does not block the rank. It ends its duration after all ranks have reached theirs, on separate links.
- UNSHARD: blocks the rank for its duration, without overlap.
- RESHARD: takes no time.
- UNSHARD_LAYERS: takes no time. From then on the ranks that share the stage's weights gather them during compute, so
  they start compute actions together, like the ranks of a lane, each with its own chunk. A replica with late inputs
  delays the others, and all take as long as the slowest. Gather time beyond compute is part of the durations
  (`interlace.estimate.predict` adds it).

The step ends when all actions have ended.

The simulator is written in C++ (`arrays`); tests/simulate/reference.py is the same model in Python, as its oracle.
`simulate` takes about a microsecond per action, mostly to create readable objects; `simulate_arrays` takes 0.06.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from math import inf

import numpy as np
from numpy.typing import NDArray

from interlace.schedule.actions import CHUNK, CODES, COMPUTE, MODULE, OP, STAGE, Action, Op
from interlace.schedule.check import check
from interlace.schedule.costs import Durations, seconds_of
from interlace.schedule.schedule import Schedule
from interlace.simulate.arrays import simulate_arrays
from interlace.simulate.timeline import Timeline

Transfer = float | Callable[[Action, int, int], float]
"""Transfer time of a message in seconds: one number, or a function of (its SEND, source rank, target lane)."""

_WORK = [CODES[op] for op in COMPUTE]
_MESSAGES = [CODES[Op.SEND], CODES[Op.RECV]]


def simulate(
    schedule: Schedule,
    durations: Durations,
    *,
    transfer: Transfer = 0.0,
    overhead: float = 0.0,
    reduce_grad: float | Callable[[Action], float] = 0.0,
    unshard: float | Callable[[Action], float] = 0.0,
    dispatch: float | Callable[[Action], float] = 0.0,
) -> Timeline:
    """Start and finish of each action of a sound schedule (see `check`), in seconds from the step's start.

    durations: seconds of FORWARD and BACKWARD (and BACKWARD_INPUT, BACKWARD_WEIGHT where used). A mapping with keys
        (op, module, stage, chunk), (op, module, stage), (op, module) or op, of which the most specific one is used; or
        a function of (op, module, stage, chunk).
    transfer: transfer time of a message; a number or a function of (its SEND action, source rank, target lane).
    overhead: seconds of the rank for each SEND and each RECV, without waiting.
    reduce_grad, unshard, dispatch: seconds of each REDUCE_GRAD, UNSHARD, DISPATCH; a number or a function of it.

    Raises ValueError for an action without a cost and ScheduleError for a schedule that never finishes.
    """
    lists, rows = schedule.actions, schedule.rows
    op = rows[:, OP]
    ranks = np.repeat(np.arange(len(lists)), np.diff(schedule.first))

    def action(i: int) -> Action:
        rank = int(ranks[i])
        return lists[rank][i - int(schedule.first[rank])]

    seconds = np.zeros(len(rows))
    travel = np.full(len(rows), 0.0 if callable(transfer) else _non_negative("transfer", transfer))
    seconds[np.isin(op, _MESSAGES)] = _non_negative("overhead", overhead)
    work = np.flatnonzero(np.isin(op, _WORK))
    seconds[work] = seconds_of(durations, rows[work][:, [OP, MODULE, STAGE, CHUNK]], schedule.graph.modules)
    for name, kind, cost in (
        ("reduce_grad", Op.REDUCE_GRAD, reduce_grad),
        ("unshard", Op.UNSHARD, unshard),
        ("dispatch", Op.DISPATCH, dispatch),
    ):
        for i in np.flatnonzero(op == CODES[kind]).tolist():
            seconds[i] = _non_negative(name, cost(action(i)) if callable(cost) else cost)
    if callable(transfer):
        for i in np.flatnonzero(op == CODES[Op.SEND]).tolist():
            travel[i] = _non_negative("transfer", transfer(action(i), int(ranks[i]), action(i).peer))
    try:
        result = simulate_arrays(schedule, seconds, transfer=travel)
    except ValueError:
        check(schedule)  # often gives the cause, not only the place
        raise
    start, finish = _per_rank(result.start, schedule), _per_rank(result.finish, schedule)
    return Timeline(lists, start, finish, schedule.name, schedule.table)


def _per_rank(times: NDArray[np.float64], schedule: Schedule) -> list[list[float]]:
    flat, first = times.tolist(), schedule.first.tolist()
    return [flat[a:b] for a, b in pairwise(first)]


def _non_negative(name: str, seconds: float) -> float:
    if not 0.0 <= seconds < inf:
        raise ValueError(f"{name} is {seconds} seconds; it must be a number >= 0")
    return seconds
