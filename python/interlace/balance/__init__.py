"""Who computes what: items with weights (token blocks, samples, microbatches) dealt to bins (ranks).

- assignment  weighted items to bins: `assign` by nine methods, `assign_exact`, `lower_bound`
- tokens      token blocks to context-parallel ranks: `distribute_tokens` -> `TokenShards`; `block_for`, `rows_per_rank`
- rearrange   samples to data-parallel ranks after they were drawn: `post_balance`, `nodewise_placement`, `compose`,
              `all_to_all_plan`
- microbatches  samples to microbatches by encoder and LLM cost at once: `assign_microbatches`, `assign_replicas`
- reorder     what runs when: `reorder_samples`, `reorder_microbatches`

numpy arrays in, numpy arrays out; the algorithms are in csrc/balance/ and release the GIL.
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
    compose,
    internode_volume,
    nodewise_bound,
    nodewise_placement,
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
    "rearrangement_volume",
    "nodewise_placement",
    "nodewise_bound",
    "internode_volume",
    "compose",
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
