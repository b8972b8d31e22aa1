"""Bitfield attention inside unmodified HuggingFace models: `attn_implementation="interlace"`.

Two ways lead a mask to the attention layers. `use_plan(plan)` sets a context variable that every layer consults when
the model passes it no mask (vision and audio encoders). Language models insist on making a mask themselves; they let
a 4-D tensor through untouched, so `carrier(plan)` makes one that takes no memory (a scalar expanded to [B, 1, Q, K])
and has the plan attached.

Without a plan the implementation is a drop-in: plain causal and bidirectional masks, with or without padding, become
plans; single-token decoding and patterns that only exist as a function (packed positions, chunks) stay dense boolean
masks and run on torch's scaled_dot_product_attention. A 4-D mask given by the user is honoured the same way.

Importing this module registers the implementation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function, sdpa_mask

from interlace.attention.op import bitfield_attention
from interlace.attention.plan import AttentionPlan
from interlace.masks import BitfieldMask, word

NAME = "interlace"

_active: ContextVar[tuple[AttentionPlan | None, str | None]] = ContextVar("interlace_plan", default=(None, None))


@contextmanager
def use_plan(plan: AttentionPlan | None, *, backend: str | None = None) -> Iterator[None]:
    """Attention layers called inside follow `plan` wherever their model passes them no mask.

    `backend` names the attention backend for these calls (None = the fastest). None as plan switches back to the
    model's own masks. Nests; each thread has its own.
    """
    token = _active.set((plan, backend))
    try:
        yield
    finally:
        _active.reset(token)


def current_plan() -> tuple[AttentionPlan | None, str | None]:
    """The plan and backend that `use_plan` set here."""
    return _active.get()


def carrier(plan: AttentionPlan, *, backend: str | None = None) -> Tensor:
    """A bool tensor [B, 1, Q, K] without memory that HuggingFace passes on as an attention mask, holding `plan`.

    `backend` names the attention backend for the layers that receive it (None = the fastest).
    """
    scalar = torch.zeros((), dtype=torch.bool, device=plan.device)
    mask = scalar.expand(plan.batch, 1, plan.q_len, plan.k_len)
    mask.interlace_plan = (plan, backend)  # type: ignore[attr-defined]
    return mask


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """HuggingFace's attention interface: q [B, Hq, Tq, D], k and v [B, Hkv, Tk, D] -> [B, Tq, Hq, D].

    Raises ValueError for attention dropout and additive biases, which the kernels do not have.
    """
    if attention_mask is None:
        plan, backend = _active.get()
    else:
        plan, backend = getattr(attention_mask, "interlace_plan", (None, None))
        if plan is None and attention_mask.numel() > 1 and not any(attention_mask.stride()):
            raise ValueError(
                "an attention mask lost its plan on the way to the attention layer (the model copied it); run the "
                "model inside interlace.attention.hf.use_plan(plan) with attention_mask=None instead"
            )
    if plan is None:
        if softcap is not None:
            raise ValueError("softcap needs a plan: pass the mask with interlace.attention.hf.use_plan")
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    if dropout:
        raise ValueError(f"attention dropout is {dropout}; bitfield attention has none: set attention_dropout to 0")
    for name in ("position_bias", "s_aux", "cache"):
        if kwargs.get(name) is not None:
            raise ValueError(f"{type(module).__name__} passes {name!r}, which bitfield attention does not have")
    if sliding_window is not None:
        plan = windowed(plan, sliding_window)
    out = bitfield_attention(query, key, value, plan, scale=scaling, softcap=softcap, backend=backend)
    assert isinstance(out, Tensor)
    return out.transpose(1, 2).contiguous(), None


def windowed(plan: AttentionPlan, window: int) -> AttentionPlan:
    """`plan` with queries that see at most `window` positions back; made once per plan and window."""
    made: dict[int, AttentionPlan] = plan.__dict__.setdefault("_windowed", {})
    if window not in made:
        q = BitfieldMask(
            plan.q_bits,
            doc=plan.q_doc,
            span=plan.q_span,
            pos=plan.q_pos,
            window=plan.q_window.clamp(max=window),
            sinks=plan.sinks,
        )
        k = BitfieldMask(plan.k_bits, doc=plan.k_doc, span=plan.k_span, pos=plan.k_pos)
        made[window] = AttentionPlan.build(q, k, block=plan.block)
    return made[window]


def make_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Tensor | None = None,
    device: torch.device | str = "cpu",
    **kwargs: Any,
) -> Tensor | None:
    """HuggingFace's mask interface: a carrier of the active plan, or of one made for what the model asks."""
    plan, backend = _active.get()
    if plan is not None:
        return carrier(plan, backend=backend)
    if torch.device(device).type == "meta":
        return None  # shapes are all that is asked for, and a plan depends on values
    causal = mask_function is causal_mask_function
    if q_length == 1 or not (causal or mask_function is bidirectional_mask_function):
        return sdpa_mask(
            batch_size=batch_size,
            q_length=q_length,
            kv_length=kv_length,
            q_offset=int(q_offset),
            kv_offset=int(kv_offset),
            mask_function=mask_function,
            attention_mask=attention_mask,
            device=device,
            **{**kwargs, "allow_is_causal_skip": q_length == 1},
        )
    bits = torch.full((batch_size, kv_length), word(0, causal=causal), dtype=torch.int64, device=device)
    index = torch.arange(kv_length, dtype=torch.int32, device=device).expand(batch_size, -1)
    doc = None
    if attention_mask is not None:
        seen = attention_mask[:, int(kv_offset) : int(kv_offset) + kv_length].to(device=device, dtype=torch.bool)
        seen = nn.functional.pad(seen, (0, kv_length - seen.shape[1]))
        doc = torch.where(seen, 0, -1).to(torch.int32)
    keys = BitfieldMask(bits, doc=doc, pos=index.contiguous())
    first = int(q_offset) - int(kv_offset)
    queries = keys if (first, q_length) == (0, kv_length) else keys.select(slice(first, first + q_length))
    return carrier(AttentionPlan.build(queries, keys), backend=backend)


def register() -> None:
    """Make `attn_implementation="interlace"` known to HuggingFace (importing this module does it)."""
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, make_mask)


register()
