"""Bitfield attention inside unmodified HuggingFace models: `attn_implementation="interlace"`, transformers 4.57 and 5.

A mask reaches the attention layers in two ways:

1. `use_plan(plan)` sets a context variable. Every layer reads it if the model passes the layer no mask (vision and
   audio encoders). If a model requests one mask per kind of layer (language models), these are made from the plan,
   narrowed by the kind's own window or chunks (`limits`). Both also work in code that torch.compile captures as one
   graph (`active`, `attention.plan`).
2. `carrier(plan)` is for places that the context does not reach (other threads). It is a 4-D attention mask that models
   pass on unchanged: a scalar expanded to [B, 1, Q, K] that takes no memory and has the plan attached. The model then
   makes no mask of its own, so limits that it would have put there are lost. Layers that may have a window in the mask
   are therefore rejected.

Without a plan the implementation is a drop-in. The mask function that the model composes (causal or not, windows,
padding, packed positions, chunks, image blocks) is translated to a plan, which is checked against the function itself
(`masks`). If a function is unknown or the check fails, the mask stays dense, on torch's scaled_dot_product_attention,
with one warning that names the function. Two other masks stay dense: masks for a single new token, where nothing can be
skipped, and 4-D masks given by the user, which are applied unchanged. Attention sinks, position biases and sparse
indices are rejected, since neither bitfield nor dense attention supports them.

`"interlace_flash"` is the same implementation under another name. It makes Qwen2-VL and related models pass all their
images in one call with `cu_seqlens`, instead of one call per image (transformers 5; 4.57 tests for the name
"flash_attention_2" and keeps its loop). It is meant for vision towers:
`attn_implementation={"": "interlace", "vision_config": "interlace_flash"}`.

Importing this module registers both.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable
from functools import partial, wraps
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from transformers import AttentionInterface, AttentionMaskInterface, masking_utils, modeling_utils
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import causal_mask_function, sdpa_mask

from interlace.attention.backend import accumulate_dtype
from interlace.attention.hf import masks as _hf_masks
from interlace.attention.hf.active import (
    EXPORTED,
    Backend,
    another_thread_has_a_plan,
    current_plan,
    current_plan_is_unset,
    under_current_plan,
    use_plan,
)
from interlace.attention.hf.carriers import DTYPE as CARRIER_DTYPE
from interlace.attention.hf.carriers import Carrier
from interlace.attention.hf.dropout import no_dropout
from interlace.attention.hf.limits import Limits, limits_of
from interlace.attention.hf.masks import MaskFunction, Sides, Unknown
from interlace.attention.hf.plans import cut, narrowed, packed_plan
from interlace.attention.op import bitfield_attention
from interlace.attention.plan import AttentionPlan, interval_plan, whole_graph
from interlace.masks.values import batching, readable

__all__ = ["Backend", "attention", "carrier", "current_plan", "make_mask", "register", "under_current_plan", "use_plan"]

NAME = "interlace"
FLASH_NAME = "interlace_flash"

# Arguments that some models pass beside the mask, and their effect on scores. None of them may be ignored.
REFUSED = {
    "s_aux": "attention sinks (a learned logit per head)",
    "sinks": "attention sinks",
    "position_bias": "a bias added to the scores",
    "head_mask": "a factor per head",
    "indices": "a list of keys per query",
    "block_indices": "a list of key blocks per query",
    "cache": "a paged cache",
}

_UNSET: Any = object()  # default of sliding_window: the layer did not pass one


def carrier(plan: AttentionPlan, *, backend: str | None = None) -> Tensor:
    """A tensor [B, 1, Q, K] without memory or values that holds `plan`. HuggingFace passes it on as an attention mask.

    `backend` names the attention backend for the layers that receive it (None = the fastest). Layers that pass their
    own sliding window narrow the plan by it. Models that have the window in the mask that they make (PhiMoE, Llama 4)
    are rejected, since a carrier replaces that mask: use `use_plan` for them.
    """
    return Carrier.of(plan, backend, True)


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
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """HuggingFace's attention interface: q [B, Hq, Tq, D], k and v [B, Hkv, Tk, D] -> [B, Tq, Hq, D].

    Raises ValueError for features that bitfield attention lacks (see REFUSED, and dropout under a plan), for a mask
    that is neither 4-D nor None, and if the model contradicts the plan: by a dense mask, or by a window that a carrier
    does not include.
    """
    sliding_window: int | None = kwargs.pop("sliding_window", _UNSET)
    for name, meaning in REFUSED.items():
        if kwargs.get(name) is not None:
            raise ValueError(
                f"{type(module).__name__} passes {name!r}, {meaning}, which bitfield attention does not support: "
                'use attn_implementation="eager" for this model'
            )
    if kwargs.get("output_attentions"):
        _warn("attention weights are not computed: output_attentions=True returns None for them")
    narrow = True
    if getattr(module, "_is_replica", False) and another_thread_has_a_plan():
        raise ValueError(
            "use_plan does not apply to the replica threads of torch.nn.DataParallel: use DistributedDataParallel, or "
            "run the model without a plan"
        )
    if attention_mask is None:
        plan, backend = current_plan()
        _check_recomputed(module, plan)
    else:
        # narrow: the plan does not include the layer's own window yet.
        plan, backend, narrow = getattr(attention_mask, "interlace_plan", (None, None, True))
        if plan is None:
            _check_dense(attention_mask)
            _check_no_active_plan(module)
        elif narrow and torch.compiler.is_exporting():
            raise ValueError(EXPORTED)
        elif narrow and sliding_window is _UNSET:
            _check_no_window(module, plan)
    sliding_window = None if sliding_window is _UNSET else sliding_window
    boundaries = _boundaries(kwargs)
    if boundaries is not None and query.shape[2] > 1:
        if plan is None and attention_mask is None:
            is_causal = kwargs.get("is_causal")
            causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
            if sliding_window is not None and not causal:
                raise ValueError(
                    "cu_seq_lens_q with a two-sided window is not supported: pass an attention mask instead"
                )
            plan = packed_plan(*boundaries, query.shape[2], key.shape[2], causal=causal)
        elif plan is None:
            raise ValueError("got both cu_seq_lens_q and a dense attention mask: pass one of them")
        elif not narrow:  # made from the model's own mask function, which does not include these boundaries
            plan = cut(plan, *boundaries)
    if plan is None:
        if softcap is not None:
            return _softcapped(query, key, value, attention_mask, scaling, softcap, dropout), None
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    if dropout:
        raise no_dropout(module, dropout)
    if sliding_window is not None and narrow:
        plan = narrowed(plan, Limits(back=sliding_window))
    attend = backend if callable(backend) else partial(bitfield_attention, backend=backend)
    out = attend(query, key, value, plan, scale=scaling, softcap=softcap)
    assert isinstance(out, Tensor)
    return out.transpose(1, 2).contiguous(), None


def _flash_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """`attention` for FLASH_NAME. Rejects inputs that only FlashAttention's own wrapper supports.

    If the name contains "flash", some models (Pixtral) mark the image of each patch by position ids alone.
    """
    unmarked = attention_mask is None and kwargs.get("cu_seq_lens_q") is None and current_plan()[0] is None
    if unmarked and query.shape[2] > 1 and kwargs.get("position_ids") is not None:
        raise ValueError(
            f'{type(module).__name__} under "{FLASH_NAME}" separates its images by position_ids only: '
            f'use attn_implementation="{NAME}" for it'
        )
    return attention(module, query, key, value, attention_mask, **kwargs)


_followed_a_plan: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def _check_recomputed(module: nn.Module, plan: AttentionPlan | None) -> None:
    """Raise ValueError if a backward pass recomputes a layer without the plan that its forward used."""
    if torch.compiler.is_compiling():
        return
    if plan is not None:
        if module.training or torch.is_grad_enabled():
            _followed_a_plan.add(module)
    elif current_plan_is_unset() and module in _followed_a_plan and torch._C._current_graph_task_id() != -1:
        raise ValueError(
            f"{type(module).__name__} is recomputed in the backward pass outside the interlace.attention.hf.use_plan "
            "of its forward pass, so it would see other tokens. Call backward inside use_plan too, or use "
            'interlace.model.set_checkpointing(layers, "full") or model.gradient_checkpointing_enable() after '
            "importing interlace.attention.hf; both keep the plan. If this forward pass had no plan, but earlier ones "
            "had, run it inside use_plan(None)"
        )


def _check_dense(mask: Tensor) -> None:
    _check_carries_plan(mask)
    if mask.dim() != 4:
        raise ValueError(
            f"the attention mask of a layer has shape {list(mask.shape)}, expected [batch, heads or 1, queries, keys]; "
            f'under "{FLASH_NAME}" some models pass their padding mask unchanged: use "{NAME}" for them'
        )
    if mask.dtype != torch.bool and not mask.dtype.is_floating_point:
        raise ValueError(
            f"the attention mask is {mask.dtype}; it must be bool (True: visible) or floating point (added)"
        )


def _check_carries_plan(mask: Tensor | None) -> None:
    if mask is None or mask.dtype != CARRIER_DTYPE or isinstance(mask, Carrier):
        return
    if torch.compiler.is_exporting():
        raise ValueError(EXPORTED)
    raise ValueError(
        "an attention mask lost its plan before the attention layer (the model or a transform of torch.func copied "
        "it): run the model inside interlace.attention.hf.use_plan(plan) with "
        "attention_mask=None"
    )


def _check_no_active_plan(module: nn.Module) -> None:
    if current_plan()[0] is not None:
        raise ValueError(
            f"{type(module).__name__} got a dense mask inside use_plan(plan), which contradicts the plan: pass "
            "attention_mask=None. If it is None already, the model makes its own masks and does not support plans"
        )


def _check_no_window(module: nn.Module, plan: AttentionPlan) -> None:
    """Reject a carrier if the mask that it replaces could have held a window or chunks."""
    config = getattr(module, "config", None)
    tokens = plan.k_len  # in compiled code positions are unknown until it runs
    if not torch.compiler.is_compiling():
        tokens = 1 + int(plan.k_pos.max()) if plan.k_pos.numel() else 0
    for name in ("sliding_window", "attention_chunk_size"):
        limit = getattr(config, name, None)
        if isinstance(limit, int) and tokens > limit:
            raise ValueError(
                f"{type(module).__name__} has {name} = {limit}, which a carrier does not apply: run the model inside "
                "interlace.attention.hf.use_plan(plan) with attention_mask=None, which applies it to the plan"
            )


def _softcapped(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float | None,
    softcap: float,
    dropout: float,
) -> Tensor:
    """Dense attention with softcap, which torch's lacks: for decoding steps and masks without a plan."""
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


def _boundaries(kwargs: dict[str, Any]) -> tuple[Tensor, Tensor] | None:
    q_ends = kwargs.get("cu_seq_lens_q")
    if q_ends is None:
        return None
    k_ends = kwargs.get("cu_seq_lens_k")
    return q_ends, q_ends if k_ends is None else k_ends


# ---------------------------------------------------------------------- the mask function


def make_mask(
    *,
    batch_size: int,
    kv_length: int,
    kv_offset: int = 0,
    mask_function: MaskFunction = causal_mask_function,
    attention_mask: Tensor | None = None,
    skip_for_one_token: bool = True,
    **kwargs: Any,
) -> Tensor | None:
    """HuggingFace's mask interface: returns a carrier of the active plan, or of a plan made for the requested mask.

    transformers 5 gives the queries by q_length and q_offset, 4.57 by cache_position. The active plan is narrowed by
    the window or chunks of the mask function. An unknown mask function, or padding that is not in the plan, raises
    ValueError. Without a plan, two cases return a dense mask: an unknown mask function, with one warning that names it,
    and a single query.
    """
    _check_carries_plan(attention_mask)
    plan, backend = current_plan()
    compiling = torch.compiler.is_compiling()
    full_graph = compiling and whole_graph()
    if plan is not None and full_graph:  # the function cannot be analysed here: layers narrow the plan or reject it
        if attention_mask is not None:
            raise ValueError("a compiled model cannot compare padding with the active plan: pass attention_mask=None")
        return Carrier.of(plan, backend, True)
    if plan is not None:
        return Carrier.of(_narrowed_for(plan, mask_function, attention_mask), backend, False)
    arguments = {
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
        return None  # on meta only shapes are needed, and a plan depends on values
    if q_length == 1:
        return _dense(arguments, skip=skip_for_one_token)
    if cache_position is None:
        cache_position = torch.arange(q_length, device=device) + kwargs.get("q_offset", 0)
    if full_graph or (not compiling and (batching() or isinstance(cache_position, FakeTensor))):
        dense = _dense(arguments, skip=False)
        assert dense is not None
        if not readable(dense):
            return Carrier.of(interval_plan(dense), backend, False)
    at = Sides(cache_position.unsqueeze(0).long(), torch.arange(kv_length, device=device).unsqueeze(0) + kv_offset)
    built = _plan_of(mask_function, at, batch_size, attention_mask)
    return _dense(arguments, skip=False) if built is None else Carrier.of(built, backend, False)


@torch.compiler.disable(recursive=True)
def _narrowed_for(plan: AttentionPlan, function: MaskFunction, padding: Tensor | None) -> AttentionPlan:
    """The active plan within the limits of the requested mask; raises ValueError."""
    if not readable(padding):
        raise ValueError(
            "padding under torch.func.vmap cannot be compared with the active plan: put it in the plan (doc = -1)"
        )
    if padding is not None and padding.dim() == 2:
        kept = nn.functional.pad(padding.to(plan.k_doc.device).bool(), (0, max(0, plan.k_len - padding.shape[1])))
        if bool(((plan.k_doc >= 0) & ~kept[:, : plan.k_len]).any()):
            raise ValueError(
                "the attention mask hides tokens that the active plan shows: put the padding in the plan (doc = -1) "
                "and pass attention_mask=None"
            )
    try:
        limits = limits_of(function)
    except Unknown as error:
        raise ValueError(
            f"a plan cannot replace the mask {_hf_masks.describe(function)}: {error}. Run this model without a plan, "
            "on one sample per row"
        ) from error
    return narrowed(plan, limits)


def _dense(arguments: dict[str, Any], *, skip: bool) -> Tensor | None:
    """The mask for "sdpa": bool [B, 1, Q, K], or None if it may be skipped."""
    if not skip:
        arguments = {**arguments, "allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    return sdpa_mask(**arguments)  # type: ignore[no-any-return]


@torch.compiler.disable(
    recursive=True,
    reason="the size of a plan depends on the mask's values: under fullgraph=True build the plan outside the compiled "
    "model and pass attention_mask=interlace.attention.hf.carrier(plan)",
)
def _plan_of(function: MaskFunction, at: Sides, batch: int, attention_mask: Tensor | None) -> AttentionPlan | None:
    """The plan for a mask function; None, with one warning per function, if it is unknown."""
    try:
        padding = None
        if attention_mask is not None:
            if attention_mask.dim() != 2:
                raise Unknown(f"the padding mask has {attention_mask.dim()} dimensions, not 2")
            tokens = int(at.k[0, -1]) + 1 if at.k.numel() else 0
            padding = attention_mask.to(device=at.q.device, dtype=torch.bool)
            padding = nn.functional.pad(padding, (0, max(0, tokens - padding.shape[1])))
        queries, keys = _hf_masks.masks(_hf_masks.translate(function, at), at, batch, padding)
        mismatch = _hf_masks.differs(function, at, queries, keys, padding)
        if mismatch is None:
            return AttentionPlan.build(queries, keys)
        reason, pair = "its translation differs from the function", f", at (batch, query, key) = {mismatch}"
    except (Unknown, IndexError, TypeError, ValueError, RuntimeError) as error:
        reason, pair = str(error), ""
    name = _hf_masks.describe(function)
    _warn(f"mask function {name} is run as a dense mask on scaled_dot_product_attention: {reason}", pair)
    return None


_warned: set[str] = set()


def _warn(message: str, detail: str = "") -> None:
    """Warn once per message; `detail` may differ between calls."""
    if message not in _warned:
        _warned.add(message)
        warnings.warn(f"interlace: {message}{detail}", stacklevel=2)


def register() -> None:
    """Register "interlace" and "interlace_flash" as `attn_implementation` (called when this module is imported)."""
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, make_mask)
    AttentionInterface.register(FLASH_NAME, _flash_attention)
    # A decoding step without any mask would look like a row of images without boundaries.
    AttentionMaskInterface.register(FLASH_NAME, partial(make_mask, skip_for_one_token=False))
    _replace(modeling_utils, "lazy_import_flash_attention", _skip_kernel_download)
    _replace(modeling_utils, "checkpoint", _remember_plans)
    _replace(masking_utils, "find_packed_sequence_indices", _skip_packing_search)


def _replace(module: ModuleType, name: str, change: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replace a function of a module by change(function), once per process."""
    function = getattr(module, name)
    if not hasattr(function, "knows_interlace"):
        changed = wraps(function)(change(function))
        changed.knows_interlace = True  # type: ignore[attr-defined]
        setattr(module, name, changed)


def _skip_kernel_download(load: Callable[..., Any]) -> Callable[..., Any]:
    """Stops transformers 5 from importing or downloading a kernel for FLASH_NAME, as it does for names with "flash"."""

    def load_others(implementation: str | None, *args: object, **kwargs: object) -> object:
        return None if implementation == FLASH_NAME else load(implementation, *args, **kwargs)

    return load_others


def _remember_plans(checkpoint: Callable[..., Any]) -> Callable[..., Any]:
    """Makes layers that transformers checkpoints use the plan of their forward when they are recomputed."""

    def checkpoint_under_plan(function: Callable[..., Any], *args: object, **kwargs: object) -> object:
        return checkpoint(under_current_plan(function), *args, **kwargs)

    return checkpoint_under_plan


def _skip_packing_search(find: Callable[..., Any]) -> Callable[..., Any]:
    """Skips transformers' search for packed sequences in position ids where it is not needed. It runs in every forward
    and reads its result from the GPU. A plan already defines the packing; on meta there are no values to read."""

    def find_without_plan(position_ids: Tensor, *args: object, **kwargs: object) -> object:
        if position_ids.is_meta or (not torch.compiler.is_compiling() and current_plan()[0] is not None):
            return None
        return find(position_ids, *args, **kwargs)

    return find_without_plan


register()
