"""The global batch: samples, or lists of samples; and what stages are given of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch

from interlace.model import MultimodalModel
from interlace.run.device import moved
from interlace.schedule import StepTable


def grouped(samples: Sequence[Any], microbatches: int | None) -> tuple[list[Any], list[list[int]] | None]:
    """The samples of a batch, and if they come in lists the places of each list's."""
    if not samples:
        raise ValueError("a step needs at least one sample")
    grouped = [isinstance(item, (list, tuple)) for item in samples]
    if not any(grouped):
        return list(samples), None
    if not all(grouped):
        raise ValueError("samples mixes samples and lists: pass a list of samples, or a list of microbatches")
    if microbatches is not None and microbatches != len(samples):
        raise ValueError(f"microbatches is {microbatches} but {len(samples)} of them are given: leave it out")
    flat: list[Any] = []
    groups = []
    for group in samples:
        if group:
            groups.append(list(range(len(flat), len(flat) + len(group))))
            flat += group
    if not flat:
        raise ValueError("all microbatches are empty: a step needs at least one sample")
    return flat, groups


def in_groups(flat: Sequence[Any], groups: Sequence[Sequence[int]] | None) -> list[list[Any]]:
    """The samples in their groups, or all in one."""
    return [list(flat)] if groups is None else [[flat[i] for i in group] for group in groups]


def collator(
    mllm: MultimodalModel,
    table: StepTable,
    samples: Sequence[Any],
    stages: Collection[tuple[str, int]],
    device: torch.device,
) -> Callable[[str, int, bool], Any]:
    """(module, chunk, first stage) -> the chunk's collated inputs on `device`, made when first asked for.

    stages: (module, stage) of those who ask, each once for a chunk; after the last of them nothing is kept.
    """
    later = Counter(module for module, stage in stages if stage)
    kept: dict[int, tuple[dict[str, Any], int]] = {}  # chunk -> what stages after the first take, and how many will yet

    def inputs(module: str, chunk: int, first: bool) -> dict[str, Any]:
        made, left = (None, 1) if first else kept.pop(chunk, (None, later[module]))
        if made is None:
            made = mllm.collate_module(module, [samples[i] for i in table.chunks[chunk].samples], decode=first)
            made = made if device.type == "cpu" else moved(made, device)
        if left > 1:
            kept[chunk] = made, left - 1
        return made

    return inputs
