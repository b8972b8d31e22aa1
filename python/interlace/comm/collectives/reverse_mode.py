"""Rejects forward mode and torch.func: collectives are differentiable only by backward() and torch.autograd.grad."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import forward_ad


def check_reverse_mode(name: str, *tensors: Tensor) -> None:
    """Raises RuntimeError in forward mode and under a transform of torch.func.

    In forward mode the operation would drop tangents (a derivative of 0). Under torch.func there are no bytes to move.
    """
    if torch._C._are_functorch_transforms_active():
        raise RuntimeError(
            f"{name} does not support transforms of torch.func (grad, vmap, jvp, ...): differentiate with "
            "torch.autograd.grad or backward(), and pass a batch as a dimension of the tensors"
        )
    if forward_ad._current_level >= 0 and any(forward_ad.unpack_dual(x).tangent is not None for x in tensors):
        raise RuntimeError(
            f"{name} has no forward-mode derivative (dual numbers): differentiate with torch.autograd.grad or "
            "backward()"
        )
