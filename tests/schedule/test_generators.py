"""GPipe and 1F1B: textbook orders, and what must hold for every graph, placement, freezing and presence."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from interlace.schedule import Op, StageGraph, check, gpipe, one_f_one_b
from interlace.simulate import simulate
from tests.schedule.graphs import Case, cases, compute_text, expected_compute, in_flight

LLM = "language_model"
BOTH = [("vision", LLM), ("audio", LLM)]


def chain(stages: int) -> StageGraph:
    return StageGraph.build({"m": list(range(stages))})


def test_textbook_1f1b() -> None:
    graph = chain(4)
    assert [compute_text(actions) for actions in one_f_one_b(graph, graph.everything(6)).actions] == [
        "F0 F1 F2 F3 B0 F4 B1 F5 B2 B3 B4 B5",
        "F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 B4 B5",
        "F0 F1 B0 F2 B1 F3 B2 F4 B3 F5 B4 B5",
        "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5",
    ]


def test_textbook_gpipe() -> None:
    graph = chain(2)
    lists = gpipe(graph, graph.everything(3)).actions
    assert [compute_text(actions) for actions in lists] == ["F0 F1 F2 B0 B1 B2"] * 2
    assert [str(action) for action in lists[1]] == [
        "RECV:m/0@0<0", "F:m/1@0", "RECV:m/0@1<0", "F:m/1@1", "RECV:m/0@2<0", "F:m/1@2",
        "B:m/1@0", "SEND_GRAD:m/0@0>0", "B:m/1@1", "SEND_GRAD:m/0@1>0", "B:m/1@2", "SEND_GRAD:m/0@2>0",
        "REDUCE_GRAD:m/1",
    ]  # fmt: skip


@given(st.integers(1, 8), st.integers(1, 20), st.integers(1, 9), st.integers(1, 9))
@settings(max_examples=60, deadline=None)
def test_a_uniform_chain_takes_the_textbook_time_and_memory(p: int, m: int, forward: int, backward: int) -> None:
    graph = chain(p)
    costs = {Op.FORWARD: forward, Op.BACKWARD: backward}
    for generate in (gpipe, one_f_one_b):
        timeline = simulate(generate(graph, graph.everything(m)), costs)
        assert timeline.makespan == (m + p - 1) * (forward + backward)
        assert timeline.bubble == pytest.approx((p - 1) / (m + p - 1))
    assert simulate(gpipe(graph, graph.everything(m)), costs).peak_in_flight == (m,) * p
    assert timeline.peak_in_flight == tuple(min(m, p - stage) for stage in range(p))


@given(st.integers(1, 6), st.integers(1, 12))
def test_1f1b_is_the_classical_order_written_out(p: int, m: int) -> None:
    graph = chain(p)
    for stage, actions in enumerate(one_f_one_b(graph, graph.everything(m)).actions):
        warm_up = min(m, p - 1 - stage)
        want = [f"F{k}" for k in range(warm_up)]
        for k in range(m - warm_up):
            want += [f"F{k + warm_up}", f"B{k}"]
        want += [f"B{k}" for k in range(m - warm_up, m)]
        assert compute_text(actions).split() == want


def test_parallel_encoders_run_ahead_by_cornstarchs_counts() -> None:
    graph = StageGraph.build({"vision": [0, 1], "audio": [2], LLM: [3, 4]}, BOTH)
    schedule = one_f_one_b(graph, graph.everything(8))
    warm_ups = [compute_text(actions).split().index("B0") - 1 for actions in schedule.actions]
    assert warm_ups == [3, 2, 2, 1, 0]
    # Balanced stages pipeline as one chain as long as the longest path.
    assert simulate(schedule, {Op.FORWARD: 1.0, Op.BACKWARD: 2.0}).makespan == (8 + 4 - 1) * 3


def test_everything_on_one_rank() -> None:
    graph = StageGraph.build({"vision": [0], "audio": [0], LLM: [0, 0]}, BOTH)
    actions = one_f_one_b(graph, graph.everything(2)).actions[0]
    once = "F:vision/0@{0} F:audio/0@{0} F:language_model/0@{0} F:language_model/1@{0} " \
        "B:language_model/1@{0} B:language_model/0@{0} B:audio/0@{0} B:vision/0@{0}"  # fmt: skip
    want = [*once.format(0).split(), *once.format(1).split()]
    want += [
        "REDUCE_GRAD:language_model/1",
        "REDUCE_GRAD:language_model/0",
        "REDUCE_GRAD:audio/0",
        "REDUCE_GRAD:vision/0",
    ]
    assert [str(action) for action in actions] == want


def test_merged_encoders_share_a_rank_and_its_depth() -> None:
    graph = StageGraph.build({"vision": [0, 1], "audio": [0, 1], LLM: [2]}, BOTH)
    rank = [str(a) for a in one_f_one_b(graph, graph.everything(4)).actions[1] if a.op in (Op.FORWARD, Op.BACKWARD)]
    assert rank[:6] == ["F:vision/1@0", "F:audio/1@0", "F:vision/1@1", "F:audio/1@1", "B:audio/1@0", "B:vision/1@0"]


def test_replicated_encoders_run_everywhere_but_learn_where_they_are_read() -> None:
    graph = StageGraph.build({"vision": [(0, 1, 2)], LLM: [0, 1, 2]}, BOTH[:1])
    schedule = one_f_one_b(graph, graph.everything(2))
    for rank, actions in enumerate(schedule.actions):
        ops = [a.op for a in actions if a.module == "vision"]
        assert ops.count(Op.FORWARD) == 2 and ops.count(Op.BACKWARD) == (2 if rank == 0 else 0)
        assert ops.count(Op.SEND) == ops.count(Op.RECV) == 0
        assert ops[-1] is Op.REDUCE_GRAD
    check(schedule)


def test_frozen_encoders_send_no_gradients() -> None:
    graph = StageGraph.build({"vision": [0, 1], LLM: [2]}, BOTH[:1], trainable={"vision": [False, True]})
    schedule = one_f_one_b(graph, graph.everything(3))
    assert {a.op for a in schedule.actions[0]} == {Op.FORWARD, Op.SEND}
    assert not any(a.grad and a.stage == 0 for a in schedule.actions[1])
    assert any(a.grad and a.stage == 1 for a in schedule.actions[1])


def test_absent_modules_have_no_actions() -> None:
    graph = StageGraph.build({"vision": [0], "audio": [1], LLM: [2, 3]}, BOTH)
    everything = frozenset(graph.modules)
    schedule = one_f_one_b(graph, [everything, {LLM}, everything - {"audio"}, {LLM}])
    seen = {(a.module, a.microbatch) for actions in schedule.actions for a in actions if a.op is not Op.REDUCE_GRAD}
    assert seen == {("vision", 0), ("vision", 2), ("audio", 0), *((LLM, k) for k in range(4))}
    text_only = one_f_one_b(graph, [{LLM}, {LLM}])
    assert text_only.actions[0] == text_only.actions[1] == []
    check(text_only)


def test_rare_encoders_run_ahead_within_their_memory() -> None:
    # Present in microbatches 0, 5, 6 only: 5 need not wait for the backward of 0.
    graph = StageGraph.build({"vision": [0], LLM: [1]}, BOTH[:1])
    presence = [{"vision", LLM} if k in (0, 5, 6) else {LLM} for k in range(8)]
    assert compute_text(one_f_one_b(graph, presence).actions[0]) == "F0 F5 B0 F6 B5 B6"


def test_interleaved_stages_are_ordered_without_a_closed_form() -> None:
    interleaved = StageGraph.build({"m": [0, 1, 2, 3, 0, 1, 2, 3]})
    folded = StageGraph.build({"m": [0, 0, 1, 1, 2, 2, 3, 3]})
    costs = {Op.FORWARD: 1.0, Op.BACKWARD: 2.0}
    for generate in (gpipe, one_f_one_b):
        schedule = generate(interleaved, interleaved.everything(12))
        check(schedule)
        # Two chunks per rank halve the bubble at best (Megatron-LM, arXiv 2104.04473, section 2.2).
        whole = simulate(generate(folded, folded.everything(12)), costs).makespan
        assert whole == (12 + 3) * 6 and (24 + 3) * 3 <= simulate(schedule, costs).makespan < whole


@given(cases(), st.sampled_from(["gpipe", "1f1b", "guided"]), st.data())
@settings(max_examples=250, deadline=None)
def test_every_schedule_is_sound(case: Case, kind: str, data: st.DataObject) -> None:
    graph = case.graph
    if kind == "guided":
        seconds = {
            (op, s.module, s.index): data.draw(st.integers(0, 5))
            for s in graph.stages
            for op in (Op.FORWARD, Op.BACKWARD)
        }
        schedule = one_f_one_b(graph, case.presence, durations=seconds)
        if graph.rank_depths is not None:
            classical = simulate(one_f_one_b(graph, case.presence), seconds)
            assert simulate(schedule, seconds).makespan <= classical.makespan
    else:
        schedule = (gpipe if kind == "gpipe" else one_f_one_b)(graph, case.presence)
    report = check(schedule)
    assert report.actions == sum(map(len, schedule.actions))

    reduced = set()
    for k, present in enumerate(case.presence):
        forward, backward = expected_compute(graph, present)
        for op, want in ((Op.FORWARD, forward), (Op.BACKWARD, backward)):
            found = [
                (graph.position[a.module, a.stage], rank)
                for rank, actions in enumerate(schedule.actions)
                for a in actions
                if a.op is op and a.microbatch == k
            ]
            assert sorted(found) == sorted(want)
        reduced |= {i for i, _ in backward if not graph.stages[i].pass_through}
    for rank, actions in enumerate(schedule.actions):
        names = {(a.module, a.stage) for a in actions if a.op is Op.REDUCE_GRAD}
        assert names == {
            (graph.stages[i].module, graph.stages[i].index) for i in reduced if rank in graph.stages[i].ranks
        }
        for i in graph.hosted(rank):
            stage = graph.stages[i]
            own = [a for a in actions if (a.module, a.stage) == (stage.module, stage.index)]
            for op in (Op.FORWARD, Op.BACKWARD):
                order = [a.microbatch for a in own if a.op is op]
                assert order == sorted(order)
            if kind != "gpipe":
                assert in_flight(actions, stage.module, stage.index) <= graph.in_flight_caps[i, rank]


@given(cases(max_microbatches=3))
@settings(max_examples=60, deadline=None)
def test_messages_stand_next_to_what_makes_and_needs_them(case: Case) -> None:
    schedule = one_f_one_b(case.graph, case.presence, reduce_grad=False)
    for actions in schedule.actions:
        for before, action in pairwise(actions):
            if action.op is Op.SEND:
                assert before.op in (Op.FORWARD, Op.BACKWARD, Op.SEND)
                assert before.microbatch == action.microbatch
            if before.op is Op.RECV:
                assert action.op in (Op.FORWARD, Op.BACKWARD, Op.RECV)
        assert not actions or actions[-1].op is not Op.RECV


def test_bad_presence_is_refused() -> None:
    graph = chain(2)
    with pytest.raises(ValueError, match="at least one microbatch"):
        one_f_one_b(graph, [])
    with pytest.raises(ValueError, match=r"presence\[1\] names 'x'; modules: m"):
        gpipe(graph, [{"m"}, {"x"}])
    with pytest.raises(ValueError, match="is the string 'm'"):
        gpipe(graph, ["m"])
    with pytest.raises(ValueError, match="no entry for BACKWARD of m/1"):
        one_f_one_b(graph, graph.everything(1), durations={Op.FORWARD: 1.0})
