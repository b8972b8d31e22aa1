"""Where a model is cut: what each layer costs, given what is frozen, and which layers form a pipeline stage.

numpy arrays in, numpy arrays out; the algorithms are in csrc/plan/. `profile` alone runs torch, to time layers.
"""

from interlace.plan.cost import backward_needs, frozen_costs, trainable_before
from interlace.plan.partitioning import partition
from interlace.plan.profile import LayerTimes, profile_layers

__all__ = ["LayerTimes", "backward_needs", "frozen_costs", "partition", "profile_layers", "trainable_before"]
