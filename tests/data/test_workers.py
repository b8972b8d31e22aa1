"""Worker processes prepare the same batches as the trainer's thread, also after faults."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections import Counter
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from interlace.comm.transports.shm import start_time_of
from interlace.data import Loader, ReadAhead, RowLoader, Sample
from interlace.data.workers import pool as workers
from interlace.data.workers.decode_cache import PREFIX, Place
from interlace.data.workers.pool import WorkerPool, WorkersError, sensible
from interlace.data.workers.tasks import OfStream, Task, packed, sample_key
from interlace.modalities.errors import DecodeError
from tests import forkserver
from tests.data.pictures import Killer, Pictures
from tests.data.workers import numbers, seen, take


@pytest.fixture(autouse=True)
def _server() -> None:
    forkserver.context()  # the server has imported torch: workers start fast


def pooled(folder: Path, count: int = 2, limit: int = 1 << 24, **settings: Any) -> Any:
    """Starts `count` workers that keep their items in `folder`; limit 0: they keep none."""
    where = Place(folder / f"{PREFIX}a", limit) if limit else None
    return lambda loader: WorkerPool(loader, count, where=where, **settings)


@pytest.mark.parametrize(
    ("limit", "wanted"),
    [
        pytest.param(0, None, id="sent"),
        pytest.param(3_000, seen, id="hardly kept, in part"),
        pytest.param(1 << 24, None, id="kept"),
        pytest.param(0, seen, id="sent, in part", marks=pytest.mark.slow),
        pytest.param(3_000, None, id="hardly kept", marks=pytest.mark.slow),
        pytest.param(1 << 24, seen, id="kept, in part", marks=pytest.mark.slow),
    ],
)
def test_the_bits_are_those_of_the_thread(tmp_path, wanted, limit):
    with Loader(Pictures(20, tmp_path), 6, seed=1, ahead=ReadAhead(wanted=wanted)) as loader:
        expected = take(loader, 8)
    with Loader(
        Pictures(20, tmp_path), 6, seed=1, ahead=ReadAhead(wanted=wanted, producers=pooled(tmp_path, limit=limit))
    ) as loader:
        assert take(loader, 8) == expected
    assert not list(tmp_path.glob(f"{PREFIX}*"))


def test_rows_are_those_of_the_thread(tmp_path):
    with RowLoader(Pictures(40, tmp_path), 2, 20, seed=2, ahead=ReadAhead(wanted=seen)) as loader:
        expected = take(loader, 20)
    assert loader.epoch > 0
    with RowLoader(
        Pictures(40, tmp_path), 2, 20, seed=2, ahead=ReadAhead(wanted=seen, producers=pooled(tmp_path))
    ) as loader:
        assert take(loader, 20) == expected


@settings(max_examples=6, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(stop=st.integers(0, 9), first=st.sampled_from([0, 1, 3]), then=st.sampled_from([0, 2]), ahead=st.integers(1, 4))
def test_a_run_goes_on_with_any_number_of_workers(tmp_path, stop, first, then, ahead):
    def loader(count: int) -> Loader:
        producers = pooled(tmp_path, count) if count else None
        return Loader(
            Pictures(15, tmp_path, varies=True), 4, seed=3, ahead=ReadAhead(prefetch=ahead, producers=producers)
        )

    with Loader(Pictures(15, tmp_path, varies=True), 4, seed=3, ahead=ReadAhead(prefetch=1)) as whole:
        expected = take(whole, stop + 4)
    with loader(first) as before:
        begun = take(before, stop)
        state = before.state_dict()
    with loader(then) as after:
        after.load_state_dict(state)
        assert begun + take(after, 4) == expected


def test_loading_a_state_drops_batches_in_flight(tmp_path):
    with Loader(Pictures(12, tmp_path), 3, ahead=ReadAhead(prefetch=1)) as loader:
        expected = take(loader, 6)
    with Loader(Pictures(12, tmp_path), 3, ahead=ReadAhead(prefetch=3, producers=pooled(tmp_path))) as loader:
        state = loader.state_dict()
        assert take(loader, 4) == expected[:4]
        loader.load_state_dict(state)
        assert take(loader, 6) == expected


def test_workers_decode_only_wanted_items_and_each_once(tmp_path):
    dataset = Pictures(12, tmp_path)
    with Loader(
        dataset, 6, shuffle=False, ahead=ReadAhead(prefetch=1, wanted=seen, producers=pooled(tmp_path, 3))
    ) as loader:
        for _ in range(6):  # three epochs
            batch = next(loader)
            assert [item.loaded for s in batch for item in s.media["vision"]] == [
                at % 2 == 0 for at, s in enumerate(batch) for _ in s.media["vision"]
            ]
        every = [line[:4] for line in dataset.decoded()]
        assert sorted(every) == sorted(set(every)) and {line[2] for line in every} == {"vision"}
        assert {int(line[0]) % 2 for line in every} == {0}
        assert str(os.getpid()) not in {line[4] for line in dataset.decoded()}
        sound = batch[1].media["audio"][0]
        oracle = Pictures(12, tmp_path).sample(7, 0).media["audio"][0].data
        assert not sound.loaded and torch.equal(sound.data, oracle)
        assert dataset.read_items == len(every) + 1


def test_two_ranks_of_a_node_decode_an_item_once(tmp_path):
    """Two loaders with workers of their own, as on two ranks: their workers decode in parallel, nothing twice."""
    sets = [Pictures(24, tmp_path, seconds=0.01) for _ in range(2)]
    loaders = [Loader(one, 6, seed=1, ahead=ReadAhead(producers=pooled(tmp_path))) for one in sets]
    result: dict[int, list[Any]] = {}

    def run(rank: int) -> None:
        result[rank] = take(loaders[rank], 8)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert result[0] == result[1]
    every = [line[:1] + line[2:4] for line in sets[0].decoded()]
    assert len(every) == len(set(every)) == sum(index % 3 + 1 for index in range(24))
    assert sets[0].read_items + sets[1].read_items == len(every)
    for loader in loaders:
        loader.close()
    assert not list(tmp_path.glob(f"{PREFIX}*"))


def test_what_varies_is_decoded_anew_in_each_epoch(tmp_path):
    dataset = Pictures(6, tmp_path, varies=True)
    with Loader(dataset, 6, ahead=ReadAhead(prefetch=1, producers=pooled(tmp_path))) as loader:
        one, other = take(loader, 2)
    assert sorted(map(str, one)) != sorted(map(str, other))


def test_a_worker_that_is_killed_costs_nothing(tmp_path):
    with Loader(Pictures(30, tmp_path), 5, seed=4) as loader:
        expected = take(loader, 12)
    with Loader(
        Pictures(30, tmp_path, seconds=0.005), 5, seed=4, ahead=ReadAhead(producers=pooled(tmp_path))
    ) as loader:
        result = []
        for step in range(12):
            result.append(numbers(next(loader)))
            if step == 0:
                killer = Killer(loader.producers, random.Random(1))
            if step % 3 == 0:
                killer.kill()
        assert result == expected
        killer.wait()


def test_sample_is_blanked_only_after_three_worker_deaths(tmp_path, caplog):
    with Loader(Pictures(9, tmp_path), 3, shuffle=False) as loader:
        expected = take(loader, 3)
    dataset = Pictures(9, tmp_path, deadly={4: 2, 7: 1000})
    with caplog.at_level("WARNING", "interlace.data"):
        with Loader(dataset, 3, shuffle=False, ahead=ReadAhead(producers=pooled(tmp_path))) as loader:
            assert take(loader, 2) == expected[:2]
            last = next(loader)
        assert loader.producers.restarts == 2 + 3
    broken = last[1]
    assert all(not item.data.any() for items in broken.media.values() for item in items)
    assert numbers([last[0], last[2]]) == [expected[2][0], expected[2][2]]
    assert (
        dataset.blank_items == 1
        and "3 worker processes were lost at sample 7 of epoch 0" in dataset.failures["pictures:7"]
    )
    output = [record.message for record in caplog.records]
    assert sum("was killed by SIGKILL (out of memory?) at sample 7" in line for line in output) == 3
    assert any("pictures:7 can no longer be read, blank used instead" in line for line in output)


def test_what_cannot_be_read_is_counted_by_the_trainer(tmp_path):
    """As without workers: eight broken items of a few may be blank, one more ends the run."""
    dataset = Pictures(9, tmp_path, broken=(1, 2))
    with Loader(dataset, 9, shuffle=False, ahead=ReadAhead(prefetch=1, producers=pooled(tmp_path))) as loader:
        batch = next(loader)
        assert not any(item.data.any() for at in (1, 2) for items in batch[at].media.values() for item in items)
        assert dataset.blank_items >= 2 + 3 and dataset.read_items >= sum(i % 3 + 1 for i in range(9))
        assert dataset.failures == {
            f"pictures:{at}": f"failed after it was verified: pictures:{at}: the disk is gone" for at in (1, 2)
        }
        with pytest.raises(DecodeError, match=r"9 of .* items that were verified before the run can no longer be read"):
            next(loader)


class Failing(Pictures):
    def sample(self, index: int, epoch: int) -> Sample:
        if index == 7:
            raise OSError("the disk is gone")
        return super().sample(index, epoch)


def test_errors_of_the_dataset_arrive_in_order(tmp_path):
    with Loader(
        Failing(10, tmp_path), 2, shuffle=False, ahead=ReadAhead(prefetch=3, producers=pooled(tmp_path))
    ) as loader:
        assert len(take(loader, 3)) == 3
        with pytest.raises(OSError, match="the disk is gone"):
            next(loader)


def test_a_worker_that_hangs_is_ended(tmp_path, caplog):
    dataset = Pictures(1, tmp_path, seconds=3600.0)
    producers = pooled(tmp_path, 1, patience=1.5, deaths=2)
    with (
        caplog.at_level("WARNING", "interlace.data"),
        Loader(dataset, 1, ahead=ReadAhead(prefetch=1, producers=producers)) as loader,
    ):
        (sample,) = next(loader)
        assert not any(item.data.any() for items in sample.media.values() for item in items)
    assert dataset.blank_items >= 1 and caplog.text.count("took longer than 1.5 s and was ended at sample 0") >= 2


class Unready(Pictures):
    """Kills the process that unpickles it."""

    def __reduce__(self) -> Any:
        return os._exit, (5,)


def test_time_that_another_rank_takes_is_not_a_workers_own(tmp_path, monkeypatch):
    """A worker that waits for a sample decoded by another process is not ended for it."""
    dataset, ahead = Pictures(4, tmp_path), [0.0]
    monkeypatch.setattr(workers, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + ahead[0]))
    with Loader(
        dataset, 4, shuffle=False, ahead=ReadAhead(prefetch=1, producers=pooled(tmp_path, patience=60.0))
    ) as loader:
        loader.begin()
        kept = loader.producers.decoded
        with kept.claimed(sample_key(dataset, Task("load", at=2))) as mine:
            assert mine
            asked = loader.producers.ask(Task("load", at=2, items=(("audio", 0),)))
            # Many others, so that both workers answer some: the earlier attempt at the sample is then over.
            for ahead[0] in range(0, 101, 10):
                others = [loader.producers.ask(Task("load", at=at, items=(("audio", 0),))) for at in (0, 1, 3) * 2]
                assert all(other.result(60).items for other in others)
            assert not asked.done() and loader.producers.restarts == 0
        assert asked.result(60).items and not dataset.blank_items


def test_items_that_never_are_kept_together_are_sent(tmp_path):
    """The folder has room for one of two items: each kept item evicts the other."""
    big = Pictures(6, tmp_path, side=40)  # 2 pictures of 19,328 bytes and more
    with Loader(big, 3, shuffle=False) as loader:
        expected = take(loader, 2)
    (tmp_path / "decoded").unlink()
    with Loader(big, 3, shuffle=False, ahead=ReadAhead(producers=pooled(tmp_path, limit=30_000))) as loader:
        assert take(loader, 2) == expected
    counts = Counter(line[:4] for line in big.decoded())
    assert max(counts.values()) == 2, counts  # once for the folder, and once more for the trainer


def test_workers_that_cannot_begin_are_told(tmp_path):
    with Loader(Unready(4, tmp_path), 2, ahead=ReadAhead(producers=pooled(tmp_path))) as loader:
        with pytest.raises(WorkersError, match="3 worker processes in a row ended with exit code 5 before they could"):
            next(loader)


def test_a_dataset_that_cannot_be_sent_is_refused(tmp_path):
    dataset = Pictures(4, tmp_path)
    dataset.lock = threading.Lock()  # type: ignore[attr-defined]
    with pytest.raises(WorkersError, match=r"cannot be handed to worker processes \(TypeError.*; set data.workers = 0"):
        Loader(dataset, 2, ahead=ReadAhead(producers=pooled(tmp_path))).begin()


def test_in_flight_is_bounded(tmp_path):
    """Two batches ahead: decoding follows consumption."""
    dataset = Pictures(60, tmp_path)
    with Loader(dataset, 3, shuffle=False, ahead=ReadAhead(prefetch=2, producers=pooled(tmp_path))) as loader:
        next(loader)
        time.sleep(0.5)
        assert max(int(line[0]) for line in dataset.decoded()) < 3 * (1 + 2 + 2)


class Encoded:
    """A stream; its media are sent to the workers as bytes."""


def _decode(data: bytes) -> torch.Tensor:
    return torch.full((len(data) // 4,), float(data[0]))


def test_large_tasks_and_large_answers_do_not_block_each_other():
    """Neither fits into a pipe: a worker does not read while it sends, and the trainer must not wait for it."""
    stream: Any = Encoded()
    pool = WorkerPool(OfStream(stream), 1)
    loads = [packed(stream, [partial(_decode, bytes([number]) * (1 << 22))]) for number in range(6)]
    answers = [pool.ask(Task("decode", loads=each)) for each in loads]
    assert [answer.result(timeout=600).items[0].tensor()[-1] for answer in answers] == list(range(6))
    pool.close()


def _train_and_hang(folder: Path) -> None:
    loader = Loader(Pictures(8, folder), 2, ahead=ReadAhead(producers=pooled(folder)))
    next(loader)
    (folder / "pids").write_text(" ".join(map(str, loader.producers.pids())))
    signal.pause()


@pytest.mark.slow  # starts its own fork server
def test_workers_end_with_their_trainer(tmp_path):
    process = forkserver.context().Process(target=_train_and_hang, args=(tmp_path,))
    process.start()
    deadline = time.monotonic() + 600
    while not (tmp_path / "pids").exists() or not (tmp_path / "pids").read_text():
        assert process.is_alive() and time.monotonic() < deadline
        time.sleep(0.01)
    process.kill()
    process.join()
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    while any(start_time_of(pid) is not None for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    while list(tmp_path.glob(f"{PREFIX}*")):  # the last worker removes the folder
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.slow
@pytest.mark.parametrize("limit", [0, 1 << 24], ids=["sent", "kept"])
def test_twenty_kills_lose_and_double_nothing(tmp_path, limit):
    draw = random.Random(7)
    with Loader(Pictures(90, tmp_path), 6, seed=5, ahead=ReadAhead(wanted=seen)) as loader:
        expected = take(loader, 60)
    dataset = Pictures(90, tmp_path, seconds=0.01)
    # Kills hit random tasks; a separate test checks that several kills at one task make a sample broken.
    with Loader(
        dataset, 6, seed=5, ahead=ReadAhead(wanted=seen, producers=pooled(tmp_path, 3, limit, deaths=100))
    ) as loader:
        loader.begin()
        steps, result, killer = set(draw.sample(range(60), 20)), [], Killer(loader.producers, draw)
        for step in range(60):
            time.sleep(draw.uniform(0, 0.05))
            if step in steps:
                killer.kill()
            result.append(numbers(next(loader)))
        assert result == expected and dataset.blank_items == 0
        killer.wait()
        assert loader.producers.restarts == 20


def test_how_many_workers_a_rank_starts_by_itself(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(16), raising=False)
    assert [sensible(ranks) for ranks in (1, 2, 4, 8, 16, 100)] == [4, 4, 2, 0, 0, 0]
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(2), raising=False)
    assert sensible(1) == 0
