"""Load balancing: assignment of weighted items (token blocks, samples, microbatches, layers) to bins (ranks, stages).

- `assignment`: weighted items to bins: `assign` by eight methods, `assign_exact`, `lower_bound`.
- `partition`: layers to stages, in order.
- `tokens`: token blocks to context-parallel ranks: `distribute_tokens` -> `TokenShards`; `block_for`, `rows_per_rank`.
- `rearrange`: drawn samples to data-parallel ranks: `post_balance`, `batch_costs`, `nodewise_placement`,
  `all_to_all_plan`.
- `microbatches`: samples to microbatches by encoder and LLM cost: `assign_microbatches`, `assign_replicas`.
- `reorder`: the order of samples and microbatches: `reorder_samples`, `reorder_microbatches`.

Inputs and outputs are numpy arrays; the algorithms are in csrc/balance/ and release the GIL.
"""

from interlace.balance.assignment import METHODS, ExactAssignment, assign, assign_exact, lower_bound
from interlace.balance.microbatches import (
    MicrobatchPlan,
    assign_microbatches,
    assign_replicas,
    bottleneck_match,
    subset_sum,
)
from interlace.balance.rearrange import (
    AllToAllPlan,
    all_to_all_plan,
    batch_costs,
    nodewise_bound,
    nodewise_placement,
    nodewise_placement_of_items,
    post_balance,
    rearrangement_volume,
)
from interlace.balance.reorder import MicrobatchOrder, SampleOrder, reorder_microbatches, reorder_samples
from interlace.balance.tokens import TokenShards, block_for, distribute_tokens, rows_per_rank

__all__ = [
    "METHODS",
    "assign",
    "assign_exact",
    "ExactAssignment",
    "lower_bound",
    "distribute_tokens",
    "block_for",
    "rows_per_rank",
    "TokenShards",
    "post_balance",
    "batch_costs",
    "rearrangement_volume",
    "nodewise_placement",
    "nodewise_placement_of_items",
    "nodewise_bound",
    "all_to_all_plan",
    "AllToAllPlan",
    "MicrobatchPlan",
    "assign_microbatches",
    "assign_replicas",
    "bottleneck_match",
    "subset_sum",
    "MicrobatchOrder",
    "SampleOrder",
    "reorder_microbatches",
    "reorder_samples",
]
