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

from interlace.attention.hf import current_plan, use_plan


def _forward(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
    forward = type(layer).forward
    if not torch.is_grad_enabled():
        return forward(layer, *args, **kwargs)
    plan, backend = current_plan()

    def compute(*args: Any, **kwargs: Any) -> Any:
        with use_plan(plan, backend=backend):
            return forward(layer, *args, **kwargs)

    return checkpoint(compute, *args, use_reentrant=False, **kwargs)


def set_checkpointing(layers: Iterable[nn.Module], enabled: bool) -> None:
    """Turn activation checkpointing of each of `layers` on or off; calling it twice changes nothing."""
    for layer in layers:
        # Set on the instance, as a bound method: deepcopy then binds it to the copy.
        if getattr(layer.__dict__.get("forward"), "__func__", None) is _forward:
            del layer.__dict__["forward"]
        if enabled:
            layer.__dict__["forward"] = MethodType(_forward, layer)
