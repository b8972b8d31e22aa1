"""Inputs of vision towers that take tiles of images, and the images' sizes.

LLaVA-NeXT, LLaVA-OneVision     the concatenated tiles of all images [N, 3, H, W], and image_sizes [n, 2]

An item has the shape (tiles, 3, H, W), and about={"image_sizes": (height, width)} in pixels. The modules after the
layers join the tiles of an image. The number of features depends on the image's own size. In LLaVA-OneVision, images
have one tile each if a sample has several images.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from interlace.model.inputs.base import Inputs, Item, ItemInputs
from interlace.model.rows import ALONE

SIZES = "image_sizes"

MOST = 16  # maximum tiles of an example


@dataclass(frozen=True)
class TileInputs(ItemInputs):
    """Tiles of one encoder. length and examples are measured by running it.

    tile: shape of a tile (3, height, width).
    length: tokens of a tile inside the layers, including class tokens.
    examples: images of the size of a tile and larger, each with its required number of tiles.
    """

    tile: tuple[int, int, int]
    length: int = 0
    examples: tuple[Item, ...] = ()
    argument: str = "pixel_values"
    in_one_row = True
    item_keys = (SIZES,)

    def item(self, tiles: int, height: int, width: int) -> Item:
        """An image of this size with this many tiles."""
        return Item((tiles, *self.tile), {SIZES: (height, width)})

    @property
    def default(self) -> Item:
        """An image of the size of a tile."""
        return self.examples[0]

    def candidates(self, height: int, width: int) -> list[Item]:
        """Candidate items for an image of this size: in two tiles, in three, and so on, and in one."""
        return [self.item(tiles, height, width) for tiles in (*range(2, MOST + 1), 1)]

    def check(self, item: Item, name: str) -> None:
        """Raise ValueError unless the item is (tiles, *tile) and has its size in `about`."""
        size = item.about.get(SIZES)
        if size is None or len(size) != 2 or any(n != int(n) or n < 1 for n in size):
            raise ValueError(
                f"{name} needs {SIZES} of each item, its height and width in pixels, but its about is "
                f"{dict(item.about)}: pass Media(shape, ..., about={{{SIZES!r}: (height, width)}})"
            )
        if len(item.shape) != 4 or item.shape[1:] != self.tile:
            raise ValueError(f"media of shape {item.shape} does not fit {name}, which takes (tiles, *{self.tile})")

    def tokens(self, item: Item) -> int:
        return item.shape[0] * self.length

    def kwargs(self, inputs: Inputs, which: Sequence[int], like: Tensor) -> dict[str, Any]:
        tiles = torch.cat([inputs[self.argument][i].to(like) for i in which])
        return {self.argument: tiles, SIZES: inputs[SIZES][list(which)]}

    def blank(self, items: Sequence[Item], packing: str, like: Tensor) -> dict[str, Any]:
        tiles = sum(item.shape[0] for item in items)
        sizes = torch.tensor([item.about[SIZES] for item in items], dtype=torch.int64, device="cpu")
        return {self.argument: like.new_zeros(()).expand(tiles, *self.tile), SIZES: sizes}

    def sets(self, items: Sequence[Item], packing: str) -> list[list[int]]:
        """Separate sets for images in one tile and in several: models treat one-tile images as several in a sample."""
        if packing == ALONE:
            return [[i] for i in range(len(items))]
        tiled = [[i for i, item in enumerate(items) if (item.shape[0] > 1) == more] for more in (True, False)]
        return [some for some in tiled if some]
