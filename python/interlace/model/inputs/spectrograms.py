"""Inputs of spectrogram encoders: Whisper, and others that pad every clip to one length.

An item is a clip (mel bins, frames), which is padded with zeros. Or the item is padded already, as by HuggingFace's
feature extractors. Then about={"frames": (n,)} is the number of its real frames. The extractors' padding is not zero,
and convolutions before the layers mix some of it into the last frames.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from interlace.model.inputs.base import Inputs, Item, ItemInputs, data_of, together
from interlace.model.sample import Media

if TYPE_CHECKING:
    from transformers import PretrainedConfig

FRAMES = "frames"


@dataclass(frozen=True)
class AudioInputs(ItemInputs):
    """Spectrograms of one encoder.

    channels: mel bins.
    frames: maximum frames, given by the encoder's positions.
    stride: frames that become one token.
    """

    channels: int
    frames: int
    stride: int
    argument: str = "input_features"
    item_keys = ()

    @staticmethod
    def of(module: nn.Module, config: PretrainedConfig) -> AudioInputs:
        """Inputs for this module. Raises AttributeError for a config without the encoder's number of positions."""
        channels = int(getattr(config, "num_channels", None) or getattr(config, "num_mel_bins", None) or 0)
        convolutions = [m for m in module.modules() if isinstance(m, nn.Conv1d)]
        stride = math.prod(int(conv.stride[0]) for conv in convolutions)
        return AudioInputs(channels, int(config.max_source_positions) * stride, stride)

    @property
    def default(self) -> Item:
        """A clip of the longest length."""
        return Item((self.channels, self.frames))

    def check(self, item: Item, name: str) -> None:
        """Raise ValueError unless a clip (mel bins, frames) fits."""
        shape = item.shape
        if len(shape) != 2 or shape[0] != self.channels:
            raise ValueError(
                f"audio of shape {shape} does not fit {name}, which takes ({self.channels} mel bins, frames)"
            )
        if shape[1] > self.frames:
            raise ValueError(
                f"audio of {shape[1]} frames is too long for {name}, which has positions for {self.frames} frames: "
                f"shorten the clip or raise max_source_positions to {-(-shape[1] // self.stride)}"
            )
        frames = item.about.get(FRAMES)
        if frames is not None and (len(frames) != 1 or frames[0] != int(frames[0]) or not 1 <= frames[0] <= shape[1]):
            raise ValueError(
                f"media of shape {shape} for {name} has about {FRAMES} = {frames}: pass (n,), the number of its "
                f"{shape[1]} frames without padding"
            )

    def tokens(self, item: Item) -> int:
        return -(-_frames(item) // self.stride)

    def collate(self, items: Sequence[Media]) -> Inputs:
        frames = max((item.shape[1] for item in items), default=0)
        device = "meta" if any(item.data is None for item in items) else None
        features = torch.zeros(len(items), self.channels, frames, device=device)
        for row, item in zip(features, items, strict=True):
            row[:, : item.shape[1]] = data_of(item)
        lengths = torch.tensor([_frames(item) for item in items], dtype=torch.int64, device="cpu")
        return {self.argument: features, "lengths": lengths}

    def items(self, inputs: Inputs) -> list[Item]:
        channels = inputs[self.argument].shape[1]
        return [Item((channels, int(n))) for n in inputs["lengths"]]

    def kwargs(self, inputs: Inputs, which: Sequence[int], like: Tensor) -> dict[str, Any]:
        """Arguments of the call, with clips padded to the encoder's length."""
        stacked = torch.stack([inputs[self.argument][i].to(like) for i in which])
        return {self.argument: nn.functional.pad(stacked, (0, self.frames - stacked.shape[2]))}

    def blank(self, items: Sequence[Item], packing: str, like: Tensor) -> dict[str, Any]:
        return {self.argument: torch.empty((1, *self.default.shape), device="meta", dtype=like.dtype)}

    def sets(self, items: Sequence[Item], packing: str) -> list[list[int]]:
        return together(items, packing)


def _frames(item: Item | Media) -> int:
    """Frames of a clip, without padding."""
    return int(item.about.get(FRAMES, (item.shape[1],))[0])
