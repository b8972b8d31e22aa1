"""The global batch: samples, or lists of samples; and the inputs of stages made from it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from interlace.layout import Layout
from interlace.model import Media, MultimodalModel
from interlace.model.inputs.places import KEY, with_places
from interlace.model.language import look_at
from interlace.model.naming import LANGUAGE_MODEL
from interlace.model.sample import check_samples
from interlace.run.execute.device import moved
from interlace.run.tables.assign import DEFERRING, Assigner
from interlace.run.tables.dispatch import Dispatcher
from interlace.run.tables.table import Lengths, step_table
from interlace.schedule import StepTable

Microbatches = int | Sequence[int] | None
"""Number for every replica of the language model, or one number for each (see `step_table`)."""


@dataclass(frozen=True, eq=False)
class Dispatched:
    """A global batch of streams on the ranks of this process.

    of_rank: rank -> the samples of all ranks in the batch's order. Samples whose tokens the rank does not need are
    outlines, and media that it does not read have no data. start: called by a rank, with its number, at the DISPATCH of
    the step that trains on this batch. It starts the exchange of the next batch and returns a call, which returns the
    end time of that exchange (`time.monotonic`; None: not yet).
    """

    of_rank: Mapping[int, list[Any]]
    start: Callable[[int], Callable[[], float | None]]

    @property
    def samples(self) -> list[Any]:
        """The samples of the first rank here: their metadata are equal on every rank."""
        return next(iter(self.of_rank.values()))


@dataclass(frozen=True, eq=False)
class GlobalBatch:
    """Inputs of a step, equal on every rank: samples, and the options of their cut (see `ParallelModel.step`)."""

    samples: list[Any]
    groups: list[list[int]] | None
    """Indices of the samples of each chunk of the language model; None: samples are spread by their tokens."""
    microbatches: Microbatches
    chunks: Mapping[str, int] | None
    place: tuple[int, int, int]
    dispatched: Dispatched | None = None
    """Set if the samples come from streams."""

    @classmethod
    def of(
        cls,
        samples: Sequence[Any] | Dispatched,
        microbatches: Microbatches = None,
        chunks: Mapping[str, int] | None = None,
        place: tuple[int, int, int] = (0, 0, 0),
    ) -> GlobalBatch:
        """The batch of samples, lists of samples, or streams. Raises ValueError for an empty batch, for a mixture, and
        for objects that are no samples."""
        if isinstance(microbatches, Sequence):
            microbatches = tuple(microbatches)
        if isinstance(samples, Dispatched):
            return cls(samples.samples, None, microbatches, chunks, place, samples)
        if isinstance(samples, Sequence) and not samples:
            raise ValueError("a step needs at least one sample")
        lists = [isinstance(item, (list, tuple)) for item in samples] if isinstance(samples, Sequence) else []
        if not any(lists):
            check_samples("a step", samples)
            return cls(list(samples), None, microbatches, chunks, place)
        if not all(lists):
            raise ValueError("samples mixes samples and lists: pass a list of samples, or a list of microbatches")
        if isinstance(microbatches, int) and microbatches != len(samples):
            raise ValueError(f"microbatches is {microbatches}, but samples has {len(samples)} lists: omit microbatches")
        flat: list[Any] = []
        groups = []
        for group in samples:
            if group:
                groups.append(list(range(len(flat), len(flat) + len(group))))
                flat += group
        check_samples("a step", flat)
        if not flat:
            raise ValueError("all microbatches are empty: a step needs at least one sample")
        return cls(flat, groups, microbatches, chunks, place)

    def table(
        self, layout: Layout, assigner: Assigner | None = None, dispatcher: Dispatcher | None = None
    ) -> StepTable:
        """Its table on `layout`. assigner: assigns samples to microbatches by costs instead of by tokens. dispatcher:
        assigns samples to replicas; not those of the language model if lists of samples are given.

        Raises ValueError, as `step_table`, for lists of samples with an assigner, and for chunks if the assigner may
        defer samples.
        """
        *encoders, language_model = layout.modules
        lengths = Lengths.of(self.samples, encoders)
        if assigner is not None and assigner.method != "tokens":
            if self.groups is not None:
                raise ValueError(
                    f"assign = {assigner.method!r} assigns samples to microbatches, but samples is a list of "
                    "microbatches already: pass one list of samples, or use assign = 'tokens'"
                )
            if assigner.method in DEFERRING and self.chunks:  # even if it defers none of these samples
                raise ValueError(
                    f"assign = {assigner.method!r} determines the encoders' chunks itself: omit chunks, or use "
                    "assign = 'stratified'"
                )
        return table_of(
            layout, lengths, assigner, dispatcher, given=self._groups_of_replicas(layout.spec(language_model).dp),
            microbatches=self.microbatches, groups=self.groups, chunks=self.chunks, place=self.place,
        )  # fmt: skip

    def of_rank(self, rank: int) -> list[Any]:
        """The samples on a rank of this process."""
        return self.samples if self.dispatched is None else self.dispatched.of_rank[rank]

    def starter(self, rank: int) -> Callable[[], Callable[[], float | None]]:
        """The call of a rank's DISPATCH; see `Dispatched.start`."""
        return (lambda: lambda: None) if self.dispatched is None else partial(self.dispatched.start, rank)

    def _groups_of_replicas(self, dp: int) -> NDArray[np.int64] | None:
        """int64 [n], the replica of the language model (of `dp`) for each sample, if lists are given."""
        if self.groups is None:
            return None
        return np.repeat(np.arange(len(self.groups)) % dp, [len(group) for group in self.groups])

    def lists(self) -> list[list[Any]]:
        """The samples in their groups, or all in one."""
        return [self.samples] if self.groups is None else [[self.samples[i] for i in group] for group in self.groups]


def table_of(
    layout: Layout,
    lengths: Lengths,
    assigner: Assigner | None,
    dispatcher: Dispatcher | None,
    *,
    given: NDArray[np.int64] | None = None,
    microbatches: Microbatches = None,
    **options: Any,
) -> StepTable:
    """The table of a step: replicas by `dispatcher`, microbatches inside each replica by `assigner`. If each replica
    has its own number of microbatches, these numbers decide instead.

    given: int64 [n], the replicas of the language model, if these are fixed. options: as of `step_table`.
    """
    if isinstance(microbatches, Sequence):
        if assigner is not None:
            raise ValueError(
                f"assign = {assigner.method!r} assumes equal replicas, but microbatches has one number per replica: "
                "pass one number, or use assign = 'tokens'"
            )
        return step_table(layout, lengths, microbatches=microbatches, **options)
    replicas = None if dispatcher is None else dispatcher(lengths, given).replica
    assignment = None
    if assigner is not None:
        *_, language_model = layout.modules
        # Encoders that follow the language model are balanced with it: samples are assigned by both costs.
        own = dispatcher is not None and replicas is not None and dispatcher.method != "llm"
        assignment = assigner(lengths, microbatches, replicas[language_model] if own and replicas else None)
    return step_table(layout, lengths, microbatches=microbatches, assignment=assignment, replicas=replicas, **options)


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


def collated(mllm: MultimodalModel, module: str, samples: Sequence[Any], device: torch.device, *, decode: bool) -> Any:
    """A module's inputs for `samples` on `device`, with host values that would otherwise need a GPU synchronization."""
    made = mllm.collate_module(module, samples, decode=decode)
    places = None
    if module == LANGUAGE_MODEL:
        look_at(mllm.language_settings, made["plan"])
        places = with_places(made, mllm.placeholders, device)
    made = made if device.type == "cpu" else moved(made, device)
    if places is not None:
        made[KEY] = places._replace(ids=made["input_ids"], labels=made["labels"])
    return made


def collator(
    mllm: MultimodalModel,
    table: StepTable,
    samples: Sequence[Any],
    stages: Collection[tuple[str, int]],
    device: torch.device,
) -> Callable[[str, int, bool], Any]:
    """(module, chunk, first stage) -> the chunk's collated inputs on `device`, made on first use.

    stages: (module, stage) of the callers, each of which calls once per chunk; after the last call nothing is kept.
    """
    later = Counter(module for module, stage in stages if stage)
    kept: dict[int, tuple[dict[str, Any], int]] = {}  # chunk -> inputs of later stages, number of calls still to come

    def inputs(module: str, chunk: int, first: bool) -> dict[str, Any]:
        made, left = (None, 1) if first else kept.pop(chunk, (None, later[module]))
        if made is None:
            made = collated(mllm, module, [samples[i] for i in table.chunks[chunk].samples], device, decode=first)
        if left > 1:
            kept[chunk] = made, left - 1
        return made

    return inputs
