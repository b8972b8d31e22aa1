"""The attention op: `plan` (which blocks hold anything), `op` (the custom op that users call) and its backends, one
file each: `reference` (dense oracle), `cpu`, `triton`, `gluon`. `warm_up` compiles GPU kernels before they are needed.
`hf` is the drop-in for HuggingFace models, which know it as
`attn_implementation="interlace"` as soon as this package and transformers are both imported.
"""

from interlace.attention import _on_transformers
from interlace.attention._warm_up import warm_up
from interlace.attention.op import bitfield_attention
from interlace.attention.plan import AttentionPlan, PlanStats

__all__ = ["AttentionPlan", "PlanStats", "bitfield_attention", "warm_up"]

_on_transformers.register()
