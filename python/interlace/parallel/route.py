"""Which bytes: the rows of one chunk that another chunk reads, as one message carries them.

A message has the rows in the order in which the reader has its placeholders, so it can be put there in one go; the
gradient takes the same rows the other way. Lanes of one rank so far: the rows of a lane are the rows of its rank.
"""

from __future__ import annotations

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


class Routes:
    """The routes of a step's table, for rows on `device`."""

    def __init__(self, table: StepTable, device: torch.device | str = "cpu") -> None:
        self._device = torch.device(device)
        self._pieces: dict[tuple[int, int], NDArray[np.int32]] = {}
        self.total: dict[tuple[str, int], int] = {}
        """(encoder, chunk that reads) -> rows that it reads of that encoder in all."""
        self.sources: dict[int, list[int]] = {}
        """Chunk -> the chunks whose rows it reads."""
        self.readers: dict[int, list[int]] = {}
        """Chunk -> the chunks that read its rows."""
        for edge in table.edges:
            pieces = edge.pieces
            if len(pieces) == 0:
                continue
            pieces = pieces[np.lexsort((pieces[:, 3], pieces[:, 2], pieces[:, 0]))]
            key = pieces[:, 0].astype(np.int64) << 32 | pieces[:, 2]
            starts = np.flatnonzero(np.concatenate([[True], key[1:] != key[:-1]]))
            for part, (source, _, reader, _, _) in zip(
                np.split(pieces, starts[1:]), pieces[starts].tolist(), strict=True
            ):
                self._pieces[source, reader] = part
                self.sources.setdefault(reader, []).append(source)
                self.readers.setdefault(source, []).append(reader)
            readers, place = np.unique(pieces[:, 2], return_inverse=True)
            sums = np.bincount(place.reshape(-1), weights=pieces[:, 4])
            self.total.update({(edge.producer, int(r)): int(n) for r, n in zip(readers, sums, strict=True)})
        self._made: dict[tuple[int, int], Route] = {}

    def between(self, source: int, reader: int) -> Route:
        """The route of what chunk `reader` reads of chunk `source`."""
        route = self._made.get((source, reader))
        if route is None:
            pieces = self._pieces[source, reader]
            count = int(pieces[:, 4].sum())
            rows, places = (_index(pieces[:, column], pieces[:, 4], self._device) for column in (1, 3))
            route = Route(rows, places, count)
            self._made[source, reader] = route
        return route


def _index(starts: NDArray[np.int32], counts: NDArray[np.int32], device: torch.device) -> Index:
    if np.array_equal(starts[:-1] + counts[:-1], starts[1:]):
        return slice(int(starts[0]), int(starts[-1] + counts[-1]))
    before = np.cumsum(counts) - counts
    rows = np.repeat(starts.astype(np.int64) - before, counts) + np.arange(int(counts.sum()))
    return torch.from_numpy(rows).to(device)


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
