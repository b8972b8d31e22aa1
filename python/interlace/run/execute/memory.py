"""Allocates the weights that a process holds, of a model that was built on the meta device.

New memory has no values yet. It is filled with NaN (integer buffers: with invalid indices), so that a weight that is
not loaded shows in the first step. If a rank keeps only some rows of a weight, the whole weight gets no memory: it is
one element, expanded to the full shape.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor, nn


def allocate(model: nn.Module, names: Collection[str], device: torch.device | str, *, bare: bool = False) -> bool:
    """Replace the parameters `names` of `model` that are on meta by parameters on `device`, under all their names.

    bare: allocate a single element, see `without_memory`. Returns whether any were replaced.
    """
    make = without_memory if bare else without_values
    unallocated, every = set(names), model.named_parameters(remove_duplicate=False)
    wanted = {id(parameter) for name, parameter in every if parameter.is_meta and name in unallocated}
    if not wanted:
        return False
    made: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}  # id -> on meta (kept so that its id is not reused), new
    for module in model.modules():
        for key, parameter in module._parameters.items():
            if parameter is not None and id(parameter) in wanted:
                pair = made.setdefault(id(parameter), (parameter, make(parameter, device)))
                module._parameters[key] = pair[1]
    return True


def allocate_buffers(model: nn.Module, device: torch.device | str) -> None:
    """Replace all buffers of `model` that are on meta by buffers on `device`: they are small, and code reads them."""
    for module in model.modules():
        for key, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[key] = _invalid_values(buffer, device)


def without_values(parameter: nn.Parameter, device: torch.device | str) -> nn.Parameter:
    """A Parameter like `parameter` on `device`."""
    return nn.Parameter(_invalid_values(parameter.detach(), device), parameter.requires_grad)


def without_memory(parameter: nn.Parameter, device: torch.device | str) -> nn.Parameter:
    """A Parameter like `parameter` on `device` whose elements all share one element of memory."""
    one = torch.empty((), dtype=parameter.dtype, device="meta")
    return nn.Parameter(_invalid_values(one, device).expand(parameter.shape), parameter.requires_grad)


def is_bare(parameter: nn.Parameter) -> bool:
    """Whether all elements of `parameter` share one element of memory: nothing can be copied into it."""
    return not parameter.is_meta and parameter.numel() > 1 and not any(parameter.stride())


def _invalid_values(like: Tensor, device: torch.device | str) -> Tensor:
    if like.dtype is torch.bool:
        return torch.ones_like(like, device=device)
    value = float("nan") if like.is_floating_point() or like.is_complex() else torch.iinfo(like.dtype).max
    return torch.full_like(like, value, device=device)
