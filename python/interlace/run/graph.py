"""What a layout means for a model: its stage graph for the schedule generators, and which layer a parameter belongs to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from interlace.layout import Layout
from interlace.plan import ModuleCosts, layer_costs
from interlace.schedule import Op, StageGraph, StepTable


def stage_graph(mllm: Any, layout: Layout) -> StageGraph:
    """The nodes and links of `layout`, and what of it is trained in `mllm`.

    Raises ValueError where the layout is of another model, or cuts replicas so that tied weights are together in some
    and apart in others.
    """
    modules = mllm.modules_order()
    if list(layout.modules) != list(modules):
        raise ValueError(
            f"the layout has the modules {', '.join(layout.modules)}, the model {', '.join(modules)}, in this order"
        )
    for name in modules:
        layers, placed = len(mllm.layer_list(name)), layout.pipelines(name)[0].num_layers
        if layers != placed:
            raise ValueError(f"{name} has {layers} layers, but the layout places {placed}")
    trainable = {name: tuple(layer.trainable for layer in mllm.layers(name)) for name in modules}
    return StageGraph(layout, tuple(mllm.edges()), trainable, _tied(mllm, layout))


def _tied(mllm: Any, layout: Layout) -> tuple[tuple[tuple[str, int], ...], ...]:
    """The trained weights that live in layers of several stages."""
    parameters = dict(mllm.named_parameters(remove_duplicate=False))
    layer_of = parameter_layers(mllm)
    found = []
    for names in mllm.tied_parameters():
        places = sorted({layer_of[name] for name in names})
        if not parameters[names[0]].requires_grad or len(places) < 2:
            continue
        if len({module for module, _ in places}) > 1:
            raise ValueError(
                f"{names[0]} is one weight of several modules, whose ranks could not keep it equal: untie it"
            )
        cuts = {
            tuple(next(s.index for s in pipeline.stages if s.start <= layer < s.stop) for _, layer in places)
            for pipeline in layout.pipelines(places[0][0])
        }
        if len({len(set(stages)) for stages in cuts}) > 1:
            raise ValueError(
                f"the tied weight {names[0]} is on one stage of some replicas and on several of others: cut all alike"
            )
        if any(len(set(stages)) > 1 for stages in cuts):
            found.append(tuple(places))
    return tuple(found)


def parameter_layers(mllm: Any) -> dict[str, tuple[str, int]]:
    """Name of a parameter -> (module, the layer that it travels with)."""
    found = {}
    for module in mllm.modules_order():
        layers = mllm.layers(module)
        whole = "language_model." if module == "language_model" else f"encoders.{module}."
        homes = [(f"{part.name}.", layer.index) for layer in layers for part in layer.parts]
        for name, _ in mllm.named_parameters(remove_duplicate=False):
            if name.startswith(whole):
                # What is registered beside the layers and is no part of its own precedes them.
                found[name] = module, next((index for prefix, index in homes if name.startswith(prefix)), 0)
    return found


def stage_durations(
    mllm: Any,
    layout: Layout,
    costs: Mapping[str, ModuleCosts],
    *,
    recompute: bool = False,
    table: StepTable | None = None,
) -> dict[tuple[Any, ...], float]:
    """Seconds of FORWARD and BACKWARD of every stage, for `simulate`, from measured (or estimated) layer costs.

    costs: of one microbatch. table: gives every chunk its own, by its share of the samples of a chunk of the language
    model; keys then are (op, module, stage, chunk).
    """
    per_layer = layer_costs(costs, mllm.modules_order(), recompute=recompute)
    found: dict[tuple[Any, ...], float] = {}

    def seconds(stage: Any) -> tuple[float, float]:
        cost = costs[stage.module]
        forward = np.bincount(cost.layer, weights=cost.times.forward, minlength=cost.num_layers)
        once = float(forward[stage.start : stage.stop].sum())
        both = float(per_layer[stage.module][stage.start : stage.stop].sum())
        return once, max(both - once, 0.0)

    for pipeline in layout.pipelines():
        share = {-1: 1.0}
        if table is not None:
            readers = [len(chunk.samples) for chunk in table.chunks if chunk.module == list(layout.modules)[-1]]
            share = {
                i: len(table.chunks[i].samples) / float(np.mean(readers))
                for i in table.of(pipeline.module, pipeline.replica)
            }
        for stage in pipeline.stages:
            times = seconds(stage)
            for op, time in zip((Op.FORWARD, Op.BACKWARD), times, strict=True):
                for chunk, part in share.items():
                    key = (op, stage.module, stage.index) if table is None else (op, stage.module, stage.index, chunk)
                    found[key] = time * part
    return found
