"""Stage graph of a layout for a model, and the layer that each parameter belongs to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise, product

import numpy as np
from torch import nn

from interlace.layout import Layout
from interlace.model import MultimodalModel
from interlace.model.rows import PACKED, ROWS
from interlace.parallel.route import pairs as met
from interlace.plan import ModuleCosts, layer_costs
from interlace.schedule import Op, StageGraph, StepTable


def stage_graph(mllm: MultimodalModel, layout: Layout) -> StageGraph:
    """The nodes and links of `layout`, with the trainable layers of `mllm`.

    Raises ValueError if the layout is of another model, or if it shards tied weights whose layers are together in some
    replicas and on different stages in others.
    """
    modules = mllm.modules_order()
    if list(layout.modules) != list(modules):
        raise ValueError(
            f"the layout's modules are {', '.join(layout.modules)}, the model's {', '.join(modules)}, in this order"
        )
    for name in modules:
        layers, placed = len(mllm.layer_list(name)), layout.pipelines(name)[0].num_layers
        if layers != placed:
            raise ValueError(f"{name} has {layers} layers, but the layout places {placed}")
    trainable = {name: tuple(layer.trainable for layer in mllm.layers(name)) for name in modules}
    return StageGraph(layout, tuple(mllm.edges()), trainable, _tied(mllm, layout), repeating=_repeating(mllm))


def _repeating(mllm: MultimodalModel) -> frozenset[str]:
    """The modules that may run a layer several times for one chunk: they call their layers for some of the chunk's
    samples or items at a time, or have one layer at several places."""
    repeating = set()
    for name in mllm.modules_order():
        layers, packing, limit = mllm.layer_list(name), mllm.packing[name], None
        if name not in mllm.encoders:
            limit = mllm.language_settings.limit
            packing = PACKED if packing == ROWS else packing  # one batch of rows here, but not in encoders
        if packing != PACKED or limit is not None or len(set(map(id, layers))) < len(layers):
            repeating.add(name)
    return frozenset(repeating)


def edges(graph: StageGraph) -> list[tuple[int, int]]:
    """(from, to) of all ranks between which a step may send, activations one way and gradients the other; sorted.

    If two modules have equally many replicas, each replica feeds the one of the same number; else any replica may feed
    any other (see table.py).
    """
    layout = graph.layout
    pairs = [pair for pipeline in layout.pipelines() for pair in pairwise(pipeline.stages)]
    for producer, consumer in graph.links:
        sources, readers = layout.pipelines(producer), layout.pipelines(consumer)
        feeds = zip(sources, readers, strict=True) if len(sources) == len(readers) else product(sources, readers)
        pairs += [(source.stages[-1], reader.stages[0]) for source, reader in feeds]
    rank_pairs = {
        way
        for source, reader in pairs
        for lane in reader.lanes
        if lane not in source.lanes
        for i, j in met(len(source.lane.ranks), len(lane.ranks))
        for a, b in ((source.lane.ranks[i], lane.ranks[j]),)
        for way in ((a, b), (b, a))
    }
    return sorted((a, b) for a, b in rank_pairs if a != b)


def groups(graph: StageGraph) -> list[tuple[int, ...]]:
    """The ranks of all sums and gathers that a step may make."""
    rank_groups = [reduction.ranks for reduction in graph.reductions]
    for shard in graph.shards:
        rank_groups += [shard.ranks, *(tuple(sorted(same)) for same in zip(*shard.sets, strict=True))]
    return rank_groups


def _tied(mllm: MultimodalModel, layout: Layout) -> tuple[tuple[tuple[str, int], ...], ...]:
    """The layers of trained weights that are in several stages; one entry for all weights in the same layers.
    Raises ValueError for tied weights that the ranks cannot hold."""
    parameters = dict(mllm.named_parameters(remove_duplicate=False))
    layer_of = parameter_layers(mllm)
    tied: dict[tuple[tuple[str, int], ...], None] = {}
    for names in mllm.tied_parameters():
        places = sorted({layer_of[name] for name in names})
        if len(places) < 2:
            continue
        trained = parameters[names[0]].requires_grad
        if len({module for module, _ in places}) > 1:
            specs = [layout.spec(module) for module in {module for module, _ in places}]
            if not trained and all(spec.tp == 1 and spec.shard != "full" for spec in specs):
                continue
            raise ValueError(
                f"{names[0]} is shared by several modules, and their ranks cannot keep it equal: untie it, or freeze "
                "it and use tp = 1 without shard = 'full' for these modules"
            )
        homes = [{pipeline.stage_with(layer) for _, layer in places} for pipeline in layout.pipelines(places[0][0])]
        spec = layout.spec(places[0][0])
        if trained and spec.shard != "none" and layout.uneven(places[0][0], [layer for _, layer in places]):
            raise ValueError(
                f"the tied weight {names[0]} is on one stage, or one rank, of some replicas and on several of others, "
                f"so shard = {spec.shard!r} would slice it differently: cut and place all replicas the same way"
            )
        for lanes in ({stage.lane for stage in stages} for stages in homes):  # a rank has one piece of the weight
            if len({rank for lane in lanes for rank in lane.ranks}) < sum(len(lane.ranks) for lane in lanes):
                raise ValueError(
                    f"the tied weight {names[0]} is on lanes that share some of their ranks "
                    f"({' and '.join(sorted(map(str, lanes)))}): give its stages the same lane, or disjoint lanes"
                )
        if trained and max(map(len, homes)) > 1:
            tied[tuple(places)] = None
    return tuple(tied)


def check_read(graph: StageGraph, table: StepTable) -> None:
    """Raises ValueError for a chunk of an encoder without a reader: its backward would wait for a gradient."""
    feeding, read = {producer for producer, _ in graph.links}, set(table.links[:, 0].tolist())
    unread = next((c for i, c in enumerate(table.chunks) if c.module in feeding and i not in read), None)
    if unread is not None:
        raise ValueError(f"no chunk reads {unread}, so it has no gradient: omit it from the step's table")


def parameter_layers(mllm: MultimodalModel) -> dict[str, tuple[str, int]]:
    """Name of a parameter -> (module, the layer that it is placed with)."""
    layer_of = {}
    for module in mllm.modules_order():
        layers = mllm.layers(module)
        whole = "language_model." if module == "language_model" else f"encoders.{module}."
        homes = [(f"{part.name}.", layer.index) for layer in layers for part in layer.parts]
        for name, _ in mllm.named_parameters(remove_duplicate=False):
            if name.startswith(whole):
                # Parameters beside the layers that belong to no listed part count to the first layer.
                layer_of[name] = module, next((index for prefix, index in homes if name.startswith(prefix)), 0)
    return layer_of


def users_of(root: nn.Module, layers: Sequence[nn.Module]) -> dict[int, set[int]]:
    """id of a parameter of `root` -> the layers that have it, counted from 1; 0: modules beside the layers have it."""
    users: dict[int, set[int]] = {}
    for number, layer in enumerate(layers, 1):
        for parameter in layer.parameters():
            users.setdefault(id(parameter), set()).add(number)
    pending, seen = [root], set(map(id, layers))
    while pending:
        module = pending.pop()
        if id(module) not in seen:
            seen.add(id(module))
            pending += module.children()
            for beside in module.parameters(recurse=False):
                users.setdefault(id(beside), set()).add(0)
    return users


def stage_durations(
    mllm: MultimodalModel, layout: Layout, costs: Mapping[str, ModuleCosts], *, recompute: bool = False
) -> dict[tuple[Op, str, int], float]:
    """Seconds of FORWARD, BACKWARD and its halves of every stage, for `simulate`.

    costs: of one chunk, measured or counted. Stages are those of the first replica. BACKWARD_WEIGHT is the time that
    gradients of trained weights add, BACKWARD_INPUT the rest of the BACKWARD.
    """
    per_layer = layer_costs(costs, mllm.modules_order(), recompute=recompute)
    durations = {}
    for module in layout.modules:
        cost = costs[module]
        forward = np.bincount(cost.layer, weights=cost.times.forward, minlength=cost.num_layers)
        trained = np.where(cost.trainable, cost.times.weight_grad, 0.0)
        weight = np.bincount(cost.layer, weights=trained, minlength=cost.num_layers)
        for stage in layout.pipelines(module)[0].stages:
            seconds = float(forward[stage.start : stage.stop].sum())
            both = max(float(per_layer[module][stage.start : stage.stop].sum()) - seconds, 0.0)
            second = min(float(weight[stage.start : stage.stop].sum()), both)
            durations[Op.FORWARD, module, stage.index] = seconds
            durations[Op.BACKWARD, module, stage.index] = both
            durations[Op.BACKWARD_INPUT, module, stage.index] = both - second
            durations[Op.BACKWARD_WEIGHT, module, stage.index] = second
    return durations
