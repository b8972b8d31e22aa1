"""Tensors on their way from the host to a GPU."""

from __future__ import annotations

import torch
from torch import Tensor

from interlace import _device


def sent(tensor: Tensor, device: torch.device) -> Tensor:
    """`tensor` on `device`; from the host to a GPU through pinned memory, so that nobody waits for it."""
    if tensor.is_meta or tensor.device == device:
        return tensor
    to_gpu = _device.on_gpu(device) and tensor.device.type == "cpu"
    return (tensor.contiguous().pin_memory() if to_gpu else tensor).to(device, non_blocking=to_gpu)
