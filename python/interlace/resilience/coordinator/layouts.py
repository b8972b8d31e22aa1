"""Layouts of generations: one chain of layers per pipeline, cut into one part per lane.

A lane is `tp * cp` ranks of one node that share the work of a range of layers, as in any layout. Tensor and context
parallelism stay inside a node, so a lost node takes whole lanes with it. A rank keeps its place in a lane for its
lifetime; state for that place is copied from ranks of the same place.

Pure functions over sizes: every rank computes the same Layout and the same microbatches per pipeline without
communication (dissertation 2.4.1.2, 2.4.2.2 and 2.5.2).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache, cached_property
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np

from interlace import plan
from interlace.costs.modules import ModuleCosts, layer_costs
from interlace.layout import Lane, Layout, ParallelSpec, Pipeline, Stage
from interlace.resilience.generation import Generation

if TYPE_CHECKING:
    from interlace.model.multimodal import MultimodalModel

PER_STAGE = 4  # microbatches per stage for which templates are cut (value of the paper)


class Templates:
    """Pipeline templates of one model for any number of ranks.

    The chain of layers has the encoders in order, then the language model.

    model: a MultimodalModel, which may be on the meta device. costs: costs of one microbatch, in any unit.
    recompute: whether layers with a backward run a second forward.
    specs: tp and cp, equal for all modules, and their sharding (shard, shard_ranks). By default a lane is one rank.
    """

    def __init__(
        self,
        model: MultimodalModel,
        costs: Mapping[str, ModuleCosts],
        *,
        recompute: bool = False,
        specs: Mapping[str, ParallelSpec] | None = None,
    ) -> None:
        per_layer = layer_costs(costs, model.modules_order(), recompute=recompute)
        self.layers = {name: len(each) for name, each in per_layer.items()}
        self.specs = specs or dict.fromkeys(self.layers, ParallelSpec())
        (self.lane_size,) = {spec.lane_size for spec in self.specs.values()}
        self._chain = np.concatenate(list(per_layer.values()))
        self.template = cache(self._template)

    @cached_property
    def most_ranks(self) -> int:
        """Largest pipeline, in ranks: one layer per lane."""
        return len(self._chain) * self.lane_size

    def _template(self, ranks: int) -> plan.PipelineTemplate:
        """Fastest pipeline of `ranks` ranks (`plan.pipeline_template`), with one stage per lane.

        All lanes have the same size, so their costs are proportional. Raises ValueError for more lanes than layers, and
        for an incomplete lane.
        """
        lanes, rest = divmod(ranks, size := self.lane_size)
        if rest or lanes < 1:
            raise ValueError(f"{ranks} ranks of a pipeline are not divisible into lanes of {size} ranks (tp * cp)")
        if lanes > len(self._chain):
            raise ValueError(
                f"a pipeline of {ranks} ranks needs at least one layer per {f'{size} ranks' if size > 1 else 'rank'}, "
                f"but the model has {len(self._chain)} layers: use fewer ranks per node, or more "
                "nodes per fault to survive"
            )
        return plan.pipeline_template(self._chain[:, None], lanes, 1, widths=[1], microbatches_per_stage=PER_STAGE)

    def time(self, ranks: int) -> float:
        """Time per microbatch of a pipeline of `ranks` ranks, averaged over an iteration (T_i of the paper)."""
        return self.template(ranks).iteration_time / (PER_STAGE * (ranks // self.lane_size))

    def shares(self, sizes: Sequence[int], microbatches: int) -> tuple[int, ...]:
        """Microbatches of each pipeline of `sizes` ranks, with the slowest pipeline as fast as possible.

        Each pipeline gets at least one, even if `microbatches` is smaller than the number of pipelines.
        """
        return tuple(plan.split_batch([self.time(n) for n in sizes], max(microbatches, len(sizes))).tolist())

    def layout(self, sizes: Sequence[int]) -> Layout:
        """Layout of pipelines of `sizes` ranks, numbered in order. Each pipeline has a replica of every module."""
        bounds = [self.template(size).boundaries for size in sizes]
        firsts = [0, *accumulate(sizes)]
        modules: dict[str, tuple[ParallelSpec, tuple[Pipeline, ...]]] = {}
        offset = 0
        for name, layers in self.layers.items():
            pipelines = []
            for replica, (first, cuts) in enumerate(zip(firsts, bounds, strict=False)):
                starts = np.clip(cuts - offset, 0, layers).tolist()
                homes = [place for place in range(len(starts) - 1) if starts[place] < starts[place + 1]]
                stages = (
                    Stage(name, index, starts[place], starts[place + 1], Lane(self._ranks(first, place)))
                    for index, place in enumerate(homes)
                )
                pipelines.append(Pipeline(name, replica, tuple(stages)))
            deepest = max(len(pipeline.stages) for pipeline in pipelines)
            modules[name] = replace(self.specs[name], pp=deepest, dp=len(sizes)), tuple(pipelines)
            offset += layers
        return Layout(modules, sum(sizes), "chain")

    def _ranks(self, first: int, place: int) -> tuple[int, ...]:
        """Ranks of the lane at `place` in a pipeline whose first rank is `first`."""
        size = self.lane_size
        return tuple(range(first + place * size, first + (place + 1) * size))


def sizes_of(generation: Generation) -> list[int]:
    """Number of ranks of each pipeline."""
    return [sum(generation.nodes[node].ranks for node in pipeline) for pipeline in generation.pipelines]


def held_by(layout: Layout, rank: int, layers: Mapping[str, tuple[str, int]], first: Mapping[str, str]) -> list[str]:
    """Parameters that `rank` holds, by their first names, in model order.

    layers: name of a parameter -> (module, layer that it moves with), for every name of a tied parameter
    (`interlace.run.graph.parameter_layers`). first: every name of a parameter -> its first name.
    """
    mine = [(stage.module, range(stage.start, stage.stop)) for stage in layout.of_rank(rank)]
    held = {
        first[name]: None
        for name, (module, layer) in layers.items()
        if any(module == of and layer in span for of, span in mine)
    }
    return [name for name in first if name in held]
