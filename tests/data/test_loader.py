from __future__ import annotations

import math
import threading
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import Dataset

from interlace.data import Loader, Media, ReadAhead, Sample, unigram_nats
from interlace.data.workers import ahead


class Numbers(Dataset[Sample]):
    """Sample i of epoch e is the number 1000 e + i; fails at ``bad``; counts requests."""

    def __init__(self, size: int, bad: int = -1) -> None:
        self.size, self.bad, self.asked = size, bad, 0
        self.failures: dict[str, str] = {}

    def __len__(self) -> int:
        return self.size

    def sample(self, index: int, epoch: int) -> Sample:
        self.asked += 1
        if index == self.bad:
            raise OSError("the disk is gone")
        value = torch.tensor([1000 * epoch + index])
        return Sample(value, value)

    def report(self) -> str:
        return "numbers: all well"


def numbers(batch: list[Sample]) -> list[int]:
    return [int(s.input_ids[0]) for s in batch]


def take(loader: Loader, count: int) -> list[list[int]]:
    return [numbers(next(loader)) for _ in range(count)]


@settings(max_examples=60, deadline=None)
@given(
    size=st.integers(1, 40),
    batch=st.integers(1, 45),
    epochs=st.integers(1, 3),
    stop=st.integers(0, 200),
    prefetch=st.sampled_from([0, 0, 1, 3]),
    shuffle=st.booleans(),
    seed=st.integers(0, 5),
)
def test_every_epoch_has_every_sample_once_also_across_a_resume(size, batch, epochs, stop, prefetch, shuffle, seed):
    make = {"seed": seed, "shuffle": shuffle, "ahead": ReadAhead(prefetch=prefetch)}
    per_epoch = math.ceil(size / batch)
    steps, stop = epochs * per_epoch, stop % (epochs * per_epoch + 1)
    with Loader(Numbers(size), batch, **make) as loader:
        assert [loader.batches(epoch) for epoch in range(epochs)] == [per_epoch] * epochs and loader.left_out(0) == 0
        whole = take(loader, steps + 2)
    with Loader(Numbers(size), batch, **make) as loader:
        first = take(loader, stop)
        state = loader.state_dict()
    with Loader(Numbers(size), batch, **make) as loader:
        loader.load_state_dict(state)
        assert loader.state_dict() == state
        assert first + take(loader, steps + 2 - stop) == whole
    for epoch in range(epochs):
        mine = whole[epoch * per_epoch : (epoch + 1) * per_epoch]
        assert [len(numbers) for numbers in mine[:-1]] == [batch] * (per_epoch - 1)
        assert sorted(n for numbers in mine for n in numbers) == [1000 * epoch + i for i in range(size)]


@settings(max_examples=40, deadline=None)
@given(size=st.integers(1, 40), batch=st.integers(1, 8), stop=st.integers(0, 20), seed=st.integers(0, 5))
def test_drop_last_yields_only_full_batches_and_counts_the_rest(size, batch, stop, seed):
    batch = min(batch, size)
    per_epoch = size // batch
    make = {"seed": seed, "ahead": ReadAhead(prefetch=0), "drop_last": True}
    with Loader(Numbers(size), batch, **make) as loader:
        whole = take(loader, stop + 3 * per_epoch)
        assert loader.left_out(0) == loader.left_out(2) == size % batch
    resumed = Loader(Numbers(size), batch, **make)
    resumed.load_state_dict(loader.state_dict() | {"epoch": stop // per_epoch, "position": stop % per_epoch})
    assert take(resumed, 3 * per_epoch) == whole[stop:]
    with Loader(Numbers(size), batch, seed=seed, ahead=ReadAhead(prefetch=0)) as smaller:
        assert take(smaller, per_epoch) == whole[:per_epoch]  # the same order, without a smaller last batch
    for epoch in range(len(whole) // per_epoch):
        seen = [n for numbers in whole[epoch * per_epoch : (epoch + 1) * per_epoch] for n in numbers]
        assert len(set(seen)) == len(seen) == size - size % batch
        assert all(n // 1000 == epoch and n % 1000 < size for n in seen)


def test_a_state_without_drop_last_is_of_a_run_that_dropped():
    """Old states have no such key: runs then always dropped the end of an epoch."""
    old = Loader(Numbers(10), 4, drop_last=True).state_dict() | {"position": 1}
    del old["drop_last"]
    with pytest.raises(ValueError, match=r"drop_last = True, this run False: .* resume with data\.drop_last = true"):
        Loader(Numbers(10), 4).load_state_dict(old)
    same = Loader(Numbers(10), 4, drop_last=True, ahead=ReadAhead(prefetch=0))
    same.load_state_dict(old)
    assert (same.epoch, same.position) == (0, 1)


def test_a_state_names_the_batch_that_is_next():
    whole = take(Loader(Numbers(50), 6, ahead=ReadAhead(prefetch=0)), 20)
    state = Loader(Numbers(50), 6).state_dict() | {"epoch": 1, "position": 3}
    loader = Loader(Numbers(50), 6, ahead=ReadAhead(prefetch=0))
    loader.load_state_dict(state)
    assert take(loader, 2) == whole[12:14]  # an epoch has 9 batches
    assert [i + 1000 for i in loader.indices(1, 3)] == whole[12]


class Pictures(Numbers):
    """Each sample has an image; `loaded` lists the numbers of decoded images."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.loaded: list[int] = []
        self.threads: set[str] = set()

    def sample(self, index: int, epoch: int) -> Sample:
        def load() -> torch.Tensor:
            self.loaded.append(index)
            self.threads.add(threading.current_thread().name)
            return torch.full((3, 1, 1), float(index))

        made = super().sample(index, epoch)
        made.media["vision"] = [Media((3, 1, 1), 1, load=load)]
        return made


def even(batch: list[Sample]) -> list[Media]:
    return [item for sample in batch if int(sample.input_ids[0]) % 2 == 0 for item in sample.media["vision"]]


def test_prefetch_loads_wanted_items_and_others_once_on_access():
    dataset = Pictures(18)  # nothing of the next epoch is loaded: one batch is taken, one is kept, one waits for room
    with Loader(dataset, 6, shuffle=False, ahead=ReadAhead(prefetch=1, wanted=even)) as loader:
        batch = next(loader)
        assert [item.loaded for s in batch for item in s.media["vision"]] == [True, False] * 3
        assert dataset.threads == {"interlace-prefetch"}
        values = [float(item.data[0]) for s in batch for item in s.media["vision"]]
    assert values == list(range(6))
    assert not [n for n in dataset.loaded if n % 2 and n not in (1, 3, 5)]
    assert sorted(n for n in dataset.loaded if n < 6) == list(range(6))  # each once


def test_prefetch_loads_all_by_default_and_nothing_if_zero():
    with Loader(Pictures(6), 3, shuffle=False, ahead=ReadAhead(prefetch=1)) as loader:
        assert all(item.loaded for s in next(loader) for item in s.media["vision"])
    dataset = Pictures(6)
    with Loader(dataset, 3, ahead=ReadAhead(prefetch=0, wanted=even)) as loader:
        next(loader)
    assert dataset.loaded == []


def test_what_goes_wrong_while_media_are_loaded_ahead_arrives():
    def lost(batch: list[Sample]) -> list[Media]:
        raise OSError("the disk is gone")

    with (
        Loader(Pictures(6), 3, ahead=ReadAhead(wanted=lost)) as loader,
        pytest.raises(OSError, match="the disk is gone"),
    ):
        next(loader)


def test_seeds_and_epochs_shuffle_differently():
    orders = {tuple(Loader(Numbers(30), 30, seed=s).indices(e, 0)) for s in range(3) for e in range(3)}
    assert len(orders) == 9
    assert Loader(Numbers(30), 30, shuffle=False).indices(2, 0) == list(range(30))


def test_prefetch_is_bounded_and_state_counts_what_was_consumed():
    dataset = Numbers(100)
    with Loader(dataset, 5, ahead=ReadAhead(prefetch=3)) as loader:
        next(loader)
        deadline = time.monotonic() + 60
        while dataset.asked < 5 * 5 and time.monotonic() < deadline:  # 1 consumed, 3 queued, 1 waiting for room
            time.sleep(0.01)
        time.sleep(0.3)
        assert dataset.asked == 25
        assert (loader.state_dict()["epoch"], loader.state_dict()["position"]) == (0, 1)


def test_close_stops_the_thread_and_refuses_further_use():
    def prefetchers() -> int:
        return sum(t.name == "interlace-prefetch" for t in threading.enumerate())

    before = prefetchers()
    loader = Loader(Numbers(10), 2)
    next(loader)
    assert prefetchers() == before + 1
    loader.close()
    loader.close()
    assert prefetchers() == before
    with pytest.raises(RuntimeError, match="this loader is closed"):
        next(loader)


@pytest.mark.parametrize("prefetch", [0, 2])
def test_errors_of_the_dataset_arrive_in_order(prefetch):
    with Loader(Numbers(10, bad=7), 2, shuffle=False, ahead=ReadAhead(prefetch=prefetch)) as loader:
        assert take(loader, 3) == [[0, 1], [2, 3], [4, 5]]
        with pytest.raises(OSError, match="the disk is gone"):
            next(loader)


def test_end_of_epoch_is_reported(caplog):
    with caplog.at_level("INFO", "interlace.data"), Loader(Numbers(4), 2) as loader:
        take(loader, 3)
    assert [r.message for r in caplog.records] == ["end of epoch 0: numbers: all well"]


def test_only_failures_that_are_new_are_told_loudly(caplog):
    dataset = Numbers(4)
    dataset.failures["a.png"] = "broken"
    with caplog.at_level("INFO", "interlace.data"), Loader(dataset, 4, ahead=ReadAhead(prefetch=0)) as loader:
        take(loader, 2)
        dataset.failures["b.png"] = "broken"
        take(loader, 1)
    assert [r.levelname for r in caplog.records] == ["INFO", "INFO", "WARNING"]  # a.png was reported before
    assert caplog.messages[-1] == "end of epoch 2: 1 files more cannot be read, e.g. b.png"


def test_a_plain_map_style_dataset_works():
    samples = [Sample(torch.tensor([i]), torch.tensor([i])) for i in range(6)]
    with Loader(samples, 2, shuffle=False) as loader:  # type: ignore[arg-type]
        assert take(loader, 4) == [[0, 1], [2, 3], [4, 5], [0, 1]]


def test_bad_settings_and_foreign_states():
    for arguments, message in (
        ({"batch_size": 0}, "batch_size is 0: a batch needs at least one sample"),
        ({"batch_size": 11, "drop_last": True}, "the dataset has 10 samples, one batch needs 11"),
    ):
        with pytest.raises(ValueError, match=message):
            Loader(Numbers(10), **arguments)
    with pytest.raises(ValueError, match="the dataset has no samples"):
        Loader(Numbers(0), 1)
    state = Loader(Numbers(10), 2).state_dict()
    for other in (Loader(Numbers(10), 2, seed=1), Loader(Numbers(10), 5), Loader(Numbers(12), 2)):
        with pytest.raises(ValueError, match="the order of samples would differ"):
            other.load_state_dict(state)


def test_unigram_baseline_against_counting_by_hand():
    from math import log

    train, heldout = [[1, 1, 2]], [[1], [2, 3]]
    total = 3 + 4
    expected = -(log(3 / total) + log(2 / total) + log(1 / total)) / 3
    assert unigram_nats(train, heldout, vocab_size=4) == pytest.approx(expected)
    assert unigram_nats([range(264)] * 100, [[0, 5, 263]]) == pytest.approx(log(264))
    with pytest.raises(ValueError, match="at least one"):
        unigram_nats([], heldout)
    with pytest.raises(ValueError, match="outside the vocabulary"):
        unigram_nats([[9]], [[1]], vocab_size=4)


def test_hanging_prefetch_thread_raises_a_timeout(monkeypatch):
    monkeypatch.setattr(ahead, "LONGEST", 0.05)
    monkeypatch.setattr(ahead, "CLOSING", 0.05)
    gone = threading.Event()

    class Hanging(Numbers):
        def sample(self, index: int, epoch: int) -> Sample:
            assert gone.wait(60)
            return super().sample(index, epoch)

    loader = Loader(Hanging(4), 2, ahead=ReadAhead(prefetch=1))
    with pytest.raises(TimeoutError, match="the thread that reads the data ahead hangs; is the storage still there"):
        next(loader)
    gone.set()
    loader.close()


def test_orders_that_are_gone_through_elsewhere_do_not_change():
    """The read-ahead thread asks for the next epoch while the step asks for this one."""
    loader = Loader(Numbers(6), 2, ahead=ReadAhead(prefetch=0))
    loader.order(0)
    before = loader._orders
    loader.order(1)
    assert set(before) == {0} and set(loader._orders) == {0, 1}
    loader.order(2)
    assert set(loader._orders) == {1, 2}
