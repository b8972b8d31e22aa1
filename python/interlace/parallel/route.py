"""Which bytes: the rows of one chunk that another chunk reads, as one message carries them.

A message has the rows in the order in which the reader has its placeholders, so it can be put there in one go; the
gradient takes the same rows the other way.

The ranks of a lane all hold all rows of a message. So that none is sent twice, it travels between lanes in parts: as
many as the larger lane has ranks, and the receiving ranks join theirs. Neither the sizes of the lanes need divide each
other, nor the rows.

Where tokens are dealt among context-parallel ranks, a rank reads the rows of its own placeholders alone. A message then
has those of the first rank, of the second, ...: regions, each of which travels in parts between the ranks that have it,
several with tensor parallelism, and the other lane.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from interlace.parallel.sending import sent
from interlace.schedule.table import StepTable

Index = slice | Tensor
"""Rows that follow each other, or int64 [n]."""


class Route(NamedTuple):
    """rows: of the chunk that is read, region by region. regions: rows of each context-parallel rank that reads (one
    region without context parallelism). places: for each of them, where its rows go among its placeholders of that
    encoder. length: rows in all.
    """

    rows: Index
    places: tuple[Index, ...]
    length: int
    regions: tuple[int, ...]


class Part(NamedTuple):
    """Rows [start, stop) of a message, from one place in the sending lane to one in the receiving lane."""

    sender: int
    receiver: int
    start: int
    stop: int


@lru_cache
def pairs(senders: int, receivers: int) -> tuple[tuple[int, int], ...]:
    """(sender, receiver) of each part of a message between lanes of so many ranks, in the order of the rows.

    Each receiver has parts that follow each other. The other way round the same places meet, so a gradient goes back
    where its rows came from.
    """
    count = max(senders, receivers)
    return tuple((part * senders // count, part * receivers // count) for part in range(count))


@lru_cache(1024)
def parts_of_regions(regions: tuple[int, ...], senders: int, receivers: int, *, receives: bool) -> tuple[Part, ...]:
    """The parts of a message of regions of so many rows, dealt among the ranks of the lane that receives or that sends.

    Equally many neighbours of that lane have a region together. A part may be empty.
    """
    met = pairs(senders, receivers)
    size = receivers if receives else senders
    regional: list[list[tuple[int, int]]] = [[] for _ in regions]
    for sender, receiver in met:
        regional[(receiver if receives else sender) * len(regions) // size].append((sender, receiver))
    found = []
    first = 0
    for rows, mine in zip(regions, regional, strict=True):
        cuts = [first + part * rows // len(mine) for part in range(len(mine) + 1)]
        found += [Part(*pair, *cut) for pair, cut in zip(mine, pairwise(cuts), strict=True)]
        first += rows
    return tuple(found)


def shares(parts: Sequence[Part], receivers: int) -> tuple[int, ...]:
    """How many rows each receiver is sent."""
    found = [0] * receivers
    for part in parts:
        found[part.receiver] += part.stop - part.start
    return tuple(found)


class Routes:
    """The routes of a step's table, for rows on `device`.

    ranks: context-parallel ranks of what reads. owners: (chunk that reads, encoder) -> int [n], the rank that has each
    of its placeholders of that encoder; asked once for each, when first needed. Raises ValueError for a chunk some of
    whose placeholders nothing fills, or two things.
    """

    def __init__(
        self,
        table: StepTable,
        device: torch.device | str = "cpu",
        *,
        ranks: int = 1,
        owners: Callable[[int, str], NDArray[np.int64]] | None = None,
    ) -> None:
        self._table, self._device, self._ranks, self._owners = table, torch.device(device), ranks, owners
        self._total: dict[tuple[str, int], int] = {}  # (encoder, chunk that reads) -> rows that it reads in all
        self._dealt: dict[tuple[str, int], _Dealt] = {}
        self.sources: dict[int, list[int]] = {}
        """Chunk -> the chunks whose rows it reads."""
        self.readers: dict[int, list[int]] = {}
        """Chunk -> the chunks that read its rows."""
        self._pieces: dict[tuple[int, int], list[list[int]]] = {}
        self._made: dict[tuple[int, int], Route] = {}
        for edge in table.edges:
            if len(edge.pieces):
                _check_filled(table, edge.producer, edge.pieces)
            order = np.lexsort((edge.pieces[:, 3], edge.pieces[:, 2], edge.pieces[:, 0]))
            for piece in edge.pieces[order].tolist():
                source, _, reader, _, count = piece
                found = self._pieces.get((source, reader))
                if found is None:
                    found = self._pieces[source, reader] = []
                    self.sources.setdefault(reader, []).append(source)
                    self.readers.setdefault(source, []).append(reader)
                found.append(piece)
                key = (edge.producer, reader)
                self._total[key] = self._total.get(key, 0) + count

    def between(self, source: int, reader: int) -> Route:
        """The route of what chunk `reader` reads of chunk `source`."""
        route = self._made.get((source, reader))
        if route is None:
            route = self._made[source, reader] = self._route(source, reader)
        return route

    def _route(self, source: int, reader: int) -> Route:
        pieces = self._pieces[source, reader]
        if self._owners is None:
            length = sum(piece[4] for piece in pieces)
            return Route(self._joined(pieces, 1), (self._joined(pieces, 3),), length, (length,))
        rows, places = _rows(pieces, 1), _rows(pieces, 3)
        dealt = self._dealt_of(self._table.chunks[source].module, reader)
        owner = dealt.owner[places]
        order = np.argsort(owner, kind="stable")
        rows, places = rows[order], dealt.place[places[order]]
        regions = np.bincount(owner, minlength=self._ranks)
        own = np.split(places, np.cumsum(regions)[:-1])
        return Route(self._index(rows), tuple(map(self._index, own)), len(rows), tuple(regions.tolist()))

    def _joined(self, pieces: list[list[int]], column: int) -> Index:
        """The rows of the pieces on the side that starts at `column`; in most routes, and at once, one slice."""
        if all(piece[column] + piece[4] == follows[column] for piece, follows in pairwise(pieces)):
            return slice(pieces[0][column], pieces[-1][column] + pieces[-1][4])
        return self._index(_rows(pieces, column))

    def total(self, producer: str, reader: int, rank: int = 0) -> int:
        """Rows that a context-parallel rank of chunk `reader` reads of encoder `producer` in all."""
        if self._owners is None:
            return self._total.get((producer, reader), 0)
        return int(np.count_nonzero(self._dealt_of(producer, reader).owner == rank))

    def _dealt_of(self, producer: str, reader: int) -> _Dealt:
        found = self._dealt.get((producer, reader))
        if found is None:
            assert self._owners is not None
            owner = self._owners(reader, producer)
            place = np.zeros(len(owner), np.int64)
            for rank in range(self._ranks):
                mine = owner == rank
                place[mine] = np.arange(np.count_nonzero(mine))
            found = self._dealt[producer, reader] = _Dealt(owner, place)
        return found

    def _index(self, rows: NDArray[np.int64]) -> Index:
        if (np.diff(rows) == 1).all():
            first = int(rows[0]) if len(rows) else 0
            return slice(first, first + len(rows))
        return sent(torch.from_numpy(rows), self._device)


class _Dealt(NamedTuple):
    """Of each placeholder of an encoder in a chunk: the rank that has it, and its place among those of that rank."""

    owner: NDArray[np.int64]
    place: NDArray[np.int64]


def _rows(pieces: Sequence[Sequence[int]], column: int) -> NDArray[np.int64]:
    """The rows of the pieces on the side that starts at `column`."""
    return np.concatenate([np.arange(piece[column], piece[column] + piece[4], dtype=np.int64) for piece in pieces])


def _check_filled(table: StepTable, producer: str, pieces: NDArray[np.int32]) -> None:
    """What no piece fills would be whatever the memory held before."""
    pieces = pieces[np.lexsort((pieces[:, 3], pieces[:, 2]))]
    due = np.zeros(len(pieces), np.int64)
    follows = pieces[1:, 2] == pieces[:-1, 2]
    due[1:][follows] = (pieces[:-1, 3].astype(np.int64) + pieces[:-1, 4])[follows]
    wrong = pieces[:, 3] != due
    if wrong.any():
        _, _, reader, row, _ = pieces[wrong.argmax()].tolist()
        raise ValueError(
            f"{table.chunks[reader]} has a piece of {producer} for placeholder {row} where that for "
            f"{due[wrong.argmax()]} is due: each placeholder is filled once, from 0 on"
        )


def take(rows: Tensor, index: Index) -> Tensor:
    """rows[index], a view where that is possible."""
    return rows[index] if isinstance(index, slice) else rows.index_select(0, index)


def put(into: Tensor, index: Index, rows: Tensor, *, add: bool = False) -> None:
    """into[index] = rows, or += rows."""
    if isinstance(index, slice):
        into[index].add_(rows) if add else into[index].copy_(rows)
    elif add:
        into.index_add_(0, index, rows)
    else:
        into.index_copy_(0, index, rows)
