"""What an encoder of sound is called with that takes clips of any length, or of one, as they are: without padding.

wav2vec 2.0, HuBERT, WavLM      input_values [n, samples]
audio spectrogram transformer   input_values [n, frames, mel bins] of one length
conformers                      input_features [n, frames, mel bins]

Clips of one length go into one call, so that normalisation over time, convolutional positions and whatever else looks
at neighbours before the layers sees what it sees of a clip alone.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from interlace.model.feed import Inputs, Item, by_size, data_of
from interlace.model.rows import PACKED
from interlace.model.sample import Media

TOKENS = 100  # of the clips with which an encoder is measured
BINS = ("num_mel_bins", "feature_size", "input_feat_per_channel", "feature_projection_input_dim", "input_dim")
"""What configs call the numbers of a frame."""


@dataclass(frozen=True)
class ClipInputs:
    """default: a clip that the encoder takes; time: the dimension of its shape that counts samples or frames;
    any_length: whether clips may be shorter or longer."""

    argument: str
    default: Item
    time: int
    any_length: bool = False
    in_one_row = False

    @staticmethod
    def of(module: nn.Module, config: Any, argument: str, layer_path: str) -> list[ClipInputs]:
        """The kinds of clips that it may be made for. Raises ValueError for layers that are dropped at random."""
        if getattr(config, "layerdrop", 0):
            raise ValueError(
                f"its config has layerdrop {config.layerdrop}, which cannot be cut into stages: set it to 0"
            )
        before = itertools.takewhile(lambda part: part[0] != layer_path, module.named_modules())
        strides = [max(part.stride) for _, part in before if isinstance(part, (nn.Conv1d, nn.Conv2d))]
        length = TOKENS * math.prod(strides)
        bins = next((int(n) for name in BINS if isinstance(n := getattr(config, name, None), int)), 0)
        whole = getattr(config, "max_length", None)
        found = []
        if bins and isinstance(whole, int):
            found.append(ClipInputs(argument, Item((whole, bins)), 0))
        if bins:
            found += [ClipInputs(argument, Item((length, bins)), 0), ClipInputs(argument, Item((bins, length)), 1)]
        return [*found, ClipInputs(argument, Item((length,)), 0)]

    def check(self, item: Item, name: str) -> None:
        """Raise ValueError unless a clip has the dimensions of `default`."""
        fixed = [size for dim, size in enumerate(item.shape) if dim != self.time]
        if fixed != [size for dim, size in enumerate(self.default.shape) if dim != self.time]:
            length = "samples" if len(self.default.shape) == 1 else "frames"
            wanted = [length if dim == self.time else str(size) for dim, size in enumerate(self.default.shape)]
            raise ValueError(f"audio of shape {item.shape} does not fit {name}, which takes ({', '.join(wanted)})")
        if not self.any_length and item.shape != self.default.shape:
            raise ValueError(
                f"audio of shape {item.shape} does not fit {name}, which takes clips of one length: cut them, or fill "
                f"them up, to {self.default.shape}"
            )

    def with_length(self, length: int) -> Item:
        """A clip of so many samples or frames."""
        return Item(tuple(length if dim == self.time else size for dim, size in enumerate(self.default.shape)))

    def collate(self, items: Sequence[Media]) -> Inputs:
        return {self.argument: [data_of(item) for item in items]}

    def items(self, inputs: Inputs) -> list[Item]:
        return [Item(tuple(clip.shape)) for clip in inputs[self.argument]]

    def kwargs(self, inputs: Inputs, which: Sequence[int], like: Tensor) -> dict[str, Any]:
        return {self.argument: torch.stack([inputs[self.argument][i].to(like) for i in which])}

    def blank(self, items: Sequence[Item], packing: str, like: Tensor) -> dict[str, Any]:
        one = self.default if packing == PACKED else items[0]
        return {self.argument: torch.empty((1, *one.shape), device="meta", dtype=like.dtype)}

    def sets(self, items: Sequence[Item], packing: str) -> list[list[int]]:
        return by_size(items, packing)
