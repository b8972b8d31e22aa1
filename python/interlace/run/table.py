"""What a step computes, from lengths alone: which samples form which chunk, and which rows of it another chunk reads.

Every rank makes the table of a step by itself: it is the same everywhere, as it follows from the lengths of the samples
in the global batch, the layout and the numbers of chunks. Nothing is exchanged, decoded or timed for it.

Chunks of the language model are bins of samples of about equal length, or those of an `Assignment`; in replicas that
follow from these, or in those of a dispatch (`interlace.run.dispatch`). Those of an encoder follow them: what the k-th
chunks of the language model's replicas read is encoded together, shared out over the encoder's replicas by its rows (or
kept in its own replica where both have equally many, or as a dispatch says). With fewer chunks than the language model
one chunk is encoded for several of its microbatches, with more the k-th is encoded in parts. Deferred samples
(dissertation 4.5.2) are encoded with the k-th too, as a chunk of their own, and read by a later one.
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

PORT = "embeds"

Ints = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Lengths:
    """The lengths of a batch of n samples.

    tokens: int64 [n], of the language model. targets: int64 [n], positions with a valid target. rows: encoder -> int64
    [n], rows of features that its items become. items: encoder -> int64 [n], how many; None: one where there are rows.
    """

    tokens: Ints
    targets: Ints
    rows: Mapping[str, Ints]
    items: Mapping[str, Ints] | None = None

    @classmethod
    def of(cls, samples: Sequence[Any], encoders: Sequence[str]) -> Lengths:
        """Those of `samples`; media need not be decoded."""
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

    def take(self, index: Ints) -> Lengths:
        """Those of the samples at `index`."""
        items = None if self.items is None else {name: each[index] for name, each in self.items.items()}
        rows = {name: each[index] for name, each in self.rows.items()}
        return Lengths(self.tokens[index], self.targets[index], rows, items)


@dataclass(frozen=True, eq=False)
class Assignment:
    """Which microbatch takes each of n samples; see `interlace.run.assign`.

    replica: int [n], of the language model. encoder_slot, llm_slot: int [n], from 0 on; a sample whose slot in the
    language model is the later one is deferred. work: module -> int64 [n], FLOPs of each sample, estimated.
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
        default: twice the stages of its pipeline. Replicas of unequal speed may have a number each. groups: instead,
        the samples of its chunks; the i-th goes to replica i modulo their number, or where `microbatches` has a number
        for each of them to the next in turn that has not got its number yet. chunks: encoder -> chunks of each of its
        replicas (default: as many as the language model has, 1 under "shared"). place: see StepTable. assignment: in
        place of `microbatches` and `groups`, what is in
        which microbatch. One with deferred samples says what the encoders' chunks are, too. replicas: module ->
        int64 [n], the replica of each sample (of an encoder: of each that has items). Of the language model it is read
        where neither `groups` nor `assignment` says it.

    Raises ValueError for a batch without samples, counts below 1, unknown encoders, and deferral where encoders are
    given their chunks.
    """
    *encoders, language_model = layout.modules
    given = dict(chunks or {})
    unknown = [name for name in given if name not in encoders]
    if unknown:
        raise ValueError(f"chunks names {unknown[0]!r}: the encoders are {', '.join(encoders) or 'none'}")
    dp = layout.spec(language_model).dp
    homes = None if microbatches is None or isinstance(microbatches, int) else _turns(microbatches, dp)
    counts = [microbatches] if isinstance(microbatches, int) else list(microbatches or ())
    for name, count in [*(("microbatches", c) for c in counts), *((f"chunks[{n!r}]", c) for n, c in given.items())]:
        if count < 1:
            raise ValueError(f"{name} is {count}: it must be at least 1")
    if len(lengths) == 0:
        raise ValueError("a step needs at least one sample")
    if homes is not None and (assignment is not None or replicas is not None):
        raise ValueError(
            "replicas with a number of microbatches each share samples by these: leave out assignment and replicas "
            "(assign = 'tokens', balance = 'none')"
        )
    late = np.zeros(len(lengths), bool)
    if assignment is not None:
        late = np.asarray(assignment.llm_slot != assignment.encoder_slot)
        bin_of = assignment.llm_slot.astype(np.int64) * dp + assignment.replica
        bins = int(bin_of.max()) + 1
        if late.any() and (given or layout.placement == "shared"):
            raise ValueError(
                "samples are deferred from one chunk of an encoder to the next, which leaves no choice of how many "
                "there are: leave out chunks, and placement 'shared'"
            )
    elif homes is not None:
        bin_of = homes[_places(lengths, len(homes), groups)]
        bins = int(bin_of.max()) + 1
    elif groups is None and replicas is not None and language_model in replicas:
        home = replicas[language_model]
        wanted = counts[0] if counts else 2 * layout.spec(language_model).pp
        bin_of = home.astype(np.int64)
        for replica, mine in enumerate(_members(home, dp)[1] if wanted > 1 else []):
            count = min(len(mine), wanted)
            if count:
                slot = balance.assign(lengths.tokens[mine], count, capacity=-(-len(mine) // count))
                bin_of[mine] = slot.astype(np.int64) * dp + replica
        bins = int(bin_of.max()) + 1
    elif groups is None:
        wanted = counts[0] if counts else 2 * layout.spec(language_model).pp
        bins = min(len(lengths), dp * wanted)
        bin_of = balance.assign(lengths.tokens, bins, capacity=-(-len(lengths) // bins))
    else:
        bins = len(groups)
        bin_of = _places(lengths, bins, groups)
    order, members_of = _members(bin_of, bins)
    slots = -(-bins // dp)  # bin b is of replica b % dp, which takes those that are not empty in order
    encoded = members_of
    if late.any():
        assert assignment is not None
        _, encoded = _members(assignment.encoder_slot.astype(np.int64) * dp + assignment.replica, slots * dp)

    made: list[Chunk] = []
    source: dict[str, tuple[Ints, Ints]] = {}
    for name in encoders:
        default = 1 if layout.placement == "shared" else slots
        source[name] = _encoder_chunks(
            made, name, lengths.rows[name], encoded, given.get(name, default), layout.spec(name).dp, dp, late,
            None if replicas is None else replicas.get(name),
        )  # fmt: skip
    first, numbers = len(made), [0] * bins
    for replica in range(min(dp, bins)):
        index = 0
        for b in range(replica, bins, dp):
            if len(members_of[b]):
                numbers[b] = len(made)
                made.append(Chunk(language_model, replica, index, members_of[b].astype(np.int32)))
                index += 1

    destination = np.array(numbers)[bin_of]  # of each sample
    read = np.concatenate([chunk.samples for chunk in made[first:]])  # as pieces are sorted: they need not be again
    edges = []
    for name in encoders:
        rows = lengths.rows[name]
        offset = _before(rows, order, members_of)
        chunk, row = source[name]
        used = read[rows[read] > 0]
        pieces = np.empty((len(used), 5), np.int32)
        for column, values in enumerate((chunk, row, destination, offset, rows)):
            pieces[:, column] = values[used]
        edges.append(Edge(name, language_model, PORT, merged(pieces)))
    targets = np.zeros(len(made), np.int64)
    targets[first:] = np.bincount(destination - first, weights=lengths.targets, minlength=len(made) - first).astype(
        np.int64
    )
    if assignment is None:
        return StepTable(tuple(made), tuple(edges), targets, place)
    work = np.array([assignment.work[chunk.module][chunk.samples].sum() for chunk in made], np.int64)
    filled = np.any([rows > 0 for rows in lengths.rows.values()], axis=0) if encoders else np.zeros(len(lengths), bool)
    deferred = np.flatnonzero(late & filled).astype(np.int32)
    return StepTable(tuple(made), tuple(edges), targets, place, work, deferred)


def _places(lengths: Lengths, count: int, groups: Sequence[Sequence[int]] | None) -> Ints:
    """int64 [n]: which of `count` microbatches has each sample: its group, or so that their tokens are even."""
    if groups is None:
        bins = min(len(lengths), count)
        return balance.assign(lengths.tokens, bins, capacity=-(-len(lengths) // bins)).astype(np.int64)
    if len(groups) != count:
        raise ValueError(f"{len(groups)} groups of samples cannot be {count} microbatches")
    found = np.full(len(lengths), -1, np.int64)
    for place, members in enumerate(groups):
        found[list(members)] = place
    return found


def _turns(counts: Sequence[int], dp: int) -> Ints:
    """int64 [sum(counts)]: the bins of chunks of replicas that have so many each, in turn: of slot 0 first."""
    if len(counts) != dp:
        raise ValueError(f"microbatches has {len(counts)} numbers for {dp} replicas: give one for each, or one for all")
    return np.array([slot * dp + r for slot in range(max(counts)) for r in range(dp) if slot < counts[r]], np.int64)


def _members(bin_of: NDArray[np.integer], bins: int, of: Ints | None = None) -> tuple[Ints, list[Ints]]:
    """The samples by bin, rising in each: all of them, and bin by bin. of: what has bins, in place of all samples."""
    few = bins <= np.iinfo(np.uint16).max
    order = np.argsort(bin_of.astype(np.uint16) if few else bin_of, kind="stable")  # 16 bits are sorted by radix
    order = order if of is None else of[order]
    ends = np.cumsum(np.bincount(bin_of, minlength=bins)).tolist()
    return order, [order[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]


def _before(rows: Ints, order: Ints, groups: Sequence[Ints]) -> Ints:
    """int64 [n]: of each sample, the rows of those before it in its group; 0 of one without a group. order: the groups
    one after the other."""
    found = np.zeros(len(rows), np.int64)
    behind = np.zeros(len(order) + 1, np.int64)
    np.cumsum(rows[order], out=behind[1:])
    sizes = np.fromiter(map(len, groups), np.int64, len(groups))
    found[order] = behind[:-1] - np.repeat(behind[np.cumsum(sizes) - sizes], sizes)
    return found


def _encoder_chunks(
    made: list[Chunk],
    name: str,
    rows: Ints,
    members_of: Sequence[NDArray[np.int64]],
    count: int,
    dp: int,
    readers: int,
    late: NDArray[np.bool_],
    home: Ints | None,
) -> tuple[Ints, Ints]:
    """Adds the chunks of an encoder to `made`; returns the chunk and the first row in it of each sample's items.

    members_of: the samples that are encoded for each chunk of the language model, first those of slot 0 of all
    replicas, and so on. count: chunks wanted per replica of `dp`. readers: replicas of the language model. late: the
    deferred samples, which get a chunk of their own behind that of the others. home: the replica of each sample; None:
    see the module's docstring.
    """
    slots = -(-len(members_of) // readers)
    parts: list[list[list[NDArray[np.int64]]]] = [[[] for _ in range(count)] for _ in range(dp)]
    for turn in range(min(count, slots)):
        # With fewer chunks than slots a turn is a chunk over several slots, with more it is a slot in several chunks.
        span = range(-(-turn * slots // count), -(-(turn + 1) * slots // count)) if count < slots else (turn, turn)
        into = [turn] if count <= slots else range(-(-turn * count // slots), -(-(turn + 1) * count // slots))
        here = members_of[span[0] * readers : (span[-1] + 1) * readers]
        for replica, items in _of_replicas(here, rows, dp, readers, home):
            homes = range(dp) if replica < 0 else (replica,)
            bins = len(into) * len(homes)
            if bins == 1 or len(items) == 0:
                parts[homes[0]][into[0]].append(items)
                continue
            share = balance.assign(rows[items], bins)
            for b, mine in enumerate(_members(share, bins, items)[1]):
                parts[homes[b % len(homes)]][into[b // len(homes)]].append(mine)
    own, places = list[Ints](), list[tuple[int, int]]()
    first, behind = len(made), bool(late.any())
    for replica in range(dp):
        index = 0
        for pieces in parts[replica]:
            items = pieces[0] if len(pieces) == 1 else np.concatenate([np.zeros(0, np.int64), *pieces])
            for mine in (items[~late[items]], items[late[items]]) if behind else (items,):
                if len(mine):
                    own.append(mine)
                    places.append((replica, index))
                    index += 1
    order = np.concatenate([np.zeros(0, np.int64), *own])
    sizes = np.fromiter(map(len, own), np.int64, len(own))
    samples, end = order.astype(np.int32), 0
    for (replica, index), size in zip(places, sizes.tolist(), strict=True):
        made.append(Chunk(name, replica, index, samples[end : end + size]))
        end += size
    chunk = np.full(len(rows), -1, np.int64)
    chunk[order] = np.repeat(np.arange(first, len(made)), sizes)
    return chunk, _before(rows, order, own)


def _of_replicas(
    members_of: Sequence[NDArray[np.int64]], rows: Ints, dp: int, readers: int, home: Ints | None
) -> list[tuple[int, NDArray[np.int64]]]:
    """(replica, the samples that it encodes) of those of one turn; replica -1: they are for all replicas to share."""
    joined = np.concatenate(members_of) if len(members_of) else np.zeros(0, np.int64)
    items = joined[rows[joined] > 0]
    if home is not None:
        return list(enumerate(_members(home[items], dp, items)[1]))
    if dp != readers:
        return [(-1, items)]
    bins = [each[rows[each] > 0] for each in members_of]  # as many replicas: each encodes for its own
    none = [np.zeros(0, np.int64)]
    return [(replica, np.concatenate(bins[replica::readers] or none)) for replica in range(dp)]


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
