"""Tensor and context parallelism: one module on several ranks.

- `tensor`: makes a module tensor parallel by a plan (module path -> style). `families`: ready plans.
- `linear`: column- and row-parallel linear layers. `adapters`: layers with LoRA. `vocabulary`: vocabulary-parallel
  embeddings and heads. `layer`: their base class. `region`: position of a shard in the whole tensor.
- `mappings`: differentiable sum, split and gather. `products`: the same, overlapped with matrix products.
- `state`: state dicts of the whole module. `context`: context parallelism of a chunk's rows. `route`: rows that one
  chunk sends to another. `sending`: asynchronous copies to a GPU.
"""

from interlace.parallel.families import plan_for
from interlace.parallel.linear import ColumnParallelLinear, RowParallelLinear
from interlace.parallel.mappings import Ranks
from interlace.parallel.state import full_state_dict
from interlace.parallel.tensor import check_plan, tensor_parallel, used_in_part
from interlace.parallel.vocabulary import VocabularyHead

__all__ = [
    "ColumnParallelLinear",
    "Ranks",
    "RowParallelLinear",
    "VocabularyHead",
    "check_plan",
    "full_state_dict",
    "plan_for",
    "tensor_parallel",
    "used_in_part",
]
