"""Base of a checkpoint: frozen weights from folders, which the checkpoints of a run do not store.

Frozen weights stay as in their folder, so a checkpoint of adapters can be much smaller than the model. For each such
weight the manifest has the folder and a print: the SHA-256 of dtype, shape and values as the files hold them. For
embeddings and heads, recognized by their names, the print covers all values: training may change rows of a few words
only. For other matrices it covers 16 vectors, spread from the first row to the last, so that the print of a base of
gigabytes takes seconds. Prints do not depend on the folder's location or on how its files are cut. Training changes all
rows of such a matrix, and so its print. A change of some rows is detected only if they are among the 16.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from interlace.train.checkpoint.storage import BaseWeight, CheckpointError, Manifest

if TYPE_CHECKING:
    from interlace.train.models.pretrained import Source

VECTORS = 16
ROWS = 4096  # rows read at a time
WORDS = ("embed", "head", "wte", "vocab")
"""Parts of names of weights with a row per word, in any case."""

Stored = Callable[[], Mapping[str, "Source"]]
"""Parameter -> location of its weights in the folders of the config: read on first use."""


def prints_of(sources: Mapping[str, Source]) -> dict[str, BaseWeight]:
    """Folder and print of each weight. Raises CheckpointError if one cannot be read."""
    from safetensors import SafetensorError, safe_open

    opened: dict[Path, Any] = {}
    weights = {}
    with contextlib.ExitStack() as files:
        for name, source in sources.items():
            state = hashlib.sha256()
            for file, key in source.tensors():
                try:
                    if file not in opened:
                        opened[file] = files.enter_context(safe_open(file, framework="pt"))
                    values = opened[file].get_slice(key)
                    state.update(f"{values.get_dtype()} {values.get_shape()} ".encode())
                    for vector in _places(name, values.get_shape()):
                        part = values[vector] if vector else opened[file].get_tensor(key)
                        state.update(part.contiguous().reshape(-1).view(torch.uint8).numpy().data)
                except (OSError, SafetensorError) as error:
                    raise CheckpointError(f"{file}: cannot read {key}: {error}; copy it again") from None
            weights[name] = BaseWeight(folder=str(source.tensors()[0].file.parent), sha256=state.hexdigest())
    return weights


def _places(name: str, shape: list[int]) -> list[tuple[slice, ...]]:
    """Slices covered by a print: all of a vector, and of a weight with a row per word; of others, a few vectors along
    the last dimension, from the first to the last."""
    if not shape:
        return [()]
    if len(shape) == 1 or any(word in name.lower() for word in WORDS):
        rest = tuple(slice(0, size) for size in shape[1:])
        return [(slice(at, min(at + ROWS, shape[0])), *rest) for at in range(0, shape[0], ROWS)]
    places = [[(size - 1) * i // (VECTORS - 1) for size in shape[:-1]] for i in range(VECTORS)]
    return [(*(slice(at, at + 1) for at in place), slice(0, shape[-1])) for place in places]


def base_of(
    path: Path, manifest: Manifest, stored: Stored, known: Mapping[str, BaseWeight] | None = None
) -> dict[str, Source]:
    """Sources of the weights that the checkpoint at `path` leaves to folders.

    known: prints already made for `stored`. Raises CheckpointError for other weights than those at the start of the
    run.
    """
    if not manifest.base:
        return {}
    sources, known = stored(), known or {}
    if lost := [name for name in manifest.base if name not in sources]:
        folder = manifest.base[lost[0]].folder
        raise CheckpointError(
            f"{path} does not contain {lost[0]}, which is frozen and stored in {folder}: set model.path or "
            "model.NAME.path to that folder"
        )
    now = {**known, **prints_of({name: sources[name] for name in manifest.base if name not in known})}
    if other := [name for name, weight in manifest.base.items() if now[name].sha256 != weight.sha256]:
        before, more = manifest.base[other[0]].folder, f" and {len(other) - 1} more" if len(other) > 1 else ""
        raise CheckpointError(
            f"{path} needs the frozen weights of {before}, but {now[other[0]].folder} has different ones: "
            f"{other[0]}{more}. Set the folder of the run's start (--set model.path=... or model.NAME.path=...)"
        )
    return {name: sources[name] for name in manifest.base}
