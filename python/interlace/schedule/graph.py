"""Stage graph: stages of a layout as nodes, with data flow, required backwards and gradient reductions.

A node is one stage on one lane; copies are separate nodes. Stage i of a pipeline feeds stage i + 1. The last stage of a
producing module feeds the first stage of a consuming one wherever a chunk of the consumer reads rows of the producer
(`StepTable.links`), in any replica. A consumer reads the copy on its own lane if there is one, else the stage's own
lane. Copies without a reader run forwards only.

A chunk runs BACKWARD on a stage if the stage has something to train, or if it runs BACKWARD on what feeds the stage:
the previous stage, or the last stage of a module from which the chunk reads rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from interlace.layout import Lane, Layout, ParallelSpec, Pipeline, Reduction, Shard, Stage
from interlace.schedule.actions import valid_module_name

Ints = NDArray[np.int32]


class Node(NamedTuple):
    """A stage on one lane. pipeline: index in `Layout.pipelines()`. copy: 0 is the stage's own lane."""

    pipeline: int
    stage: int
    lane: int
    copy: int


class GraphArrays(NamedTuple):
    """A StageGraph for compiled code. All int32; nodes in the order of `StageGraph.nodes`.

    node_pipeline, node_stage, node_lane, node_copy, node_trains [nodes]: as in Node, and whether it trains something.
    pipeline_module [pipelines], pipeline_first [pipelines + 1]: module and first node of each pipeline.
    lane_first [lanes + 1], lane_rank: the ranks of each lane. module_links [n, 2]: producer and consumer modules.
    reduction_first [reductions + 1], reduction_rank, reduction_node: ranks of each reduction, each with its first node
        that holds some of the weights. reduction_tied [reductions]: whether it is for a tied weight.
        reduction_member_first [reductions + 1], reduction_member: all nodes whose backward adds to it.
    shard_first [shards + 1], shard_rank, shard_node: ranks and nodes of each shard, likewise. shard_full [shards]:
        whether its weights are whole only between UNSHARD and RESHARD. shard_by_layer [shards]: see `by_layer`.
        shard_member_first [shards + 1], shard_member: all nodes that compute with its weights on one of its ranks.
    """

    node_pipeline: Ints
    node_stage: Ints
    node_lane: Ints
    node_copy: Ints
    node_trains: Ints
    pipeline_module: Ints
    pipeline_first: Ints
    lane_first: Ints
    lane_rank: Ints
    module_links: Ints
    reduction_first: Ints
    reduction_rank: Ints
    reduction_node: Ints
    reduction_tied: Ints
    reduction_member_first: Ints
    reduction_member: Ints
    shard_first: Ints
    shard_rank: Ints
    shard_node: Ints
    shard_full: Ints
    shard_by_layer: Ints
    shard_member_first: Ints
    shard_member: Ints


@dataclass(frozen=True)
class StageGraph:
    """A layout with the properties of the model that schedules need.

    links: (producer, consumer) modules; the last stage of the producer feeds the first stage of the consumer.
    trainable: per module, for each layer, whether anything in it is trained.
    tied: groups of (module, layer) that hold one trained weight (input embedding and output head of one module).
    in_part: modules with weights of which each rank of a lane uses a part, so that all of them sum the gradients.
    repeating: modules that may run a layer several times per chunk, such as those that process samples separately.

    Raises ValueError with the name of the inconsistent part.
    """

    layout: Layout
    links: tuple[tuple[str, str], ...]
    trainable: Mapping[str, tuple[bool, ...]]
    tied: tuple[tuple[tuple[str, int], ...], ...] = ()
    in_part: frozenset[str] = frozenset()
    repeating: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        for name in self.modules:
            if not valid_module_name(name):
                raise ValueError(f'module name {name!r} must not contain white space or any of , ; / @ + < > = "')
            layers = self.layout.pipelines(name)[0].num_layers
            if len(self.trainable.get(name, ())) != layers:
                raise ValueError(f"trainable[{name!r}] needs one flag for each of its {layers} layers")
        for link in self.links:
            for name in link:
                if name not in self.modules:
                    raise ValueError(
                        f"link {link} has the unknown module {name!r}: use one of {', '.join(self.modules)}"
                    )
            if any(stage.copies for stage in self.layout.pipelines(link[1])[0].stages):
                raise ValueError(
                    f"{link[1]} reads {link[0]} and has copies: only modules that read no other module may have copies"
                )
        if len(set(self.links)) != len(self.links):
            raise ValueError(f"links has duplicates: {self.links}")
        for group in self.tied:
            names = {name for name, _ in group}
            if len(set(group)) < 2 or len(names) > 1:
                raise ValueError(f"tied has the group {group}: a group needs two or more layers of one module")
            for name, layer in group:
                if not 0 <= layer < len(self.trainable.get(name, ())):
                    raise ValueError(f"tied has layer {layer} of {name!r}, which does not exist")
        self.module_order  # noqa: B018 (raises for a cycle)

    @cached_property
    def modules(self) -> tuple[str, ...]:
        """Module names, by their number in rows."""
        return tuple(self.layout.modules)

    @cached_property
    def module_order(self) -> tuple[str, ...]:
        """Modules in topological order, producers first. Raises ValueError for a cycle."""
        order: list[str] = []
        remaining = list(self.modules)
        while remaining:
            free = [n for n in remaining if not any(b == n and a in remaining for a, b in self.links)]
            if not free:
                raise ValueError(f"the links of the modules {', '.join(remaining)} form a cycle")
            order.append(free[0])
            remaining.remove(free[0])
        return tuple(order)

    @cached_property
    def pipelines(self) -> tuple[Pipeline, ...]:
        """Pipelines of the layout."""
        return self.layout.pipelines()

    @cached_property
    def pipeline_number(self) -> dict[tuple[str, int], int]:
        """(module, replica) -> index in `pipelines`."""
        return {(p.module, p.replica): i for i, p in enumerate(self.pipelines)}

    @cached_property
    def nodes(self) -> tuple[Node, ...]:
        """All nodes, ordered by pipeline, stage and copy."""
        return tuple(
            Node(p, stage.index, self.layout.lane_number(lane), copy)
            for p, pipeline in enumerate(self.pipelines)
            for stage in pipeline.stages
            for copy, lane in enumerate(stage.lanes)
        )

    def trains(self, stage: Stage) -> bool:
        """True if anything in `stage` is trained."""
        return any(self.trainable[stage.module][stage.start : stage.stop])

    @cached_property
    def reductions(self) -> tuple[Reduction, ...]:
        """Possible gradient reductions of a step: those of layers with trained weights, then those of tied weights."""
        layout = self.layout
        reductions = [g for g in layout.reduce_groups(self.in_part) if any(self.trainable[g.module][g.start : g.stop])]
        for number, group in enumerate(self.tied):
            module = group[0][0]
            tp = layout.spec(module).tp
            layers = [layer for _, layer in group]
            sets: list[tuple[int, ...]] = []
            if number in self.uneven:
                for same_weights in zip(*(layout.same_weights(module, layer) for layer in layers), strict=True):
                    sets.append(tuple(sorted({rank for ranks in same_weights for rank in ranks})))
            for pipeline in layout.pipelines(module) if number not in self.uneven else ():
                lanes = [pipeline.stage_with(layer).lane for layer in layers]
                for same_weights in zip(*(lane.cp_groups(tp) for lane in lanes), strict=True):
                    # Context-parallel ranks have the same sum by now, so each reduces with ranks of its own place.
                    sets += [tuple(sorted(set(same_place))) for same_place in zip(*same_weights, strict=True)]
            reductions += [
                Reduction(module, min(layers), max(layers) + 1, ranks, number) for ranks in sets if len(ranks) > 1
            ]
        return tuple(reductions)

    @cached_property
    def uneven(self) -> frozenset[int]:
        """Indices in `tied` of groups whose layers share stages or lanes differently in different replicas.

        Gradients of their weight are not part of the reductions of layers. One reduction sums them over all holders.
        """
        return frozenset(
            number
            for number, group in enumerate(self.tied)
            if self.layout.uneven(group[0][0], [layer for _, layer in group])
        )

    def members(self, reduction: Reduction) -> list[int]:
        """Nodes whose backward contributes to `reduction`.

        For a tied weight these are nodes of every replica: a rank contributes the sum over replicas, even if its own
        replica ran nothing.
        """
        if reduction.tied >= 0:
            return self._tied_members[reduction.tied]
        layers = {*range(reduction.start, reduction.stop)}
        return self._holding(reduction.module, layers, reduction.ranks)

    @cached_property
    def _tied_members(self) -> list[list[int]]:
        """For each group of tied layers, the nodes that hold one of them."""
        held = [{layer for _, layer in group} for group in self.tied]
        return [
            self._holding(group[0][0], layers, range(self.layout.world))
            for group, layers in zip(self.tied, held, strict=True)
        ]

    @cached_property
    def _nodes_on(self) -> dict[tuple[str, int], list[int]]:
        """(module, rank) -> nodes of the module whose lane includes the rank, in order."""
        nodes: dict[tuple[str, int], list[int]] = {}
        lanes = self.layout.lanes()
        for number, node in enumerate(self.nodes):
            module = self.pipelines[node.pipeline].module
            for rank in lanes[node.lane].ranks:
                nodes.setdefault((module, rank), []).append(number)
        return nodes

    def stage_of(self, node: int) -> Stage:
        """Stage of a node. node: index in `nodes`."""
        return self.pipelines[self.nodes[node].pipeline].stages[self.nodes[node].stage]

    def _holding(self, module: str, layers: set[int], ranks: Iterable[int]) -> list[int]:
        """The nodes of a module that hold one of `layers` on one of `ranks`, in order."""
        holds_layers: dict[int, bool] = {}
        for rank in ranks:
            for number in self._nodes_on.get((module, rank), ()):
                if number not in holds_layers:
                    stage = self.stage_of(number)
                    holds_layers[number] = not layers.isdisjoint(range(stage.start, stage.stop))
        return sorted(number for number, holds in holds_layers.items() if holds)

    @cached_property
    def shards(self) -> tuple[Shard, ...]:
        """Shards that a step may have to gather: all weights if fully sharded, else those with trained layers."""
        return tuple(
            group
            for group in self.layout.shard_groups()
            if group.full or any(self.trainable[group.module][group.start : group.stop])
        )

    def shard_members(self, shard: Shard) -> list[int]:
        """Nodes that compute with weights of `shard` on one of its ranks.

        They include other stages of these ranks that hold tied weights.
        """
        layers = set(range(shard.start, shard.stop))
        for group in self.tied:
            if group[0][0] == shard.module and layers.intersection(layer for _, layer in group):
                layers.update(layer for _, layer in group)
        return self._holding(shard.module, layers, shard.owners)

    def by_layer(self, shard: Shard, members: Sequence[int] | None = None) -> bool:
        """True if `shard` may be gathered layer by layer. members: of it, if they are known.

        Two conditions make all of its ranks join the same gathers. Each rank has exactly the shard's layers in one
        stage. Each layer runs once per chunk.
        """
        stages = [self.stage_of(node) for node in (self.shard_members(shard) if members is None else members)]
        same_layers = all((stage.start, stage.stop) == (shard.start, shard.stop) for stage in stages)
        return shard.full and shard.module not in self.repeating and same_layers

    @cached_property
    def arrays(self) -> GraphArrays:
        """The graph for compiled code."""
        nodes, lanes, reductions, shards = self.nodes, self.layout.lanes(), self.reductions, self.shards
        number = {name: i for i, name in enumerate(self.modules)}
        adding = [self.members(reduction) for reduction in reductions]
        users = [self.shard_members(shard) for shard in shards]
        by_layer = [self.by_layer(shard, members) for shard, members in zip(shards, users, strict=True)]
        return GraphArrays(
            _ints([n.pipeline for n in nodes]),
            _ints([n.stage for n in nodes]),
            _ints([n.lane for n in nodes]),
            _ints([n.copy for n in nodes]),
            _ints([self.trains(self.stage_of(n)) for n in range(len(nodes))]),
            _ints([number[p.module] for p in self.pipelines]),
            _starts([sum(len(stage.lanes) for stage in p.stages) for p in self.pipelines]),
            *_lists([lane.ranks for lane in lanes]),
            _ints([[number[a], number[b]] for a, b in self.links]).reshape(-1, 2),
            *self._group_arrays(reductions, adding, [reduction.tied >= 0 for reduction in reductions]),
            *self._group_arrays(shards, users, [shard.full for shard in shards], by_layer),
        )

    def _group_arrays(
        self, groups: Sequence[Reduction | Shard], members: Sequence[Sequence[int]], *flags: Sequence[bool]
    ) -> list[Ints]:
        """The arrays of reductions or shards: ranks, for each rank its first node among the members, flags, members."""
        first_nodes = []
        for group, candidates in zip(groups, map(set, members), strict=True):
            for rank in group.ranks:
                first_nodes.append(next(n for n in self._nodes_on[group.module, rank] if n in candidates))
        ranks = _lists([group.ranks for group in groups])
        return [*ranks, _ints(first_nodes), *map(_ints, flags), *_lists(members)]

    @classmethod
    def build(
        cls,
        modules: Mapping[str, Sequence[int | Sequence[int]]],
        links: Iterable[tuple[str, str]] = (),
        *,
        trainable: Mapping[str, bool | Sequence[bool]] | None = None,
        tied: Iterable[Sequence[tuple[str, int]]] = (),
        replicas: int = 1,
    ) -> StageGraph:
        """Graph of modules with one layer per stage. modules: rank (or ranks of the copies) of each stage.

        trainable: per module, or per stage of it, whether anything in it is trained (default: all).
        tied: groups of (module, stage). replicas: number of replicas of all modules, on separate ranks.

            StageGraph.build({"vision": [0], "audio": [1], "language_model": [2, 3]},
                             [("vision", "language_model"), ("audio", "language_model")])
        """
        lanes_of = {
            name: [(held_by,) if isinstance(held_by, int) else tuple(held_by) for held_by in stages]
            for name, stages in modules.items()
        }
        every = (rank for stages in lanes_of.values() for held_by in stages for rank in held_by)
        per_replica = 1 + max(every, default=-1)
        specs = {}
        flags: dict[str, tuple[bool, ...]] = {}
        for name, stage_ranks in lanes_of.items():
            if not stage_ranks:
                raise ValueError(f"module {name!r} has no stages")
            trained = True if trainable is None else trainable.get(name, True)
            flags[name] = (trained,) * len(stage_ranks) if isinstance(trained, bool) else tuple(map(bool, trained))
            pipelines = []
            for replica in range(replicas):
                lanes = [[Lane((replica * per_replica + rank,)) for rank in held_by] for held_by in stage_ranks]
                pipelines.append(Pipeline.cut(name, replica, range(len(lanes) + 1), lanes))
            specs[name] = (ParallelSpec(pp=len(stage_ranks), dp=replicas), tuple(pipelines))
        layout = Layout(specs, per_replica * replicas)
        return cls(layout, tuple(links), flags, tuple(tuple(group) for group in tied))


def _ints(values: Sequence[object]) -> Ints:
    return np.array(values, dtype=np.int32)


def _starts(counts: Sequence[int]) -> Ints:
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)


def _lists(lists: Sequence[Sequence[int]]) -> tuple[Ints, Ints]:
    """Starts of lists of numbers, and the numbers of all."""
    return _starts([len(each) for each in lists]), _ints([number for each in lists for number in each])
