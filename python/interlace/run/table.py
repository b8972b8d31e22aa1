"""What a step computes, from lengths alone: which samples form which chunk, and which rows of it another chunk reads.

Every rank makes the table of a step by itself: it is the same everywhere, as it follows from the lengths of the samples
in the global batch, the layout and the numbers of chunks. Nothing is exchanged, decoded or timed for it.

Chunks of the language model are bins of samples of about equal length. Those of an encoder follow them: what the k-th
chunks of the language model's replicas read is encoded together, shared out over the encoder's replicas by its rows (or
kept in its own replica where both have equally many). With fewer chunks than the language model one chunk is encoded
for several of its microbatches, with more the k-th is encoded in parts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from interlace import balance
from interlace.layout import Layout
from interlace.schedule.table import Chunk, Edge, StepTable, merged

IGNORE = -100
PORT = "embeds"

Ints = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Lengths:
    """The lengths of a batch of n samples.

    tokens: int64 [n], of the language model. targets: int64 [n], positions with a valid target. rows: encoder -> int64
    [n], rows of features that its items become.
    """

    tokens: Ints
    targets: Ints
    rows: Mapping[str, Ints]

    @classmethod
    def of(cls, samples: Sequence[Any], encoders: Sequence[str]) -> Lengths:
        """Those of `samples`; media need not be decoded."""
        return cls(
            np.array([len(sample.input_ids) for sample in samples], np.int64),
            np.array([np.count_nonzero(sample.labels.numpy() != IGNORE) for sample in samples], np.int64),
            {
                name: np.array([sum(item.tokens for item in s.media.get(name, ())) for s in samples], np.int64)
                for name in encoders
            },
        )

    def __len__(self) -> int:
        return len(self.tokens)


def step_table(
    layout: Layout,
    lengths: Lengths,
    *,
    microbatches: int | None = None,
    groups: Sequence[Sequence[int]] | None = None,
    chunks: Mapping[str, int] | None = None,
    place: tuple[int, int, int] = (0, 0, 0),
) -> StepTable:
    """The table of one step.

    microbatches: chunks of each replica of the language model (the layout's last module), at most one per sample;
        default: twice the stages of its pipeline. groups: instead, the samples of its chunks; the i-th goes to replica
        i modulo their number. chunks: encoder -> chunks of each of its replicas (default: as many as the language model
        has, 1 under "shared"). place: see StepTable.

    Raises ValueError for a batch without samples, counts below 1, and unknown encoders.
    """
    *encoders, language_model = layout.modules
    given = dict(chunks or {})
    unknown = [name for name in given if name not in encoders]
    if unknown:
        raise ValueError(f"chunks names {unknown[0]!r}: the encoders are {', '.join(encoders) or 'none'}")
    for name, count in [("microbatches", microbatches), *((f"chunks[{n!r}]", c) for n, c in given.items())]:
        if count is not None and count < 1:
            raise ValueError(f"{name} is {count}: it must be at least 1")
    if len(lengths) == 0:
        raise ValueError("a step needs at least one sample")
    dp = layout.spec(language_model).dp
    if groups is None:
        wanted = microbatches or 2 * layout.spec(language_model).pp
        bins = min(len(lengths), dp * wanted)
        bin_of = balance.assign(lengths.tokens, bins, capacity=-(-len(lengths) // bins))
    else:
        bins = len(groups)
        bin_of = np.full(len(lengths), -1, np.int32)
        for b, members in enumerate(groups):
            bin_of[list(members)] = b
    order = np.argsort(bin_of, kind="stable")
    members_of = np.split(order, np.cumsum(np.bincount(bin_of, minlength=bins))[:-1])
    slots = -(-bins // dp)  # bin b is the (b // dp)-th chunk of replica b % dp

    made: list[Chunk] = []
    source: dict[str, tuple[Ints, Ints]] = {}
    for name in encoders:
        default = 1 if layout.placement == "shared" else slots
        source[name] = _encoder_chunks(
            made, name, lengths.rows[name], members_of, given.get(name, default), layout.spec(name).dp, dp
        )
    first = len(made)
    number = np.empty(bins, np.int64)
    for replica in range(min(dp, bins)):
        for index, b in enumerate(range(replica, bins, dp)):
            number[b] = len(made)
            made.append(Chunk(language_model, replica, index, members_of[b].astype(np.int32)))

    destination = number[bin_of]  # of each sample
    edges = []
    for name in encoders:
        rows = lengths.rows[name]
        offset = np.zeros(len(lengths), np.int64)
        for mine in members_of:
            offset[mine] = np.cumsum(rows[mine]) - rows[mine]
        chunk, row = source[name]
        used = np.flatnonzero(rows)
        pieces = np.stack([chunk[used], row[used], destination[used], offset[used], rows[used]], axis=1)
        edges.append(Edge(name, language_model, PORT, merged(pieces.astype(np.int32))))
    targets = np.zeros(len(made), np.int64)
    targets[first:] = np.bincount(destination - first, weights=lengths.targets, minlength=bins).astype(np.int64)
    return StepTable(tuple(made), tuple(edges), targets, place)


def _encoder_chunks(
    made: list[Chunk],
    name: str,
    rows: Ints,
    members_of: Sequence[NDArray[np.int64]],
    count: int,
    dp: int,
    readers: int,
) -> tuple[Ints, Ints]:
    """Adds the chunks of an encoder to `made`; returns the chunk and the first row in it of each sample's items.

    members_of: the samples of the chunks that read them, first those of slot 0 of all replicas, and so on. count:
    chunks wanted per replica of `dp`. readers: replicas of the language model.
    """
    slots = -(-len(members_of) // readers)
    parts: list[list[list[NDArray[np.int64]]]] = [[[] for _ in range(count)] for _ in range(dp)]
    for turn in range(min(count, slots)):
        # With fewer chunks than slots a turn is a chunk over several slots, with more it is a slot in several chunks.
        span = range(-(-turn * slots // count), -(-(turn + 1) * slots // count)) if count < slots else (turn, turn)
        into = [turn] if count <= slots else range(-(-turn * count // slots), -(-(turn + 1) * count // slots))
        here = members_of[span[0] * readers : (span[-1] + 1) * readers]
        for replica in range(dp) if dp == readers else (-1,):  # as many replicas: each encodes for its own
            found = here if replica < 0 else here[replica::readers]
            items = np.concatenate(found) if found else np.zeros(0, np.int64)
            items = items[rows[items] > 0]
            homes = range(dp) if replica < 0 else (replica,)
            bins = len(into) * len(homes)
            if bins == 1 or len(items) == 0:
                parts[homes[0]][into[0]].append(items)
                continue
            share = balance.assign(rows[items], bins)
            for b in range(bins):
                parts[homes[b % len(homes)]][into[b // len(homes)]].append(items[share == b])
    chunk, first_row = np.full(len(rows), -1, np.int64), np.zeros(len(rows), np.int64)
    for replica in range(dp):
        index = 0
        for pieces in parts[replica]:
            items = np.concatenate(pieces) if pieces else np.zeros(0, np.int64)
            if len(items) == 0:
                continue
            chunk[items] = len(made)
            first_row[items] = np.cumsum(rows[items]) - rows[items]
            made.append(Chunk(name, replica, index, items.astype(np.int32)))
            index += 1
    return chunk, first_row


def nominal_table(
    layout: Layout, microbatches: int, chunks: Mapping[str, int] | None = None, samples: int | None = None
) -> StepTable:
    """A table for planning: `samples` alike, each with one item of every encoder.

    By default so many that every chunk of every replica has equally many, if that can be.
    """
    *encoders, language_model = layout.modules
    count = layout.spec(language_model).dp * microbatches
    if samples is None:
        samples = count
        for name in encoders:
            samples = int(np.lcm(samples, layout.spec(name).dp * (chunks or {}).get(name, microbatches)))
    ones = np.ones(samples, np.int64)
    lengths = Lengths(ones, ones, dict.fromkeys(encoders, ones))
    return step_table(layout, lengths, microbatches=microbatches, chunks=chunks)
