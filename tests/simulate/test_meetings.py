"""Weights gathered layer by layer: ranks that share them synchronize in simulated time and wait for each other."""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from interlace.layout import Lane, Layout, ParallelSpec, Pipeline, Stage
from interlace.schedule import Op, Schedule, ScheduleError, StageGraph, StepTable, check, gpipe, one_f_one_b, zb_h1
from interlace.schedule.actions import COMPUTE
from interlace.simulate import Timeline, simulate, simulate_arrays
from tests.schedule import graphs
from tests.simulate.cases import by_hand
from tests.simulate.reference import simulate_in_python

SEEDS = st.integers(0, 2**32 - 1)
LLM = "llm"


def lanes_of(dp: int, tp: int, cp: int, pp: int) -> list[list[tuple[int, ...]]]:
    """The ranks of each stage of each replica, from rank 1 on."""
    size = tp * cp
    starts = [[1 + size * (pp * replica + stage) for stage in range(pp)] for replica in range(dp)]
    return [[tuple(range(first, first + size)) for first in own] for own in starts]


def replicas(dp: int, tp: int = 1, cp: int = 1, pp: int = 1, trained: bool = True) -> StageGraph:
    """An encoder on rank 0, and its consumer: replicas with shard = "full" on separate ranks."""
    pipelines = tuple(
        Pipeline(LLM, d, tuple(Stage(LLM, i, i, i + 1, Lane(ranks)) for i, ranks in enumerate(own)))
        for d, own in enumerate(lanes_of(dp, tp, cp, pp))
    )
    vision = Pipeline("vision", 0, (Stage("vision", 0, 0, 1, Lane((0,))),))
    spec = ParallelSpec(tp=tp, cp=cp, pp=pp, dp=dp, shard="full")
    layout = Layout({"vision": (ParallelSpec(), (vision,)), LLM: (spec, pipelines)}, 1 + dp * tp * cp * pp)
    return StageGraph(layout, (("vision", LLM),), {"vision": (True,), LLM: (trained,) * pp})


def table_of(graph: StageGraph, chunks: int) -> StepTable:
    """`chunks` chunks of each replica, each with the encoder chunk that it reads, in turn."""
    dp = graph.layout.spec(LLM).dp
    counts = {("vision", 0): dp * chunks} | {(LLM, d): chunks for d in range(dp)}
    pairs = [("vision", 0, d + dp * k, LLM, d, k) for d in range(dp) for k in range(chunks)]
    return graphs.table_of(counts, pairs)


def by_layer(schedule: Schedule) -> bool:
    return any(a.op is Op.UNSHARD_LAYERS for actions in schedule.actions for a in actions)


def test_a_replica_whose_inputs_come_later_holds_up_the_other() -> None:
    """By hand: rank 1 has its rows at 1, rank 2 at 2; they compute for 3 and 5 seconds, both from 2 to 7."""
    graph = replicas(2)
    gathers = "UNSHARD_LAYERS:llm/0+0 RECV:vision/0@"
    lists = [
        "F:vision/0@0 SEND:vision/0@0+2>1 F:vision/0@1 SEND:vision/0@1+3>2",
        f"{gathers}0+2<0 F:llm/0@2 RESHARD:llm/0+0",
        f"{gathers}1+3<0 F:llm/0@3 RESHARD:llm/0+0",
    ]
    forwards = {(Op.FORWARD, "vision"): 1.0, (Op.FORWARD, LLM, 0, 2): 3.0, (Op.FORWARD, LLM, 0, 3): 5.0}

    def spans(lists: list[str]) -> list[tuple[float, float]]:
        schedule = replace(by_hand(graph, lists), table=table_of(graph, 1))
        result = simulate(schedule, forwards)
        assert result == simulate_in_python(schedule, forwards)
        return [
            (result.start[r][i], result.finish[r][i])
            for r in (1, 2)
            for i, action in enumerate(result.actions[r])
            if action.op is Op.FORWARD
        ]

    assert spans(lists) == [(2.0, 7.0), (2.0, 7.0)]
    assert spans([each.replace("_LAYERS", "") for each in lists]) == [(1.0, 4.0), (2.0, 7.0)]


def played(schedule: Schedule, rng: random.Random) -> tuple[Timeline, dict[Any, float]] | None:
    """Both simulators agree on all times to the last bit, or report a deadlock."""
    seconds = {
        (a.op, a.module, a.stage, a.chunk): rng.choice([0.0, rng.random(), 2 * rng.random()])
        for actions in schedule.actions
        for a in actions
        if a.op in COMPUTE
    }
    transfer = rng.random() * rng.choice([0, 1])
    options = {"transfer": transfer, "overhead": rng.choice([0.0, 0.125]), "reduce_grad": rng.random()}
    try:
        expected = simulate_in_python(schedule, seconds, **options)
    except ScheduleError:
        with pytest.raises(ScheduleError):
            simulate(schedule, seconds, **options)
        return None
    result = simulate(schedule, seconds, **options)
    assert result.start == expected.start and result.finish == expected.finish
    return result, seconds


@settings(max_examples=60, deadline=None)
@given(SEEDS)
def test_ranks_that_share_weights_meet(seed: int) -> None:
    """The k-th forward or backward of all ranks starts when the last rank reaches it, and takes the longest time."""
    rng = random.Random(seed)
    degrees = [rng.choice([1, 2]) for _ in range(3)]
    dp = rng.choice([2, 3])
    graph = replicas(dp, *degrees, trained=rng.random() < 0.9)
    make = rng.choice([gpipe, one_f_one_b, zb_h1])
    schedule = make(graph, table_of(graph, rng.choice([1, 2, 3])))
    check(schedule)
    assume(by_layer(schedule))  # otherwise some replica has another order
    result = played(schedule, rng)
    assert result is not None
    timeline, seconds = result
    lanes = lanes_of(dp, *degrees)
    for stage in range(len(lanes[0])):
        runs = defaultdict(list)  # rank -> (when it had reached the action, start, finish, seconds)
        for rank in (rank for replica in lanes for rank in replica[stage]):
            ready = 0.0
            for record in (r for r in timeline.records() if r.rank == rank):
                action = record.action
                if action.op in COMPUTE:
                    cost = seconds[action.op, action.module, action.stage, action.chunk]
                    runs[rank].append((ready, record.start, record.finish, cost))
                ready = record.start if action.op is Op.REDUCE_GRAD else record.finish
        for together in zip(*runs.values(), strict=True):
            begin, longest = max(each[0] for each in together), max(each[3] for each in together)
            assert {each[1:3] for each in together} == {(begin, begin + longest)}


def damaged(schedule: Schedule, rng: random.Random) -> Schedule:
    """Two actions of a rank exchanged: often a deadlock."""
    lists = [list(actions) for actions in schedule.actions]
    own = rng.choice(lists)
    if len(own) > 1:
        i, j = rng.sample(range(len(own)), 2)
        own[i], own[j] = own[j], own[i]
    return Schedule.of_actions("damaged", schedule.graph, schedule.table, lists)


def full_case(rng: random.Random) -> tuple[StageGraph, StepTable]:
    """Any stages of `random_case`, sharded "full". Replicas have equal numbers of chunks; index k reads index k."""
    graph = graphs.random_case(rng.randrange(5000)).graph
    modules = {name: (replace(spec, shard="full"), result) for name, (spec, result) in graph.layout.modules.items()}
    graph = replace(graph, layout=Layout(modules, graph.layout.world))
    chunks, dp = rng.choice([1, 2, 3]), {name: spec.dp for name, (spec, _) in modules.items()}
    counts = {(name, d): chunks for name in graph.modules for d in range(dp[name])}
    pairs = [(a, d % dp[a], k, b, d, k) for a, b in graph.links for d in range(dp[b]) for k in range(chunks)]
    return graph, graphs.table_of(counts, pairs)


@settings(max_examples=80, deadline=None)
@given(SEEDS)
def test_any_graph_plays_alike_in_both(seed: int) -> None:
    """Merged, folded, shared, tied and copied stages, whole and damaged lists."""
    rng = random.Random(seed)
    schedule = rng.choice([gpipe, one_f_one_b, zb_h1])(*full_case(rng))
    assume(by_layer(schedule))
    assert played(schedule, rng) is not None
    played(damaged(schedule, rng), rng)


def test_who_waits_for_whom_is_said_of_ranks_that_meet() -> None:
    graph = replicas(2)
    lists = ["", "UNSHARD_LAYERS:llm/0+0 F:llm/0@2", "UNSHARD_LAYERS:llm/0+0"]
    schedule = replace(by_hand(graph, lists), table=table_of(graph, 1))
    waits = r"rank 1: F:llm/0@2 \(action 1\) waits for rank 2, which has finished its list"
    with pytest.raises(ScheduleError, match=waits):
        simulate_arrays(schedule, [0.0] * 3)
    apart = replace(by_hand(graph, [*lists[:2], lists[2] + " B:llm/0@3"]), table=table_of(graph, 1))
    with pytest.raises(ScheduleError, match=r"rank 1: F:llm/0@2 .* waits for rank 2, which is at B:llm/0@3"):
        simulate_arrays(apart, [0.0] * 4)
    with pytest.raises(ValueError, match=r"rank 1, gathers shard 1 layer by layer, which is none"):
        simulate_arrays(replace(by_hand(graph, ["", "UNSHARD_LAYERS:llm/0+1", ""]), table=table_of(graph, 1)), [0.0])
