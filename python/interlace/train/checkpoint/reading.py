"""Fills tensors and pieces from a checkpoint, and from the folders of its base weights."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)

from interlace.train.checkpoint.folder import LATE_SECONDS, wait_until_visible
from interlace.train.checkpoint.pieces import LoadPlanner, Piece
from interlace.train.checkpoint.storage import DTYPES, CheckpointError, Manifest, read_chunk

if TYPE_CHECKING:
    from interlace.train.models.pretrained import Source


def read_into(path: Path, manifest: Manifest, targets: Mapping[str, Tensor | Piece]) -> None:
    """Fills `targets` in place from the checkpoint's tensors with these keys, all of which it has."""
    deadline = time.monotonic() + LATE_SECONDS
    metadata = Metadata(
        {
            key: TensorStorageMetadata(
                TensorProperties(DTYPES[stored.dtype]),
                torch.Size(stored.shape),
                [ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes)) for chunk in stored.chunks],
            )
            for key, stored in manifest.tensors.items()
            if key in targets
        }
    )
    planner = LoadPlanner()
    planner.set_up_planner(dict(targets), metadata, is_coordinator=True)
    try:
        plan = planner.create_local_plan()
    except (ValueError, RuntimeError) as error:
        raise CheckpointError(f"{path}: {error}") from None
    for item in plan.items:
        stored = manifest.tensors[item.storage_index.fqn]
        offsets = list(item.storage_index.offset or ())
        chunk = next(chunk for chunk in stored.chunks if chunk.offsets == offsets)
        wait_until_visible(path / chunk.file, manifest.files[chunk.file].size, deadline)
        tensor = read_chunk(path, stored, chunk, (item.storage_offsets, item.lengths))
        target = planner.resolve_tensor(item).detach()
        target.copy_(tensor)
        planner.commit_tensor(item, target)


def read_base(targets: Mapping[str, Tensor | Piece], base: Mapping[str, Source]) -> None:
    """Fills `targets` in place from the folders of `base`."""
    for name, value in targets.items():
        tensor, region = (value.tensor, value.region) if isinstance(value, Piece) else (value, None)
        try:
            tensor.copy_(base[name].read(region))
        except ValueError as error:
            raise CheckpointError(str(error)) from None
