"""Region: which part of a whole tensor a rank holds, as plain numbers, for whoever saves, loads or sums it.

A rank's tensor is one rectangle of the whole, or several joined along a dimension (a rank's gate and up of one layer
that is both). The rows of such a tensor, which ranks may share out among them, are a Region again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Box(NamedTuple):
    """A rectangle of a tensor: where it begins and how long it is along each dimension."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    def of(self, whole: Tensor) -> Tensor:
        """What of `whole` lies in it, a view."""
        return whole[tuple(slice(offset, offset + size) for offset, size in zip(self.offsets, self.sizes, strict=True))]


class Region(NamedTuple):
    """What is held of a tensor of `shape`: these boxes of it, which do not overlap, joined along `dim` in this order.

    They are equally long along all other dimensions.
    """

    shape: tuple[int, ...]
    boxes: tuple[Box, ...]
    dim: int = 0

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Region:
        """All of a tensor."""
        return cls(tuple(shape), (Box((0,) * len(shape), tuple(shape)),))

    @property
    def sizes(self) -> tuple[int, ...]:
        """The shape of what is held."""
        length = sum(box.sizes[self.dim] for box in self.boxes) if self.shape else 0
        return tuple(length if i == self.dim else size for i, size in enumerate(self.boxes[0].sizes))

    def piece(self, whole: Tensor) -> Tensor:
        """What is held of `whole`: a view where it is one box."""
        views = [box.of(whole) for box in self.boxes]
        return views[0] if len(views) == 1 else torch.cat(views, self.dim)

    def put(self, whole: Tensor, piece: Tensor) -> None:
        """Write what is held into `whole`, as `piece` takes it out; the rest stays as it is."""
        for box, part in zip(self.boxes, self.parts(piece), strict=True):
            box.of(whole).copy_(part)

    def parts(self, piece: Tensor) -> list[Tensor]:
        """What of `piece` lies in each box, views. Raises ValueError for a tensor of another shape."""
        if tuple(piece.shape) != self.sizes:
            raise ValueError(f"a tensor {list(piece.shape)} where {list(self.sizes)} of {list(self.shape)} are held")
        if len(self.boxes) == 1:
            return [piece]
        return list(piece.split([box.sizes[self.dim] for box in self.boxes], self.dim))

    def rows(self, start: int, stop: int) -> Region:
        """Rows [start, stop) of what is held, counted along its first dimension.

        Raises ValueError for rows that there are not, and for none.
        """
        if not 0 <= start < stop <= self.sizes[0]:
            raise ValueError(f"rows {start} to {stop} are no part of the {self.sizes[0]} that are held")
        boxes, before = [], 0
        for box in self.boxes:
            first, last = (start, stop) if self.dim else (max(start - before, 0), min(stop - before, box.sizes[0]))
            before += box.sizes[0]
            if first < last:
                offsets, sizes = (box.offsets[0] + first, *box.offsets[1:]), (last - first, *box.sizes[1:])
                boxes.append(Box(offsets, sizes))
        return Region(self.shape, tuple(boxes), self.dim)
