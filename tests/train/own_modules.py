"""User modules beside a config: projectors and callbacks, valid and invalid ones."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from interlace.model import ItemProjector


class Bottleneck(nn.Module):
    def __init__(self, inputs: int, outputs: int, *, width: int = 8) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(inputs, width), nn.Linear(width, outputs)

    def forward(self, features: Tensor) -> Tensor:
        return self.up(torch.tanh(self.down(features)))


class Mean(ItemProjector):
    """One token of each item."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, outputs)

    def tokens(self, features: int, grid: Any) -> int:
        return 1

    def forward(self, features: Tensor, lengths: Any, grids: Any) -> Tensor:
        return self.linear(torch.stack([item.mean(0) for item in features.split(list(lengths))]))


class Scaled(nn.Module):
    """Has a parameter that no checkpoint can fill."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(inputs, outputs), nn.Parameter(torch.ones(outputs))

    def forward(self, features: Tensor) -> Tensor:
        return self.linear(features) * self.scale


class Loose(nn.Linear):
    """Keeps a tensor that is not registered, so neither moved to a device nor saved."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.shift = torch.ones(outputs)


class Narrow(nn.Linear):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs - 1)


class TakesTwo(nn.Linear):
    def forward(self, features: Tensor, more: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(features) + more


class Raises(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        raise RuntimeError("no such luck")


NOTHING = 3


def half(inputs: dict[str, Any], output: Tensor) -> Tensor:
    return output * 0.5


def no_arguments() -> None:
    return None


def halved(inputs: dict[str, Any]) -> dict[str, Any]:
    return {**inputs, "pixel_values": [image * 0.5 for image in inputs["pixel_values"]]}


def raises(inputs: dict[str, Any], output: Tensor) -> Tensor:
    raise KeyError("pooled")
