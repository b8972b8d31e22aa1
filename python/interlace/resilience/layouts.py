"""Which rank runs what in a generation: one chain of layers per pipeline, each cut for as many lanes as it has ranks.

A lane is `tp * cp` ranks of one node that share the work of a range of layers, as in any layout; tensor and context
parallelism stay inside nodes, so that a lost node takes whole lanes along, and a rank keeps its place in them all its
life: what belongs there is copied from ranks of the same place.

Pure functions over sizes, so that every rank finds the same Layout alone, and all of them the microbatches that each
pipeline gets (dissertation 2.4.1.2, 2.4.2.2 and 2.5.2).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache, cached_property
from itertools import accumulate
from typing import Any

import numpy as np

from interlace import plan
from interlace.layout import Lane, Layout, ParallelSpec, Pipeline, Stage
from interlace.plan.module_costs import ModuleCosts, layer_costs
from interlace.resilience.generation import Generation

PER_STAGE = 4  # microbatches for each stage that templates are cut for: the paper's


class Templates:
    """The pipeline templates of one model: its chain of layers (encoders in order, then the language model), cut for
    any number of ranks.

    model: a MultimodalModel, which may be on meta. costs: of one microbatch; any unit. recompute: layers with a
    backward take another forward. specs: tp and cp of the modules, which are the same for all, and what of them the
    ranks of a lane share out (shard, shard_ranks); by default a lane is a rank.
    """

    def __init__(
        self,
        model: Any,
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
        """Of a pipeline: a layer for each lane."""
        return len(self._chain) * self.lane_size

    def _template(self, ranks: int) -> plan.PipelineTemplate:
        """The fastest pipeline of `ranks` ranks (`plan.pipeline_template`), of which lanes are the stages: all are of
        one size, so that their costs are in proportion.

        Raises ValueError for more lanes than layers, and for a part of a lane.
        """
        lanes, rest = divmod(ranks, size := self.lane_size)
        if rest or lanes < 1:
            raise ValueError(f"a pipeline of {ranks} ranks has no whole number of lanes of {size} ranks (tp * cp)")
        if lanes > len(self._chain):
            raise ValueError(
                f"a pipeline of {ranks} ranks needs a layer for each{f' {size} of them' if size > 1 else ''}, and the "
                f"model has {len(self._chain)}: use fewer ranks per node, or more nodes per fault to survive"
            )
        return plan.pipeline_template(self._chain[:, None], lanes, 1, widths=[1], microbatches_per_stage=PER_STAGE)

    def time(self, ranks: int) -> float:
        """Of a pipeline of `ranks` ranks for one microbatch, over a whole iteration (the paper's T_i)."""
        return self.template(ranks).iteration_time / (PER_STAGE * (ranks // self.lane_size))

    def shares(self, sizes: Sequence[int], microbatches: int) -> tuple[int, ...]:
        """How many of `microbatches` each pipeline of `sizes` ranks takes: the slowest is as fast as can be, and each
        has at least one (of fewer than there are pipelines: one each all the same)."""
        return tuple(plan.split_batch([self.time(n) for n in sizes], max(microbatches, len(sizes))).tolist())

    def layout(self, sizes: Sequence[int]) -> Layout:
        """Pipelines of `sizes` ranks, numbered one after the other; all modules have a replica in each."""
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
        """Of the lane at `place` in a pipeline whose ranks begin at `first`."""
        size = self.lane_size
        return tuple(range(first + place * size, first + (place + 1) * size))


def sizes_of(generation: Generation) -> list[int]:
    """Ranks of each of its pipelines."""
    return [sum(generation.nodes[node].ranks for node in pipeline) for pipeline in generation.pipelines]


def held_by(layout: Layout, rank: int, layers: Mapping[str, tuple[str, int]], first: Mapping[str, str]) -> list[str]:
    """The parameters that `rank` holds, by their first names, in the order of the model.

    layers: name of a parameter -> (module, the layer that it travels with), under every name that it has
    (`interlace.run.graph.parameter_layers`). first: every name of a parameter -> its first one.
    """
    mine = [(stage.module, range(stage.start, stage.stop)) for stage in layout.of_rank(rank)]
    found = {
        first[name]: None
        for name, (module, layer) in layers.items()
        if any(module == of and layer in span for of, span in mine)
    }
    return [name for name in first if name in found]
