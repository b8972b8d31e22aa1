"""Readers of a stream: every sample once per epoch, and exact places, for any shards and any number of readers."""

from __future__ import annotations

import json
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from interlace.data.streams.base import IterableStream, Reader, dealt, dealt_anew
from interlace.model import Sample


def stream_of(counts: list[int]) -> IterableStream:
    def source(shard: int, count: int):
        return lambda: (Sample(torch.tensor([1, 2]), torch.tensor([2, 3]), {}, f"{shard}/{i}") for i in range(count))

    return IterableStream([source(shard, count) for shard, count in enumerate(counts)])


def names(reader: Reader, count: int | None = None) -> list[str]:
    result: list[str] = []
    while (count is None or len(result) < count) and (sample := reader.next()) is not None:
        result.append(sample.name)
    return result


def all_names(counts: list[int]) -> Counter[str]:
    return Counter(f"{shard}/{i}" for shard, count in enumerate(counts) for i in range(count))


COUNTS = st.lists(st.integers(0, 9), min_size=1, max_size=7)


@settings(max_examples=60, deadline=None)
@given(COUNTS, st.integers(1, 5), st.integers(0, 6), st.integers(0, 99))
def test_an_epoch_has_every_sample_once(counts: list[int], readers: int, buffer: int, seed: int) -> None:
    stream = stream_of(counts)
    each = [Reader(stream, k, readers, seed=seed, buffer=buffer) for k in range(readers)]
    for _ in range(2):
        assert Counter(name for reader in each for name in names(reader)) == all_names(counts)
        for reader in each:
            reader.advance()


def test_a_buffer_mixes_and_none_keeps_the_order() -> None:
    assert names(Reader(stream_of([8]), 0, 1)) == [f"0/{i}" for i in range(8)]
    mixed = names(Reader(stream_of([40]), 0, 1, buffer=10))
    assert mixed != [f"0/{i}" for i in range(40)] and sorted(mixed) == sorted(f"0/{i}" for i in range(40))
    assert mixed != names(Reader(stream_of([40]), 0, 1, seed=1, buffer=10))


def test_epochs_deal_the_shards_anew() -> None:
    dealings = [[unit[1] for unit in dealt(20, epoch, 0, 0, 2)] for epoch in range(3)]
    assert len({tuple(result) for result in dealings}) == 3 and all(len(result) == 10 for result in dealings)


@settings(max_examples=60, deadline=None)
@given(COUNTS, st.integers(1, 3), st.integers(0, 6), st.integers(0, 12), st.integers(0, 9), st.integers(0, 5))
def test_a_place_is_exact(counts: list[int], readers: int, buffer: int, after: int, seed: int, ahead: int) -> None:
    stream = stream_of(counts)
    for k in range(readers):
        one, plain = (Reader(stream, k, readers, seed=seed, buffer=buffer) for _ in range(2))
        names(plain, after)
        for _ in range(after):  # a consumer looks at the next samples
            one.coming(ahead), names(one, 1)
        assert [sample.name for sample in one.coming(ahead)] == names(plain, ahead)
        other = Reader(stream, k, readers, seed=seed, buffer=buffer)
        other.load(json.loads(json.dumps(one.state())))
        for _ in range(2):
            assert names(other) == names(one)
            one.advance(), other.advance()


@settings(max_examples=80, deadline=None)
@given(
    COUNTS, st.lists(st.integers(0, 12), min_size=1, max_size=4), st.lists(st.integers(1, 5), min_size=1, max_size=3),
    st.integers(0, 6), st.data(),
)  # fmt: skip
def test_another_number_of_readers_loses_and_doubles_nothing(
    counts: list[int], taken: list[int], later: list[int], buffer: int, data: st.DataObject
) -> None:
    """Redistributed several times within an epoch, also with some readers already in the next one."""
    stream = stream_of(counts)
    each = [Reader(stream, k, len(taken), seed=3, buffer=buffer) for k in range(len(taken))]
    seen: Counter[str] = Counter()
    epochs = 1
    for reader, count in zip(each, taken, strict=True):
        reader.coming(data.draw(st.integers(0, 4)))
        result = names(reader, count)
        reader.coming(data.draw(st.integers(0, 4)))
        seen.update(result)
        if len(result) < count and data.draw(st.booleans()):
            reader.advance()
            epochs = 2
            seen.update(names(reader, 2))
    for readers in later:
        states = dealt_anew([json.loads(json.dumps(reader.state())) for reader in each], stream, 3, readers)
        each = [Reader(stream, k, readers, seed=3, buffer=buffer) for k in range(readers)]
        for reader, state in zip(each, states, strict=True):
            reader.load(state)
        seen.update(name for reader in each for name in names(reader, 2))
    seen.update(name for reader in each for name in names(reader))
    assert seen == Counter({name: epochs * count for name, count in all_names(counts).items()})


def test_data_that_have_changed_are_refused() -> None:
    one = Reader(stream_of([9]), 0, 1, buffer=4)
    names(one, 4)
    with pytest.raises(ValueError, match="no longer has its sample"):
        Reader(stream_of([2]), 0, 1, buffer=4).load(one.state())


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="between 0 and 1"):
        Reader(stream_of([1]), 2, 2)
    with pytest.raises(ValueError, match="negative"):
        Reader(stream_of([1]), 0, 1, buffer=-1)
    with pytest.raises(ValueError, match="at least one source"):
        IterableStream([])
