"""Stage graphs: refused inputs, reduction groups, and the arrays for compiled code."""

import numpy as np
import pytest

from interlace import _core
from interlace.layout import Lane, Layout, ParallelSpec, Pipeline, Reduction, Stage
from interlace.schedule import StageGraph
from interlace.schedule.step import step_arrays
from tests.schedule.graphs import random_case
from tests.schedule.oracle import Demand

LLM = "language_model"
LINK = ("vision", LLM)


def layout_of(layers: dict[str, int]) -> Layout:
    modules = {
        name: (ParallelSpec(), (Pipeline(name, 0, (Stage(name, 0, 0, count, Lane((0,))),)),))
        for name, count in layers.items()
    }
    return Layout(modules, 1)


@pytest.mark.parametrize(
    ("links", "trainable", "tied", "says"),
    [
        (
            (("vision", "x"),),
            {},
            (),
            r"link \('vision', 'x'\) has the unknown module 'x': use one of vision, language_model",
        ),
        ((LINK, LINK), {}, (), "links has duplicates"),
        ((LINK, LINK[::-1]), {}, (), "the links of the modules vision, language_model form a cycle"),
        ((LINK,), {"vision": (True,)}, (), r"trainable\['vision'\] needs one flag for each of its 2 layers"),
        ((LINK,), {}, (((LLM, 0),),), "a group needs two or more layers of one module"),
        ((LINK,), {}, (((LLM, 0), ("vision", 1)),), "a group needs two or more layers of one module"),
        ((LINK,), {}, (((LLM, 0), (LLM, 3)),), "tied has layer 3 of 'language_model', which does not exist"),
    ],
)
def test_bad_graphs_are_refused(
    links: tuple[tuple[str, str], ...],
    trainable: dict[str, tuple[bool, ...]],
    tied: tuple[tuple[tuple[str, int], ...], ...],
    says: str,
) -> None:
    layout = layout_of({"vision": 2, LLM: 3})
    with pytest.raises(ValueError, match=says):
        StageGraph(layout, links, {"vision": (True,) * 2, LLM: (True,) * 3, **trainable}, tied)


def test_bad_parts_are_refused() -> None:
    with pytest.raises(ValueError, match="'m' has no stages"):
        StageGraph.build({"m": []})
    with pytest.raises(ValueError, match="module name 'a b' must not contain white space"):
        StageGraph.build({"a b": [0]})
    with pytest.raises(ValueError, match="b reads a and has copies"):
        StageGraph.build({"a": [0], "b": [(0, 1)]}, [("a", "b")])


def test_modules_go_producers_first() -> None:
    graph = StageGraph.build({LLM: [0], "audio": [0], "vision": [0]}, [("vision", LLM), ("audio", LLM)])
    assert graph.modules == (LLM, "audio", "vision")
    assert graph.module_order == ("audio", "vision", LLM)


def test_only_what_is_trained_is_summed_tied_weights_last() -> None:
    graph = StageGraph.build(
        {"vision": [(0, 1)], LLM: [0, 1, 2]},
        [LINK],
        trainable={"vision": False, LLM: [True, False, True]},
        tied=[((LLM, 0), (LLM, 2))],
        replicas=2,
    )
    assert graph.reductions == (
        Reduction(LLM, 0, 1, (0, 3)),
        Reduction(LLM, 2, 3, (2, 5)),
        Reduction(LLM, 0, 3, (0, 2), 0),
        Reduction(LLM, 0, 3, (3, 5), 0),
    )
    members = [[graph.nodes[n][:2] for n in graph.members(r)] for r in graph.reductions]
    tied = [(2, 0), (2, 2), (3, 0), (3, 2)]  # each replica sums the contributions of both
    assert members == [[(2, 0), (3, 0)], [(2, 2), (3, 2)], tied, tied]
    copies = StageGraph.build({"vision": [(0, 1)], LLM: [0, 1]}, [LINK])
    assert copies.reductions == (Reduction("vision", 0, 1, (0, 1)),)


def test_arrays_say_what_the_graph_says() -> None:
    for seed in range(100):
        graph = random_case(seed).graph
        a = graph.arrays
        lanes = graph.layout.lanes()
        assert all(column.dtype == np.int32 for column in a)
        columns = zip(a.node_pipeline, a.node_stage, a.node_lane, a.node_copy, strict=True)
        assert [tuple(map(int, row)) for row in columns] == [tuple(node) for node in graph.nodes]
        for number, node in enumerate(graph.nodes):
            stage = graph.pipelines[node.pipeline].stages[node.stage]
            assert stage.lanes[node.copy] == lanes[node.lane]
            assert bool(a.node_trains[number]) == any(graph.trainable[stage.module][stage.start : stage.stop])
            assert a.pipeline_first[node.pipeline] <= number < a.pipeline_first[node.pipeline + 1]
        assert [graph.modules[m] for m in a.pipeline_module] == [p.module for p in graph.pipelines]
        for i, lane in enumerate(lanes):
            assert tuple(a.lane_rank[a.lane_first[i] : a.lane_first[i + 1]]) == lane.ranks
        assert [(graph.modules[p], graph.modules[c]) for p, c in a.module_links] == list(graph.links)
        for i, reduction in enumerate(graph.reductions):
            taking_part = slice(a.reduction_first[i], a.reduction_first[i + 1])
            assert tuple(a.reduction_rank[taking_part]) == reduction.ranks
            members = graph.members(reduction)
            for rank, node in zip(reduction.ranks, a.reduction_node[taking_part], strict=True):
                assert node == min(n for n in members if rank in lanes[graph.nodes[n].lane].ranks)
            assert list(a.reduction_member[a.reduction_member_first[i] : a.reduction_member_first[i + 1]]) == members
            assert bool(a.reduction_tied[i]) == (reduction.tied >= 0)
        for i, shard in enumerate(graph.shards):
            taking_part = slice(a.shard_first[i], a.shard_first[i + 1])
            assert tuple(a.shard_rank[taking_part]) == tuple(sorted(shard.owners))
            members = graph.shard_members(shard)
            for rank, node in zip(shard.ranks, a.shard_node[taking_part], strict=True):
                assert node == min(n for n in members if rank in lanes[graph.nodes[n].lane].ranks)
            assert list(a.shard_member[a.shard_member_first[i] : a.shard_member_first[i + 1]]) == members
            assert bool(a.shard_full[i]) == shard.full
            nodes = [graph.nodes[n] for n in members]
            stages = [graph.pipelines[node.pipeline].stages[node.stage] for node in nodes]
            whole = all((stage.start, stage.stop) == (shard.start, shard.stop) for stage in stages)
            assert bool(a.shard_by_layer[i]) == (shard.full and whole)


def test_jobs_and_backwards_equal_the_definitions() -> None:
    for seed in range(300):
        case = random_case(seed)
        for backward in (True, False):
            demand = Demand(case.graph, case.table, backward)
            nodes, chunks, runs = _core.schedule_jobs(*step_arrays(case.graph, case.table), backward)
            jobs = list(zip(nodes.tolist(), chunks.tolist(), strict=True))
            assert sorted(jobs) == sorted(demand.forwards)
            assert {job for job, run in zip(jobs, runs, strict=True) if run} == demand.backwards


def test_compiled_code_refuses_arrays_that_do_not_fit() -> None:
    graph = StageGraph.build({"a": [0], "b": [1, 2]}, [("a", "b")])
    a, chunks, links = graph.arrays, np.array([0, 1], np.int32), np.array([[0, 1]], np.int32)
    _core.schedule_jobs(a, chunks, links, True)
    for fields, says in (
        (a[:-1], "23 arrays"),
        (a._replace(node_lane=np.array([0, 1, 9], np.int32)), "node_lane names a lane that is none"),
        (a._replace(node_stage=np.array([0, 1, 0], np.int32)), "node 1 is out of order"),
        (a._replace(pipeline_first=np.array([0, 2, 1], np.int32)), "pipeline_first must rise"),
        (a._replace(pipeline_first=np.array([0, 0, 3], np.int32)), "pipeline 0 has no nodes"),
        (a._replace(module_links=np.array([[0, 1], [1, 0]], np.int32)), "feed each other in a cycle"),
        (a._replace(module_links=np.zeros((0, 2), np.int32)), "chunk 1 reads chunk 0, but the graph has no link"),
    ):
        with pytest.raises(ValueError, match=says):
            _core.schedule_jobs(fields, chunks, links, True)
    for pairs, says in (([[0, 1], [0, 1]], "sorted"), ([[0, 2]], r"links\[1\] is 2"), ([0, 1], "must have shape")):
        with pytest.raises(ValueError, match=says):
            _core.schedule_jobs(a, chunks, np.array(pairs, np.int32), True)
    with pytest.raises(ValueError, match=r"chunk_pipeline\[0\] is 2"):
        _core.schedule_jobs(a, chunks + 2, links, True)
    with pytest.raises(ValueError, match="seconds must have four entries per job: 12, not 2"):
        _core.schedule_lists(a, chunks, links, 1, True, True, np.ones(2), *[np.zeros(0)] * 2, 0)
