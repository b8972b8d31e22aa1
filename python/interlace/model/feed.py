"""What all kinds of encoder inputs have in common (images.py, patches.py, tiles.py, audio.py, clips.py).

Each kind is a frozen dataclass with

    argument, default               name of the forward's main input; an item of the size that the encoder was made for
    in_one_row                      whether one call takes all items, and lays their tokens side by side itself
    check(item, name)               ValueError for an item that the encoder `name` cannot take, saying what it takes
    tokens(item)                    tokens inside the layers, without class tokens (clips.py: only the encoder knows)
    collate(media), items(inputs)   inputs of these media, meta tensors of those without data; and the items of inputs
    sets(items, packing)            which items one call of the encoder takes
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


class Item(NamedTuple):
    """An item without its data: `Media.shape` and `Media.about`."""

    shape: Shape
    about: About = NOTHING


def data_of(item: Media) -> Tensor:
    """Its tensor; a meta tensor where it has none."""
    return torch.empty(item.shape, device="meta") if item.data is None else item.data


def by_size(items: Sequence[Item], packing: str) -> list[list[int]]:
    """Items of a size as a set; each its own where the packing is "alone"."""
    if packing == ALONE:
        return [[i] for i in range(len(items))]
    sizes: dict[Shape, list[int]] = {}
    for i, item in enumerate(items):
        sizes.setdefault(item.shape, []).append(i)
    return list(sizes.values())


def together(items: Sequence[Item], packing: str) -> list[list[int]]:
    """All items as one set where they are packed, else as `by_size`."""
    return [list(range(len(items)))] if packing == PACKED else by_size(items, packing)
