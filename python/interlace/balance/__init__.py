"""Who computes what: items with weights (token blocks, samples, microbatches) dealt to bins (ranks).

numpy arrays in, numpy arrays out; the algorithms are in csrc/balance/ and release the GIL.
"""

from interlace.balance.assignment import METHODS, assign, lower_bound
from interlace.balance.microbatches import (
    MicrobatchPlan,
    assign_microbatches,
    assign_replicas,
    bottleneck_match,
    subset_sum,
)
from interlace.balance.reorder import MicrobatchOrder, SampleOrder, reorder_microbatches, reorder_samples

__all__ = ["METHODS", "assign", "lower_bound"]
__all__ += ["MicrobatchPlan", "assign_microbatches", "assign_replicas", "bottleneck_match", "subset_sum"]
__all__ += ["MicrobatchOrder", "SampleOrder", "reorder_microbatches", "reorder_samples"]
