"""Who sums which gradients: the ranks that hold the same weights, layer by layer.

Layers that the same stages hold form one reduction, so that replicas with different cuts need no rule of their own. The
ranks of a lane at different tensor-parallel places hold different weights and sum apart; those at different context-
parallel places hold the same ones and sum together. Weights that each rank of a lane holds, but uses on its own rows or
heads only (norms, with sequence parallelism), are summed over all ranks of all lanes.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from interlace.layout.layout import Layout


@dataclass(frozen=True, slots=True)
class Reduction:
    """The gradients of layers [start, stop) of `module` are summed over `ranks`.

    tied: the place of a group of tied weights in `StageGraph.tied`, where these alone are summed over ranks of several
    stages (-1: the layers' own weights). in_part: of the weights that the ranks of a lane use in part each, over whole
    lanes; otherwise of all others.
    """

    module: str
    start: int
    stop: int
    ranks: tuple[int, ...]
    tied: int = -1
    in_part: bool = False


def reduce_groups(layout: Layout, in_part: Collection[str] = ()) -> tuple[Reduction, ...]:
    """The reductions of a layout over more than one rank, modules and layers in order.

    in_part: the modules with weights that the ranks of a lane use in part each.
    """
    found = []
    for module, (spec, pipelines) in layout.modules.items():
        cuts = sorted({stage.start for pipeline in pipelines for stage in pipeline.stages})
        for start, stop in zip(cuts, [*cuts[1:], pipelines[0].num_layers], strict=True):
            lanes = layout.holders(module, start)
            for place in range(spec.tp):
                ranks = tuple(sorted({rank for lane in lanes for rank in lane.ranks[place :: spec.tp]}))
                found.append(Reduction(module, start, stop, ranks))
            if module in in_part:
                ranks = tuple(sorted({rank for lane in lanes for rank in lane.ranks}))
                found.append(Reduction(module, start, stop, ranks, in_part=True))
    return tuple(reduction for reduction in found if len(reduction.ranks) > 1)
