"""Common parts of encoder inputs (images.py, patches.py, tiles.py, spectrograms.py, clips.py).

Each kind is a frozen dataclass with

    argument, default               name of the forward's main input; an item of the encoder's configured size
    item_keys                       names of numbers about each item (`Media.about`) that are inputs, too
    in_one_row                      True if one call takes all items and concatenates their tokens itself
    check(item, name)               ValueError for an item that the encoder `name` does not support, with what it takes
    tokens(item)                    tokens inside the layers, without class tokens (clips.py: only the encoder can tell)
    collate(media), items(inputs)   inputs of these media, meta tensors for those without data; and the items of inputs
    sets(items, packing)            the items of each encoder call
    kwargs(inputs, which, like)     arguments of that call, on the device and in the dtype of `like`
    blank(items, packing, like)     arguments for a stage after the first, where only shapes matter: without memory
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from interlace.model.rows import ALONE, PACKED
from interlace.model.sample import Media

Inputs = dict[str, Any]
Shape = tuple[int, ...]
About = Mapping[str, tuple[float, ...]]
NOTHING: About = {}
NUMBERS = {"grid_thw": 3, "merge_sizes": 1, "image_sizes": 2, "spatial_shapes": 2}
"""Count of numbers per item under these names."""


class Item(NamedTuple):
    """An item without its data: `Media.shape` and `Media.about`."""

    shape: Shape
    about: About = NOTHING


class ItemInputs:
    """Base of the kinds of inputs: items in a list under `argument`, and their numbers under `item_keys`."""

    argument: str
    item_keys: tuple[str, ...]
    in_one_row: bool = False

    def collate(self, items: Sequence[Media]) -> Inputs:
        inputs: Inputs = {self.argument: [data_of(item) for item in items]}
        for key in self.item_keys:
            numbers = [[int(n) for n in item.about.get(key, (0,) * NUMBERS[key])] for item in items]
            inputs[key] = torch.tensor(numbers, dtype=torch.int64, device="cpu").reshape(
                len(items), -1 if items else NUMBERS[key]
            )
        return inputs

    def items(self, inputs: Inputs) -> list[Item]:
        numbers = {key: inputs[key].tolist() for key in self.item_keys}
        return [
            Item(tuple(data.shape), {key: tuple(rows[i]) for key, rows in numbers.items()})
            for i, data in enumerate(inputs[self.argument])
        ]

    def sets(self, items: Sequence[Item], packing: str) -> list[list[int]]:
        return together(items, packing) if self.in_one_row else by_size(items, packing)


def data_of(item: Media) -> Tensor:
    """Tensor of the item; a meta tensor if it has no data."""
    return torch.empty(item.shape, device="meta") if item.data is None else item.data


def by_size(items: Sequence[Item], packing: str) -> list[list[int]]:
    """Sets of items of equal size. If the packing is "alone", each item is a set."""
    if packing == ALONE:
        return [[i] for i in range(len(items))]
    sizes: dict[Shape, list[int]] = {}
    for i, item in enumerate(items):
        sizes.setdefault(item.shape, []).append(i)
    return list(sizes.values())


def together(items: Sequence[Item], packing: str) -> list[list[int]]:
    """One set of all items if they are packed; otherwise as `by_size`."""
    return [list(range(len(items)))] if packing == PACKED else by_size(items, packing)
