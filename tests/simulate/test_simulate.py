"""The simulator against a fixpoint written out in full, and against lower bounds."""

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from interlace.schedule import Action, Op, Schedule, ScheduleError, StageGraph, gpipe, one_f_one_b
from interlace.simulate import Record, Timeline, simulate
from tests.schedule.graphs import Case, cases, expected_compute, fixpoint_times

LLM = "language_model"
COMPUTE = (Op.FORWARD, Op.BACKWARD)


@given(cases(), st.booleans(), st.integers(0, 3), st.integers(0, 2), st.randoms(use_true_random=False))
@settings(max_examples=200, deadline=None)
def test_times_equal_the_fixpoint_and_respect_lower_bounds(
    case: Case, classical: bool, transfer: int, overhead: int, random: object
) -> None:
    graph = case.graph
    schedule = (one_f_one_b if classical else gpipe)(graph, case.presence)
    seconds = {
        (op, s.module, s.index, k): float(random.randint(0, 7))  # type: ignore[attr-defined]
        for op in COMPUTE
        for s in graph.stages
        for k in range(len(case.presence))
    }
    timeline = simulate(schedule, seconds, transfer=float(transfer), overhead=float(overhead))
    assert timeline.finish == fixpoint_times(schedule, seconds, float(transfer), float(overhead))
    assert timeline.makespan == max((max(times) for times in timeline.finish if times), default=0.0)

    busiest = 0.0
    for rank, actions in enumerate(schedule.actions):
        work = sum(seconds[a.op, a.module, a.stage, a.microbatch] for a in actions if a.op in COMPUTE)
        assert timeline.busy_per_rank[rank] == work
        busiest = max(busiest, work)
    assert timeline.makespan >= busiest
    assert sum(timeline.busy_per_module.values()) == sum(timeline.busy_per_rank)
    for k, present in enumerate(case.presence):
        assert timeline.makespan >= longest_path(graph, present, k, seconds, float(transfer))


def longest_path(
    graph: StageGraph, present: frozenset[str], k: int, seconds: dict[tuple[Op, str, int, int], float], transfer: float
) -> float:
    """The longest chain of one microbatch's forwards and backwards over stages that have no copies."""
    _, backward = expected_compute(graph, present)
    alone = [i for i, s in enumerate(graph.stages) if len(s.ranks) == 1 and s.module in present]
    down: dict[int, float] = {}

    def cost(op: Op, i: int) -> float:
        return seconds[op, graph.stages[i].module, graph.stages[i].index, k]

    def hop(p: int, c: int) -> float:
        return transfer if graph.stages[p].ranks != graph.stages[c].ranks else 0.0

    for i in graph.topological:
        if i in alone:
            before = [down[p] + hop(p, i) for p, c in graph.edges if c == i and p in alone]
            down[i] = max(before, default=0.0) + cost(Op.FORWARD, i)
    up: dict[int, float] = {}
    for i in reversed(graph.topological):
        if i in alone and (i, graph.stages[i].ranks[0]) in backward:
            after = [up[c] + hop(i, c) for p, c in graph.edges if p == i and c in up]
            up[i] = max([down[i], *after]) + cost(Op.BACKWARD, i)
    return max([*down.values(), *up.values()], default=0.0)


def two_stages(microbatches: int = 1) -> Schedule:
    graph = StageGraph.build({"vision": [0], LLM: [1]}, [("vision", LLM)])
    return one_f_one_b(graph, graph.everything(microbatches))


def test_a_step_by_hand() -> None:
    costs = {Op.FORWARD: 1.0, (Op.FORWARD, LLM): 2.0, (Op.BACKWARD, "vision", 0): 3.0, (Op.BACKWARD, LLM, 0, 0): 5.0}
    timeline = simulate(
        two_stages(), costs, transfer=0.5, overhead=0.25, reduce_grad=lambda a: 10.0 * (a.module == LLM)
    )
    records = [(str(r.action), r.start, r.finish) for r in timeline.records()]
    assert records == [
        ("F:vision/0@0", 0.0, 1.0),
        ("SEND:vision/0@0>1", 1.0, 1.25),
        ("RECV_GRAD:vision/0@0<1", 1.25, 10.0),
        ("B:vision/0@0", 10.0, 13.0),
        ("REDUCE_GRAD:vision/0", 13.0, 13.0),
        ("RECV:vision/0@0<0", 0.0, 2.0),
        (f"F:{LLM}/0@0", 2.0, 4.0),
        (f"B:{LLM}/0@0", 4.0, 9.0),
        ("SEND_GRAD:vision/0@0>0", 9.0, 9.25),
        (f"REDUCE_GRAD:{LLM}/0", 9.25, 19.25),
    ]
    assert timeline.makespan == 19.25
    assert timeline.busy_per_rank == (4.0, 7.0) and timeline.busy_per_module == {"vision": 4.0, LLM: 7.0}
    assert timeline.utilization == {"vision": 4.0 / 19.25, LLM: 7.0 / 19.25}
    assert timeline.bubble == pytest.approx(1 - 11.0 / (2 * 19.25))
    assert timeline.peak_in_flight == (1, 1)
    assert timeline.peak_memory({("vision", 0): 6.0}) == (6.0, 0.0)


def test_copies_reduce_together() -> None:
    graph = StageGraph.build({"vision": [(0, 1)], LLM: [0, 1]}, [("vision", LLM)])
    timeline = simulate(one_f_one_b(graph, graph.everything(1)), {Op.FORWARD: 1.0, Op.BACKWARD: 1.0}, reduce_grad=2.0)
    finish = {(r.rank, str(r.action)): r.finish for r in timeline.records()}
    assert finish[0, "REDUCE_GRAD:vision/0"] == finish[1, "REDUCE_GRAD:vision/0"]


def test_tied_weights_are_reduced_when_the_last_of_their_stages_is_done() -> None:
    graph = StageGraph.build({LLM: [0, 1]}, tied=[[(LLM, 0), (LLM, 1)]])
    schedule = one_f_one_b(graph, graph.everything(1))
    timeline = simulate(
        schedule, {Op.FORWARD: 1.0, Op.BACKWARD: 2.0}, reduce_grad=lambda action: 5.0 if action.part else 0.0
    )
    ends = {(r.rank, str(r.action)): (r.start, r.finish) for r in timeline.records()}
    tied = f"REDUCE_GRAD:{LLM}/0+1"
    assert ends[1, tied] == (4.0, 11.0) and ends[0, tied] == (6.0, 11.0) and timeline.makespan == 11.0


def test_messages_between_two_ranks_share_a_link() -> None:
    schedule = two_stages(3)
    costs = {Op.FORWARD: 1.0, Op.BACKWARD: 0.0, (Op.FORWARD, LLM): 0.0}
    timeline = simulate(schedule, costs, transfer=lambda action, source, target: 0.0 if action.grad else 4.0)
    arrivals = [r.finish for r in timeline.records() if r.action.op is Op.RECV and not r.action.grad]
    # The first leaves after 1 s; the second is made meanwhile and has to wait for the link.
    assert arrivals == [5.0, 9.0, 13.0]


def test_bad_costs_and_stuck_schedules_are_refused() -> None:
    with pytest.raises(ValueError, match="no entry for FORWARD of vision/0, microbatch 0"):
        simulate(two_stages(), {Op.BACKWARD: 1.0})
    with pytest.raises(ValueError, match=r"costs -1\.0 seconds"):
        simulate(two_stages(), lambda op, module, stage, microbatch: -1.0)
    with pytest.raises(ValueError, match="transfer is nan"):
        simulate(two_stages(), {Op.FORWARD: 1.0, Op.BACKWARD: 1.0}, transfer=float("nan"))
    stuck = two_stages()
    stuck.actions[0].remove(Action(Op.SEND, "vision", 0, 0, peer=1))
    with pytest.raises(ScheduleError, match="rank 0 lacks SEND"):
        simulate(stuck, {Op.FORWARD: 1.0, Op.BACKWARD: 1.0})


def test_measured_records_make_the_same_timeline() -> None:
    simulated = simulate(two_stages(4), {Op.FORWARD: 1.0, Op.BACKWARD: 2.0}, transfer=0.125)
    shifted = [Record(r.rank, r.action, r.start + 100.0, r.finish + 100.0) for r in simulated.records()]
    measured = Timeline.from_records(reversed(list(shifted)), name="1f1b")
    assert measured.makespan == simulated.makespan and measured.begin == 100.0
    assert measured.bubble == simulated.bubble and measured.busy == simulated.busy
    assert Timeline.from_records(shifted, num_ranks=3).busy_per_rank[2] == 0.0
    with pytest.raises(ValueError, match="before its start"):
        Timeline.from_records([(0, Action(Op.FORWARD, "m", 0), 1.0, 0.5)])
    with pytest.raises(ValueError, match="names rank 1 of 1 ranks"):
        Timeline.from_records(shifted, num_ranks=1)
    empty = Timeline.from_records([], num_ranks=2)
    assert (empty.makespan, empty.bubble, empty.peak_in_flight) == (0.0, 0.0, (0, 0))


def test_a_quarter_of_a_million_actions_take_about_a_second() -> None:
    graph = StageGraph.build({"m": list(range(64))})
    schedule = one_f_one_b(graph, graph.everything(660))
    assert sum(map(len, schedule.actions)) > 250_000
    start = time.process_time()
    timeline = simulate(schedule, {Op.FORWARD: 1.0, Op.BACKWARD: 2.0})
    assert time.process_time() - start < 3.0
    assert timeline.makespan == (660 + 63) * 3
