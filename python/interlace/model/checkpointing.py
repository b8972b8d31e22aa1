"""Activation checkpointing per layer: keep a layer's input, recompute its inside in backward.

`layer.forward` is replaced on the instance, so hooks stay outside and run once. Backward runs where no attention plan
is active, possibly in another thread, so the recomputation re-establishes the plan of the forward.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from interlace.attention.hf import under_current_plan


def _forward(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
    forward = MethodType(type(layer).forward, layer)
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    return checkpoint(under_current_plan(forward), *args, use_reentrant=False, **kwargs)


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


def set_checkpointing(layers: Iterable[nn.Module], enabled: bool) -> None:
    """Turn activation checkpointing of each of `layers` on or off; calling it twice changes nothing."""
    for layer in layers:
        # Set on the instance, as a bound method: deepcopy then binds it to the copy.
        if getattr(layer.__dict__.get("forward"), "__func__", None) is _forward:
            del layer.__dict__["forward"]
        if enabled:
            layer.__dict__["forward"] = MethodType(_forward, layer)
