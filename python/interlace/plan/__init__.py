"""Where a model is cut: what each layer costs, given what is frozen, which layers form a stage, and on which rank.

cost.py (frozen-aware costs) · partitioning.py (the exact cut, in csrc/plan/) · profile.py (times single layers) ·
profile_model.py (all layers of a model) · parallel_plan.py (ParallelSpec per module -> ParallelPlan).
"""

from interlace.plan.cost import backward_needs, frozen_costs, trainable_before
from interlace.plan.parallel_plan import (
    ModuleCosts,
    ParallelPlan,
    ParallelSpec,
    StagePlan,
    analytic_costs,
    layer_costs,
)
from interlace.plan.partitioning import partition
from interlace.plan.profile import LayerTimes, profile_layers
from interlace.plan.profile_model import profile_model

__all__ = [
    "LayerTimes",
    "ModuleCosts",
    "ParallelPlan",
    "ParallelSpec",
    "StagePlan",
    "analytic_costs",
    "backward_needs",
    "frozen_costs",
    "layer_costs",
    "partition",
    "profile_layers",
    "profile_model",
    "trainable_before",
]
