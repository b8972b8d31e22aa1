"""Event simulation of a schedule: the lists that the executor runs, played on clocks.

The model. A rank runs its list in order. Compute actions take what `durations` says; the ranks of a lane start one
together, when the last of them has reached it. A SEND leaves the rank free at once; its content travels for `transfer`
seconds, and what one rank sends from one lane to another follows each other (one link per pair, no contention between
pairs). A RECV lasts until its message has arrived, from a lane of several ranks from all of them. A REDUCE_GRAD leaves
the rank free at once, too: it goes on beside the computing, and ends when its ranks have all reached it and its seconds
have passed. It follows earlier reductions of the same ranks (they share links); that of a tied weight follows all
others of its ranks. A DISPATCH leaves the rank free at once as well, and ends its seconds after all ranks have reached
theirs, on links of its own. An UNSHARD takes its seconds before anything else, as if nothing computed beside the
gather; a RESHARD takes none, nor does an UNSHARD_LAYERS: from it on the ranks that share the stage's weights gather
them inside of what they compute. So they meet there as the ranks of a lane do, each with a chunk of its own: a replica
whose inputs come later holds up the others, and all take as long as the slowest (what their gathers take beyond the
computing is part of the durations, where `interlace.run.predict` puts it). The step ends when everything has.

The rows are played in C++ (`arrays`); `reference` is the same in Python, kept as its oracle. Cost: about a microsecond
per action, nearly all of it for making objects that people can read; 0.06 by `simulate_arrays`.
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
"""Seconds that a message travels: one number, or a function of (its SEND, source rank, target lane)."""

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
    """When each action of a sound schedule (see `check`) starts and finishes, in seconds from the step's start.

    durations: seconds of FORWARD and BACKWARD (and BACKWARD_INPUT, BACKWARD_WEIGHT where used): a mapping with keys
        (op, module, stage, chunk), (op, module, stage), (op, module) or op, the most specific one counts, or
        a function of (op, module, stage, chunk).
    transfer: seconds that a message travels; a number or a function of (its SEND action, source rank, target lane).
    overhead: seconds that a rank itself spends on each SEND and each RECV, beside waiting.
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
        found = simulate_arrays(schedule, seconds, transfer=travel)
    except ValueError:
        check(schedule)  # often knows why, not only where
        raise
    start, finish = _per_rank(found.start, schedule), _per_rank(found.finish, schedule)
    return Timeline(lists, start, finish, schedule.name, schedule.table)


def _per_rank(times: NDArray[np.float64], schedule: Schedule) -> list[list[float]]:
    every, first = times.tolist(), schedule.first.tolist()
    return [every[a:b] for a, b in pairwise(first)]


def _non_negative(name: str, seconds: float) -> float:
    if not 0.0 <= seconds < inf:
        raise ValueError(f"{name} is {seconds} seconds; it must be a number from 0 upwards")
    return seconds
