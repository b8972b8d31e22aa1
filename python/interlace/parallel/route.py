"""Which bytes: the rows of one chunk that another chunk reads, as one message carries them.

A message has the rows in the order in which the reader has its placeholders, so it can be put there in one go; the
gradient takes the same rows the other way.

The ranks of a lane all hold all rows of a message. So that none is sent twice, it travels between lanes in parts: as
many as the larger lane has ranks, and the receiving ranks join theirs. Neither the sizes of the lanes need divide each
other, nor the rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from interlace.schedule.table import StepTable

Index = slice | Tensor
"""Rows that follow each other, or int64 [n]."""


class Route(NamedTuple):
    """rows: of the chunk that is read. places: of the one that reads, among its placeholders of that encoder.

    length: how many they are.
    """

    rows: Index
    places: Index
    length: int


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
def parts(rows: int, senders: int, receivers: int) -> tuple[Part, ...]:
    """The parts of a message of so many rows. A part may be empty."""
    met = pairs(senders, receivers)
    return tuple(
        Part(sender, receiver, part * rows // len(met), (part + 1) * rows // len(met))
        for part, (sender, receiver) in enumerate(met)
    )


@lru_cache(1024)
def shares(rows: int, senders: int, receivers: int) -> tuple[int, ...]:
    """How many rows each receiver is sent."""
    found = [0] * receivers
    for part in parts(rows, senders, receivers):
        found[part.receiver] += part.stop - part.start
    return tuple(found)


class Routes:
    """The routes of a step's table, for rows on `device`.

    Raises ValueError for a chunk some of whose placeholders nothing fills, or two things.
    """

    def __init__(self, table: StepTable, device: torch.device | str = "cpu") -> None:
        self._device = torch.device(device)
        self.total: dict[tuple[str, int], int] = {}
        """(encoder, chunk that reads) -> rows that it reads of that encoder in all."""
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
                self.total[key] = self.total.get(key, 0) + count

    def between(self, source: int, reader: int) -> Route:
        """The route of what chunk `reader` reads of chunk `source`."""
        route = self._made.get((source, reader))
        if route is None:
            pieces = self._pieces[source, reader]
            length = sum(piece[4] for piece in pieces)
            route = Route(_index(pieces, 1, self._device), _index(pieces, 3, self._device), length)
            self._made[source, reader] = route
        return route


def _index(pieces: Sequence[Sequence[int]], column: int, device: torch.device) -> Index:
    """The rows of the pieces on the side that starts at `column`."""
    if all(a[column] + a[4] == b[column] for a, b in pairwise(pieces)):
        return slice(pieces[0][column], pieces[-1][column] + pieces[-1][4])
    return torch.cat([torch.arange(piece[column], piece[column] + piece[4]) for piece in pieces]).to(device)


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
