"""The global batch: samples, or lists of samples; and what stages are given of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from interlace.layout import Layout
from interlace.model import Media, MultimodalModel
from interlace.run.device import moved
from interlace.run.table import Lengths, step_table
from interlace.schedule import StepTable


@dataclass(frozen=True, eq=False)
class GlobalBatch:
    """What every rank is given for a step: samples, and how they are to be cut (see `ParallelModel.step`)."""

    samples: list[Any]
    groups: list[list[int]] | None
    """The places of the samples of each chunk of the language model; None: they are spread by their tokens."""
    microbatches: int | None
    chunks: Mapping[str, int] | None
    place: tuple[int, int, int]

    @classmethod
    def of(
        cls,
        samples: Sequence[Any],
        microbatches: int | None = None,
        chunks: Mapping[str, int] | None = None,
        place: tuple[int, int, int] = (0, 0, 0),
    ) -> GlobalBatch:
        """That of samples, or of lists of samples. Raises ValueError for an empty batch and for a mixture of both."""
        if not samples:
            raise ValueError("a step needs at least one sample")
        lists = [isinstance(item, (list, tuple)) for item in samples]
        if not any(lists):
            return cls(list(samples), None, microbatches, chunks, place)
        if not all(lists):
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
        return cls(flat, groups, microbatches, chunks, place)

    def table(self, layout: Layout) -> StepTable:
        """Its table on `layout`."""
        *encoders, _ = layout.modules
        lengths = Lengths.of(self.samples, encoders)
        return step_table(
            layout, lengths, microbatches=self.microbatches, groups=self.groups, chunks=self.chunks, place=self.place
        )

    def lists(self) -> list[list[Any]]:
        """The samples in their groups, or all in one."""
        return [self.samples] if self.groups is None else [[self.samples[i] for i in group] for group in self.groups]


def read_media(layout: Layout, ranks: Collection[int], table: StepTable, samples: Sequence[Any]) -> list[Media]:
    """The media of `samples` that `ranks` read in a step with this table: of chunks whose first stage they have."""
    firsts = {
        (stage.module, layout.replica(rank, stage.module))
        for rank in ranks
        for stage in layout.of_rank(rank)
        if stage.index == 0
    }
    return [
        item
        for chunk in table.chunks
        if (chunk.module, chunk.replica) in firsts
        for i in chunk.samples
        for item in samples[i].media.get(chunk.module, ())
    ]


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
