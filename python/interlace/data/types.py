"""Sample and Media, as the model's collation takes them."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor


@dataclass
class Media:
    """One image (3, H, W) or clip (mel_bins, frames); ``tokens`` it becomes; ``data`` None where not decoded."""

    shape: tuple[int, ...]
    tokens: int
    data: Tensor | None = None


@dataclass
class Sample:
    """One training sample, uncollated."""

    input_ids: Tensor
    labels: Tensor
    media: dict[str, list[Media]] = field(default_factory=dict)
    name: str = ""

    def __len__(self) -> int:
        return len(self.input_ids)
