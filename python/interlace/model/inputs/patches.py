"""Inputs of encoders that take numbers about each item (`Media.about`) beside its data.

Qwen2-VL and its relatives  the concatenated patches of all images, as made by the library's image processor
                            [N, channels * frames * height * width of a patch], and grid_thw [n, 3]: frames, rows and
                            columns of patches. VideoLLaMA 3 also takes merge_sizes [n]

One call takes all items, and the encoder separates them itself. From the numbers it computes rotary positions, windows
and attention boundaries, for each of its layers, again on every stage. A probe (probe/encoder.py) verifies this. It
also determines the shape of a patch and the number of patches per feature.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from interlace.model.inputs.base import NUMBERS, Inputs, Item, ItemInputs
from interlace.parallel.sending import to_device

if TYPE_CHECKING:
    from transformers import PretrainedConfig

GRID, MERGES = "grid_thw", "merge_sizes"
UNIT = 4  # sides of probed grids are multiples of it: encoders merge 2 x 2 patches, rarely 4 x 4
NOMINAL = 32  # rows and columns of an item if a config has no size


@dataclass(frozen=True)
class PatchInputs(ItemInputs):
    """Patches of one encoder.

    patch: shape of a patch in the encoder's format.
    width: width of its layers.
    side: side of a nominal item in patches.
    merged: number of patches that become one feature.
    pooled: True if `pooler_output` holds these features; False if it holds one vector per item.
    videos: True if an item may have several frames.
    """

    argument: str
    item_keys: tuple[str, ...]
    patch: tuple[int, ...]
    width: int
    side: int
    merged: int = 1
    pooled: bool = True
    videos: bool = False
    in_one_row = True

    @staticmethod
    def of(module: nn.Module, config: PretrainedConfig, layer_path: str, parameters: Collection[str]) -> PatchInputs:
        """Inputs of an encoder whose forward takes grid_thw. Raises ValueError without a map of patches to tokens."""
        embeddings = (
            part.weight
            for name, part in module.named_modules()
            if isinstance(part, (nn.Conv2d, nn.Conv3d, nn.Linear)) and not name.startswith(f"{layer_path}.")
        )
        weight = next(embeddings, None)
        if weight is None:
            raise ValueError("it has no convolution or linear layer for patches")
        image, patch = getattr(config, "image_size", None), getattr(config, "patch_size", None)
        side = NOMINAL
        if isinstance(image, int) and isinstance(patch, int):
            side = max(UNIT, image // patch // UNIT * UNIT)
        item_keys = tuple(name for name in parameters if name in (GRID, MERGES))
        return PatchInputs(next(iter(parameters)), item_keys, (weight[0].numel(),), weight.shape[0], side)

    def patches(self, module: nn.Module) -> list[tuple[int, ...]]:
        """Candidate shapes of a patch: flat, or in the format of the first convolution."""
        shapes = (tuple(p.shape[1:]) for p in module.parameters() if p[0].numel() == self.patch[0] and p.dim() > 2)
        return [self.patch, *list(shapes)[:1]]

    def item(self, *grid: int, merge: int = 1) -> Item:
        """An image or a video of this grid of patches (frames, rows, columns)."""
        numbers = {GRID: grid, MERGES: (merge,)}
        return Item((math.prod(grid), *self.patch), {name: numbers[name] for name in self.item_keys})

    @property
    def default(self) -> Item:
        """An image of the encoder's configured size."""
        return self.item(1, self.side, self.side)

    def _merge(self, item: Item) -> int:
        """Rows (and columns) of patches that become one feature."""
        return math.isqrt(self.merged) * (int(item.about[MERGES][0]) if MERGES in self.item_keys else 1)

    def check(self, item: Item, name: str) -> None:
        """Raise ValueError unless the item (patches, numbers of a patch) matches its grid and other numbers."""
        for key in self.item_keys:
            numbers = item.about.get(key)
            if numbers is None or len(numbers) != NUMBERS[key] or any(n != int(n) or n < 1 for n in numbers):
                raise ValueError(
                    f"{name} needs {key} of each item, {NUMBERS[key]} integers, but its about is {dict(item.about)}: "
                    f"pass Media(shape, ..., about={{{key!r}: (...)}})"
                )
        frames, rows, columns = (int(n) for n in item.about[GRID])
        if item.shape != (frames * rows * columns, *self.patch):
            raise ValueError(
                f"media of shape {item.shape} does not fit {name}, which for grid_thw {(frames, rows, columns)} takes "
                f"patches of shape {(frames * rows * columns, *self.patch)}"
            )
        if frames > 1 and not self.videos:
            raise ValueError(f"{name} takes images, but grid_thw has {frames} frames: pass each frame as an item")
        merge = self._merge(item)
        if rows % merge or columns % merge:
            raise ValueError(
                f"{rows} x {columns} patches do not fit {name}, which merges {merge} x {merge} patches: resize media "
                f"so that rows and columns of patches are multiples of {merge}"
            )

    def tokens(self, item: Item) -> int:
        return item.shape[0]

    def features(self, item: Item) -> int:
        """Number of features of an item."""
        return item.shape[0] // self._merge(item) ** 2

    def kwargs(self, inputs: Inputs, which: Sequence[int], like: Tensor) -> dict[str, Any]:
        return {
            self.argument: torch.cat([inputs[self.argument][i].to(like) for i in which]),
            **self._numbers([inputs[key][list(which)].tolist() for key in self.item_keys], like),
        }

    def blank(self, items: Sequence[Item], packing: str, like: Tensor) -> dict[str, Any]:
        total = sum(item.shape[0] for item in items)
        numbers = [[[int(n) for n in item.about[key]] for item in items] for key in self.item_keys]
        return {self.argument: like.new_zeros(()).expand(total, *self.patch), **self._numbers(numbers, like)}

    def _numbers(self, numbers: list[list[list[int]]], like: Tensor) -> dict[str, Tensor]:
        """int64 [n, k] for each name; [n] for a single number."""
        made = {}
        for key, rows in zip(self.item_keys, numbers, strict=True):
            tensor = to_device(torch.tensor(rows, dtype=torch.int64, device="cpu"), like.device)
            made[key] = tensor[:, 0] if NUMBERS[key] == 1 else tensor
        return made
