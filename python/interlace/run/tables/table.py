"""Step table from lengths alone: the samples of each chunk, and the rows of it that other chunks read.

Every rank makes the table of a step by itself. It is equal on all ranks, because it depends only on the lengths of the
samples in the global batch, the layout and the numbers of chunks. Nothing is exchanged, decoded or timed for it.

Chunks of the language model are bins of samples of about equal total length, or those of an `Assignment`. Their
replicas follow from these, or from a dispatch (`interlace.run.tables.dispatch`). Chunks of an encoder follow those of
the language model: items that the k-th chunks of its replicas read are encoded together. They are distributed over the
encoder's replicas by rows, or stay in the same replica if both have equally many, or follow the dispatch. With fewer
chunks than the language model, one encoder chunk serves several of its microbatches; with more, the k-th is encoded in
parts. Deferred samples (dissertation 4.5.2) are encoded with the k-th too, as a separate chunk, and read by a later
one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat

import numpy as np
from numpy.typing import NDArray

from interlace import balance
from interlace.layout import Layout
from interlace.model import Sample, SampleOutline
from interlace.schedule.table import Chunk, Edge, StepTable, merged

PORT = "embeds"
MOST_NOMINAL = 1 << 20  # most samples of a table for planning: there are equally many links between chunks

Ints = NDArray[np.int64]
Samples = Sequence[Sample | SampleOutline]
"""Samples of a batch. Those whose tokens are on other ranks are outlines."""


@dataclass(frozen=True, eq=False)
class Lengths:
    """The lengths of a batch of n samples.

    tokens: int64 [n], of the language model. targets: int64 [n], positions with a valid target. rows: encoder -> int64
    [n], rows of features of its items. items: encoder -> int64 [n], number of items; None: one if there are rows.
    """

    tokens: Ints
    targets: Ints
    rows: Mapping[str, Ints]
    items: Mapping[str, Ints] | None = None

    @classmethod
    def of(cls, samples: Samples, encoders: Sequence[str]) -> Lengths:
        """The lengths of `samples`; media need not be decoded."""
        return cls(
            np.array([len(sample) for sample in samples], np.int64),
            np.array([sample.targets for sample in samples], np.int64),
            {
                name: np.array([sum(item.tokens for item in s.media.get(name, ())) for s in samples], np.int64)
                for name in encoders
            },
            {name: np.array([len(s.media.get(name, ())) for s in samples], np.int64) for name in encoders},
        )

    def __len__(self) -> int:
        return len(self.tokens)

    def items_of(self, encoder: str) -> Ints:
        """int64 [n], the items of an encoder."""
        return (self.rows[encoder] > 0).astype(np.int64) if self.items is None else self.items[encoder]

    def of_module(self, module: str) -> tuple[Ints, Ints]:
        """int64 [n] each: rows and items of a module; for the language model tokens, and one item per sample."""
        if module in self.rows:
            return self.rows[module], self.items_of(module)
        return self.tokens, np.ones(len(self), np.int64)

    def take(self, index: Ints) -> Lengths:
        """The lengths of the samples at `index`."""
        items = None if self.items is None else {name: each[index] for name, each in self.items.items()}
        rows = {name: each[index] for name, each in self.rows.items()}
        return Lengths(self.tokens[index], self.targets[index], rows, items)


@dataclass(frozen=True, eq=False)
class Assignment:
    """Assignment of n samples to microbatches; see `interlace.run.tables.assign`.

    replica: int [n], of the language model. encoder_slot, llm_slot: int [n], from 0 on; a sample is deferred if its
    llm_slot is later than its encoder_slot. work: module -> int64 [n], estimated FLOPs of each sample.
    """

    replica: NDArray[np.integer]
    encoder_slot: NDArray[np.integer]
    llm_slot: NDArray[np.integer]
    work: Mapping[str, Ints]

    def __post_init__(self) -> None:
        if (self.llm_slot < self.encoder_slot).any():
            i = int((self.llm_slot < self.encoder_slot).argmax())
            raise ValueError(
                f"sample {i} is read in slot {self.llm_slot[i]} of the language model, before it is encoded in slot "
                f"{self.encoder_slot[i]}"
            )


def step_table(
    layout: Layout,
    lengths: Lengths,
    *,
    microbatches: int | Sequence[int] | None = None,
    groups: Sequence[Sequence[int]] | None = None,
    chunks: Mapping[str, int] | None = None,
    place: tuple[int, int, int] = (0, 0, 0),
    assignment: Assignment | None = None,
    replicas: Mapping[str, Ints] | None = None,
) -> StepTable:
    """The table of one step.

    microbatches: chunks of each replica of the language model (the layout's last module), at most one per sample;
        default: twice the stages of its pipeline. Replicas of unequal speed may have a number each. With fewer samples
        or groups than chunks there are fewer chunks, and some replicas have none.
    groups: instead, the samples of its chunks. The i-th goes to replica i modulo the number of replicas. If
        `microbatches` has a number for each replica, it goes to the next replica in turn that is not full.
    chunks: encoder -> chunks of each of its replicas (default: as many as the language model has, 1 under "shared").
    place: see StepTable.
    assignment: replaces `microbatches` and `groups`: the samples of each microbatch. With deferred samples it fixes the
        encoders' chunks, too.
    replicas: module -> int64 [n], the replica of each sample (for an encoder: of each sample with items). Ignored for
        the language model if `groups` or `assignment` is given.

    Raises ValueError for a batch without samples, counts below 1, unknown encoders, and deferral together with `chunks`
    or placement "shared".
    """
    *encoders, language_model = layout.modules
    counts_of = dict(chunks or {})
    unknown = [name for name in counts_of if name not in encoders]
    if unknown:
        raise ValueError(f"chunks names {unknown[0]!r}: the encoders are {', '.join(encoders) or 'none'}")
    dp = layout.spec(language_model).dp
    counts = [microbatches] if isinstance(microbatches, int) else list(microbatches or ())
    for name, count in [*(("microbatches", c) for c in counts), *((f"chunks[{n!r}]", c) for n, c in counts_of.items())]:
        if count < 1:
            raise ValueError(f"{name} is {count}: it must be at least 1")
    if len(lengths) == 0:
        raise ValueError("a step needs at least one sample")
    homes = None if replicas is None else replicas.get(language_model)
    per_replica = counts[0] if counts else 2 * layout.spec(language_model).pp
    late = np.zeros(len(lengths), bool)
    if isinstance(microbatches, Sequence):
        if assignment is not None or replicas is not None:
            raise ValueError(
                "microbatches per replica determine the assignment of samples: omit assignment and replicas "
                "(assign = 'tokens', balance = 'none')"
            )
        turns = _turns(counts, dp)
        bin_of = turns[_places(lengths, len(turns), groups)]
    elif assignment is not None:
        late = np.asarray(assignment.llm_slot != assignment.encoder_slot)
        bin_of = assignment.llm_slot.astype(np.int64) * dp + assignment.replica
        if late.any() and (counts_of or layout.placement == "shared"):
            raise ValueError(
                "samples are deferred from one chunk of an encoder to the next, which fixes the number of chunks: omit "
                "chunks, and do not use placement 'shared'"
            )
    elif groups is None and homes is not None:
        bin_of = homes.astype(np.int64)
        for replica, mine in enumerate(_members(homes, dp)):
            if len(mine):
                bin_of[mine] = _places(lengths.take(mine), per_replica) * dp + replica
    else:
        bin_of = _places(lengths, dp * per_replica if groups is None else len(groups), groups)
    slots = -(-(int(bin_of.max()) + 1) // dp)  # bin b belongs to replica b % dp, which takes its filled bins in order
    encoded = bin_of
    if late.any():
        assert assignment is not None
        encoded = assignment.encoder_slot.astype(np.int64) * dp + assignment.replica
    together = _by_bin(encoded, slots * dp)
    readers = encoded % dp

    all_chunks: list[Chunk] = []
    source: dict[str, tuple[Ints, Ints]] = {}
    for name in encoders:
        default, its = 1 if layout.placement == "shared" else slots, layout.spec(name).dp
        alike = readers if its == dp else None  # equally many replicas: each encodes for the same replica
        source[name] = _encoder_chunks(
            all_chunks, name, lengths.rows[name], together, slots, counts_of.get(name, default), its, late,
            alike if replicas is None else replicas.get(name, alike),
        )  # fmt: skip
    first = len(all_chunks)
    read, sizes = _by_bin(bin_of % dp * slots + bin_of // dp, dp * slots)  # in the order of pieces: no sort needed
    sizes = _add_chunks(all_chunks, language_model, read, sizes, slots)
    destination = np.repeat(np.arange(first, len(all_chunks)), sizes)  # of each of `read`
    edges = []
    for name in encoders:
        chunk, row = source[name]
        rows = lengths.rows[name][read]
        offset = _rows_before(rows, sizes)
        used = np.flatnonzero(rows)
        here = read[used]
        pieces = np.stack([chunk[here], row[here], destination[used], offset[used], rows[used]], axis=1)
        edges.append(Edge(name, language_model, PORT, merged(pieces.astype(np.int32))))
    targets = np.zeros(len(all_chunks), np.int64)
    targets[first:] = np.add.reduceat(lengths.targets[read], np.cumsum(sizes) - sizes)
    if assignment is None:
        return StepTable(tuple(all_chunks), tuple(edges), targets, place)
    work = np.array([assignment.work[chunk.module][chunk.samples].sum() for chunk in all_chunks], np.int64)
    filled = np.any([rows > 0 for rows in lengths.rows.values()], axis=0) if encoders else np.zeros(len(lengths), bool)
    deferred = np.flatnonzero(late & filled).astype(np.int32)
    return StepTable(tuple(all_chunks), tuple(edges), targets, place, work, deferred)


def _places(lengths: Lengths, count: int, groups: Sequence[Sequence[int]] | None = None) -> Ints:
    """int64 [n]: the microbatch (of `count`) of each sample: its group, or an assignment with balanced tokens."""
    if groups is None:
        bins = min(len(lengths), count)
        return balance.assign(lengths.tokens, bins, capacity=-(-len(lengths) // bins)).astype(np.int64)
    if len(groups) > count:
        raise ValueError(f"{len(groups)} groups of samples exceed the {count} microbatches")
    microbatch = np.full(len(lengths), -1, np.int64)
    for place, members in enumerate(groups):
        microbatch[list(members)] = place
    return microbatch


def _turns(counts: Sequence[int], dp: int) -> Ints:
    """int64 [sum(counts)]: the bins of the chunks, slot 0 of all replicas first. counts: chunks of each replica."""
    if len(counts) != dp:
        raise ValueError(
            f"microbatches has {len(counts)} numbers for {dp} replicas: give one per replica, or one for all"
        )
    return np.array([slot * dp + r for slot in range(max(counts)) for r in range(dp) if slot < counts[r]], np.int64)


def _by_bin(bin_of: NDArray[np.integer], bins: int) -> tuple[Ints, Ints]:
    """Indices sorted by bin, rising in each bin; and the number in each bin."""
    few = bins <= np.iinfo(np.uint16).max
    order = np.argsort(bin_of.astype(np.uint16) if few else bin_of, kind="stable")  # 16 bits are sorted by radix
    return order, np.bincount(bin_of, minlength=bins)


def _members(bin_of: NDArray[np.integer], bins: int) -> list[Ints]:
    """The indices of each bin."""
    order, sizes = _by_bin(bin_of, bins)
    return np.split(order, np.cumsum(sizes)[:-1])


def _rows_before(rows: Ints, sizes: Ints) -> Ints:
    """int64 [n]: sum of the rows before each entry in its group. sizes: of the groups, which are consecutive."""
    before = np.cumsum(rows) - rows
    return before - np.repeat(before[np.cumsum(sizes) - sizes], sizes)


def _add_chunks(all_chunks: list[Chunk], module: str, samples: Ints, sizes: Ints, per_replica: int) -> Ints:
    """Add the non-empty chunks of a module to `all_chunks`, and return their sizes.

    samples: those of the chunks, one chunk after the other. sizes: of the `per_replica` chunks of every replica.
    """
    filled = np.flatnonzero(sizes)
    replica = filled // per_replica
    index = np.arange(len(filled)) - np.searchsorted(replica, replica)
    chunk_samples, ends = samples.astype(np.int32), np.cumsum(sizes[filled]).tolist()
    each_one = (chunk_samples[begin:end] for begin, end in zip([0, *ends], ends))
    all_chunks.extend(map(Chunk, repeat(module), replica.tolist(), index.tolist(), each_one))
    return sizes[filled]


def _encoder_chunks(
    all_chunks: list[Chunk],
    name: str,
    rows: Ints,
    together: tuple[Ints, Ints],
    slots: int,
    count: int,
    dp: int,
    late: NDArray[np.bool_],
    home: Ints | None,
) -> tuple[Ints, Ints]:
    """Add the chunks of an encoder to `all_chunks`; returns the chunk and the first row in it of each sample's items.

    together: the samples to encode for each chunk of the language model, first those of slot 0 of all replicas, and so
    on; and their number per chunk. count: chunks per replica of `dp`. late: the deferred samples, which get a separate
    chunk after that of the others. home: the replica of each sample; None: all replicas share.
    """
    samples, sizes = together
    ends = np.concatenate([[0], np.cumsum(sizes.reshape(slots, -1).sum(1))]).tolist()
    encoded, keys = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]  # samples; replica * count + chunk of the replica
    turns = min(count, slots)
    for turn in range(turns):
        # With fewer chunks than slots, a turn is one chunk over several slots; with more, one slot in several chunks.
        slot, chunk = ([-(-at * of // turns) for at in (turn, turn + 1)] for of in (slots, count))
        items, wide = samples[ends[slot[0]] : ends[slot[1]]], chunk[1] - chunk[0]
        items = items[rows[items] > 0]
        if home is None:
            share = _shared_out(rows[items], wide * dp)
            key = share % dp * count + chunk[0] + share // dp
        else:
            key = home[items] * count + chunk[0]
            for mine in _members(home[items], dp) if wide > 1 else ():
                key[mine] += _shared_out(rows[items[mine]], wide)
        encoded.append(items)
        keys.append(key)
    each, items, key = count, np.concatenate(encoded), np.concatenate(keys)
    if late.any():
        each, key = 2 * count, 2 * key + late[items]
    order, sizes = _by_bin(key, dp * each)
    items, first = items[order], len(all_chunks)
    sizes = _add_chunks(all_chunks, name, items, sizes, each)
    chunk_of, row_of = np.full(len(rows), -1, np.int64), np.zeros(len(rows), np.int64)
    chunk_of[items] = np.repeat(np.arange(first, len(all_chunks)), sizes)
    row_of[items] = _rows_before(rows[items], sizes)
    return chunk_of, row_of


def _shared_out(rows: Ints, bins: int) -> Ints:
    """int64 [n]: the bin of each sample; balances rows."""
    return balance.assign(rows, bins).astype(np.int64) if bins > 1 and len(rows) else np.zeros(len(rows), np.int64)


def nominal_table(
    layout: Layout, microbatches: int, chunks: Mapping[str, int] | None = None, samples: int | None = None
) -> StepTable:
    """A table for planning with `samples` identical samples, each with one item of every encoder.

    By default there are enough samples to give every chunk of every replica equally many. If that takes more than
    MOST_NOMINAL, the number is chosen so that chunks of a module differ by at most one sample in sixteen.
    """
    *encoders, language_model = layout.modules
    if samples is None:
        counts = [layout.spec(language_model).dp * microbatches]
        counts += [layout.spec(name).dp * (chunks or {}).get(name, microbatches) for name in encoders]
        samples = math.lcm(*counts)
        samples = samples if samples <= MOST_NOMINAL else 16 * max(counts)
    ones = np.ones(samples, np.int64)
    lengths = Lengths(ones, ones, dict.fromkeys(encoders, ones))
    return step_table(layout, lengths, microbatches=microbatches, chunks=chunks)
