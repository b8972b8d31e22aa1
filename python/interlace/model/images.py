"""What a HuggingFace image encoder is called with, which its forward's own arguments tell.

SigLIP, CLIP, InternVL  pixel_values [n, 3, H, W] of one size
Pixtral                 pixel_values [n, 3, H, W], padded to the largest, and image_sizes [n, 2]; it lays the patches
                        of all images in one row itself
SigLIP 2 (NaFlex)       pixel_values [n, patches, pixels of a patch] and spatial_shapes [n, 2]
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

Size = tuple[int, int]


@dataclass(frozen=True)
class ImageInputs:
    """patch and size (of the images that the encoder was configured for, in whole patches): (height, width), pixels."""

    patch: Size
    size: Size
    accepted: frozenset[str]  # arguments of the encoder's forward

    @staticmethod
    def of(config: Any, accepted: Sequence[str]) -> ImageInputs:
        """Raises ValueError for a config that does not tell the sizes of a patch and of an image."""
        patch = _pair(config, "patch_size")
        if getattr(config, "image_size", None) is None and isinstance(getattr(config, "num_patches", None), int):
            side = math.isqrt(config.num_patches)  # of the square of learned positions
            return ImageInputs(patch, (side * patch[0], side * patch[1]), frozenset(accepted))
        size = _pair(config, "image_size")
        whole = (size[0] - size[0] % patch[0], size[1] - size[1] % patch[1])  # SigLIP so400m: 384 pixels, patches of 14
        return ImageInputs(patch, whole, frozenset(accepted))

    @property
    def in_one_row(self) -> bool:
        """Whether one call takes images of several sizes, and lays their tokens side by side itself."""
        return "image_sizes" in self.accepted

    @property
    def interpolates(self) -> bool:
        """Whether the encoder is to be asked for positions that follow an image's size."""
        return "interpolate_pos_encoding" in self.accepted

    def tokens(self, size: Size) -> int:
        """Patches of an image of `size` pixels."""
        return (size[0] // self.patch[0]) * (size[1] // self.patch[1])

    def check_shape(self, shape: tuple[int, ...], channels: int, name: str) -> None:
        """Raise ValueError unless an image of `shape` consists of patches of the encoder `name`."""
        tall, wide = self.patch
        if len(shape) != 3 or shape[0] != channels or shape[1] < tall or shape[2] < wide:
            raise ValueError(
                f"an image of shape {shape} does not fit {name}, which takes ({channels}, height, width) of at least "
                f"{tall} x {wide} pixels"
            )
        if shape[1] % tall or shape[2] % wide:
            raise ValueError(
                f"an image of {shape[1]} x {shape[2]} pixels would lose its rim: resize it so that both sides are "
                f"multiples of the patch, {tall if tall == wide else f'{tall} x {wide}'}"
            )

    def kwargs(self, images: Tensor, sizes: Sequence[Size]) -> dict[str, Any]:
        """Arguments of forward for images [n, 3, H, W], each of which fills `sizes` from its upper left corner."""
        made: dict[str, Any] = {"pixel_values": images}
        if self.interpolates:
            made["interpolate_pos_encoding"] = True
        if self.in_one_row:
            made["image_sizes"] = list(sizes)
        if "spatial_shapes" in self.accepted:
            made["pixel_values"] = self._patches(images)
            made["pixel_attention_mask"] = None  # images of one size: none is padded
            grid = [(height // self.patch[0], width // self.patch[1]) for height, width in sizes]
            made["spatial_shapes"] = torch.tensor(grid, dtype=torch.int64, device="cpu")
        return made

    def _patches(self, images: Tensor) -> Tensor:
        """[n, 3, H, W] -> [n, patches, height * width * 3 of a patch], laid out as by the library's image processor."""
        n, channels, height, width = images.shape
        rows, columns = height // self.patch[0], width // self.patch[1]
        grid = images.reshape(n, channels, rows, self.patch[0], columns, self.patch[1])
        return grid.permute(0, 2, 4, 3, 5, 1).reshape(n, rows * columns, -1)


def stack_images(images: Sequence[Tensor]) -> Tensor:
    """[3, H, W] each -> [n, 3, tallest, widest], with zeros below and to the right."""
    height, width = (max(image.shape[side] for image in images) for side in (1, 2))
    return torch.stack(
        [nn.functional.pad(image, (0, width - image.shape[2], 0, height - image.shape[1])) for image in images]
    )


def _pair(config: Any, name: str) -> Size:
    """(height, width) of what a config says: one number, or two."""
    value = getattr(config, name, None)
    pair = [value, value] if isinstance(value, int) else value
    if not isinstance(pair, (list, tuple)) or [type(side) for side in pair] != [int, int]:
        raise ValueError(f"{name} of {type(config).__name__} is {value}, neither a number nor two")
    return pair[0], pair[1]
