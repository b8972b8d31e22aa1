"""Inputs of audio encoders that take clips without padding, of any length or of one fixed length.

wav2vec 2.0, HuBERT, WavLM      input_values [n, samples]
audio spectrogram transformer   input_values [n, frames, mel bins] of one length
conformers                      input_features [n, frames, mel bins]

One call takes clips of equal length. So normalisation over time, convolutional positions and other operations on
neighbours before the layers give the same result as for a clip alone.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from interlace.model.inputs.base import Inputs, Item, ItemInputs
from interlace.model.rows import PACKED

if TYPE_CHECKING:
    from transformers import PretrainedConfig

TOKENS = 100  # length of the clips that measure an encoder
BINS = ("num_mel_bins", "feature_size", "input_feat_per_channel", "feature_projection_input_dim", "input_dim")
"""Config keys for the number of values per frame."""


@dataclass(frozen=True)
class ClipInputs(ItemInputs):
    """Clips without padding.

    default: a clip that the encoder takes.
    time: dimension of its shape that counts samples or frames.
    any_length: True if clips may be shorter or longer.
    """

    argument: str
    default: Item
    time: int
    any_length: bool = False
    item_keys = ()

    @staticmethod
    def of(module: nn.Module, config: PretrainedConfig, argument: str, layer_path: str) -> list[ClipInputs]:
        """Candidate kinds of clips for the encoder. Raises ValueError for layer drop."""
        if getattr(config, "layerdrop", 0):
            raise ValueError(
                f"its config has layerdrop = {config.layerdrop}, which pipeline stages do not support: set it to 0"
            )
        before = itertools.takewhile(lambda part: part[0] != layer_path, module.named_modules())
        strides = [max(part.stride) for _, part in before if isinstance(part, (nn.Conv1d, nn.Conv2d))]
        length = TOKENS * math.prod(strides)
        bins = next((int(n) for name in BINS if isinstance(n := getattr(config, name, None), int)), 0)
        whole = getattr(config, "max_length", None)
        candidates = []
        if bins and isinstance(whole, int):
            candidates.append(ClipInputs(argument, Item((whole, bins)), 0))
        if bins:
            candidates += [ClipInputs(argument, Item((length, bins)), 0), ClipInputs(argument, Item((bins, length)), 1)]
        return [*candidates, ClipInputs(argument, Item((length,)), 0)]

    def check(self, item: Item, name: str) -> None:
        """Raise ValueError unless a clip has the dimensions of `default`."""
        fixed = [size for dim, size in enumerate(item.shape) if dim != self.time]
        if fixed != [size for dim, size in enumerate(self.default.shape) if dim != self.time]:
            length = "samples" if len(self.default.shape) == 1 else "frames"
            wanted = [length if dim == self.time else str(size) for dim, size in enumerate(self.default.shape)]
            raise ValueError(f"a clip of shape {item.shape} does not fit {name}, which takes ({', '.join(wanted)})")
        if not self.any_length and item.shape != self.default.shape:
            raise ValueError(
                f"a clip of shape {item.shape} does not fit {name}, which takes clips of one length: cut or pad them "
                f"to {self.default.shape}"
            )

    def with_length(self, length: int) -> Item:
        """A clip with this many samples or frames."""
        return Item(tuple(length if dim == self.time else size for dim, size in enumerate(self.default.shape)))

    def kwargs(self, inputs: Inputs, which: Sequence[int], like: Tensor) -> dict[str, Any]:
        return {self.argument: torch.stack([inputs[self.argument][i].to(like) for i in which])}

    def blank(self, items: Sequence[Item], packing: str, like: Tensor) -> dict[str, Any]:
        one = self.default if packing == PACKED else items[0]
        return {self.argument: torch.empty((1, *one.shape), device="meta", dtype=like.dtype)}
