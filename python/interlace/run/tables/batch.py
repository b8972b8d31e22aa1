"""The global batch: samples, or lists of samples; and the inputs of stages made from it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray

from interlace.layout import Layout
from interlace.model import Media, MultimodalModel, Sample, SampleOutline
from interlace.model.inputs.places import KEY, with_places
from interlace.model.language import look_at
from interlace.model.naming import LANGUAGE_MODEL
from interlace.model.sample import check_samples
from interlace.run.execute.device import moved
from interlace.run.tables.assign import DEFERRING, Assigner
from interlace.run.tables.dispatch import Dispatcher
from interlace.run.tables.table import Lengths, Samples, step_table
from interlace.schedule import StepTable

Batch = Samples | Sequence[Samples]
"""Samples, or lists of samples: the chunks of the language model."""
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

    of_rank: Mapping[int, list[Sample | SampleOutline]]
    start: Callable[[int], Callable[[], float | None]]

    @property
    def samples(self) -> list[Sample | SampleOutline]:
        """The samples of the first rank here: their metadata are equal on every rank."""
        return next(iter(self.of_rank.values()))


@dataclass(frozen=True, eq=False)
class GlobalBatch:
    """Inputs of a step, equal on every rank: samples, and the options of their cut (see `ParallelModel.step`)."""

    samples: list[Sample | SampleOutline]
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
        flat: list[Sample | SampleOutline] = []
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
        lengths, given = Lengths.of(self.samples, encoders), None
        if self.groups is not None:  # the i-th goes to replica i modulo the number of replicas
            sizes = [len(group) for group in self.groups]
            given = np.repeat(np.arange(len(sizes)) % layout.spec(language_model).dp, sizes)
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
            layout, lengths, assigner, dispatcher, given=given, microbatches=self.microbatches, groups=self.groups,
            chunks=self.chunks, place=self.place,
        )  # fmt: skip

    def lists(self) -> list[list[Sample | SampleOutline]]:
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
    replicas = None if dispatcher is None else dispatcher(lengths, given)
    assignment = None
    if assigner is not None:
        *_, language_model = layout.modules
        # Encoders that follow the language model are balanced with it: samples are assigned by both costs.
        own = dispatcher is not None and replicas is not None and dispatcher.method != "llm"
        assignment = assigner(lengths, microbatches, replicas[language_model] if own and replicas else None)
    return step_table(layout, lengths, microbatches=microbatches, assignment=assignment, replicas=replicas, **options)


def read_media(layout: Layout, ranks: Collection[int], table: StepTable, samples: Samples) -> list[Media]:
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


def collated(
    mllm: MultimodalModel, module: str, samples: Sequence[Sample], device: torch.device, *, decode: bool
) -> dict[str, Any]:
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


class ChunkInputs:
    """The collated inputs of a step's chunks on one rank, made on first use.

    stages: (module, stage) of the rank. Each asks once per chunk; inputs are dropped after the last call.
    """

    def __init__(
        self,
        mllm: MultimodalModel,
        table: StepTable,
        samples: Samples,
        stages: Collection[tuple[str, int]],
        device: torch.device,
    ) -> None:
        self._mllm, self._table, self._samples, self._device = mllm, table, samples, device
        self._later = Counter(module for module, stage in stages if stage)
        self._kept: dict[int, tuple[dict[str, Any], int]] = {}  # chunk -> inputs, number of later stages still to come

    def of(self, module: str, chunk: int, *, first_stage: bool) -> dict[str, Any]:
        """The inputs of a stage. Only the first stage of a module is given decoded media."""
        made, left = (None, 1) if first_stage else self._kept.pop(chunk, (None, self._later[module]))
        if made is None:
            # Outlines have all that a module needs of samples whose tokens this rank does not compute with.
            samples = cast(list[Sample], [self._samples[i] for i in self._table.chunks[chunk].samples])
            made = collated(self._mllm, module, samples, self._device, decode=first_stage)
        if left > 1:
            self._kept[chunk] = made, left - 1
        return made
