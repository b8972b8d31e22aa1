"""Who sums which gradients: the ranks that hold the same weights, layer by layer.

Layers that the same stages hold form one reduction, so that replicas with different cuts need no rule of their own. The
ranks of a lane at different tensor-parallel places hold different weights and sum apart; those at different context-
parallel places hold the same ones and sum together.
"""

from __future__ import annotations

from dataclasses import dataclass

from interlace.layout.layout import Layout


@dataclass(frozen=True, slots=True)
class Reduction:
    """The gradients of layers [start, stop) of `module` are summed over `ranks`.

    tied: the place of a group of tied weights in `StageGraph.tied`, where these alone are summed over ranks of several
    stages (-1: the layers' own weights).
    """

    module: str
    start: int
    stop: int
    ranks: tuple[int, ...]
    tied: int = -1


def reduce_groups(layout: Layout) -> tuple[Reduction, ...]:
    """The reductions of a layout over more than one rank, modules and layers in order."""
    found = []
    for module, (spec, pipelines) in layout.modules.items():
        cuts = sorted({stage.start for pipeline in pipelines for stage in pipeline.stages})
        for start, stop in zip(cuts, [*cuts[1:], pipelines[0].num_layers], strict=True):
            lanes = layout.holders(module, start)
            for place in range(spec.tp):
                ranks = tuple(sorted({rank for lane in lanes for rank in lane.ranks[place :: spec.tp]}))
                if len(ranks) > 1:
                    found.append(Reduction(module, start, stop, ranks))
    return tuple(found)
