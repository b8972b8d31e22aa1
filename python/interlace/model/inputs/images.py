"""Inputs of a HuggingFace image encoder, derived from the arguments of its forward.

SigLIP, CLIP, InternVL  pixel_values [n, 3, H, W] of one size
Pixtral                 pixel_values [n, 3, H, W], padded to the largest, and image_sizes [n, 2]; it concatenates the
                        patches of all images into one row itself
SigLIP 2 (NaFlex)       pixel_values [n, patches, numbers of a patch] and spatial_shapes [n, 2]; items may be images, or
                        the output of its image processor, (patches, numbers of a patch) with spatial_shapes
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from interlace.model.inputs.base import Inputs, Item, ItemInputs
from interlace.model.rows import PACKED
from interlace.model.sample import Media

if TYPE_CHECKING:
    from transformers import PretrainedConfig

Size = tuple[int, int]
GRID = "spatial_shapes"


@dataclass(frozen=True)
class ImageInputs(ItemInputs):
    """Images of one encoder.

    patch, size: (height, width) in pixels of a patch, and of the encoder's configured image in whole patches.
    any_size: True if it takes images of other sizes.
    channels: channels of an image.
    """

    patch: Size
    size: Size
    channels: int
    accepted: frozenset[str]  # arguments of the encoder's forward
    any_size: bool = False
    argument: str = "pixel_values"

    @staticmethod
    def of(config: PretrainedConfig, accepted: Sequence[str]) -> ImageInputs:
        """Inputs for this module. Raises ValueError for a config without the sizes of a patch and of an image."""
        patch, channels = _pair(config, "patch_size"), int(getattr(config, "num_channels", None) or 0)
        if getattr(config, "image_size", None) is None and isinstance(getattr(config, "num_patches", None), int):
            side = math.isqrt(config.num_patches)  # side of the square of learned positions
            return ImageInputs(patch, (side * patch[0], side * patch[1]), channels, frozenset(accepted))
        size = _pair(config, "image_size")
        whole = (size[0] - size[0] % patch[0], size[1] - size[1] % patch[1])  # SigLIP so400m: 384 pixels, patches of 14
        return ImageInputs(patch, whole, channels, frozenset(accepted))

    @property
    def default(self) -> Item:
        """An image of the encoder's configured size."""
        return Item((self.channels, *self.size))

    @property
    def in_one_row(self) -> bool:  # type: ignore[override]
        """True if one call takes images of several sizes and concatenates their tokens itself."""
        return "image_sizes" in self.accepted

    @property
    def interpolates(self) -> bool:
        """True if forward takes interpolate_pos_encoding, which adapts positions to an image's size."""
        return "interpolate_pos_encoding" in self.accepted

    @property
    def item_keys(self) -> tuple[str, ...]:  # type: ignore[override]
        return (GRID,) if self.in_patches else ()

    @property
    def in_patches(self) -> bool:
        """True if it takes patches, with the number of their rows and columns per image."""
        return GRID in self.accepted

    def grid(self, item: Item) -> tuple[int, int]:
        """Rows and columns of patches."""
        if GRID in item.about:
            rows, columns = item.about[GRID]
            return int(rows), int(columns)
        return item.shape[1] // self.patch[0], item.shape[2] // self.patch[1]

    def tokens(self, item: Item) -> int:
        """Patches of an image."""
        return math.prod(self.grid(item))

    def check(self, item: Item, name: str) -> None:
        """Raise ValueError for an item that the encoder `name` does not support.

        An image (channels, height, width) must consist of whole patches. If the encoder takes (patches, numbers of a
        patch), such an item must match its declared grid.
        """
        tall, wide = self.patch
        shape = item.shape
        if self.in_patches and GRID in item.about:
            wanted = (self.tokens(item), tall * wide * self.channels)
            if shape != wanted:
                raise ValueError(
                    f"an image of {GRID} {item.about[GRID]} has shape {shape}, but {name} takes (patches, values per "
                    f"patch), {wanted}"
                )
            return
        if len(shape) != 3 or shape[0] != self.channels or shape[1] < tall or shape[2] < wide:
            raise ValueError(
                f"an image of shape {shape} does not fit {name}, which takes ({self.channels}, height, width) of at "
                f"least {tall} x {wide} pixels"
            )
        if shape[1] % tall or shape[2] % wide:
            raise ValueError(
                f"an image of {shape[1]} x {shape[2]} pixels does not divide into patches: resize it so that both "
                f"sides are multiples of the patch, {tall if tall == wide else f'{tall} x {wide}'}"
            )
        if not self.any_size and shape != self.default.shape:
            raise ValueError(
                f"an image of shape {shape} does not fit {name}, which cannot interpolate positions: resize images to "
                f"{self.default.shape}"
            )

    def collate(self, items: Sequence[Media]) -> Inputs:
        inputs = super().collate(items)
        if self.in_patches:
            inputs[self.argument] = [
                self._patches(one[None])[0] if one.dim() == 3 else one for one in inputs[self.argument]
            ]
            grids = [self.grid(Item(item.shape, item.about)) for item in items]
            inputs[GRID] = torch.tensor(grids, dtype=torch.int64, device="cpu").reshape(len(items), 2)
        return inputs

    def kwargs(self, inputs: Inputs, which: Sequence[int], like: Tensor) -> dict[str, Any]:
        images = [inputs[self.argument][i].to(like) for i in which]
        if self.in_patches:
            return self._patch_arguments(torch.stack(images), inputs[GRID][list(which)])
        return self._arguments(stack_images(images), [(image.shape[1], image.shape[2]) for image in images])

    def blank(self, items: Sequence[Item], packing: str, like: Tensor) -> dict[str, Any]:
        if self.in_one_row:  # its layers take the location of each patch
            height, width = (max(item.shape[side] for item in items) for side in (1, 2))
            zeros = like.new_zeros(()).expand(len(items), self.channels, height, width)
            return self._arguments(zeros, [(item.shape[1], item.shape[2]) for item in items])
        one = self.default if packing == PACKED else items[0]
        if self.in_patches:
            grid, numbers = self.grid(one), math.prod(self.patch) * self.channels
            patches = torch.empty((1, math.prod(grid), numbers), device="meta", dtype=like.dtype)
            return self._patch_arguments(patches, torch.tensor([grid], dtype=torch.int64, device="cpu"))
        return self._arguments(torch.empty((1, *one.shape), device="meta", dtype=like.dtype), [one.shape[1:]])

    def _arguments(self, images: Tensor, sizes: Sequence[tuple[int, ...]]) -> dict[str, Any]:
        """Arguments of forward for images [n, 3, H, W]. Each image fills `sizes` from the upper left corner."""
        made: dict[str, Any] = {self.argument: images}
        if self.interpolates:
            made["interpolate_pos_encoding"] = True
        if self.in_one_row:
            made["image_sizes"] = list(sizes)
        return made

    def _patch_arguments(self, patches: Tensor, grids: Tensor) -> dict[str, Any]:
        """Arguments of forward for patches [n, patches, numbers of a patch] and grids int64 [n, 2]."""
        # equal numbers of patches, so no padding
        return {self.argument: patches, "pixel_attention_mask": None, GRID: grids}

    def _patches(self, images: Tensor) -> Tensor:
        """[n, 3, H, W] -> [n, patches, height * width * 3 of a patch], laid out as by the library's image processor."""
        n, channels, height, width = images.shape
        rows, columns = height // self.patch[0], width // self.patch[1]
        grid = images.reshape(n, channels, rows, self.patch[0], columns, self.patch[1])
        return grid.permute(0, 2, 4, 3, 5, 1).reshape(n, rows * columns, -1)


def stack_images(images: Sequence[Tensor]) -> Tensor:
    """Stack images [3, H, W] into [n, 3, tallest, widest], with zeros below and to the right."""
    height, width = (max(image.shape[side] for image in images) for side in (1, 2))
    return torch.stack(
        [nn.functional.pad(image, (0, width - image.shape[2], 0, height - image.shape[1])) for image in images]
    )


def _pair(config: PretrainedConfig, name: str) -> Size:
    """(height, width) of a config value: one number, or two."""
    value = getattr(config, name, None)
    pair = [value, value] if isinstance(value, int) else value
    if not isinstance(pair, (list, tuple)) or [type(side) for side in pair] != [int, int]:
        raise ValueError(f"{name} of {type(config).__name__} is {value}, neither one number nor two")
    return pair[0], pair[1]
