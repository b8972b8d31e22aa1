"""Schedules with split backwards, made from any schedule: W anywhere between its I and the sum of its weights.

A generator may place W freely. So tests of the executor use these lists: seeded, at random places that the checker
allows. The ranks of a lane have one order, and so have ranks that gather weights layer by layer.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from interlace.run import ParallelModel
from interlace.schedule import GENERATORS, Op, Schedule
from interlace.schedule.actions import COMPUTE, Action

Lane = tuple[int, ...]
_ENDS = (Op.REDUCE_GRAD, Op.RESHARD)


def split_backwards(
    schedule: Schedule, seed: int = 0, *, share: float = 1.0, most: int = 6, in_order: bool = True
) -> Schedule:
    """`schedule` with a `share` of its backwards split; W at most `most` compute actions of its lane after I.

    in_order: a stage adds up the gradients of chunks in the order of `schedule`, which gives the same bits.
    """
    if not schedule.backward:
        return schedule
    graph, lists = schedule.graph, [list(actions) for actions in schedule.actions]
    layered = {a.module for actions in lists for a in actions if a.op is Op.UNSHARD_LAYERS}
    lanes: dict[Lane, list[list[int]]] = defaultdict(list)  # per rank, its indices of the lane's compute actions
    for rank, actions in enumerate(lists):
        result: dict[Lane, list[int]] = defaultdict(list)
        for place, action in enumerate(actions):
            if action.op in COMPUTE:
                result[_lane(schedule, action, rank)].append(place)
        for lane, places in result.items():
            lanes[lane].append(places)
    after: list[dict[int, list[Action]]] = [defaultdict(list) for _ in lists]  # index -> actions inserted after it
    for lane, by_rank in lanes.items():
        first = lists[lane[0]]
        sequence = [first[place] for place in by_rank[0]]
        count: Counter[tuple[str, int]] = Counter()
        last: dict[tuple[str, int], int] = {}  # position of the weights of the last chunk
        for at, action in enumerate(sequence):
            if action.op is not Op.BACKWARD:
                continue
            node = action.module, action.stage
            rng = random.Random(f"{seed} {node} {count[node]}")  # the same for each replica
            count[node] += 1
            if rng.random() >= share:
                continue
            stop = min(_stop(lists[rank], places, at, action) for rank, places in zip(lane, by_rank, strict=True))
            allowed = list(range(at, stop))
            if action.module in layered:
                allowed = [i for i in allowed if (sequence[i].module, sequence[i].stage) == node]
            allowed = allowed[: most + 1]
            if in_order:
                allowed = [i for i in allowed if i >= last.get(node, 0)] or [last[node]]
            behind = last[node] = rng.choice(allowed)
            for rank, places in zip(lane, by_rank, strict=True):
                lists[rank][places[at]] = replace(action, op=Op.BACKWARD_INPUT)
                after[rank][places[behind]].append(replace(action, op=Op.BACKWARD_WEIGHT))
    made = [[a for i, each in enumerate(actions) for a in (each, *after[r][i])] for r, actions in enumerate(lists)]
    return Schedule.of_actions(
        f"split {schedule.name}", graph, schedule.table, made, backward=True, reduce_grad=schedule.reduce_grad
    )


def _lane(schedule: Schedule, action: Action, rank: int) -> Lane:
    chunk, graph = schedule.table.chunks[action.chunk], schedule.graph
    pipeline = graph.pipelines[graph.pipeline_number[chunk.module, chunk.replica]]
    return tuple(pipeline.stages[action.stage].lane_of(rank).ranks)


def _stop(actions: list[Action], places: list[int], at: int, action: Action) -> int:
    """Number of compute actions at `places` before the weights of `action` are summed or released."""
    for place in range(places[at], len(actions)):
        if actions[place].op in _ENDS and actions[place].module == action.module:
            return sum(other < place for other in places)
    return len(places)


def splitting(monkeypatch: pytest.MonkeyPatch, seed: int = 0, **options: Any) -> None:
    """From now on generators return split lists, which the checker verifies as usual."""
    for name, generator in GENERATORS.items():
        monkeypatch.setitem(GENERATORS, name, partial(_generate, generator, seed, options))


def _generate(generator: Any, seed: int, options: dict[str, Any], *args: Any, **kwargs: Any) -> Schedule:
    return split_backwards(generator(*args, **kwargs), seed, **options)


def halves(parallel: ParallelModel) -> list[Action]:
    """The BACKWARD_WEIGHT actions of the last step, of all ranks."""
    assert parallel._last is not None
    return [action for actions in parallel._last[0].actions for action in actions if action.op is Op.BACKWARD_WEIGHT]
