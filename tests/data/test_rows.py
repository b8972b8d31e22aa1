"""Rows of packed samples: full, deterministic, each sample once, resumable anywhere."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from interlace.data import ReadAhead, RowLoader, Sample


class Texts:
    """Sample i is `lengths[i]` tokens i."""

    def __init__(self, lengths: list[int]) -> None:
        self.token_lengths = np.array(lengths)

    def __len__(self) -> int:
        return len(self.token_lengths)

    def sample(self, index: int, epoch: int) -> Sample:
        ids = torch.full((int(self.token_lengths[index]),), index)
        return Sample(ids, torch.full_like(ids, -100))


def _shape(batch: list[Any]) -> list[list[int]]:
    return [[int(sample.input_ids[0]) for sample in row] for row in batch]


LENGTHS = st.lists(st.integers(1, 50), min_size=1, max_size=120)


@settings(max_examples=60, deadline=None)
@given(LENGTHS, st.integers(1, 5), st.integers(50, 160), st.integers(0, 3), st.integers(0, 50))
def test_rows_hold_whole_samples_and_an_epoch_has_all_of_them(
    lengths: list[int], rows: int, most: int, seed: int, stop: int
) -> None:
    loader = RowLoader(Texts(lengths), rows, most, seed=seed, ahead=ReadAhead(prefetch=0))
    count = loader.batches(0) + loader.batches(1)
    batches = [next(loader) for _ in range(count)]
    assert (loader.epoch, loader.position) == (2, 0) and loader.left_out(0) == loader.left_out(1) == 0
    for batch in batches:
        assert len(batch) <= rows and all(row for row in batch)
        assert all(sum(len(sample) for sample in row) <= most for row in batch)
    shapes = [_shape(batch) for batch in batches]
    for mine in (shapes[: loader.batches(0)], shapes[loader.batches(0) :]):
        assert sorted(index for batch in mine for row in batch for index in row) == list(range(len(lengths)))
    stop %= count + 1
    first = RowLoader(Texts(lengths), rows, most, seed=seed, ahead=ReadAhead(prefetch=0))
    assert [_shape(next(first)) for _ in range(stop)] == shapes[:stop]
    resumed = RowLoader(Texts(lengths), rows, most, seed=seed, ahead=ReadAhead(prefetch=0))
    resumed.load_state_dict(first.state_dict())
    assert [_shape(next(resumed)) for _ in range(count - stop)] == shapes[stop:]


@settings(max_examples=60, deadline=None)
@given(LENGTHS, st.integers(1, 5), st.integers(50, 160), st.integers(0, 3))
def test_drop_last_leaves_out_what_does_not_fill_the_rows(lengths: list[int], rows: int, most: int, seed: int) -> None:
    try:
        loader = RowLoader(Texts(lengths), rows, most, seed=seed, ahead=ReadAhead(prefetch=0), drop_last=True)
    except ValueError as error:
        assert "make no batch" in str(error) and sum(lengths) <= rows * most
        return
    seen = [index for _ in range(loader.batches(0)) for row in _shape(next(loader)) for index in row]
    assert len(set(seen)) == len(seen) == len(lengths) - loader.left_out(0)
    assert loader.epoch == 1 and loader.position == 0
    # The rest of the epoch would not have filled another batch.
    assert sum(lengths) - sum(lengths[index] for index in seen) <= rows * most
    whole = RowLoader(Texts(lengths), rows, most, seed=seed, ahead=ReadAhead(prefetch=0))
    assert [index for _ in range(loader.batches(0)) for row in _shape(next(whole)) for index in row] == seen


def test_rows_are_nearly_full_and_about_equal() -> None:
    lengths = np.random.default_rng(0).integers(10, 400, 4000).tolist()
    loader = RowLoader(Texts(lengths), 4, 4096, ahead=ReadAhead(prefetch=0))
    for _ in range(20):
        sizes = [sum(len(sample) for sample in row) for row in next(loader)]
        assert min(sizes) > 0.9 * 4096 and max(sizes) - min(sizes) < 200


def test_resumed_row_loader_continues_with_the_next_batch() -> None:
    texts = Texts(np.random.default_rng(1).integers(5, 60, 50).tolist())
    loader = RowLoader(texts, 2, 120, seed=5, ahead=ReadAhead(prefetch=2))
    taken = [_shape(next(loader)) for _ in range(9)]
    state = loader.state_dict()
    expected = [_shape(next(loader)) for _ in range(9)]
    loader.close()
    other = RowLoader(texts, 2, 120, seed=5, ahead=ReadAhead(prefetch=0))
    assert [_shape(next(other)) for _ in range(9)] == taken
    again = RowLoader(texts, 2, 120, seed=5, ahead=ReadAhead(prefetch=1))
    again.load_state_dict(state)
    assert [_shape(next(again)) for _ in range(9)] == expected
    again.close()
    with pytest.raises(ValueError, match="row_tokens = 120, this run 130"):
        RowLoader(texts, 2, 130, seed=5).load_state_dict(state)


def test_the_reader_is_asked_for_rows() -> None:
    asked: list[Any] = []
    loader = RowLoader(
        Texts([30] * 9), 2, 60, ahead=ReadAhead(prefetch=1, wanted=lambda rows: asked.append(_shape(rows)) or [])
    )
    assert _shape(next(loader)) == asked[0] and [len(row) for row in asked[0]] == [2, 2]
    loader.close()


def test_refusals() -> None:
    with pytest.raises(ValueError, match="a sample has 30 tokens, a row takes 20"):
        RowLoader(Texts([30, 5]), 1, 20)
    with pytest.raises(ValueError, match=r"make no batch of 3 rows.* or leave out drop_last"):
        RowLoader(Texts([30, 5]), 3, 40, drop_last=True)
    with pytest.raises(ValueError, match="rows is 0"):
        RowLoader(Texts([30, 5]), 0, 40)
