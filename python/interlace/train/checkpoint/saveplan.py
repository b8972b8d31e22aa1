"""Save plan: the tensors that each rank writes into a checkpoint, as JSON values.

torch.distributed.checkpoint's planners make the plans. By default it sends them pickled; JSON avoids that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from interlace.train.checkpoint.storage import DTYPES, code_of


def items_of(plan: SavePlan) -> list[list[Any]]:
    """For each tensor or shard: key, offsets in its index (or None), hint, kind, offsets, sizes, shape, dtype."""
    rows = []
    for item in plan.items:
        data, index = item.tensor_data, item.index
        if data is None:
            raise ValueError(f"{index.fqn} is not a tensor: checkpoints contain only tensors")
        offset = None if index.offset is None else list(index.offset)
        rows.append([
            index.fqn, offset, index.index, item.type.name, list(data.chunk.offsets), list(data.chunk.sizes),
            list(data.size), code_of(index.fqn, data.properties.dtype),
        ])  # fmt: skip
    return rows


def plan_of(items: Sequence[Sequence[Any]]) -> SavePlan:
    """The plan described by `items_of`. Raises ValueError, KeyError or TypeError for an invalid description."""
    return SavePlan([
        WriteItem(
            MetadataIndex(key, None if offset is None else torch.Size(offset), hint),
            WriteItemType[kind],
            tensor_data=TensorWriteData(
                ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)),
                TensorProperties(DTYPES[dtype]),
                torch.Size(shape),
            ),
        )
        for key, offset, hint, kind, offsets, sizes, shape, dtype in items
    ])  # fmt: skip
