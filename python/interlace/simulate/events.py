"""Event simulation of a schedule: the lists that the executor runs, played on clocks.

The model. A rank runs its list in order. Compute actions take what `durations` says. A SEND leaves the rank free
at once; its content travels for `transfer` seconds, and messages between the same two ranks follow each other
(one link per directed pair, no contention between pairs). A RECV lasts until its message has arrived. A
REDUCE_GRAD starts when all copies of its stage have reached it.

The actions are put into arrays here and played in C++ (`arrays`); `reference` is the same in Python, kept as its
oracle. Cost: about half a microsecond per action, nearly all of it for making the arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf

import numpy as np
from numpy.typing import NDArray

from interlace.schedule.actions import COMPUTE, Action, Op
from interlace.schedule.check import check
from interlace.schedule.costs import Durations, duration_of
from interlace.schedule.schedule import Schedule
from interlace.simulate.arrays import ActionArrays, simulate_arrays
from interlace.simulate.timeline import Timeline

Transfer = float | Callable[[Action, int, int], float]
"""Seconds that a message travels: one number, or a function of (its SEND, source rank, target rank)."""


def simulate(
    schedule: Schedule,
    durations: Durations,
    *,
    transfer: Transfer = 0.0,
    overhead: float = 0.0,
    reduce_grad: float | Callable[[str, int], float] = 0.0,
) -> Timeline:
    """When each action of a sound schedule (see `check`) starts and finishes, in seconds from the step's start.

    durations: seconds of FORWARD and BACKWARD (and BACKWARD_INPUT, BACKWARD_WEIGHT where used): a mapping with keys
        (op, module, stage, microbatch), (op, module, stage), (op, module) or op, the most specific one counts, or
        a function of (op, module, stage, microbatch).
    transfer: seconds that a message travels; a number or a function of (its SEND action, source, target).
    overhead: seconds that a rank itself spends on each SEND and each RECV, beside waiting.
    reduce_grad: seconds of each REDUCE_GRAD; a number or a function of (module, stage).

    Raises ValueError for an action without a cost and ScheduleError for a schedule that never finishes.
    """
    lists = schedule.actions
    seconds_of = _seconds(durations, overhead, reduce_grad)
    arrays = ActionArrays.of_schedule(schedule)
    seconds = np.fromiter((seconds_of(a) for actions in lists for a in actions), np.float64, len(arrays))
    if not callable(transfer):
        travel = np.full(len(arrays), _non_negative("transfer", transfer), np.float64)
    else:
        travel = np.zeros(len(arrays))
        place = 0
        for rank, actions in enumerate(lists):
            for action in actions:
                if action.op is Op.SEND:
                    travel[place] = _non_negative("transfer", transfer(action, rank, action.peer))
                place += 1
    try:
        found = simulate_arrays(arrays, seconds, transfer=travel)
    except ValueError:
        check(schedule)  # often knows why, not only where
        raise
    return Timeline(lists, _per_rank(found.start, lists), _per_rank(found.finish, lists), schedule.name)


def _seconds(
    durations: Durations, overhead: float, reduce_grad: float | Callable[[str, int], float]
) -> Callable[[Action], float]:
    cost = duration_of(durations)
    own = _non_negative("overhead", overhead)

    def seconds(action: Action) -> float:
        op = action.op
        if op in COMPUTE:
            return cost(op, action.module, action.stage, action.microbatch)
        if op is Op.SEND or op is Op.RECV:
            return own
        if op is Op.REDUCE_GRAD:
            time = reduce_grad(action.module, action.stage) if callable(reduce_grad) else reduce_grad
            return _non_negative("reduce_grad", time)
        return 0.0

    return seconds


def _per_rank(times: NDArray[np.float64], lists: Sequence[Sequence[Action]]) -> list[list[float]]:
    every = times.tolist()
    out, place = [], 0
    for actions in lists:
        out.append(every[place : place + len(actions)])
        place += len(actions)
    return out


def _non_negative(name: str, seconds: float) -> float:
    if not 0.0 <= seconds < inf:
        raise ValueError(f"{name} is {seconds} seconds; it must be a number from 0 upwards")
    return seconds
