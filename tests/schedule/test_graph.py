"""Stage graphs: validation, derived flags, depths."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from interlace.schedule import Stage, StageGraph
from interlace.schedule.work import Work
from tests.schedule.graphs import Case, cases, expected_compute

LLM = "language_model"
BOTH = [("vision", LLM), ("audio", LLM)]


@given(st.integers(1, 5), st.integers(0, 5), st.integers(1, 5))
def test_depths_are_cornstarchs_warm_up_counts(vision: int, audio: int, llm: int) -> None:
    modules = {"vision": list(range(vision)), LLM: list(range(vision + audio, vision + audio + llm))}
    if audio:
        modules["audio"] = list(range(vision, vision + audio))
    graph = StageGraph.build(modules, BOTH[: 1 + bool(audio)])
    for position, stage in enumerate(graph.stages):
        own = len(modules[stage.module])
        want = llm - stage.index - 1 if stage.module == LLM else own + llm - stage.index - 1
        assert graph.depths[position, stage.ranks[0]] == want
        assert graph.rank_depths is not None and graph.rank_depths[stage.ranks[0]] == want


def test_stages_on_one_rank_count_once() -> None:
    merged = StageGraph.build({"vision": [0, 1], "audio": [0, 1], LLM: [2, 3]}, BOTH)
    assert merged.rank_depths == (3, 2, 1, 0)
    folded = StageGraph.build({"vision": [0, 0], "audio": [0], LLM: [0, 1, 1]}, BOTH)
    assert folded.rank_depths == (1, 0)
    assert StageGraph.build({"vision": [0], "audio": [0], LLM: [0, 0]}, BOTH).rank_depths == (0,)
    copies = StageGraph.build({"vision": [(0, 1, 2)], LLM: [0, 1, 2]}, BOTH[:1])
    assert copies.rank_depths == (2, 1, 0)


def test_ranks_that_feed_each_other_have_no_unit_depth() -> None:
    looped = StageGraph.build({"m": [0, 1, 0, 1]})
    assert looped.rank_depths is None
    assert [looped.depths[i, i % 2] for i in range(4)] == [3, 2, 1, 0]


def test_flags_follow_from_what_is_trainable() -> None:
    # Frozen encoder with a trainable projector in its last stage, frozen LLM.
    graph = StageGraph.build({"vision": [0, 1], LLM: [2, 3]}, BOTH[:1], trainable={"vision": [False, True], LLM: False})
    flags = [(s.backward, s.input_grad, s.pass_through) for s in graph.stages]
    assert flags == [(False, False, False), (True, False, False), (True, True, True), (True, True, True)]


@given(cases())
@settings(max_examples=150, deadline=None)
def test_work_equals_the_definitions(case: Case) -> None:
    for present in set(case.presence):
        work = Work.of(case.graph, present)
        forward, backward = expected_compute(case.graph, present)
        assert set(work.forward) == forward and len(work.forward) == len(forward)
        assert set(work.backward) == backward and len(work.backward) == len(backward)


def test_a_frozen_llm_has_no_backward_without_the_encoders() -> None:
    graph = StageGraph.build({"vision": [0], LLM: [0, 1]}, BOTH[:1], trainable={LLM: False})
    assert len(Work.of(graph, frozenset({"vision", LLM})).backward) == 3
    assert not Work.of(graph, frozenset({LLM})).backward


def stage(module: str = "m", index: int = 0, ranks: tuple[int, ...] = (0,), backward: bool = True) -> Stage:
    return Stage(module, index, ranks, backward, backward and index > 0)


@pytest.mark.parametrize(
    ("stages", "edges", "ranks", "says"),
    [
        ([], [], 1, "at least one stage"),
        ([stage()], [], 0, "num_ranks is 0"),
        ([stage("a b")], [], 1, "module name 'a b'"),
        ([stage(ranks=())], [], 1, "has ranks"),
        ([stage(ranks=(0, 0))], [], 1, "each of its ranks once"),
        ([stage(ranks=(1,))], [], 1, "on rank 1, but ranks go from 0 to 0"),
        ([stage(index=1)], [], 1, "number them 0 to 0"),
        ([stage(), stage(index=1)], [], 1, "no edge from m/0 to m/1"),
        ([stage(), stage(index=1)], [(0, 1), (0, 1)], 1, "given twice"),
        ([stage(), stage(index=1)], [(0, 2)], 1, "outside 0..1"),
        ([stage(), replace(stage(index=1), input_grad=False)], [(0, 1)], 1, "must have backward=True and input_grad"),
        ([replace(stage(), backward=False, input_grad=True)], [], 1, "but has backward=False"),
        ([replace(stage(), pass_through=True)], [], 1, "needs input_grad=True"),
        ([replace(stage(), input_grad=True), stage(index=1)], [(0, 1), (1, 0)], 1, "cycle: m/0, m/1"),
    ],
)
def test_bad_graphs_are_refused(stages: list[Stage], edges: list[tuple[int, int]], ranks: int, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        StageGraph(tuple(stages), tuple(edges), ranks)


def test_bad_parts_are_refused() -> None:
    with pytest.raises(ValueError, match="'m' has no stages"):
        StageGraph.build({"m": []})
    with pytest.raises(ValueError, match="names 'x'; modules: m"):
        StageGraph.build({"m": [0]}, [("x", "m")])
    with pytest.raises(ValueError, match=r"trainable\['m'\] has 2 entries for 1 stages"):
        StageGraph.build({"m": [0]}, trainable={"m": [True, False]})
