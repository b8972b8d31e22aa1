"""What a dataset yields and a model takes: uncollated samples with their media."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

IGNORE = -100
"""Label of a position that has no target."""


@dataclass
class Media:
    """One image or clip.

    shape: of ``data``: image (3, height, width), audio (mel bins, frames).
    tokens: language model tokens it becomes after encoder and projector, the number of its placeholders.
    data: the tensor, or None on a rank that does not run its encoder.
    """

    shape: tuple[int, ...]
    tokens: int
    data: Tensor | None = None

    def __post_init__(self) -> None:
        self.shape = tuple(int(n) for n in self.shape)
        if self.data is not None and tuple(self.data.shape) != self.shape:
            raise ValueError(f"media of shape {self.shape} holds data of shape {tuple(self.data.shape)}")


@dataclass
class Sample:
    """One document.

    input_ids: int64 [L]; each media item stands as ``tokens`` consecutive copies of its modality's placeholder id.
    labels: int64 [L]; the id wanted after each position (already shifted), -100 where none is.
    media: modality -> items in their order of appearance.
    name: for messages and sample pages.
    """

    input_ids: Tensor
    labels: Tensor
    media: dict[str, list[Media]] = field(default_factory=dict)
    name: str = ""

    def __post_init__(self) -> None:
        if self.input_ids.dim() != 1 or self.input_ids.shape != self.labels.shape:
            raise ValueError(
                f"sample {self.name!r}: input_ids and labels must be of one shape [L], "
                f"got {tuple(self.input_ids.shape)} and {tuple(self.labels.shape)}"
            )
