"""Random layouts and tables for property tests."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from interlace.layout import Lane, Layout, ParallelSpec, Pipeline, Stage
from interlace.schedule import Chunk, Edge, StageGraph, StepTable

SHARDS = ("none", "none", "optimizer", "full")


@dataclass(frozen=True)
class Case:
    """A graph and a matching table."""

    graph: StageGraph
    table: StepTable


def random_case(seed: int, max_ranks: int = 5, max_chunks: int = 5) -> Case:
    """Any acyclic modules on any ranks: merged, folded, shared, copied, frozen, tied, sharded, in any numbers."""
    rng = random.Random(seed)
    world = rng.randint(1, max_ranks)
    names = [f"m{i}" for i in range(rng.randint(1, 4))]
    links = [(a, b) for i, a in enumerate(names) for b in names[i + 1 :] if rng.random() < 0.5]
    readers = {b for _, b in links}
    modules, trainable, tied = {}, {}, []
    for name in rng.sample(names, len(names)):
        size = 1 if world == 1 or rng.random() < 0.7 else 2
        dp = rng.randint(1, min(3, world // size))
        stages = rng.choice([1, 1, 2, 3])
        layers = stages + rng.randint(0, 2)
        homes: list[list[int]] = [[] for _ in range(dp)]
        for place, rank in enumerate(rng.sample(range(world), world)):
            if place < dp * size or rng.random() < 0.7:
                homes[place % dp].append(rank)
        pipelines = []
        for replica, home in enumerate(homes):
            cuts = [0, *sorted(rng.sample(range(1, layers), stages - 1)), layers]
            lanes = [Lane(tuple(rng.sample(home, size))) for _ in range(stages)]
            copies: list[Lane] = []
            if stages == 1 and name not in readers and rng.random() < 0.3:
                left = [rank for rank in home if rank not in lanes[0].ranks]
                copies = [Lane(tuple(left[i : i + size])) for i in range(0, len(left) - size + 1, size)]
            parts = [Stage(name, i, cuts[i], cuts[i + 1], lanes[i], tuple(copies)) for i in range(stages)]
            pipelines.append(Pipeline(name, replica, tuple(parts)))
        tp = rng.choice([1, size])
        modules[name] = (ParallelSpec(tp, size // tp, stages, dp, shard=rng.choice(SHARDS)), tuple(pipelines))
        some = rng.choice([0.0, 0.5, 1.0, 1.0])
        trainable[name] = tuple(rng.random() < some for _ in range(layers))
        if layers > 1 and trainable[name][0] and trainable[name][-1] and rng.random() < 0.5:
            tied.append(((name, 0), (name, layers - 1)))
    in_part = frozenset(name for name in modules if rng.random() < 0.3)
    graph = StageGraph(_without_idle(modules), tuple(rng.sample(links, len(links))), trainable, tuple(tied), in_part)
    return Case(graph, random_table(rng, graph, max_chunks))


def _without_idle(modules: dict[str, tuple[ParallelSpec, tuple[Pipeline, ...]]]) -> Layout:
    used = sorted(
        {r for _, ps in modules.values() for p in ps for s in p.stages for lane in s.lanes for r in lane.ranks}
    )
    new = {rank: i for i, rank in enumerate(used)}

    def moved(lane: Lane) -> Lane:
        return Lane(tuple(new[rank] for rank in lane.ranks))

    made = {}
    for name, (spec, pipelines) in modules.items():
        made[name] = (
            spec,
            tuple(
                replace(
                    p,
                    stages=tuple(replace(s, lane=moved(s.lane), copies=tuple(map(moved, s.copies))) for s in p.stages),
                )
                for p in pipelines
            ),
        )
    return Layout(made, len(used))


def random_table(rng: random.Random, graph: StageGraph, max_chunks: int) -> StepTable:
    """Chunks of all replicas in any order, and any links between those of linked modules."""
    keys = [
        (p.module, p.replica)
        for p in graph.pipelines
        for _ in range(rng.choice([0, 1, max_chunks, rng.randint(0, max_chunks)]))
    ] or [(graph.pipelines[0].module, 0)]
    rng.shuffle(keys)
    counts: Counter[tuple[str, int]] = Counter()
    chunks = []
    for place, key in enumerate(keys):
        chunks.append(Chunk(*key, counts[key], np.array([place], np.int32)))
        counts[key] += 1
    edges = []
    for producer, consumer in graph.links:
        dense = rng.choice([0.1, 0.3, 0.6])
        pairs = [
            (i, 0, j, 0, 1)
            for i, a in enumerate(chunks)
            for j, b in enumerate(chunks)
            if (a.module, b.module) == (producer, consumer) and rng.random() < dense
        ]
        edges.append(Edge(producer, consumer, "embeds", np.array(pairs, np.int32).reshape(-1, 5)))
    return StepTable(tuple(chunks), tuple(edges))


def table_of(counts: Mapping[tuple[str, int], int], pairs: Sequence[tuple[str, int, int, str, int, int]]) -> StepTable:
    """counts: (module, replica) -> chunks. pairs: (module, replica, index) that is read by (module, replica, index)."""
    chunks = [Chunk(m, r, i, np.zeros(1, np.int32)) for (m, r), count in counts.items() for i in range(count)]
    at = {(c.module, c.replica, c.index): place for place, c in enumerate(chunks)}
    edges: dict[tuple[str, str], list[tuple[int, ...]]] = {}
    for *source, target_module, target_replica, target_index in pairs:
        target = at[target_module, target_replica, target_index]
        edges.setdefault((source[0], target_module), []).append((at[tuple(source)], 0, target, 0, 1))  # type: ignore
    return StepTable(
        tuple(chunks), tuple(Edge(*key, "embeds", np.array(result, np.int32)) for key, result in edges.items())
    )
