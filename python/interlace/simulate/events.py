"""Event simulation of a schedule: the lists that the executor runs, played on clocks.

The model. A rank runs its list in order. Compute actions take what `durations` says. A SEND leaves the rank free
at once; its content travels for `transfer` seconds, and messages between the same two ranks follow each other
(one link per directed pair, no contention between pairs). A RECV lasts until its message has arrived. A
REDUCE_GRAD starts when all ranks of this replica that sum with this one have reached it.

The actions are put into arrays here and played in C++ (`arrays`); `reference` is the same in Python, kept as its
oracle. Cost: about half a microsecond per action, most of it for reading the objects; 0.05 once there are arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from math import inf

import numpy as np
from numpy.typing import NDArray

from interlace.schedule.actions import COMPUTE, Action, Op
from interlace.schedule.check import check
from interlace.schedule.costs import Durations, duration_of
from interlace.schedule.schedule import Schedule
from interlace.simulate.arrays import OPS, ActionArrays, simulate_arrays
from interlace.simulate.timeline import Timeline

Transfer = float | Callable[[Action, int, int], float]
"""Seconds that a message travels: one number, or a function of (its SEND, source rank, target rank)."""

_WORK = [OPS.index(op) for op in COMPUTE]
_MESSAGES = [OPS.index(Op.SEND), OPS.index(Op.RECV)]


def simulate(
    schedule: Schedule,
    durations: Durations,
    *,
    transfer: Transfer = 0.0,
    overhead: float = 0.0,
    reduce_grad: float | Callable[[Action], float] = 0.0,
) -> Timeline:
    """When each action of a sound schedule (see `check`) starts and finishes, in seconds from the step's start.

    durations: seconds of FORWARD and BACKWARD (and BACKWARD_INPUT, BACKWARD_WEIGHT where used): a mapping with keys
        (op, module, stage, microbatch), (op, module, stage), (op, module) or op, the most specific one counts, or
        a function of (op, module, stage, microbatch).
    transfer: seconds that a message travels; a number or a function of (its SEND action, source, target).
    overhead: seconds that a rank itself spends on each SEND and each RECV, beside waiting.
    reduce_grad: seconds of each REDUCE_GRAD; a number or a function of the action.

    Raises ValueError for an action without a cost and ScheduleError for a schedule that never finishes.
    """
    lists = schedule.actions
    arrays = ActionArrays.of_schedule(schedule)
    every = list(chain.from_iterable(lists))
    seconds = np.zeros(len(every))
    travel = np.full(len(every), 0.0 if callable(transfer) else _non_negative("transfer", transfer))
    seconds[np.isin(arrays.op, _MESSAGES)] = _non_negative("overhead", overhead)
    work = np.flatnonzero(np.isin(arrays.op, _WORK))
    seconds[work] = _compute_seconds(arrays, work, durations)
    for i in np.flatnonzero(arrays.op == OPS.index(Op.REDUCE_GRAD)).tolist():
        time = reduce_grad(every[i]) if callable(reduce_grad) else reduce_grad
        seconds[i] = _non_negative("reduce_grad", time)
    if callable(transfer):
        rank_of = np.repeat(np.arange(len(lists)), np.diff(arrays.offsets))
        for i in np.flatnonzero(arrays.op == OPS.index(Op.SEND)).tolist():
            travel[i] = _non_negative("transfer", transfer(every[i], int(rank_of[i]), every[i].peer))
    try:
        found = simulate_arrays(arrays, seconds, transfer=travel)
    except ValueError:
        check(schedule)  # often knows why, not only where
        raise
    return Timeline(lists, _per_rank(found.start, lists), _per_rank(found.finish, lists), schedule.name)


def _compute_seconds(arrays: ActionArrays, work: NDArray[np.int64], durations: Durations) -> NDArray[np.float64]:
    """What the actions at `work` take, asked for once for each op, stage and, where that can matter, microbatch."""
    one_for_all = not callable(durations) and not any(isinstance(key, tuple) and len(key) == 4 for key in durations)
    kind = arrays.op[work] * np.int64(len(arrays.stages)) + arrays.stage[work]
    if not one_for_all:
        kind = kind << 32 | arrays.microbatch[work]
    _, first, number = np.unique(kind, return_index=True, return_inverse=True)
    cost = duration_of(durations)
    found = np.zeros(len(first))
    for k in np.argsort(first).tolist():  # as they come, so that the first action without a cost is the one named
        i = work[first[k]]
        module, stage = arrays.stages[arrays.stage[i]]
        found[k] = cost(OPS[arrays.op[i]], module, stage, int(arrays.microbatch[i]))
    return np.asarray(found[number.reshape(-1)])


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
