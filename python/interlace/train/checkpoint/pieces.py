"""Piece: a part of a tensor in a checkpoint, written once if several ranks hold it, readable under any other cut."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from interlace.parallel.region import Region
from interlace.train.checkpoint.storage import code_of


@dataclass(frozen=True, slots=True)
class Piece:
    """A rank's part of a tensor: `tensor`, placed in the whole by `region`."""

    tensor: Tensor
    region: Region

    @classmethod
    def of(cls, value: Tensor | Piece) -> Piece:
        """The value as a piece, without a gradient; a tensor is the piece that is the whole."""
        if isinstance(value, Piece):
            return cls(value.tensor.detach(), value.region)
        return cls(value.detach(), Region.full(value.shape))


class Part(NamedTuple):
    """A box of the tensor `key` [shape], beginning at `offsets`: `entry` of a file. dtype: as named by safetensors."""

    key: str
    entry: str
    dtype: str
    shape: list[int]
    offsets: list[int]
    tensor: Tensor


def pieces_of(tensors: Mapping[str, Tensor], regions: Mapping[str, Region]) -> dict[str, Tensor | Piece]:
    """`tensors` by name; those with an entry in `regions` are converted to pieces."""
    return {name: Piece(tensor, regions[name]) if name in regions else tensor for name, tensor in tensors.items()}


def parts_of(values: Mapping[str, Tensor | Piece]) -> list[Part]:
    """Boxes of these tensors and pieces, as views. Raises ValueError for a dtype that checkpoints cannot store."""
    parts = []
    for key, value in values.items():
        piece = Piece.of(value)
        shape, dtype = list(piece.region.shape), code_of(key, piece.tensor.dtype)
        for box, tensor in zip(piece.region.boxes, piece.region.parts(piece.tensor), strict=True):
            entry = key if list(box.sizes) == shape else f"{key}@{','.join(map(str, box.offsets))}"
            parts.append(Part(key, entry, dtype, shape, list(box.offsets), tensor))
    return parts


def shared_out(held: Sequence[Mapping[str, int]]) -> list[set[str]]:
    """Entries that each rank writes: each once, by the rank with the fewest bytes so far among those that hold it.

    held: for each rank, its entries and their bytes.
    """
    holders: dict[str, list[int]] = {}
    for rank, entries in enumerate(held):
        for entry in entries:
            holders.setdefault(entry, []).append(rank)
    loads, shares = [0] * len(held), [set[str]() for _ in held]
    for entry, ranks in holders.items():
        rank = min(ranks, key=loads.__getitem__)
        loads[rank] += held[rank][entry] or 1
        shares[rank].add(entry)
    return shares
