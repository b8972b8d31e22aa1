"""Whole parameters of a module that `tensor_parallel` has cut: for checkpoints and comparisons.

Loading needs no function of this module: `load_state_dict` of the cut module accepts the whole module's checkpoint.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from interlace.parallel.layer import ParallelLayer


def full_state_dict(module: nn.Module) -> dict[str, Any]:
    """The state dict of the ordinary module, on every rank: tensors, and results of get_extra_state of its parts.

    Collective; cut parameters are gathered one by one.
    """
    owners = dict(module.named_modules(remove_duplicate=False))
    entries: dict[str, Any] = {}
    for key, value in module.state_dict().items():
        path, _, name = key.rpartition(".")
        owner = owners[path]
        if isinstance(owner, ParallelLayer):
            value = owner.gather(name, value)
        elif isinstance(value, Tensor):
            value = value.detach()
        entries[key] = value
    return entries
