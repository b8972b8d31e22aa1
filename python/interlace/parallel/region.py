"""Region: the part of a whole tensor that a rank holds, as plain numbers. Used to save, load and sum tensors.

A rank's tensor is one rectangle of the whole, or several joined along a dimension (gate and up fused in one layer). A
range of its rows is a Region again, so ranks can share the rows among them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Box(NamedTuple):
    """A rectangle of a tensor: its offset and size along each dimension."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    def of(self, full: Tensor) -> Tensor:
        """The part of `full` inside the box, a view."""
        return full[tuple(slice(offset, offset + size) for offset, size in zip(self.offsets, self.sizes, strict=True))]


class Region(NamedTuple):
    """Part of a tensor of `shape`: non-overlapping boxes, joined along `dim` in this order.

    The boxes have equal sizes along all other dimensions.
    """

    shape: tuple[int, ...]
    boxes: tuple[Box, ...]
    dim: int = 0

    @classmethod
    def full(cls, shape: Sequence[int]) -> Region:
        """The whole tensor as a region."""
        return cls(tuple(shape), (Box((0,) * len(shape), tuple(shape)),))

    @property
    def sizes(self) -> tuple[int, ...]:
        """The shape of the held tensor."""
        length = sum(box.sizes[self.dim] for box in self.boxes) if self.shape else 0
        return tuple(length if i == self.dim else size for i, size in enumerate(self.boxes[0].sizes))

    def piece(self, full: Tensor) -> Tensor:
        """The held part of `full`: a view if it is one box."""
        views = [box.of(full) for box in self.boxes]
        return views[0] if len(views) == 1 else torch.cat(views, self.dim)

    def put(self, full: Tensor, piece: Tensor) -> None:
        """Write `piece` into `full`; the inverse of `piece()`. The rest of `full` is unchanged."""
        for box, part in zip(self.boxes, self.parts(piece), strict=True):
            box.of(full).copy_(part)

    def parts(self, piece: Tensor) -> list[Tensor]:
        """The part of `piece` in each box, as views. Raises ValueError for a tensor of another shape."""
        if tuple(piece.shape) != self.sizes:
            raise ValueError(f"piece has shape {list(piece.shape)}, expected {list(self.sizes)} of {list(self.shape)}")
        if len(self.boxes) == 1:
            return [piece]
        return list(piece.split([box.sizes[self.dim] for box in self.boxes], self.dim))

    def rows(self, start: int, stop: int) -> Region:
        """Rows [start, stop) of the held tensor, counted along its first dimension.

        Raises ValueError for rows out of range and for an empty range.
        """
        if not 0 <= start < stop <= self.sizes[0]:
            raise ValueError(f"rows [{start}, {stop}) are empty or outside [0, {self.sizes[0]})")
        boxes, before = [], 0
        for box in self.boxes:
            first, last = (start, stop) if self.dim else (max(start - before, 0), min(stop - before, box.sizes[0]))
            before += box.sizes[0]
            if first < last:
                offsets, sizes = (box.offsets[0] + first, *box.offsets[1:]), (last - first, *box.sizes[1:])
                boxes.append(Box(offsets, sizes))
        return Region(self.shape, tuple(boxes), self.dim)
