"""Frozen weights in bf16 (``train.frozen_dtype``): half the memory, and no cast of them in every forward."""

from __future__ import annotations

import torch
from torch import nn

LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
"""Layers whose products autocast computes in 16 bits anyway: results are equal for weights stored in fp32 or bf16."""


def narrow_frozen(model: nn.Module) -> int:
    """Converts the frozen weights of linear layers and convolutions to bf16, in place; returns their number.

    Weights that are also used elsewhere (tied embeddings) are excluded, and so are vectors: norms and biases stay fp32.
    Activations between layers stay fp32, too.
    """
    users: dict[int, list[nn.Module]] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            users.setdefault(id(parameter), []).append(module)
    narrowed = 0
    for module in model.modules():
        weight = module._parameters.get("weight")
        if not isinstance(module, LAYERS) or weight is None or weight.requires_grad:
            continue
        if weight.dtype is torch.float32 and all(isinstance(user, LAYERS) for user in users[id(weight)]):
            weight.data = weight.data.to(torch.bfloat16)
            narrowed += 1
    return narrowed
