"""Projectors: from an encoder's width to the language model's, optionally with fewer tokens."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Projector(nn.Module):
    """``kind``: "linear" (one matrix) or "mlp" (two with GELU between, as LLaVA-1.5).

    ``downsample`` = k stacks k consecutive tokens of an item into one before projecting; the last group of an item is
    filled up with zeros, so n tokens become ceil(n / k).
    """

    def __init__(self, kind: str, width_in: int, width_out: int, downsample: int = 1):
        super().__init__()
        if downsample < 1:
            raise ValueError(f"downsample must be at least 1, got {downsample}")
        self.downsample = downsample
        width = width_in * downsample
        if kind == "linear":
            self.layers = nn.Sequential(nn.Linear(width, width_out))
        elif kind == "mlp":
            self.layers = nn.Sequential(nn.Linear(width, width_out), nn.GELU(), nn.Linear(width_out, width_out))
        else:
            raise ValueError(f"unknown projector {kind!r}: use 'linear', 'mlp' or an nn.Module of your own")

    def forward(self, features: Tensor) -> Tensor:
        """[n, width_in * downsample] -> [n, width_out]."""
        return self.layers(features)


def stack_tokens(features: Tensor, lengths: list[int], k: int) -> Tensor:
    """Stack ``k`` consecutive tokens of each item: [sum(lengths), D] -> [sum(ceil(length / k)), k * D]."""
    if k == 1:
        return features
    rows = []
    for item in features.split(lengths):
        fill = -len(item) % k
        if fill:
            item = torch.cat([item, item.new_zeros(fill, item.shape[1])])
        rows.append(item.reshape(len(item) // k, k * item.shape[1]))
    return torch.cat(rows) if rows else features.new_zeros(0, k * features.shape[1])
