"""The attention op and its backends.

`op` is the custom op that users call. `plan` lists the non-empty blocks of a mask. There is one file per backend:
`reference` (dense oracle), `cpu`, `triton`, `gluon`. `warm_up` compiles GPU kernels ahead of use.
`hf` is the drop-in for HuggingFace models, under the name `attn_implementation="interlace"`. It is registered once both
this package and transformers are imported.
"""

from interlace.attention._registration import register as _register
from interlace.attention._warm_up import warm_up
from interlace.attention.op import bitfield_attention
from interlace.attention.plan import AttentionPlan, PlanStats

__all__ = ["AttentionPlan", "PlanStats", "bitfield_attention", "warm_up"]

_register()
