"""Bitfield attention inside unmodified HuggingFace modules: ``attn_implementation="interlace"``.

`register()` makes the name known. Which mask applies is said outside of the module, because most of its signatures have
no place for one: ``with use_plan(plan): module(...)``. A language model builds its own causal mask unless it is given
a 4-D one; `mask_carrier` is such a tensor, without memory, that brings the plan along.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from interlace.attention.op import bitfield_attention
from interlace.attention.plan import AttentionPlan

NAME = "interlace"
_plan: contextvars.ContextVar[AttentionPlan | None] = contextvars.ContextVar("interlace_plan", default=None)


@contextlib.contextmanager
def use_plan(plan: AttentionPlan | None) -> Iterator[None]:
    """Attention inside the block follows ``plan`` (None: the module's own mask)."""
    token = _plan.set(plan)
    try:
        yield
    finally:
        _plan.reset(token)


def current_plan() -> AttentionPlan | None:
    """The plan of the innermost `use_plan`."""
    return _plan.get()


def mask_carrier(plan: AttentionPlan) -> Tensor:
    """A bool tensor [B, 1, Tq, Tk] without memory of its own that carries ``plan`` as an attribute.

    It passes the early exit of HuggingFace's mask functions for 4-D masks, so that they build nothing.
    """
    carrier = torch.empty((), dtype=torch.bool, device=plan.q_bits.device)
    carrier = carrier.expand(plan.batch, 1, plan.q_len, plan.k_len)
    carrier.interlace_plan = plan  # type: ignore[attr-defined]
    return carrier


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """HuggingFace attention function. query [B, Hq, Tq, D], key and value [B, Hkv, Tk, D] -> [B, Tq, Hq, D].

    Without a plan it is SDPA with the module's own mask. Raises ValueError for dropout, which would need a
    different mask in every block.
    """
    plan = getattr(attention_mask, "interlace_plan", None) or current_plan()
    if plan is None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, softcap=softcap, **kwargs
        )
    if dropout and module.training:
        raise ValueError(f"interlace attention has no dropout (got {dropout}): set the config's attention dropout to 0")
    output = bitfield_attention(query, key, value, plan, scale=scaling, softcap=softcap)
    return output.transpose(1, 2).contiguous(), None


def register() -> None:
    """Make ``attn_implementation="interlace"`` known to transformers; may be called again."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, sdpa_mask)
