"""Piece: a part of a tensor in a checkpoint, written once if several ranks hold it, and readable under any other cut.

torch.distributed.checkpoint's planners treat pieces as rectangles of the whole. The planners find duplicates on several
ranks, and detect if all pieces together do not cover the whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from interlace.parallel.region import Region


@dataclass(frozen=True, slots=True)
class Piece:
    """A rank's part of a tensor: `tensor`, placed in the whole by `region`."""

    tensor: Tensor
    region: Region

    def size(self) -> torch.Size:
        """Shape of the whole: planners compare it with the stored shape."""
        return torch.Size(self.region.shape)

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes)) for box in self.region.boxes]

    def __create_write_items__(self, key: str, _: Any) -> list[WriteItem]:
        properties = TensorProperties(self.tensor.dtype)
        return [
            WriteItem(
                MetadataIndex(key, chunk.offsets, number),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, properties, self.size()),
            )
            for number, chunk in enumerate(self.__create_chunk_list__())
        ]

    def at(self, offsets: tuple[int, ...]) -> Tensor:
        """View of the box that begins at `offsets` of the whole."""
        parts = self.region.parts(self.tensor)
        return next(part for box, part in zip(self.region.boxes, parts, strict=True) if box.offsets == offsets)


def pieces_of(tensors: Mapping[str, Tensor], regions: Mapping[str, Region]) -> dict[str, Tensor | Piece]:
    """`tensors` by name; those with an entry in `regions` are converted to pieces."""
    return {name: Piece(tensor, regions[name]) if name in regions else tensor for name, tensor in tensors.items()}


def detached(value: Tensor | Piece) -> Tensor | Piece:
    """The same value without a gradient."""
    return Piece(value.tensor.detach(), value.region) if isinstance(value, Piece) else value.detach()


class SavePlanner(DefaultSavePlanner):
    """Save planner that also finds pieces."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def lookup_object(self, index: MetadataIndex) -> Any:
        """The tensor, or the box of a piece that begins at the index's offset."""
        value = self.state_dict[index.fqn]
        return _chunk_of(value, index) if isinstance(value, Piece) else super().lookup_object(index)


class LoadPlanner(DefaultLoadPlanner):
    """Load planner that also finds pieces."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """As torch's own, which keeps only tensors."""
        super().set_up_planner({}, metadata, is_coordinator)
        self.state_dict = self.original_state_dict = state_dict

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        """As `SavePlanner.lookup_object`."""
        value = self.state_dict[index.fqn]
        return _chunk_of(value, index) if isinstance(value, Piece) else super().lookup_tensor(index)


def _chunk_of(value: Piece, index: MetadataIndex) -> Tensor:
    assert index.offset is not None
    return value.at(tuple(index.offset))
