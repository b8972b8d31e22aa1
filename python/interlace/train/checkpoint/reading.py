"""Fills tensors and pieces from a checkpoint, and from the folders of its base weights."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from interlace.parallel.region import Box
from interlace.train.checkpoint.folder import LATE_SECONDS, wait_until_visible
from interlace.train.checkpoint.pieces import Piece
from interlace.train.checkpoint.storage import CheckpointError, Manifest, read_chunk

if TYPE_CHECKING:
    from interlace.train.models.pretrained import Source


def read_into(path: Path, manifest: Manifest, targets: Mapping[str, Tensor | Piece]) -> None:
    """Fills `targets` in place from the checkpoint's tensors with these keys, all of which it has."""
    deadline = time.monotonic() + LATE_SECONDS
    for key, value in targets.items():
        piece, stored = Piece.of(value), manifest.tensors[key]
        if list(piece.region.shape) != stored.shape:
            raise CheckpointError(f"{path}: {key} has shape {stored.shape}, not {list(piece.region.shape)}")
        for box, target in zip(piece.region.boxes, piece.region.parts(piece.tensor), strict=True):
            for chunk in stored.chunks:
                pairs = list(zip(box.offsets, box.sizes, chunk.offsets, chunk.sizes, strict=True))
                begins = [max(mine, theirs) for mine, _, theirs, _ in pairs]
                ends = [min(mine + size, theirs + length) for mine, size, theirs, length in pairs]
                sizes = [end - begin for begin, end in zip(begins, ends, strict=True)]
                if min(sizes, default=1) <= 0:  # they do not overlap
                    continue
                wait_until_visible(path / chunk.file, manifest.files[chunk.file].size, deadline)
                inner = [begin - offset for begin, offset in zip(begins, chunk.offsets, strict=True)]
                outer = tuple(begin - offset for begin, offset in zip(begins, box.offsets, strict=True))
                Box(outer, tuple(sizes)).of(target).copy_(read_chunk(path, stored, chunk, (inner, sizes)))


def read_base(targets: Mapping[str, Tensor | Piece], base: Mapping[str, Source]) -> None:
    """Fills `targets` in place from the folders of `base`."""
    for name, value in targets.items():
        tensor, region = (value.tensor, value.region) if isinstance(value, Piece) else (value, None)
        try:
            tensor.detach().copy_(base[name].read(region))
        except ValueError as error:
            raise CheckpointError(str(error)) from None
