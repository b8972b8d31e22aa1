"""Activation checkpointing per layer: what a layer keeps for its backward pass, and what that pass computes again.

    "none"        everything that autograd saves
    "full"        the layer's input: its whole inside runs again
    "selective"   the input and the results of costly operations (`KEPT`: matrix products, attention, what ranks of a
                  lane tell each other): norms, activations and additions run again

In multiples of tokens x hidden size, a Llama block with a gated MLP of F hidden sizes keeps about 11 + 4 F, 1, or
7 + 2 F. "full" costs a second forward of every layer that has a backward; "selective" a few passes over memory, and on
every forward about 10 us of Python per operation, which a GPU notices where its kernels are as short. A layer that is
frozen behind trainable ones saves little for its backward, so "selective" may keep more there than "none" does.

`layer.forward` is replaced on the instance, so hooks stay outside and run once. Backward runs where no attention plan
is active, possibly in another thread, so the recomputation re-establishes the plan of the forward. The random state is
put back, too: dropout draws the same again.
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
"""Operations whose results "selective" keeps, by name: not every build of torch has all of them."""


UNSAFE_VIEW = "aten::_unsafe_view"
"""torch.matmul returns its product through this: the same memory under a version counter of its own."""


def keeps(_: SelectiveCheckpointContext, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """The policy of "selective", as `torch.utils.checkpoint.create_selective_checkpoint_contexts` asks for it."""
    name = operation.name()
    # Kept, too, for its counter: torch then sees that a product was changed in place, and does not take it for the old.
    view = name == UNSAFE_VIEW and type(args[0].grad_fn).__name__ != "CloneBackward0"
    if view or (name in KEPT and not _drops_out(operation, args, kwargs)):
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


def _drops_out(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether an attention draws random numbers: left out of the recomputation, it would not draw them again, and
    every dropout after it would draw others than in the forward."""
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
                f'{type(layer).__name__} changes the result of a matrix product in place, which "selective" activation '
                'checkpointing keeps: use "full"'
            ) from error

    return checkpoint(under_current_plan(run), *args, use_reentrant=False, **how, **kwargs)


def _full(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return _checkpointed(layer, args, kwargs)


def _selective(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
    # torch.compile takes the contexts of this very function, and no others.
    return _checkpointed(layer, args, kwargs, context_fn=partial(create_selective_checkpoint_contexts, keeps))


_FORWARDS: dict[str, Callable[..., Any]] = {"full": _full, "selective": _selective}


def check_entry(layer: nn.Module) -> None:
    """Raise ValueError where hooks on `layer` would run again in the recomputation, after they are gone.

    So it is in transformers 4, whose layers checkpoint their __call__ and not their forward.
    """
    recomputed = getattr(layer, "gradient_checkpointing", False) and layer.training
    if recomputed and any("__call__" in base.__dict__ for base in type(layer).__mro__ if base is not nn.Module):
        raise ValueError(
            f"{type(layer).__name__} was given activation checkpointing by gradient_checkpointing_enable(), which in "
            "this version of transformers cannot recompute a layer that a stage or a packed row enters at: call "
            "gradient_checkpointing_disable() and set_checkpointing() of the MultimodalModel"
        )


def check_checkpointing(mode: object) -> None:
    """Raises ValueError for what is no `Checkpointing`."""
    if mode not in get_args(Checkpointing):
        raise ValueError(f'activation checkpointing must be "none", "full" or "selective", not {mode!r}')


def set_checkpointing(layers: Iterable[nn.Module], mode: Checkpointing) -> None:
    """Set the activation checkpointing of each of `layers`; the last call counts. Raises ValueError for other modes."""
    check_checkpointing(mode)
    for layer in layers:
        # Set on the instance, as a bound method: deepcopy then binds it to the copy.
        if getattr(layer.__dict__.get("forward"), "__func__", None) in _FORWARDS.values():
            del layer.__dict__["forward"]
        if mode != "none":
            layer.__dict__["forward"] = MethodType(_FORWARDS[mode], layer)
