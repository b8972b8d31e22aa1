"""Activation checkpointing per layer: what a layer keeps for backward, and what backward recomputes.

    "none"        keeps everything that autograd saves
    "full"        keeps the layer's input: the whole layer runs again
    "selective"   keeps the input and the results of costly operations (`KEPT`: matrix products, attention,
                  collectives inside a lane): norms, activations and additions run again

A Llama block with a gated MLP of F hidden sizes keeps about 11 + 4 F ("none"), 1 ("full") or 7 + 2 F ("selective"), in
multiples of tokens x hidden size. "full" costs a second forward of every layer that has a backward. "selective" costs a
few passes over memory, and about 10 us of Python per operation in every forward, which matters if GPU kernels are as
short. A frozen layer behind trainable ones saves little for its backward, so for it "selective" may keep more than
"none".

`layer.forward` is replaced on the instance, so hooks stay outside and run once. Backward runs without an active
attention plan, possibly in another thread, so the recomputation restores the plan of the forward. It also restores the
random state, so dropout repeats the same draws.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from types import MethodType
from typing import Any, Literal, get_args

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from interlace.attention.hf import under_current_plan

Checkpointing = Literal["none", "full", "selective"]

KEPT = frozenset(
    {
        "aten::mm",
        "aten::addmm",
        "aten::bmm",
        "aten::baddbmm",
        "aten::linear",
        "aten::_scaled_mm",
        "aten::_grouped_mm",
        "aten::convolution",
        "aten::_scaled_dot_product_flash_attention",
        "aten::_scaled_dot_product_flash_attention_for_cpu",
        "aten::_scaled_dot_product_efficient_attention",
        "aten::_scaled_dot_product_cudnn_attention",
        "aten::_scaled_dot_product_fused_attention_overrideable",
        "interlace::bitfield_attention",
        "interlace::collective",
    }
)
"""Operations whose results "selective" keeps. Listed by name, because not every build of torch has all of them."""


UNSAFE_VIEW = "aten::_unsafe_view"
"""torch.matmul returns its product through this operation: the same memory with a separate version counter."""


def keeps(_: SelectiveCheckpointContext, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Policy of "selective", called by `torch.utils.checkpoint.create_selective_checkpoint_contexts`."""
    name = operation.name()
    # The view is kept for its version counter: torch then detects an in-place change of the product.
    view = name == UNSAFE_VIEW and type(args[0].grad_fn).__name__ != "CloneBackward0"
    if view or (name in KEPT and not _drops_out(operation, args, kwargs)):
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


def _drops_out(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """True if an attention operation uses dropout. Such an operation must be recomputed: otherwise it would not draw
    its random numbers again, and all later dropout would draw different ones than in the forward.
    """
    for place, argument in enumerate(operation._schema.arguments):
        if argument.name == "dropout_p":
            return bool((args[place] if place < len(args) else kwargs.get("dropout_p", 0.0)) != 0.0)
    return False


def _checkpointed(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], **how: Any) -> Any:
    forward = MethodType(type(layer).forward, layer)
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)

    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return forward(*args, **kwargs)
        except RuntimeError as error:
            if "has been mutated" not in str(error):
                raise
            raise ValueError(
                f'{type(layer).__name__} modifies the result of a matrix product in place, but "selective" activation '
                'checkpointing stores that result: use "full"'
            ) from error

    return checkpoint(under_current_plan(run), *args, use_reentrant=False, **how, **kwargs)


def _full(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return _checkpointed(layer, args, kwargs)


def _selective(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
    # torch.compile accepts the contexts of this exact function only.
    return _checkpointed(layer, args, kwargs, context_fn=partial(create_selective_checkpoint_contexts, keeps))


_FORWARDS: dict[str, Callable[..., Any]] = {"full": _full, "selective": _selective}


def check_entry(layer: nn.Module) -> None:
    """Raise ValueError if hooks on `layer` would run again in the recomputation, after their removal.

    This happens in transformers 4, whose layers checkpoint their __call__ instead of their forward.
    """
    recomputed = getattr(layer, "gradient_checkpointing", False) and layer.training
    if recomputed and any("__call__" in base.__dict__ for base in type(layer).__mro__ if base is not nn.Module):
        raise ValueError(
            f"{type(layer).__name__} uses gradient_checkpointing_enable(), which in this version of transformers does "
            "not support pipeline stages and packed rows: call gradient_checkpointing_disable(), then "
            "set_checkpointing() of the MultimodalModel"
        )


def check_checkpointing(mode: object) -> None:
    """Raise ValueError unless `mode` is a valid `Checkpointing`."""
    if mode not in get_args(Checkpointing):
        raise ValueError(f'activation checkpointing must be "none", "full" or "selective", not {mode!r}')


def set_checkpointing(layers: Iterable[nn.Module], mode: Checkpointing) -> None:
    """Set the activation checkpointing of each of `layers`; the last call wins. Raises ValueError for other modes."""
    check_checkpointing(mode)
    for layer in layers:
        # Set on the instance, as a bound method: deepcopy then binds it to the copy.
        if getattr(layer.__dict__.get("forward"), "__func__", None) in _FORWARDS.values():
            del layer.__dict__["forward"]
        if mode != "none":
            layer.__dict__["forward"] = MethodType(_FORWARDS[mode], layer)
