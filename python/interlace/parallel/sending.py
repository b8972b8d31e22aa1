"""Asynchronous copies of tensors and plans from the host to a GPU."""

from __future__ import annotations

import torch
from torch import Tensor

from interlace import _device
from interlace.attention.plan import AttentionPlan


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """`tensor` on `device`. Copies from the host to a GPU use pinned memory and do not block."""
    if tensor.is_meta or tensor.device == device:
        return tensor
    to_gpu = _device.on_gpu(device) and tensor.device.type == "cpu"
    return (tensor.contiguous().pin_memory() if to_gpu else tensor).to(device, non_blocking=to_gpu)


def plan_to_device(plan: AttentionPlan, device: torch.device) -> AttentionPlan:
    """`plan` on `device`, without its cached results. Copies from the host to a GPU do not block."""
    return plan if plan.device == device else plan.moved(lambda tensor: to_device(tensor, device))
