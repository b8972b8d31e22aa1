"""Where: which ranks hold which layers of which replica of which module, as pure data that everybody asks.

spec.py (ParallelSpec: the degrees of a module) · layout.py (Lane, Stage, Pipeline, Layout and its groups of ranks) ·
reductions.py (who sums which gradients, and who keeps which slices). Placements are made in `interlace.plan.place`,
from costs.
"""

from interlace.layout.layout import Lane, Layout, Pipeline, Stage
from interlace.layout.reductions import Reduction, Shard
from interlace.layout.spec import ParallelSpec

__all__ = ["Lane", "Layout", "ParallelSpec", "Pipeline", "Reduction", "Shard", "Stage"]
