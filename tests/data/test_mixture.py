"""Several sources as one dataset: exact shares over any number of epochs; each sample is used before any repeats; the
place alone is the state; the number of objects is the number of sources.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from interlace.data import Loader, MixedDataset, Part, ReadAhead, RowLoader, by_source, load_chats
from interlace.data.chats.files.sources import Rules
from interlace.data.mixture import share_of
from tests.data.chat_faults import chats, said, talk, user


def _mixed(
    sizes: list[int], weights: list[float], by: Any = "samples", lengths: list[int] | None = None
) -> MixedDataset:
    """Sources of empty samples; sample k of source s is (s, k)."""
    parts = []
    for place, (size, weight) in enumerate(zip(sizes, weights, strict=True)):
        of = 10 if lengths is None else lengths[place]
        data: Any = SimpleNamespace(
            token_lengths=np.full(size, of),
            sample=lambda index, epoch, place=place: (place, index),
            fingerprint=lambda size=size: str(size),
            failures={},
            report=lambda: "every sample could be used",
        )
        data = type("Fake", (SimpleNamespace,), {"__len__": lambda self: len(self.token_lengths)})(**vars(data))
        parts.append(Part(f"s{place}", data, weight))
    return MixedDataset(parts, by)


sources = st.lists(st.tuples(st.integers(5, 60), st.floats(0.05, 20.0)), min_size=1, max_size=5)


@settings(max_examples=25, deadline=None)
@given(sources, st.integers(0, 5), st.sampled_from(["samples", "tokens"]))
def test_mixture_shares_are_exact_and_samples_repeat_evenly(
    given_: list[tuple[int, float]], seed: int, by: Any
) -> None:
    sizes, weights = [size for size, _ in given_], [weight for _, weight in given_]
    lengths = [10 * (place + 1) for place in range(len(sizes))]
    mixed = _mixed(sizes, weights, by, lengths)
    exact = [Fraction(str(weight)) / (length if by == "tokens" else 1) for weight, length in zip(weights, lengths)]
    drawn: list[list[int]] = [[] for _ in sizes]
    for epoch in range(4):
        order = mixed.order(seed, epoch)
        assert len(order) == sum(sizes) and (order == mixed.order(seed, epoch)).all()
        for index in order.tolist():
            place, own = mixed.sample(index)  # type: ignore[misc]
            drawn[place].append(own)
        for place, result in enumerate(drawn):
            expected = (epoch + 1) * sum(sizes) * exact[place] / sum(exact)
            assert abs(len(result) - expected) <= len(sizes), "rounded once, not once an epoch"
            assert mixed.drawn(epoch + 1)[place] == len(result)
    for size, result in zip(sizes, drawn, strict=True):
        counts = Counter(result)
        assert max(counts.values(), default=0) - min((counts[k] for k in range(size)), default=0) <= 1
        for start in range(0, len(result) - size + 1, size):
            assert sorted(result[start : start + size]) == list(range(size))


def test_one_source_is_in_the_order_of_a_dataset_alone() -> None:
    """Oracle: the loader without a mixture."""
    mixed = _mixed([37], [3.0])
    alone = Loader([None] * 37, 4, seed=5, ahead=ReadAhead(prefetch=0))  # type: ignore[arg-type]
    for epoch in range(3):
        assert (mixed.order(5, epoch) == alone.order(epoch)).all()


def test_orders_of_sources_and_epochs_differ() -> None:
    mixed = _mixed([50, 50], [1, 1])
    first, second = mixed.order(0, 0), mixed.order(0, 1)
    assert not (first == second).all()
    assert not (first[first < 50] == first[first >= 50] - 50).all()
    assert not (first == mixed.order(1, 0)).all()


@pytest.mark.parametrize("rows", [False, True])
def test_a_loader_goes_on_with_the_very_next_batch(rows: bool) -> None:
    def loader() -> Any:
        mixed = _mixed([30, 11, 5], [1, 2.5, 0.5], lengths=[4, 7, 11])
        return (
            RowLoader(mixed, 2, 40, seed=3, ahead=ReadAhead(prefetch=0))
            if rows
            else Loader(mixed, 4, seed=3, ahead=ReadAhead(prefetch=0))
        )

    whole = loader()
    whole._all_media = lambda batch: []
    batches = []
    states = []
    for _ in range(30):
        states.append(json.loads(json.dumps(whole.state_dict())))
        batches.append(next(whole))
    for place in (0, 1, 9, 10, 11, 25):
        again = loader()
        again._all_media = lambda batch: []
        again.load_state_dict(states[place])
        assert [next(again) for _ in range(3)] == batches[place : place + 3]
    other = Loader(_mixed([30, 11, 5], [1, 2.0, 0.5]), 4, seed=3, ahead=ReadAhead(prefetch=0))
    with pytest.raises(ValueError, match="fingerprint"):
        other.load_state_dict(states[0])


def test_batches_say_which_source_their_samples_are_of() -> None:
    mixed = _mixed([30, 11, 5], [1, 2.5, 0.5])
    loader = Loader(mixed, 8, ahead=ReadAhead(prefetch=0, wanted=lambda batch: []))
    batch = next(loader)
    result = dict(by_source(mixed, loader.indices(0, 0), batch))
    assert {name: {place for place, _ in part} for name, part in result.items()} == {
        f"s{p}": {p} for p in {p for p, _ in batch}
    }
    assert sum(map(len, result.values())) == 8 and loader.drawn(0, 0) == 8
    assert list(by_source(_mixed([3], [1]), [0, 1], "ab")) == [("", ["a", "b"])]


def test_shares_of_tokens() -> None:
    assert share_of([1, 1], [Fraction(10), Fraction(30)]) == [Fraction(3, 4), Fraction(1, 4)]
    assert share_of([0.1, 0.2]) == [Fraction(1, 3), Fraction(2, 3)]


def test_a_million_samples_are_arrays() -> None:
    mixed = _mixed([900_000, 100_000], [1, 1])
    loader = Loader(mixed, 64, ahead=ReadAhead(prefetch=0))
    order = loader.order(0)
    assert order.dtype == np.int64 and order.nbytes == 8_000_000
    assert abs(int((order < 900_000).sum()) - 500_000) <= 1
    held = [*vars(loader).values(), *vars(mixed).values()]
    assert all(len(value) < 100 for value in held if isinstance(value, (list, dict, set)))
    assert sys.getsizeof(json.dumps(loader.state_dict())) < 500


def test_too_few_samples_for_so_many_sources_are_refused() -> None:
    with pytest.raises(ValueError, match="join some"):
        _mixed([1] * 40, [1.0] * 40)
    with pytest.raises(IndexError, match="there are 9 samples"):
        _mixed([4, 5], [1, 1]).sample(9)


def test_samples_for_validation_may_be_few() -> None:
    """They are not drawn by shares."""
    few = MixedDataset(_mixed([300, 3, 1, 2], [1.0] * 4).parts[1:], mixes=False)
    assert len(few) == 6 and [few.sample(i) for i in range(6)] == [(1, 0), (1, 1), (1, 2), (2, 0), (3, 0), (3, 1)]
    with pytest.raises(ValueError, match="3 sources have 6 samples in all"):
        MixedDataset(few.parts)


def test_limits_are_the_same_samples_each_time_and_nested(tmp_path: Path) -> None:
    path = tmp_path / "c.jsonl"
    path.write_text("\n".join(talk(user(f"question {n}"), said(f"answer {n}")) for n in range(200)))

    def some(limit: int | None) -> tuple[Any, Any]:
        return load_chats([path], [], chats(), Rules(), held_out=0.2, limit=limit, cache=tmp_path / "cache")

    whole, held = some(None)
    ten, held_of_ten = some(10)
    thirty, _ = some(30)
    assert len(ten) == 10 and len(thirty) == 30 and set(ten.picks) < set(thirty.picks) < set(whole.picks)
    assert (held.picks == held_of_ten.picks).all() and not set(held.picks) & set(whole.picks)
    assert ten.fingerprint() != thirty.fingerprint()
    assert len(some(5_000)[0]) == len(whole)
