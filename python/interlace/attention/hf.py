"""Bitfield attention inside unmodified HuggingFace models: `attn_implementation="interlace"`, transformers 4.57 and 5.

Two ways lead a mask to the attention layers. `use_plan(plan)` sets a context variable that every layer consults when
the model passes it no mask (vision and audio encoders). Language models insist on making a mask themselves; they let
a 4-D tensor through untouched, so `carrier(plan)` makes one that takes no memory (a scalar expanded to [B, 1, Q, K])
and has the plan attached.

Without a plan the implementation is a drop-in. The mask function that the model composes (causal or not, windows,
padding, packed positions, chunks, image blocks) is taken apart and becomes a plan, checked against the function itself
(`_hf_masks`). A function that is not understood, or that the check refutes, stays a dense mask on torch's
scaled_dot_product_attention, with one warning that names it. Dense as well: masks for a single new token, where there
is nothing to skip, and 4-D masks given by the user, which are honoured as they are. What neither side can do (attention
sinks, position biases, sparse indices) is refused.

`"interlace_flash"` is the same under a name that makes Qwen2-VL and its relatives hand over all their images in one
call with `cu_seqlens` instead of calling once per image (transformers 5; 4.57 asks for "flash_attention_2" by name and
keeps its loop). Meant for vision towers: `attn_implementation={"": "interlace", "vision_config": "interlace_flash"}`.

Importing this module registers both.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, modeling_utils
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import causal_mask_function, sdpa_mask

from interlace.attention import _hf_masks
from interlace.attention._hf_masks import Sides, Unknown
from interlace.attention.op import bitfield_attention
from interlace.attention.plan import AttentionPlan
from interlace.attention.reference import accumulate_dtype
from interlace.masks import BitfieldMask, Tokens, word

NAME = "interlace"
FLASH_NAME = "interlace_flash"

# What some models pass beside the mask, and what it does to the scores. Nothing here may be ignored.
REFUSED = {
    "s_aux": "attention sinks (a learned logit per head)",
    "sinks": "attention sinks",
    "position_bias": "a bias added to the scores",
    "head_mask": "a factor per head",
    "indices": "a list of keys per query",
    "block_indices": "a list of key blocks per query",
    "cache": "a paged cache",
}

# Torch computes nothing with it: a model that reads its mask instead of passing it on (Doge makes another out of it)
# fails at once, as does a copy that lost its plan. Numbers would be taken for a mask that hides nothing.
CARRIER_DTYPE = torch.bits8

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
    """A tensor [B, 1, Q, K] without memory or values that HuggingFace passes on as an attention mask, holding `plan`.

    `backend` names the attention backend for the layers that receive it (None = the fastest). Layers with a sliding
    window of their own narrow the plan by it.
    """
    return _carry(plan, backend, narrow=True)


def _carry(plan: AttentionPlan, backend: str | None, *, narrow: bool) -> Tensor:
    scalar = torch.zeros((), dtype=torch.uint8, device=plan.device).view(CARRIER_DTYPE)
    mask = scalar.expand(plan.batch, 1, plan.q_len, plan.k_len)
    mask.interlace_plan = (plan, backend, narrow)  # type: ignore[attr-defined]
    # Generation with a static cache calls contiguous() on its masks, which would make a real tensor without the plan.
    itself = weakref.ref(mask)
    mask.contiguous = lambda *args, **kwargs: itself()  # type: ignore[assignment, method-assign]
    return mask


# ---------------------------------------------------------------------- the attention function


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

    Raises ValueError for what bitfield attention does not have (see REFUSED, and dropout under a plan) and for a mask
    that is neither 4-D nor None.
    """
    for name, meaning in REFUSED.items():
        if kwargs.get(name) is not None:
            raise ValueError(
                f"{type(module).__name__} passes {name!r}, {meaning}, which bitfield attention does not have: "
                'use attn_implementation="eager" for this model'
            )
    if kwargs.get("output_attentions"):
        _warn("attention weights are never formed: output_attentions=True returns None in their place")
    narrow = True
    if attention_mask is None:
        plan, backend = _active.get()
    else:
        plan, backend, narrow = getattr(attention_mask, "interlace_plan", (None, None, True))
        if plan is None:
            _check_dense(attention_mask)
    boundaries = _boundaries(kwargs)
    if boundaries is not None and query.shape[2] > 1:
        if plan is None and attention_mask is None:
            is_causal = kwargs.get("is_causal")
            causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
            if sliding_window is not None and not causal:
                raise ValueError("cu_seq_lens_q with a window on both sides of the query is not supported")
            plan = packed_plan(*boundaries, query.shape[2], key.shape[2], causal=causal)
        elif plan is None:
            raise ValueError("cu_seq_lens_q comes with a dense attention mask: give one or the other")
        elif not narrow:  # made from the model's own mask function, which does not know of these boundaries
            plan = _cut(plan, *boundaries)
    if plan is None:
        if softcap is not None:
            return _softcapped(query, key, value, attention_mask, scaling, softcap, dropout), None
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    if dropout:
        raise ValueError(f"attention dropout is {dropout}; bitfield attention has none: set attention_dropout to 0")
    if sliding_window is not None and narrow:
        plan = windowed(plan, sliding_window)
    out = bitfield_attention(query, key, value, plan, scale=scaling, softcap=softcap, backend=backend)
    assert isinstance(out, Tensor)
    return out.transpose(1, 2).contiguous(), None


def _flash_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """`attention` for FLASH_NAME, refusing what only FlashAttention's own wrapper would understand.

    Some models (Pixtral) say which patch belongs to which image by position ids alone once a name contains "flash".
    """
    unmarked = attention_mask is None and kwargs.get("cu_seq_lens_q") is None and _active.get()[0] is None
    if unmarked and query.shape[2] > 1 and kwargs.get("position_ids") is not None:
        raise ValueError(
            f'{type(module).__name__} under "{FLASH_NAME}" marks its images by position_ids alone: '
            f'use attn_implementation="{NAME}" for it'
        )
    return attention(module, query, key, value, attention_mask, **kwargs)


def _check_dense(mask: Tensor) -> None:
    if mask.dtype == CARRIER_DTYPE:
        raise ValueError(
            "an attention mask lost its plan on the way to the attention layer (the model copied it); to pass a plan, "
            "run the model inside interlace.attention.hf.use_plan(plan) with attention_mask=None"
        )
    if mask.dim() != 4:
        raise ValueError(
            f"an attention mask of shape {list(mask.shape)} reached an attention layer, which needs "
            f'[batch, heads or 1, queries, keys]; under "{FLASH_NAME}" some models pass their padding mask as it is: '
            f'use "{NAME}" for them'
        )
    if mask.dtype != torch.bool and not mask.dtype.is_floating_point:
        raise ValueError(f"an attention mask is {mask.dtype}; it must be bool (True: seen) or floating (added)")


def _softcapped(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float | None,
    softcap: float,
    dropout: float,
) -> Tensor:
    """Dense attention with capped scores, which torch's has not: for decoding steps and masks without a plan."""
    if mask is None and query.shape[2] > 1:
        raise ValueError("softcap needs a plan: pass the mask with interlace.attention.hf.use_plan")
    groups = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
    scores = query @ key.transpose(-1, -2) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    scores = softcap * torch.tanh(scores.to(accumulate_dtype(query.dtype)) / softcap)
    if mask is not None and mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    elif mask is not None:
        scores = scores + mask
    weights = nn.functional.dropout(scores.softmax(-1).to(query.dtype), dropout)
    return (weights @ value).transpose(1, 2).contiguous()


# ---------------------------------------------------------------------- plans


def windowed(plan: AttentionPlan, window: int) -> AttentionPlan:
    """`plan` with queries that see at most `window` positions back; made once per plan and window."""
    made: dict[Any, AttentionPlan] = plan.__dict__.setdefault("_windowed", {})
    if window not in made:
        made[window] = _changed(plan, lambda q, k: (q._replace(window=q.window.clamp(max=window)), k))
    return made[window]


def _cut(plan: AttentionPlan, q_ends: Tensor, k_ends: Tensor) -> AttentionPlan:
    """`plan` without the pairs that lie in two sequences; made once per plan and ends, which are as in packed_plan."""
    if plan.batch != 1:
        raise ValueError(f"cu_seq_lens_q describes one row of packed sequences, but the batch is {plan.batch}")
    made: dict[Any, tuple[AttentionPlan, Any]] = plan.__dict__.setdefault("_cut", {})
    key = (id(q_ends), q_ends._version, id(k_ends), k_ends._version)
    if key not in made:
        of = (_segments(q_ends, plan.q_len), _segments(k_ends, plan.k_len))
        count = max(q_ends.numel(), k_ends.numel())

        def narrow(tokens: Tokens, segment: Tensor) -> Tokens:
            doc = torch.where((tokens.doc >= 0) & (segment >= 0), tokens.doc * count + segment, -1)
            span = torch.where(tokens.span >= 0, tokens.span * count + segment.clamp(min=0), -1)
            return tokens._replace(doc=doc.to(torch.int32), span=span.to(torch.int32))

        cut = _changed(plan, lambda q, k: (narrow(q, of[0]), narrow(k, of[1])))
        made[key] = (cut, (q_ends, k_ends))  # which keeps the ids in the key from being given to other tensors
    return made[key][0]


@torch.compiler.disable(recursive=True)
def _changed(plan: AttentionPlan, change: Callable[[Tokens, Tokens], tuple[Tokens, Tokens]]) -> AttentionPlan:
    q, k = change(plan.queries(), plan.keys())
    queries = BitfieldMask(q.bits, doc=q.doc, span=q.span, pos=q.pos, window=q.window, sinks=plan.sinks)
    return AttentionPlan.build(queries, BitfieldMask(k.bits, doc=k.doc, span=k.span, pos=k.pos), block=plan.block)


def _boundaries(kwargs: dict[str, Any]) -> tuple[Tensor, Tensor] | None:
    q_ends = kwargs.get("cu_seq_lens_q")
    if q_ends is None:
        return None
    k_ends = kwargs.get("cu_seq_lens_k")
    return q_ends, q_ends if k_ends is None else k_ends


def packed_plan(q_ends: Tensor, k_ends: Tensor, q_len: int, k_len: int, *, causal: bool) -> AttentionPlan:
    """The plan of sequences side by side in one row, each of which sees itself alone: FlashAttention's cu_seqlens.

    q_ends, k_ends: int [n + 1], 0 and then the end of each sequence among the queries and keys; what lies past the
    last end is padding. causal needs both to be the same. Kept on `q_ends`, so that the layers of a tower share one
    plan. Raises ValueError for boundaries that do not fit.
    """
    made: dict[Any, tuple[AttentionPlan, Tensor]] = q_ends.__dict__.setdefault("_interlace_plans", {})
    key = (q_ends._version, id(k_ends), k_ends._version, q_len, k_len, causal)
    if key not in made:
        made[key] = (_build_packed(q_ends, k_ends, q_len, k_len, causal), k_ends)
    return made[key][0]


@torch.compiler.disable(recursive=True)
def _build_packed(q_ends: Tensor, k_ends: Tensor, q_len: int, k_len: int, causal: bool) -> AttentionPlan:
    if q_ends.shape != k_ends.shape:
        raise ValueError(f"{q_ends.numel() - 1} query sequences but {k_ends.numel() - 1} key sequences")
    if causal and not torch.equal(q_ends, k_ends):
        raise ValueError("causal attention between packed sequences of different lengths is not supported")
    sides = []
    for name, ends, length in (("q", q_ends, q_len), ("k", k_ends, k_len)):
        if int(ends[-1]) > length:
            raise ValueError(f"cu_seq_lens_{name} ends at {int(ends[-1])}, past the {length} tokens there are")
        bits = torch.full((1, length), word(0, causal=causal), dtype=torch.int64, device=ends.device)
        sides.append(BitfieldMask(bits, doc=_segments(ends, length).to(torch.int32)))
    return AttentionPlan.build(*sides)


def _segments(ends: Tensor, length: int) -> Tensor:
    """int64 [1, length]: which sequence each token lies in, -1 past the last one."""
    of = torch.searchsorted(ends, torch.arange(length, device=ends.device, dtype=ends.dtype), right=True) - 1
    return torch.where(of < ends.numel() - 1, of, -1).unsqueeze(0)


# ---------------------------------------------------------------------- the mask function


def make_mask(
    *,
    batch_size: int,
    kv_length: int,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Tensor | None = None,
    skip_for_one_token: bool = True,
    **kwargs: Any,
) -> Tensor | None:
    """HuggingFace's mask interface: a carrier of the active plan, or of one made for what the model asks.

    transformers 5 names the queries by q_length and q_offset, 4.57 by cache_position. Returns a dense mask where the
    mask function is not understood, with one warning that names it, and for a single query.
    """
    plan, backend = _active.get()
    if plan is not None:
        return carrier(plan, backend=backend)
    given = {
        **kwargs,
        "batch_size": batch_size,
        "kv_length": kv_length,
        "kv_offset": kv_offset,
        "mask_function": mask_function,
        "attention_mask": attention_mask,
    }
    cache_position = kwargs.get("cache_position")
    q_length = kwargs["q_length"] if cache_position is None else cache_position.shape[0]
    device = torch.device(kwargs.get("device", "cpu") if cache_position is None else cache_position.device)
    if device.type == "meta":
        return None  # shapes are all that is asked for, and a plan depends on values
    if q_length == 1:
        return _dense(given, skip=skip_for_one_token)
    if cache_position is None:
        cache_position = torch.arange(q_length, device=device) + kwargs.get("q_offset", 0)
    at = Sides(cache_position.unsqueeze(0).long(), torch.arange(kv_length, device=device).unsqueeze(0) + kv_offset)
    made = _plan_of(mask_function, at, batch_size, attention_mask)
    return _dense(given, skip=False) if made is None else _carry(made, backend, narrow=False)


def _dense(given: dict[str, Any], *, skip: bool) -> Tensor | None:
    """The mask that "sdpa" would get: bool [B, 1, Q, K], or None where it may be skipped."""
    if not skip:
        given = {**given, "allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    return sdpa_mask(**given)  # type: ignore[no-any-return]


@torch.compiler.disable(
    recursive=True,
    reason="a plan's size depends on the mask's values: under fullgraph=True build the plan outside the compiled "
    "model and pass attention_mask=interlace.attention.hf.carrier(plan)",
)
def _plan_of(
    function: Callable[..., Any], at: Sides, batch: int, attention_mask: Tensor | None
) -> AttentionPlan | None:
    """The plan for a mask function, None where it is not understood (which is warned of, once per function)."""
    try:
        padding = None
        if attention_mask is not None:
            if attention_mask.dim() != 2:
                raise Unknown(f"a padding mask of {attention_mask.dim()} dimensions")
            tokens = int(at.k[0, -1]) + 1 if at.k.numel() else 0
            padding = attention_mask.to(device=at.q.device, dtype=torch.bool)
            padding = nn.functional.pad(padding, (0, max(0, tokens - padding.shape[1])))
        queries, keys = _hf_masks.masks(_hf_masks.translate(function, at), at, batch, padding)
        where = _hf_masks.differs(function, at, queries, keys, padding)
        if where is None:
            return AttentionPlan.build(queries, keys)
        reason, pair = "its translation is refuted", f", at (batch, query, key) = {where}"
    except (Unknown, IndexError, TypeError, ValueError, RuntimeError) as error:
        reason, pair = str(error), ""
    name = _hf_masks.describe(function)
    _warn(f"the mask function {name} stays a dense mask on scaled_dot_product_attention: {reason}", pair)
    return None


_warned: set[str] = set()


def _warn(message: str, detail: str = "") -> None:
    """Warn once of each message; `detail` may differ from time to time."""
    if message not in _warned:
        _warned.add(message)
        warnings.warn(f"interlace: {message}{detail}", stacklevel=2)


def register() -> None:
    """Make "interlace" and "interlace_flash" known as `attn_implementation` (importing this module does it)."""
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, make_mask)
    AttentionInterface.register(FLASH_NAME, _flash_attention)
    # A decoding step without any mask would look like an unmarked row of images.
    AttentionMaskInterface.register(FLASH_NAME, partial(make_mask, skip_for_one_token=False))
    _spare_the_download()


def _spare_the_download() -> None:
    """transformers 5 takes every name with "flash" in it for a kernel to import or download: not this one."""
    load = modeling_utils.lazy_import_flash_attention
    if not hasattr(load, "spares_interlace"):

        @wraps(load)
        def load_others(implementation: str | None, *args: Any, **kwargs: Any) -> Any:
            return None if implementation == FLASH_NAME else load(implementation, *args, **kwargs)

        load_others.spares_interlace = True  # type: ignore[attr-defined]
        modeling_utils.lazy_import_flash_attention = load_others


register()
