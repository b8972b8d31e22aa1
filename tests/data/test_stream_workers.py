"""Streams with items decoded by worker processes: the same batches as with each reader's thread, also after faults."""

from __future__ import annotations

import json
import random
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from interlace.data import ReadAhead, StreamError, StreamLoader, StreamOptions
from interlace.data.workers.pool import WorkerPool
from interlace.layout import Layout, ParallelSpec
from interlace.model import Media, Sample
from interlace.model.naming import LANGUAGE_MODEL
from interlace.run import parallelize
from tests import forkserver
from tests.data.pictures import Killer
from tests.data.stream_workers import Recorded, numbers
from tests.tiny import tiny_mllm


@pytest.fixture(scope="module")
def parallel() -> Any:
    forkserver.context()  # the server has imported torch: workers start fast
    mllm = tiny_mllm(layers=1)
    specs = {name: ParallelSpec(dp=3) for name in ("vision", "audio", LANGUAGE_MODEL)}
    return parallelize(mllm, Layout.from_specs(mllm, specs, placement="shared"), timeout=120)


def loader_of(
    stream: Recorded, parallel: Any, workers: int, size: int = 5, *, deaths: int = 3, readers: int | None = None
) -> StreamLoader:
    producers = (lambda given: WorkerPool(given, workers, deaths=deaths)) if workers else None
    options, ahead = StreamOptions(readers, timeout=120), ReadAhead(producers=producers)
    return StreamLoader(stream, parallel, size, buffer=3, seed=2, options=options, ahead=ahead)


def take(loader: StreamLoader, count: int) -> list[Any]:
    return [numbers(next(loader)) for _ in range(count)]


def handed_out(batches: list[Any]) -> list[str]:
    return [name for batch in batches for rank, name, *_ in batch if rank == 0]


def test_workers_decode_each_item_once_with_identical_batches(parallel: Any, tmp_path: Path) -> None:
    shards = (12, 9, 10, 8)  # more than the read-ahead of four batches: no second epoch begins
    with loader_of(Recorded(parallel.mllm, shards, tmp_path), parallel, 0) as loader:
        expected = take(loader, 4)
    (tmp_path / "decoded").unlink()
    stream = Recorded(parallel.mllm, shards, tmp_path)
    with loader_of(stream, parallel, 2) as loader:
        assert take(loader, 4) == expected
        names, own = set(handed_out(expected)), loader.producers.pids()
    assert len(names) == 20
    lines = stream.lines()
    counts = Counter((name, encoder, number) for name, encoder, number, _ in lines)
    items = {
        (name, encoder, str(k))
        for samples in stream.whole for name, sample in samples.items()
        for encoder, of in sample.media.items() for k in range(len(of))
    }  # fmt: skip
    assert set(counts.values()) == {1} and set(counts) <= items
    assert {key for key in items if key[0] in names} <= set(counts)
    assert {int(process) for *_, process in lines} <= set(own)
    with_media = sum(bool(sample.media) for samples in stream.whole for sample in samples.values())
    assert stream.counted <= with_media


@pytest.mark.parametrize(
    ("first", "then"), [pytest.param(0, 2, marks=pytest.mark.slow), pytest.param(2, 0, marks=pytest.mark.slow), (2, 1)]
)
def test_a_run_goes_on_with_any_number_of_workers(parallel: Any, tmp_path: Path, first: int, then: int) -> None:
    """Also if workers had decoded ahead of the consumed batches."""
    stream = Recorded(parallel.mllm, (7, 5, 6, 4), tmp_path)
    with loader_of(stream, parallel, 0) as loader:
        expected = take(loader, 9)
    with loader_of(stream, parallel, first) as loader:
        begun = take(loader, 3)
        state = json.loads(json.dumps(loader.state_dict()))
    with loader_of(stream, parallel, then) as loader:
        loader.load_state_dict(state)
        assert begun + take(loader, 6) == expected


def test_another_number_of_readers_takes_what_was_decoded_ahead(parallel: Any, tmp_path: Path) -> None:
    stream = Recorded(parallel.mllm, (7, 5, 6, 4), tmp_path)
    with loader_of(stream, parallel, 1, 4) as loader:
        begun = take(loader, 2)
        state = json.loads(json.dumps(loader.state_dict()))
    assert any(place["coming"] for place in state["places"])
    with loader_of(stream, parallel, 1, 4, readers=2) as loader:
        loader.load_state_dict(state)
        flat = handed_out(begun + take(loader, 9))
    every = Counter(name for samples in stream.whole for name in samples)
    assert Counter(flat[:22]) == Counter(flat[22:44]) == every


def test_dead_workers_restart_and_fatal_samples_are_left_out(parallel: Any, tmp_path: Path) -> None:
    with loader_of(Recorded(parallel.mllm, (6, 6, 6), tmp_path, broken=("0/3", "1/2")), parallel, 0) as loader:
        expected = take(loader, 6)
    stream = Recorded(parallel.mllm, (6, 6, 6), tmp_path, deadly={"0/2": 2, "1/2": 1000}, broken=("0/3",))
    with loader_of(stream, parallel, 2) as loader:
        assert take(loader, 6) == expected
        assert loader.producers.restarts >= 2 + 3
    left = sorted(set(stream.left))
    assert left[0] == "0/3: 0/3: the disk is gone"
    assert "1/2: 3 worker processes were lost at 1/2, the last one was killed by SIGKILL" in left[1]


def test_what_cannot_be_sent_is_named_on_all_ranks(parallel: Any, tmp_path: Path) -> None:
    class Closed(Recorded):
        def read(self, shard: int, epoch: int) -> Iterator[Sample]:
            for sample in super().read(shard, epoch):
                for items in sample.media.values():
                    items[:] = [Media(i.shape, i.tokens, load=lambda i=i: i.load(), about=i.about) for i in items]
                yield sample

    stream = Closed(parallel.mllm, (3, 3, 3), tmp_path)

    def pool(given: Any) -> WorkerPool:
        return WorkerPool(type(given)(Recorded(parallel.mllm, (1,), tmp_path)), 1)

    with StreamLoader(
        stream, parallel, 5, options=StreamOptions(timeout=120), ahead=ReadAhead(producers=pool)
    ) as loader:
        with pytest.raises(StreamError, match=r"what loads the media of ...  *cannot be sent to worker processes"):
            next(loader)


@pytest.mark.slow
def test_twenty_kills_lose_and_double_nothing(parallel: Any, tmp_path: Path) -> None:
    draw = random.Random(7)
    with loader_of(Recorded(parallel.mllm, (30, 30, 30), tmp_path), parallel, 0) as loader:
        expected = take(loader, 40)
    stream = Recorded(parallel.mllm, (30, 30, 30), tmp_path, seconds=0.01)
    # Kills hit random tasks; a separate test checks that several kills at one task make a sample broken.
    with loader_of(stream, parallel, 3, deaths=100) as loader:
        loader.begin()
        steps, result, killer = set(draw.sample(range(40), 20)), [], Killer(loader.producers, draw)
        for step in range(40):
            time.sleep(draw.uniform(0, 0.05))
            if step in steps:
                killer.kill()
            result.append(numbers(next(loader)))
        assert result == expected and not stream.left
        killer.wait()
        assert loader.producers.restarts == 20
