"""Projectors: from encoder features to language-model embeddings, and stacking of neighbouring tokens before."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn


class LinearProjector(nn.Module):
    """[n, inputs] -> [n, outputs], one linear layer."""

    def __init__(self, inputs: int, outputs: int):
        super().__init__()
        self.linear = nn.Linear(inputs, outputs)

    def forward(self, features: Tensor) -> Tensor:
        return self.linear(features)


class MLPProjector(nn.Module):
    """[n, inputs] -> [n, outputs] through one hidden layer of `outputs` units with GELU (as in LLaVA-1.5)."""

    def __init__(self, inputs: int, outputs: int):
        super().__init__()
        self.up = nn.Linear(inputs, outputs)
        self.down = nn.Linear(outputs, outputs)

    def forward(self, features: Tensor) -> Tensor:
        return self.down(nn.functional.gelu(self.up(features)))


PROJECTORS: dict[str, type[nn.Module]] = {"linear": LinearProjector, "mlp": MLPProjector}


def stack_tokens(features: Tensor, lengths: Sequence[int], k: int) -> Tensor:
    """Stack `k` consecutive tokens of each item into one: [sum n_i, D] -> [sum ceil(n_i / k), k * D].

    Groups never cross items; an item's last group is padded with zeros. `lengths` are the n_i.
    """
    if k == 1:
        return features
    stacked = [-(-n // k) for n in lengths]
    target: list[int] = []
    start = 0
    for n, m in zip(lengths, stacked, strict=True):
        target.extend(range(start, start + n))
        start += m * k
    padded = features.new_zeros(start, features.shape[1])
    padded = padded.index_copy(0, torch.tensor(target, dtype=torch.int64, device=features.device), features)
    return padded.view(start // k, k * features.shape[1])
