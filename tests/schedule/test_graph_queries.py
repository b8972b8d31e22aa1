"""Queries of layouts and graphs by rank, against a walk over all of their stages."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from interlace.layout import Layout, Shard, Stage
from interlace.schedule import StageGraph
from tests.schedule.graphs import random_case


def held_by(graph: StageGraph, number: int) -> tuple[Stage, set[int]]:
    node = graph.nodes[number]
    return graph.pipelines[node.pipeline].stages[node.stage], set(graph.layout.lanes()[node.lane].ranks)


def tied_with(graph: StageGraph, shard: Shard) -> set[int]:
    layers = set(range(shard.start, shard.stop))
    for group in graph.tied:
        if group[0][0] == shard.module and layers & {layer for _, layer in group}:
            layers |= {layer for _, layer in group}
    return layers


def walked(graph: StageGraph, module: str, layers: set[int], ranks: set[int]) -> list[int]:
    result = []
    for number in range(len(graph.nodes)):
        stage, lane = held_by(graph, number)
        if stage.module == module and layers & set(range(stage.start, stage.stop)) and ranks & lane:
            result.append(number)
    return result


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 10**6), st.integers(2, 9))
def test_by_rank(seed: int, ranks: int) -> None:
    graph = random_case(seed, max_ranks=ranks).graph
    layout: Layout = graph.layout
    for rank in range(-1, layout.world + 1):
        assert layout.of_rank(rank) == tuple(stage for stage in layout.stages() if rank in stage.ranks)
        for module in layout.modules:
            homes = {p.replica for p in layout.pipelines(module) for stage in p.stages if rank in stage.ranks}
            assert layout.replica(rank, module) == (homes.pop() if homes else None)
    everybody = set(range(layout.world))
    for reduction in graph.reductions:
        layers, ranks_of = set(range(reduction.start, reduction.stop)), set(reduction.ranks)
        if reduction.tied >= 0:
            layers, ranks_of = {layer for _, layer in graph.tied[reduction.tied]}, everybody
        assert graph.members(reduction) == walked(graph, reduction.module, layers, ranks_of)
    for shard in graph.shards:
        users = walked(graph, shard.module, tied_with(graph, shard), set(shard.owners))
        assert graph.shard_members(shard) == users
        assert [shard.replicas(owner) for owner in shard.owners] == [
            tuple(sorted(same)) for same in zip(*shard.sets, strict=True)
        ]
