"""Route: the rows of one chunk that another chunk reads, and their layout in a message.

A message holds the rows in the order of the reader's placeholders, so the reader writes them in one operation. The
gradient takes the same rows in the opposite direction.

All ranks of a lane hold all rows of a message. To avoid duplicate transfers, a message between lanes is split into as
many parts as the larger lane has ranks. The receiving ranks join their parts. The lane sizes need not divide each other
or the number of rows.

With context parallelism a rank reads only the rows of its own placeholders. A message then holds the rows of the first
rank, of the second, and so on, called regions. Each region travels in parts between the other lane and the ranks that
hold the region (several with tensor parallelism).
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

from interlace.parallel.sending import to_device
from interlace.schedule.table import StepTable

Index = slice | Tensor
"""Consecutive rows (slice), or row indices int64 [n]."""


class Route(NamedTuple):
    """Rows of a message and their destinations.

    rows: of the source chunk, region by region.
    regions: number of rows of each context-parallel rank that reads (one region without context parallelism).
    places: for each region, positions of its rows among the rank's placeholders of that encoder.
    length: total number of rows.
    """

    rows: Index
    places: tuple[Index, ...]
    length: int
    regions: tuple[int, ...]


class Part(NamedTuple):
    """Rows [start, stop) of a message, from one rank of the sending lane to one of the receiving lane."""

    sender: int
    receiver: int
    start: int
    stop: int


@lru_cache
def pairs(senders: int, receivers: int) -> tuple[tuple[int, int], ...]:
    """(sender, receiver) of each part of a message between lanes of these sizes, in row order.

    Each receiver has consecutive parts. The reverse direction gives the same pairs, so a gradient returns to the rank
    that sent the rows.
    """
    count = max(senders, receivers)
    return tuple((part * senders // count, part * receivers // count) for part in range(count))


@lru_cache(1024)
def parts_of_regions(regions: tuple[int, ...], senders: int, receivers: int, *, receives: bool) -> tuple[Part, ...]:
    """The parts of a message with these region sizes, if the regions belong to ranks of the receiving or sending lane.

    The same number of adjacent ranks of that lane shares each region. A part may be empty.
    """
    lane_pairs = pairs(senders, receivers)
    size = receivers if receives else senders
    regional: list[list[tuple[int, int]]] = [[] for _ in regions]
    for sender, receiver in lane_pairs:
        regional[(receiver if receives else sender) * len(regions) // size].append((sender, receiver))
    parts = []
    first = 0
    for rows, region_pairs in zip(regions, regional, strict=True):
        cuts = [first + part * rows // len(region_pairs) for part in range(len(region_pairs) + 1)]
        parts += [Part(*pair, *cut) for pair, cut in zip(region_pairs, pairwise(cuts), strict=True)]
        first += rows
    return tuple(parts)


def rows_per_receiver(parts: Sequence[Part], receivers: int) -> tuple[int, ...]:
    """Number of rows that each receiver gets."""
    counts = [0] * receivers
    for part in parts:
        counts[part.receiver] += part.stop - part.start
    return tuple(counts)


class Routes:
    """The routes of a step's table, for rows on `device`.

    ranks: number of context-parallel ranks of the readers.
    owners: (reading chunk, encoder) -> int [n], the rank of each of its placeholders of that encoder. Called once for
        each pair, on first use.

    Raises ValueError for a chunk with a placeholder that is not filled exactly once.
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
        self._total: dict[tuple[str, int], int] = {}  # (encoder, reading chunk) -> total rows read
        self._owned: dict[tuple[str, int], _Owned] = {}
        self.sources: dict[int, list[int]] = {}
        """Chunk -> chunks whose rows it reads."""
        self.readers: dict[int, list[int]] = {}
        """Chunk -> chunks that read its rows."""
        self._pieces: dict[tuple[int, int], list[list[int]]] = {}
        self._routes: dict[tuple[int, int], Route] = {}
        for edge in table.edges:
            if len(edge.pieces):
                _check_filled(table, edge.producer, edge.pieces)
            order = np.lexsort((edge.pieces[:, 3], edge.pieces[:, 2], edge.pieces[:, 0]))
            for piece in edge.pieces[order].tolist():
                source, _, reader, _, count = piece
                pieces = self._pieces.get((source, reader))
                if pieces is None:
                    pieces = self._pieces[source, reader] = []
                    self.sources.setdefault(reader, []).append(source)
                    self.readers.setdefault(source, []).append(reader)
                pieces.append(piece)
                key = (edge.producer, reader)
                self._total[key] = self._total.get(key, 0) + count

    def between(self, source: int, reader: int) -> Route:
        """The route from chunk `source` to chunk `reader`."""
        route = self._routes.get((source, reader))
        if route is None:
            route = self._routes[source, reader] = self._route(source, reader)
        return route

    def _route(self, source: int, reader: int) -> Route:
        pieces = self._pieces[source, reader]
        if self._owners is None:
            length = sum(piece[4] for piece in pieces)
            return Route(self._joined(pieces, 1), (self._joined(pieces, 3),), length, (length,))
        rows, places = _rows(pieces, 1), _rows(pieces, 3)
        owned = self._owned_of(self._table.chunks[source].module, reader)
        owner = owned.owner[places]
        order = np.argsort(owner, kind="stable")
        rows, places = rows[order], owned.place[places[order]]
        regions = np.bincount(owner, minlength=self._ranks)
        by_region = np.split(places, np.cumsum(regions)[:-1])
        return Route(self._index(rows), tuple(map(self._index, by_region)), len(rows), tuple(regions.tolist()))

    def _joined(self, pieces: list[list[int]], column: int) -> Index:
        """The rows of the pieces on the side that starts at `column`. Fast path: one slice for consecutive pieces."""
        if all(piece[column] + piece[4] == follows[column] for piece, follows in pairwise(pieces)):
            return slice(pieces[0][column], pieces[-1][column] + pieces[-1][4])
        return self._index(_rows(pieces, column))

    def total(self, producer: str, reader: int, rank: int = 0) -> int:
        """Total rows that a context-parallel rank of chunk `reader` reads from encoder `producer`."""
        if self._owners is None:
            return self._total.get((producer, reader), 0)
        return int(np.count_nonzero(self._owned_of(producer, reader).owner == rank))

    def _owned_of(self, producer: str, reader: int) -> _Owned:
        owned = self._owned.get((producer, reader))
        if owned is None:
            assert self._owners is not None
            owner = self._owners(reader, producer)
            index = np.zeros(len(owner), np.int64)
            for rank in range(self._ranks):
                of_rank = owner == rank
                index[of_rank] = np.arange(np.count_nonzero(of_rank))
            owned = self._owned[producer, reader] = _Owned(owner, index)
        return owned

    def _index(self, rows: NDArray[np.int64]) -> Index:
        if (np.diff(rows) == 1).all():
            first = int(rows[0]) if len(rows) else 0
            return slice(first, first + len(rows))
        return to_device(torch.from_numpy(rows), self._device)


class _Owned(NamedTuple):
    """For each placeholder of an encoder in a chunk: its rank, and its index among the placeholders of that rank."""

    owner: NDArray[np.int64]
    place: NDArray[np.int64]


def _rows(pieces: Sequence[Sequence[int]], column: int) -> NDArray[np.int64]:
    """The rows of the pieces on the side that starts at `column`."""
    return np.concatenate([np.arange(piece[column], piece[column] + piece[4], dtype=np.int64) for piece in pieces])


def _check_filled(table: StepTable, producer: str, pieces: NDArray[np.int32]) -> None:
    """Raises ValueError unless pieces fill all placeholders once: unfilled rows would hold uninitialized memory."""
    pieces = pieces[np.lexsort((pieces[:, 3], pieces[:, 2]))]
    expected = np.zeros(len(pieces), np.int64)
    follows = pieces[1:, 2] == pieces[:-1, 2]
    expected[1:][follows] = (pieces[:-1, 3].astype(np.int64) + pieces[:-1, 4])[follows]
    wrong = pieces[:, 3] != expected
    if wrong.any():
        _, _, reader, row, _ = pieces[wrong.argmax()].tolist()
        raise ValueError(
            f"{table.chunks[reader]} has a piece of {producer} for placeholder {row}, expected one for "
            f"{expected[wrong.argmax()]}: each placeholder must be filled once, from 0 on"
        )


def take(rows: Tensor, index: Index) -> Tensor:
    """rows[index], a view if possible."""
    return rows[index] if isinstance(index, slice) else rows.index_select(0, index)


def put(into: Tensor, index: Index, rows: Tensor, *, add: bool = False) -> None:
    """into[index] = rows, or += rows."""
    if isinstance(index, slice):
        into[index].add_(rows) if add else into[index].copy_(rows)
    elif add:
        into.index_add_(0, index, rows)
    else:
        into.index_copy_(0, index, rows)
