"""Sample and Media: what datasets yield and collation packs."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

IGNORE = -100
"""Label of a position without a target."""


@dataclass
class Media:
    """One image or clip.

    shape:  image (3, H, W) in pixels; audio (mel bins, frames)
    tokens: language-model tokens (= placeholders in the text) that it becomes after encoder and projector
    data:   floating tensor of `shape`, normalised as the encoder wants it; None on ranks that do not run the encoder,
            which need shapes only

    Raises ValueError or TypeError when these contradict each other.
    """

    shape: tuple[int, ...]
    tokens: int
    data: Tensor | None = None

    def __post_init__(self) -> None:
        self.shape = tuple(int(size) for size in self.shape)
        if not self.shape or min(self.shape) < 1:
            raise ValueError(f"media of shape {self.shape} is empty: every dimension must be at least 1")
        if self.tokens < 1:
            raise ValueError(f"media of shape {self.shape} has tokens={self.tokens}; every item becomes at least 1")
        if self.data is not None:
            if tuple(self.data.shape) != self.shape:
                raise ValueError(f"media says shape {self.shape} but its data has {tuple(self.data.shape)}")
            if not self.data.is_floating_point():
                raise TypeError(f"media data is {self.data.dtype}; scale and normalise it to a floating dtype first")


@dataclass
class Sample:
    """One training sample, uncollated.

    input_ids: int64 [L]; each media item appears as `tokens` consecutive copies of its modality's placeholder id
    labels:    int64 [L], already shifted: labels[t] is the id wanted after input_ids[t]; IGNORE (-100) = no target
    media:     modality -> its items in order of appearance in input_ids
    name:      for messages

    Raises ValueError or TypeError when these contradict each other.
    """

    input_ids: Tensor
    labels: Tensor
    media: dict[str, list[Media]] = field(default_factory=dict)
    name: str = ""

    def __post_init__(self) -> None:
        for what, ids in (("input_ids", self.input_ids), ("labels", self.labels)):
            if not isinstance(ids, Tensor) or ids.dtype != torch.int64 or ids.dim() != 1:
                got = f"{ids.dtype} {list(ids.shape)}" if isinstance(ids, Tensor) else type(ids).__name__
                raise TypeError(f"sample {self.name!r}: {what} must be an int64 tensor [length], got {got}")
        if len(self.input_ids) == 0:
            raise ValueError(f"sample {self.name!r} has no tokens")
        if len(self.labels) != len(self.input_ids):
            raise ValueError(
                f"sample {self.name!r} has {len(self.input_ids)} input_ids but {len(self.labels)} labels: give every "
                f"position a target, {IGNORE} where there is none"
            )

    def __len__(self) -> int:
        return len(self.input_ids)
