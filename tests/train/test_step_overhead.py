"""Time of a step outside its lists, on a clock set by the test."""

from __future__ import annotations

import math
import pickle
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from interlace.data import ByteTokenizer
from interlace.model import Media, Sample
from interlace.train import step_overhead
from interlace.train.auto.work import nominal_work
from interlace.train.data.feed import datasets
from interlace.train.launch import launcher
from tests.train.auto import oracle


class Clock:
    """Processor time of this thread, in seconds; a copy of it is the same clock."""

    now = 0.0

    def __call__(self) -> float:
        return Clock.now


def _picture() -> torch.Tensor:
    Clock.now += 0.25
    return torch.zeros(3, 2, 2)


class Data:
    """A sample takes 0.5 s to read; every other one has two images, each of which takes 0.25 s to decode."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def sample(self, index: int, epoch: int) -> Sample:
        Clock.now += 0.5
        pictures = [Media((3, 2, 2), 1, load=_picture) for _ in range(2 * (index % 2))]
        return Sample(torch.ones(4, dtype=torch.long), torch.ones(4, dtype=torch.long), {"vision": pictures})


class NotForOthers(Data):
    """Data that cannot be copied to another process."""

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError("an open file")


MODEL = SimpleNamespace(encoders={"vision": None, "audio": None})


@pytest.fixture
def set_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_overhead.time, "thread_time", Clock())
    monkeypatch.setattr(step_overhead, "_batch_seconds", lambda *_: (0.0625, 0.125, 0.03125))


@pytest.mark.usefixtures("set_times")
@pytest.mark.parametrize("limit", [0.0, 100.0])
def test_reading_and_decoding_are_what_the_thread_took(monkeypatch: pytest.MonkeyPatch, limit: float) -> None:
    config = oracle.config_of((2, 2))
    monkeypatch.setattr(step_overhead, "SECONDS", limit)
    result = step_overhead.measure_overhead(config, MODEL, Data(10), "cpu")(1, 1)
    # The data has no clip, so audio is unknown. The reading thread also makes the table.
    assert (result.sample, result.read, dict(result.decode)) == (0.1875, 0.5625, {"vision": 0.5})
    assert result.error == 0.03125
    gpu = step_overhead.measure_overhead(config, MODEL, Data(10), "cuda")(1, 1)
    assert (gpu.sample, gpu.read, dict(gpu.decode)) == (0.1875, 0.0, {})
    assert step_overhead.measure_overhead(config, MODEL, Data(0), "cpu")(1, 1) is step_overhead.NO_HOST_OVERHEAD


def _with_workers(monkeypatch: pytest.MonkeyPatch, workers: Any, data: Data, **ranks: int) -> tuple[float, float]:
    """read and decode with workers on 8 cores; receiving an item from a worker takes 0.25 s."""

    def received(text: bytes) -> Any:
        Clock.now += 0.25
        return pickle.loads(text)

    config = oracle.config_of((2, 2))
    config = config.model_copy(update={"data": config.data.model_copy(update={"workers": workers})})
    monkeypatch.setattr(step_overhead, "pickle", SimpleNamespace(dumps=pickle.dumps, loads=received))
    monkeypatch.setattr(launcher, "default_threads", lambda ranks: 8 // ranks)
    result = step_overhead.measure_overhead(config, MODEL, data, "cpu")(ranks["ranks"], ranks["threads"])
    assert (result.sample, set(result.decode), result.error) == (0.1875, {"vision"}, 0.03125)
    return result.read, result.decode["vision"]


@pytest.mark.usefixtures("set_times")
def test_workers_leave_the_thread_little_where_they_have_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    # A batch of 8 is received at once, and so are the images of a sample. To decode them, a worker reads it anew.
    own, sample = (0.25 / 8 + 0.0625, 0.25), (0.5, 0.5 + 2 * 0.25)
    seconds = partial(_with_workers, monkeypatch)
    assert seconds(1, Data(8), ranks=1, threads=7) == seconds("ray", Data(8), ranks=8, threads=1) == own
    assert seconds(3, Data(8), ranks=2, threads=1) == own
    # With 2 ranks of 4 cores each, all used by threads, a second of a worker is a quarter of one of all four.
    assert seconds(1, Data(8), ranks=2, threads=4) == (own[0] + sample[0] / 4, own[1] + sample[1] / 4)
    assert seconds(1, Data(8), ranks=16, threads=1) == (own[0] + sample[0], own[1] + sample[1])
    alone = (0.5625, 0.5)  # by the thread
    assert seconds(0, Data(8), ranks=1, threads=1) == seconds(2, NotForOthers(8), ranks=1, threads=1) == alone


def test_measuring_decode_still_counts_lost_items() -> None:
    config = oracle.config_of((1, 1))
    config = config.model_copy(update={"data": config.data.model_copy(update={"workers": 1})})
    model = oracle.model_of(config)
    train, _ = datasets(config, model, ByteTokenizer())
    result = step_overhead.measure_overhead(config, model, train, "cpu")(1, 1)
    assert set(result.decode) == set(model.encoders) and train.noted is None


def test_a_batch_of_a_real_model_is_timed() -> None:
    config = oracle.config_of((2, 2))
    model = oracle.model_of(config)
    table, rest, error = step_overhead._batch_seconds(config, model, nominal_work(config, model, 4).samples())
    assert 0.0 < table < math.inf and 0.0 < rest < math.inf and 0.0 <= error < math.inf
