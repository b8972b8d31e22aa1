"""The simulator against the equations of its model, small cases by hand, and lower bounds."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from interlace.schedule import Op, Schedule, ScheduleError, StageGraph, StepTable, gpipe, one_f_one_b
from interlace.schedule.actions import COMPUTE
from interlace.simulate import Record, Timeline, simulate
from tests.counted_calls import python_calls
from tests.schedule.text import parse
from tests.simulate.cases import (
    LLM,
    assert_times_obey_the_model,
    by_hand,
    lanes_graph,
    random_graph,
    random_schedule,
    random_table,
)
from tests.simulate.timelines import timeline_of


@settings(max_examples=120)
@given(st.integers(0, 2**32 - 1))
def test_times_obey_the_model_and_lower_bounds(seed: int) -> None:
    rng = np.random.default_rng(seed)
    if seed % 2:
        schedule = random_schedule(rng)
    else:
        graph = random_graph(rng)
        schedule = (one_f_one_b, gpipe)[rng.integers(2)](graph, random_table(rng, graph))
    costs = {
        (op, chunk.module, stage, k): float(rng.random())
        for op in COMPUTE
        for k, chunk in enumerate(schedule.table.chunks)
        for stage in range(2)
    }
    transfer, overhead, reduce = (float(x) for x in rng.random(3) * (rng.random(3) < 0.7))
    timeline = simulate(schedule, costs, transfer=transfer, overhead=overhead, reduce_grad=reduce)
    assert_times_obey_the_model(schedule, timeline, costs, transfer, overhead, reduce)

    work = [sum(costs[a.op, a.module, a.stage, a.chunk] for a in own if a.op in COMPUTE) for own in schedule.actions]
    assert timeline.busy_per_rank == pytest.approx(work)
    assert sum(timeline.busy_per_module.values()) == pytest.approx(sum(work))
    assert timeline.makespan >= max(timeline.busy_per_rank) * (1 - 1e-12)
    for k, chunk in enumerate(schedule.table.chunks):  # its forwards, one after the other
        depth = len(schedule.graph.layout.pipelines(chunk.module)[chunk.replica].stages)
        alone = sum(costs[Op.FORWARD, chunk.module, stage, k] for stage in range(depth))
        assert timeline.makespan >= alone * (1 - 1e-12)


def two_stages(microbatches: int = 1) -> Schedule:
    graph = StageGraph.build({"vision": [0], LLM: [1]}, [("vision", LLM)], replicas=2)
    table = StepTable.aligned(graph.links, [graph.modules] * microbatches, replicas=2)
    return one_f_one_b(graph, table)


def times(timeline: Timeline, rank: int) -> list[tuple[str, float, float]]:
    return [(str(r.action), r.start, r.finish) for r in timeline.records() if r.rank == rank]


def test_a_step_by_hand() -> None:
    """The second replica takes one second more for its last backward, for which both reductions wait."""
    costs = {
        Op.FORWARD: 1.0,
        (Op.FORWARD, LLM): 2.0,
        (Op.BACKWARD, "vision", 0): 3.0,
        (Op.BACKWARD, "vision", 0, 2): 4.0,
        (Op.BACKWARD, LLM, 0): 5.0,
    }
    timeline = simulate(
        two_stages(), costs, transfer=0.5, overhead=0.25, reduce_grad=lambda a: 10.0 * (a.module == LLM)
    )
    assert times(timeline, 0) == [
        ("F:vision/0@0", 0.0, 1.0),
        ("SEND:vision/0@0+1>2", 1.0, 1.25),
        ("RECV_GRAD:vision/0@0+1<2", 1.25, 10.0),
        ("B:vision/0@0", 10.0, 13.0),
        ("REDUCE_GRAD:vision/0+0", 13.0, 14.0),
    ]
    assert times(timeline, 1) == [
        ("RECV:vision/0@0+1<0", 0.0, 2.0),
        (f"F:{LLM}/0@1", 2.0, 4.0),
        (f"B:{LLM}/0@1", 4.0, 9.0),
        ("SEND_GRAD:vision/0@0+1>0", 9.0, 9.25),
        (f"REDUCE_GRAD:{LLM}/0+1", 9.25, 19.25),
    ]
    assert timeline.makespan == 19.25
    assert timeline.busy_per_rank == (4.0, 7.0, 5.0, 7.0) and timeline.busy_per_module == {"vision": 9.0, LLM: 14.0}
    assert timeline.utilization == {"vision": 9.0 / (2 * 19.25), LLM: 14.0 / (2 * 19.25)}
    assert timeline.bubble == pytest.approx(1 - 23.0 / (4 * 19.25))
    assert timeline.peak_in_flight == (1, 1, 1, 1)
    assert timeline.peak_memory({("vision", 0): 6.0, ("vision", 0, 2): 7.0}) == (6.0, 0.0, 7.0, 0.0)


def test_ranks_of_a_lane_start_together_with_all_inputs() -> None:
    graph = lanes_graph({"vision": [(0, 1)], "audio": [(0,)], LLM: [(2,)]}, 3)
    # Rank 0 is in two lanes.
    vision, audio, llm = (number_of(graph, name) for name in ("vision", "audio", LLM))
    schedule = by_hand(
        graph,
        [
            f"F:audio/0@{audio} SEND:audio/0@{audio}+{llm}>2 F:vision/0@{vision} SEND:vision/0@{vision}+{llm}>2",
            f"F:vision/0@{vision} SEND:vision/0@{vision}+{llm}>2",
            f"RECV:vision/0@{vision}+{llm}<0 RECV:audio/0@{audio}+{llm}<1 F:{LLM}/0@{llm}",
        ],
    )
    timeline = simulate(
        schedule,
        {Op.FORWARD: 3.0, (Op.FORWARD, "vision"): 1.0},
        transfer=lambda action, source, lane: 7.0 if source == 0 and action.module == "vision" else 0.5,
    )
    assert [start for _, start, _ in times(timeline, 0)] == [0.0, 3.0, 3.0, 4.0]
    assert times(timeline, 1)[0][1:] == (3.0, 4.0)  # waits for rank 0, which counts as idle
    assert [finish for _, _, finish in times(timeline, 2)] == [11.0, 11.0, 14.0]
    assert timeline.busy_per_rank == (4.0, 1.0, 3.0)


def number_of(graph: StageGraph, module: str) -> int:
    table = StepTable.aligned(graph.links, [graph.modules])
    return next(i for i, chunk in enumerate(table.chunks) if chunk.module == module)


def test_reductions_run_beside_the_computing_and_share_links() -> None:
    """Two modules on the same two ranks: their sums follow each other; the step ends with the last."""
    graph = StageGraph.build({"vision": [0], LLM: [0]}, [("vision", LLM)], replicas=2)
    lists = [
        [parse(cell) for cell in text.split()]
        for text in (
            f"F:vision/0@0 F:{LLM}/0@1 B:{LLM}/0@1 REDUCE_GRAD:{LLM}/0+1 B:vision/0@0 REDUCE_GRAD:vision/0+0",
            f"F:vision/0@2 F:{LLM}/0@3 B:{LLM}/0@3 REDUCE_GRAD:{LLM}/0+1 B:vision/0@2 REDUCE_GRAD:vision/0+0",
        )
    ]
    table = StepTable.aligned(graph.links, [graph.modules], replicas=2)
    schedule = Schedule.of_actions("by hand", graph, table, lists)
    costs = {Op.FORWARD: 1.0, Op.BACKWARD: 2.0, (Op.BACKWARD, LLM, 0, 3): 3.0}
    timeline = simulate(schedule, costs, reduce_grad=4.0)
    assert [(start, finish) for _, start, finish in times(timeline, 0)[2:]] == [(2, 4), (4, 9), (4, 6), (6, 13)]
    assert [(start, finish) for _, start, finish in times(timeline, 1)[2:]] == [(2, 5), (5, 9), (5, 7), (7, 13)]
    assert timeline.makespan == 13.0 and timeline.busy_per_rank == (6.0, 7.0)
    assert timeline.bubble == pytest.approx(1 - 13 / 26)


def test_tied_weights_are_reduced_after_all_else() -> None:
    graph = StageGraph.build({LLM: [0, 1]}, tied=[[(LLM, 0), (LLM, 1)]], replicas=2)
    table = StepTable.aligned((), [graph.modules], replicas=2)
    ranks = [reduction.ranks for reduction in graph.reductions]
    assert ranks == [(0, 2), (1, 3), (0, 1), (2, 3)]
    seconds = (5.0, 7.0, 1.0, 2.0)
    timeline = simulate(
        one_f_one_b(graph, table),
        {Op.FORWARD: 1.0, Op.BACKWARD: 2.0},
        reduce_grad=lambda action: seconds[action.other],
    )
    ends = {r.action.other: r.finish for r in timeline.records() if r.action.op is Op.REDUCE_GRAD}
    # Stage 1 is done at 4 and stage 0 at 6; each sums by itself, then both sums are tied.
    assert ends == {0: 11.0, 1: 11.0, 2: 12.0, 3: 13.0} and timeline.makespan == 13.0


def test_messages_between_two_lanes_share_a_link() -> None:
    graph = StageGraph.build({"vision": [0], LLM: [1]}, [("vision", LLM)])
    schedule = one_f_one_b(graph, StepTable.aligned(graph.links, [graph.modules] * 3))
    costs = {Op.FORWARD: 1.0, Op.BACKWARD: 0.0, (Op.FORWARD, LLM): 0.0}
    timeline = simulate(schedule, costs, transfer=lambda action, source, lane: 0.0 if action.grad else 4.0)
    arrivals = [r.finish for r in timeline.records() if r.action.op is Op.RECV and not r.action.grad]
    # The first leaves after 1 s; the second is made meanwhile and must wait for the link.
    assert arrivals == [5.0, 9.0, 13.0]


def test_bad_costs_and_stuck_schedules_are_refused() -> None:
    with pytest.raises(ValueError, match="no entry for FORWARD of vision/0, chunk 0"):
        simulate(two_stages(), {Op.BACKWARD: 1.0})
    with pytest.raises(ValueError, match=r"costs -1\.0 seconds"):
        simulate(two_stages(), lambda op, module, stage, chunk: -1.0)
    with pytest.raises(ValueError, match="transfer is nan"):
        simulate(two_stages(), {Op.FORWARD: 1.0, Op.BACKWARD: 1.0}, transfer=float("nan"))
    sound = two_stages()
    lists = [[a for a in own if a.op is not Op.SEND or a.grad] for own in sound.actions]
    stuck = Schedule.of_actions("stuck", sound.graph, sound.table, lists)
    with pytest.raises(ScheduleError, match="rank 0 lacks SEND"):
        simulate(stuck, {Op.FORWARD: 1.0, Op.BACKWARD: 1.0})


def test_measured_records_make_the_same_timeline() -> None:
    simulated = simulate(two_stages(4), {Op.FORWARD: 1.0, Op.BACKWARD: 2.0}, transfer=0.125, reduce_grad=0.5)
    shifted = [Record(r.rank, r.action, r.start + 100.0, r.finish + 100.0) for r in simulated.records()]
    measured = timeline_of(reversed(list(shifted)))
    assert measured.makespan == simulated.makespan and measured.begin == 100.0
    assert measured.bubble == simulated.bubble and measured.busy == simulated.busy
    assert timeline_of(shifted, ranks=5).busy_per_rank[4] == 0.0
    empty = timeline_of([], ranks=2)
    assert (empty.makespan, empty.bubble, empty.peak_in_flight) == (0.0, 0.0, (0, 0))


def test_chunks_are_numbered_within_their_replica() -> None:
    simulated = simulate(two_stages(2), {Op.FORWARD: 1.0, Op.BACKWARD: 2.0})
    assert [simulated.number(chunk) for chunk in range(8)] == [0, 0, 1, 1, 0, 0, 1, 1]
    assert timeline_of(simulated.records()).number(5) == 5


def test_a_quarter_of_a_million_actions_take_two_calls_each() -> None:
    """Linear cost: a few Python calls per action, for any number of actions."""
    graph = StageGraph.build({"m": list(range(64))})
    schedule = one_f_one_b(graph, StepTable.aligned((), [graph.modules] * 660))
    assert len(schedule.rows) > 250_000
    timeline, calls = python_calls(lambda: simulate(schedule, {Op.FORWARD: 1.0, Op.BACKWARD: 2.0}))
    assert calls < 2.1 * len(schedule.rows)
    assert timeline.makespan == (660 + 63) * 3
