"""Rows of packed samples: batches counted in tokens instead of samples.

A batch has a fixed number of rows. A row holds whole samples with at most `max_tokens` tokens in total. It becomes one
packed row of the language model, where the bitfield mask separates the documents. The samples of an epoch are taken in
their drawn order, as many per batch as fit. The balancer (`lpt`) assigns them to the rows of the batch at about equal
length, so no rank waits for a fuller row. Everything follows from the seed and the lengths: every rank can compute the
rows of any step, and the position in the epoch is the only state.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from interlace import balance
from interlace.data.dataset import SampleDataset
from interlace.data.loader import Loader
from interlace.data.workers.produced import ReadAhead
from interlace.model.sample import Media


class _Plan(NamedTuple):
    """The rows of an epoch as arrays, not as one object per sample.

    samples: int64, dataset indices row by row; starts: int64 [batches * rows + 1], offset of each row in them.
    """

    samples: np.ndarray
    starts: np.ndarray


class RowLoader(Loader):
    """Batches of `rows` rows with at most `max_tokens` tokens each.

    `__next__` yields a batch as lists of samples, one list per row; `ahead.wanted` gets the same. dataset: needs
    `token_lengths` (int64 [n]). The last batch of an epoch has the rest, in shorter or fewer rows;
    drop_last leaves these samples out.
    Raises ValueError when a sample is longer than a row, or when drop_last leaves no batch.
    """

    def __init__(
        self,
        dataset: SampleDataset,
        rows: int,
        max_tokens: int,
        *,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
        ahead: ReadAhead = ReadAhead(),  # noqa: B008 (frozen)
    ) -> None:
        super().__init__(dataset, 1, seed=seed, shuffle=shuffle, drop_last=drop_last, ahead=ahead)
        self.tokens = np.asarray(dataset.token_lengths, np.int64)
        if rows < 1:
            raise ValueError(f"rows is {rows}: a batch needs at least one")
        if int(self.tokens.max()) > max_tokens:
            raise ValueError(
                f"a sample has {int(self.tokens.max())} tokens, a row takes {max_tokens}; raise max_tokens"
            )
        self.rows, self.max_tokens = rows, max_tokens
        self._planned: dict[int, _Plan] = {}
        self.batches_per_epoch = self.batches(0)  # approximate for other epochs
        if not self.batches_per_epoch:
            raise ValueError(
                f"{len(self.tokens)} samples with {int(self.tokens.sum())} tokens make no batch of {rows} rows with "
                f"{max_tokens} tokens each; lower max_tokens or the number of rows, or leave out drop_last"
            )

    def __getstate__(self) -> dict[str, object]:
        return super().__getstate__() | {"_planned": {}, "tokens": None}  # the copy takes the lengths from its dataset

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        self.tokens = np.asarray(self.dataset.token_lengths, np.int64)  # type: ignore[attr-defined]

    def _plan(self, epoch: int) -> _Plan:
        planned = self._planned.get(epoch)
        if planned is None:
            order = self.order(epoch)
            start, samples, counts = 0, [order[:0]], [np.zeros(1, np.int64)]
            sums = np.concatenate([[0], np.cumsum(self.tokens[order])])
            room = self.rows * self.max_tokens
            while start < len(order):
                end = int(np.searchsorted(sums, sums[start] + room, side="right")) - 1
                if self.drop_last and end == len(order):  # the rest does not fill a batch
                    break
                dealt, each = self._deal(order[start:end])
                samples.append(dealt)
                counts.append(each)
                start += len(dealt)
            planned = _Plan(np.concatenate(samples), np.cumsum(np.concatenate(counts)))
            kept = {other: plan for other, plan in self._planned.items() if abs(other - epoch) < 2}
            self._planned = {**kept, epoch: planned}  # as in `Loader.order`
        return planned

    def _deal(self, picks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The first `picks` that fit into the rows, row by row, and the count per row. The rest goes to the next."""
        while True:
            lengths = self.tokens[picks]
            bins = balance.assign(lengths, self.rows)
            if int(np.bincount(bins, weights=lengths, minlength=self.rows).max()) <= self.max_tokens:
                return picks[np.argsort(bins, kind="stable")], np.bincount(bins, minlength=self.rows)
            picks = picks[:-1]

    def groups(self, epoch: int, position: int) -> list[list[int]]:
        """The dataset indices of each row of a batch, without empty rows."""
        plan = self._plan(epoch)
        ends = plan.starts[position * self.rows : (position + 1) * self.rows + 1].tolist()
        rows = [plan.samples[first:last].tolist() for first, last in pairwise(ends)]
        return [row for row in rows if row]

    def indices(self, epoch: int, position: int) -> list[int]:
        """Dataset indices of the batch at `position` of `epoch`, row by row."""
        return [index for row in self.groups(epoch, position) for index in row]

    def drawn(self, epoch: int, position: int) -> int:
        """Number of samples of the order of `epoch` drawn by the end of the batch at `position`."""
        return int(self._plan(epoch).starts[(position + 1) * self.rows])

    def _make(self, epoch: int, position: int) -> list[Any]:
        samples = iter(super()._make(epoch, position))
        return [[next(samples) for _ in row] for row in self.groups(epoch, position)]

    def _all_media(self, batch: list[Any]) -> Iterable[Media]:
        return super()._all_media([sample for row in batch for sample in row])

    def batches(self, epoch: int) -> int:
        """Number of batches of an epoch."""
        return (len(self._plan(epoch).starts) - 1) // self.rows

    def state_dict(self) -> dict[str, Any]:
        """Position of the next batch and the settings: plain numbers, the same on every rank."""
        return super().state_dict() | {"batch_size": self.rows, "row_tokens": self.max_tokens}


__all__ = ["RowLoader"]
