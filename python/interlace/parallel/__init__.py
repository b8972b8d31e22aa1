"""One module on several ranks.

`tensor` cuts a module by a plan of its paths, for which `families` has ready ones; `linear` has the two cut linear
layers, `adapters` how layers with LoRA are cut, `vocabulary` embeddings and heads cut by words, `layer` what these
share, `region` where a piece lies in its whole, `mappings` what happens where whole and cut tensors meet, `products`
the same together with a product, `state` the parameters of the whole. `context` deals the rows of a chunk among ranks,
`route` says which rows one chunk sends another, `sending` has tensors travel to a GPU.
"""

from interlace.parallel.families import plan_for
from interlace.parallel.linear import ColumnParallelLinear, RowParallelLinear
from interlace.parallel.mappings import Ranks
from interlace.parallel.state import dtensor_state_dict, full_state_dict
from interlace.parallel.tensor import check_plan, tensor_parallel, used_in_part
from interlace.parallel.vocabulary import VocabularyEmbedding, VocabularyHead, vocabulary_plan

__all__ = [
    "ColumnParallelLinear",
    "Ranks",
    "RowParallelLinear",
    "VocabularyEmbedding",
    "VocabularyHead",
    "check_plan",
    "dtensor_state_dict",
    "full_state_dict",
    "plan_for",
    "tensor_parallel",
    "used_in_part",
    "vocabulary_plan",
]
