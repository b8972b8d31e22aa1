"""Ranks of a process: their stages, which share the weights of the model.

With one rank per process, its stages hold the parameters of its model, or pieces of them with tensor parallelism. If
one process runs several ranks, each has its own modules and its own `.grad` (see `interlace.run.execute.weights`). Then
the model itself is trained in place under every layout, so use an optimizer over ``mllm.parameters()``.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Mapping, Sequence

import torch
from torch import nn

from interlace.comm.channels.base import Channel
from interlace.comm.transports import Transport
from interlace.layout import Layout, Reduction
from interlace.model import Checkpointing, MultimodalModel, StageModule
from interlace.run.execute.collectives import Collectives
from interlace.run.execute.executor import Executor
from interlace.run.execute.layers import Layers
from interlace.run.execute.memory import allocate, allocate_buffers, is_bare, without_memory, without_values
from interlace.run.execute.sharding import Sharded
from interlace.run.execute.step import Key, StageRuntime, Step
from interlace.run.execute.weights import Pieces, cut_weights
from interlace.run.graph import parameter_layers, stage_graph
from interlace.run.lanes import Place, cut, with_lanes
from interlace.schedule import StageGraph


class Rank:
    """One rank of this process.

    runtimes, stages: (module, stage) -> StageRuntime, and its StageModule. own: name in the whole model -> parameter on
    this rank; each once, under its first name; if it is sharded, the rank's rows. cut: the region in the whole weight,
    for pieces and rows. counts: names of the parameters that no lower rank holds (of a piece: no lower rank holds the
    same piece). A sum over the model takes these from each rank. sharded: place in `StageGraph.shards` -> this rank's
    part of the shard; by_layer: the same key -> the layers of a shard that a step may gather a layer at a time.
    in_part: names of the parameters that it holds whole, but applies only to its own rows or heads; the whole lane sums
    their gradients.
    """

    def __init__(
        self,
        number: int,
        runtimes: Mapping[Key, StageRuntime],
        in_part: set[str],
        graph: StageGraph,
        mllm: MultimodalModel,
        pieces: Pieces | None,
    ) -> None:
        """pieces: copies and views that follow the model's own parameters, if one process runs all ranks."""
        self.number, self.runtimes, self._in_part = number, runtimes, in_part
        self.stages = stages = {key: runtime.module for key, runtime in runtimes.items()}
        self._graph = graph
        self._layers = parameter_layers(mllm)
        held = {n: p for stage in stages.values() for n, p in stage.named_parameters(remove_duplicate=False)}
        first: dict[int, str] = {}  # id of a parameter -> its first name in the model
        for name, _ in mllm.named_parameters(remove_duplicate=False):
            if name in held:
                first.setdefault(id(held[name]), name)
        self.own = {name: held[name] for name in first.values()}
        cut = {name: where for stage in stages.values() for name, where in cut_weights(stage).items()}
        self.cut = {name: cut[name].region for name in self.own if name in cut}
        self._tied = {
            number: [name for names in mllm.tied_parameters() if self._places(names) == group for name in names]
            for number, group in enumerate(graph.tied)
        }
        aliases = {name: names for names in mllm.tied_parameters() for name in names}
        holders = {
            name: {rank for alias in aliases.get(name, (name,)) for rank in self._holders(name, alias)}
            for name in self.own
        }
        self._apart = self._frozen_apart(mllm)
        self.sharded = self._shard(pieces)
        for sharded in self.sharded.values():
            owners = {
                shard.owners[sharded.place] for shard in graph.shards if shard.module == sharded.shard.module
            }  # owners of the same rows: a weight tied across stages has them at the same place in each shard
            for name, weight in sharded.weights.items():
                if weight.part is None or weight.region is None:
                    del self.own[name]
                    self.cut.pop(name, None)
                else:
                    self.own[name], self.cut[name] = weight.part, weight.region
                    holders[name] &= owners
        self.by_layer = self._by_layer()
        self.counts = {name for name in self.own if number == min(holders[name])}

    def _shard(self, pieces: Pieces | None) -> dict[int, Sharded]:
        """Place in the graph's shards -> this rank's part of the shard."""
        graph, lanes = self._graph, self._graph.layout.lanes()
        tied = {name for names in self._tied.values() for name in names}
        by_shard = {}
        for index, shard in enumerate(graph.shards):
            if self.number not in shard.owners:
                continue
            nodes = [graph.nodes[n] for n in graph.shard_members(shard)]
            stages = {(shard.module, node.stage) for node in nodes if self.number in lanes[node.lane].ranks}
            weights = {
                name: parameter
                for name, parameter in self._of_layers(shard.module, shard.start, shard.stop).items()
                if (shard.full or parameter.requires_grad)
                and parameter.is_floating_point()
                and parameter.numel()
                and not (parameter.requires_grad and name in self._in_part)  # summed over whole lanes, and small
                and name not in self._apart
            }
            # Tensor-parallel ranks hold some weights whole: their slices are equal on all, as tied ones in all stages.
            whole = weights.keys() - self.cut.keys() if graph.layout.spec(shard.module).tp > 1 else set()
            layers = {name: self._layers[name][1] for name in weights}
            by_shard[index] = Sharded(shard, self.number, stages, weights, self.cut, layers, tied | whole)
        for sharded in by_shard.values():
            sharded.keep_parts(pieces)
        return by_shard

    def _by_layer(self) -> dict[int, Layers]:
        """The shards of `sharded` that steps may gather layer by layer."""
        graph, layers_of = self._graph, {}
        for index, sharded in self.sharded.items():
            if graph.by_layer(shard := graph.shards[index]):
                (key,) = sharded.stages
                trained = [layer for layer, flag in enumerate(graph.trainable[shard.module]) if flag]
                fed = any(consumer == shard.module for _, consumer in graph.links)  # then gradients come to all layers
                first = shard.start if fed else min(trained, default=shard.stop)
                lowest = min(max(first, shard.start), shard.stop) - shard.start + 1
                stage = self.stages[key]
                assert isinstance(stage, StageModule)
                layers_of[index] = Layers(sharded, stage, lowest)
        return layers_of

    def _frozen_apart(self, mllm: MultimodalModel) -> set[str]:
        """Names of the frozen tied weights that are on several stages of a replica. They stay whole, because each of
        these stages could gather and free them with its own set of slices."""
        own = dict(mllm.named_parameters(remove_duplicate=False))
        names_apart: set[str] = set()
        for names in mllm.tied_parameters():
            places = self._places(names)
            pipelines = self._graph.layout.pipelines(places[0][0])
            homes = [{pipeline.stage_with(layer) for _, layer in places} for pipeline in pipelines]
            if not own[names[0]].requires_grad and max(map(len, homes)) > 1:
                names_apart.update(names)
        return names_apart

    def _of_layers(self, module: str, start: int, stop: int) -> dict[str, nn.Parameter]:
        """The parameters of this rank in some layers."""
        at = self._layers
        return {n: p for n, p in self.own.items() if at[n][0] == module and start <= at[n][1] < stop}

    def _holders(self, name: str, alias: str) -> list[int]:
        """The ranks that hold under the name `alias` the same part of a weight that this one holds under `name`."""
        layout = self._graph.layout
        module, layer = self._layers[alias]
        holders = layout.same_weights(module, layer)
        if name not in self.cut:
            return [rank for ranks in holders for rank in ranks]
        places = layout.same_weights(*self._layers[name])
        return list(holders[next(place for place, ranks in enumerate(places) if self.number in ranks)])

    def _places(self, names: Sequence[str]) -> tuple[tuple[str, int], ...]:
        return tuple(sorted({self._layers[name] for name in names}))

    def parameters(self, reduction: Reduction) -> list[nn.Parameter]:
        """The parameters of this rank that `reduction` sums, in the order of the model."""
        if reduction.tied >= 0:
            return [p for name, p in self.own.items() if name in self._tied[reduction.tied]]
        due = self._of_layers(reduction.module, reduction.start, reduction.stop)
        apart = {name for number in self._graph.uneven for name in self._tied[number]}
        return [p for name, p in due.items() if (name in self._in_part) == reduction.in_part and name not in apart]

    def connect(self, transports: Mapping[tuple[int, ...], Transport]) -> None:
        """Connect the groups of ranks in its lanes (`groups_of`) to their transports."""
        for runtime in self.runtimes.values():
            runtime.place.connect(transports)

    def executor(self, channel: Channel, step: Step) -> Executor:
        """The executor of this rank's list in a step over `channel`."""
        collectives = Collectives(channel, self._graph.reductions, self.parameters, self.sharded, self.by_layer)
        return Executor(self.number, self.runtimes, self._graph, channel, collectives, step)


def held_in_lane(mllm: MultimodalModel, layout: Layout, *, sequence_parallel: bool) -> list[dict[str, int]]:
    """Per rank of a layout with the whole model on one lane: parameter -> number of its elements that the rank keeps.

    Parameters of which a rank keeps nothing are left out. mllm: on the meta device; it is not changed.
    A rank at the same place of another lane keeps equally many of each of its layers, for every cut into stages.
    Raises ValueError for a module that its tp or cp cannot cut.
    """
    if layout.world == 1:
        return [{name: parameter.numel() for name, parameter in mllm.named_parameters()}]
    graph, rows = with_lanes(stage_graph(mllm, layout), mllm, sequence_parallel=sequence_parallel)
    sizes = []
    for number in range(layout.world):
        own = copy.deepcopy(mllm)
        rank = make_ranks(own, graph, [number], "none", rows, Pieces(), torch.device("meta"))[number]
        sizes.append({name: parameter.numel() for name, parameter in rank.own.items()})
    return sizes


def make_ranks(
    mllm: MultimodalModel,
    graph: StageGraph,
    numbers: Sequence[int],
    checkpointing: Checkpointing,
    rows: Collection[str],
    pieces: Pieces,
    device: torch.device,
) -> dict[int, Rank]:
    """The ranks `numbers` of this process. Weights on meta that they hold get memory on `device`.

    rows: the modules whose rows are also cut (sequence parallelism).
    """
    several = len(numbers) > 1
    for stage in (stage for number in numbers for stage in graph.layout.of_rank(number)):
        mllm.slice(stage.module, stage.start, stage.stop)  # probes the cuts before buffers without values replace them
    if taken_before := next((name for name, parameter in mllm.named_parameters() if is_bare(parameter)), None):
        raise ValueError(
            f"{taken_before} has no values: an earlier parallelize() with shard = 'full' has moved them. Build and "
            "load the model again"
        )
    allocate_buffers(mllm, device)
    model_parameters = dict(mllm.named_parameters(remove_duplicate=False))
    in_use: set[int] = set()
    ranks = {}
    for number in numbers:
        runtimes: dict[Key, StageRuntime] = {}
        in_part: set[str] = set()
        of_rank: dict[int, nn.Parameter] = {}  # id of the model's parameter -> this rank's
        for stage in graph.layout.of_rank(number):
            spec = graph.layout.spec(stage.module)
            place = Place.of(number, stage.lane_of(number), spec.tp)
            part = mllm.slice(  # the weights of copies are linked below
                stage.module, stage.start, stage.stop, copy=several or spec.tp > 1, checkpointing=checkpointing
            )
            last = stage.stop == graph.layout.pipelines(stage.module)[0].num_layers
            sink = last and all(producer != stage.module for producer, _ in graph.links)
            runtimes[stage.module, stage.index] = StageRuntime(part, last, sink, place)
            if spec.tp > 1:
                in_part |= cut(part, place.tp, rows=stage.module in rows)
            regions = {name: where.region for name, where in cut_weights(part).items()}
            held = {name for name, _ in part.named_parameters()}
            bare = spec.shard == "full" and not several  # rows get memory later, when this rank's rows are known
            # If one process runs all ranks, they take their pieces from its whole weights.
            if allocate(mllm, held if several else held - regions.keys(), device, bare=bare):
                model_parameters = dict(mllm.named_parameters(remove_duplicate=False))
            partial_sums = several and (spec.tp > 1 or spec.shard != "none")  # as gradients during a step
            for name, mine, parameters, key in _parameters_in(part, model_parameters):
                model = model_parameters[name]
                if id(model) not in of_rank:  # else another stage of this rank, in the same lane, has the weight too
                    own = model
                    if name in regions:
                        make = without_memory if bare else without_values
                        own = make(mine, device) if mine.is_meta else mine
                    elif partial_sums or id(model) in in_use:
                        own = nn.Parameter(model.data, requires_grad=model.requires_grad)
                    if several and own is not model:
                        pieces.add(model, place.tp.rank if partial_sums else None, own, regions.get(name))
                    of_rank[id(model)] = own
                parameters[key] = of_rank[id(model)]
        if several:
            in_use.update(of_rank)
        rank = ranks[number] = Rank(number, runtimes, in_part, graph, mllm, pieces if several else None)
        for name, parameter in rank.own.items():
            if is_bare(parameter):  # it is not sharded: the rank holds all of it
                parameter.data = without_values(parameter, device).data
                if name not in rank.cut:
                    model_parameters[name].data = parameter.data
    return ranks


def _parameters_in(
    stage: nn.Module, model_parameters: Collection[str]
) -> Iterator[tuple[str, nn.Parameter, dict[str, nn.Parameter | None], str]]:
    """Name, parameter, module dict and key of each parameter of `stage` that the model has, under all its names."""
    for prefix, module in stage.named_modules():
        for key, parameter in list(module._parameters.items()):
            name = f"{prefix}.{key}" if prefix else key
            if parameter is not None and name in model_parameters:
                yield name, parameter, module._parameters, key
