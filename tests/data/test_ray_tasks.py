"""Data prepared on a local Ray cluster: bitwise equal to the thread's, each item once in the cluster, a dying keeper.

One driver for all tests, so the cluster's workers import torch once. Deaths of nodes under a run are tested in
tests/bench/test_ray_kills.py.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

ray = pytest.importorskip("ray", reason="interlace[ray] is not installed")

from bench.ray_kills import Cluster, alive, children, raylet  # noqa: E402
from interlace.data import Loader, ReadAhead, StreamLoader, StreamOptions  # noqa: E402
from interlace.data.workers import ray_tasks  # noqa: E402
from interlace.data.workers.produced import HeldOut  # noqa: E402
from interlace.data.workers.ray_tasks import Keeper, RayError, RayTasks, _connect  # noqa: E402
from interlace.layout import Layout, ParallelSpec  # noqa: E402
from interlace.model.naming import LANGUAGE_MODEL  # noqa: E402
from interlace.run import parallelize  # noqa: E402
from tests.data.pictures import Pictures  # noqa: E402
from tests.data.stream_workers import Recorded  # noqa: E402
from tests.data.stream_workers import numbers as batch_numbers  # noqa: E402
from tests.data.workers import numbers, seen, take  # noqa: E402
from tests.tiny import tiny_mllm  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """A head without CPUs, like a rank's node, and a node that decodes."""
    made = Cluster(1)
    before = signal.getsignal(signal.SIGTERM)
    _connect(made.address)
    assert signal.getsignal(signal.SIGTERM) is before  # a rank saves and exits on it
    yield made
    ray.shutdown()
    started = [pid for node in made.local.list_all_nodes() for pid in (raylet(node), *dict(children(raylet(node))))]
    made.close()
    assert len(started) > 2 and not any(alive(pid) for pid in started)
    assert not Path(made.folder).exists()


@pytest.fixture
def tasks(cluster: Cluster, tmp_path: Path) -> Any:
    """The cluster's client, as in a rank. The keeper has to be on the rank's own node, as other nodes come and go. Ray
    honours that placement only for an actor that reserves resources.
    """
    here = ray.get_runtime_context().get_node_id()

    def start(loader: Any, limit: int = 1 << 26, at: str | None = here, **more: Any) -> RayTasks:
        made = RayTasks(loader, str(tmp_path), limit=limit, **more)
        place = made.keeper.actor.__ray_call__.remote(lambda keeper: ray.get_runtime_context().get_node_id())
        assert at is None or ray.get(place) == at
        return made

    return start


@pytest.mark.every_case
def test_tiny_cache_yields_the_bits_of_the_thread(tasks, tmp_path):
    """And only the next items are decoded ahead."""
    with Loader(Pictures(60, tmp_path), 6, seed=1, ahead=ReadAhead(wanted=seen), shuffle=False) as loader:
        expected = take(loader, 12)
    (tmp_path / "decoded").unlink()
    dataset = Pictures(60, tmp_path)
    with Loader(
        dataset, 6, seed=1, ahead=ReadAhead(wanted=seen, producers=lambda it: tasks(it, 20_000)), shuffle=False
    ) as loader:
        batch = next(loader)
        sound = batch[1].media["audio"][0]
        assert numbers(batch) == expected[0] and not sound.loaded
        time.sleep(1)
        assert max(int(line[0]) for line in dataset.decoded()) < 6 * (1 + 2 + 2)
        assert sound.data.shape == sound.shape  # not requested by then
        assert take(loader, 11) == expected[1:]


def test_ranks_that_share_a_cluster_decode_an_item_once(tasks, tmp_path):
    """Held-out items also."""
    sets = [Pictures(24, tmp_path, seconds=0.01) for _ in range(2)]
    held_out = [Pictures(6, tmp_path / "held out", side=9) for _ in range(2)]
    (tmp_path / "held out").mkdir()
    loaders = [
        Loader(one, 6, seed=1, ahead=ReadAhead(producers=tasks, held_out=other))
        for one, other in zip(sets, held_out, strict=True)
    ]
    result: dict[int, list[Any]] = {}

    def run(rank: int) -> None:
        of = HeldOut(loaders[rank].producers, held_out[rank], range(6))
        items = [item for sample in of.samples for items in sample.media.values() for item in items]
        of.ask(items)
        result[rank] = [item.data.tolist() for item in items] + take(loaders[rank], 8)

    for loader in loaders:
        loader.begin()
    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    for each, size in ((held_out, 6), (sets, 24)):
        every = [line[:1] + line[2:4] for line in each[0].decoded()]
        assert len(every) == len(set(every)) == sum(index % 3 + 1 for index in range(size))
        assert each[0].read_items + each[1].read_items == len(every)
    here = [Pictures(6, tmp_path, side=9).sample(index, 0) for index in range(6)]
    own = [item.data.tolist() for sample in here for items in sample.media.values() for item in items]
    assert result[0] == result[1] and result[0][: len(own)] == own
    for loader in reversed(loaders):
        loader.close()


@pytest.mark.every_case
def test_errors_and_broken_samples_are_those_of_the_thread(tasks, tmp_path):
    dataset = Pictures(6, tmp_path, broken=(1,), deadly={4: 1000})
    with Loader(Pictures(6, tmp_path), 6, shuffle=False) as loader:
        (expected,) = take(loader, 1)
    with Loader(
        dataset, 6, shuffle=False, ahead=ReadAhead(prefetch=1, producers=lambda it: tasks(it, deaths=2))
    ) as loader:
        batch = next(loader)
        assert loader.producers.restarts >= 2
    for at in (1, 4):
        assert not any(item.data.any() for items in batch[at].media.values() for item in items)
    assert [numbers(batch)[at] for at in (0, 2, 3, 5)] == [expected[at] for at in (0, 2, 3, 5)]
    assert "2 workers were lost at sample 4" in dataset.failures["pictures:4"]
    assert "the disk is gone" in dataset.failures["pictures:1"]


class Doomed:
    """Keepers; the first one can only be on one node."""

    @staticmethod
    def options(**given: Any) -> Any:
        if given["name"].endswith("-0"):
            given = {**given, "resources": {"doomed": 1}, "scheduling_strategy": "DEFAULT"}
        return Keeper.options(**given)


def test_what_dies_costs_nothing(cluster, tasks, tmp_path, monkeypatch):
    """The keeper dies, and right after it its node; Ray then waits forever for such a node. Two ranks agree on the same
    new keeper.
    """
    monkeypatch.setattr(ray_tasks, "Keeper", Doomed)
    monkeypatch.setattr(ray_tasks, "RESTART", 0.5)
    with Loader(Pictures(60, tmp_path), 5, seed=4) as loader:
        expected = take(loader, 6)
    node = cluster.add(0, resources={"doomed": 1})
    sets = [Pictures(60, tmp_path, seconds=0.03) for _ in range(2)]
    loaders = [Loader(one, 5, seed=4, ahead=ReadAhead(producers=partial(tasks, at=None))) for one in sets]
    for loader in loaders:
        loader.begin()
    result = [take(loader, 2) for loader in loaders]
    (keeper,) = (pid for pid, name in children(raylet(node)) if name.startswith("ray::Keeper"))
    os.kill(keeper, signal.SIGKILL)
    cluster.remove(node)
    for _ in range(2, 6):
        for batches, loader in zip(result, loaders, strict=True):
            batches.append(numbers(next(loader)))
    assert result == [expected, expected]
    assert [one.blank_items for one in sets] == [0, 0]
    first, second = (loader.producers.keeper for loader in loaders)
    assert first.number >= 1 and first.actor == second.actor
    for loader in loaders:
        assert loader.producers.restarts >= 1
        loader.close()


@pytest.mark.every_case
def test_streams_have_the_batches_of_the_thread(tasks, tmp_path):
    """Samples that kill workers or cannot be decoded are left out."""
    mllm = tiny_mllm(layers=1)
    specs = {name: ParallelSpec(dp=2) for name in ("vision", "audio", LANGUAGE_MODEL)}
    parallel = parallelize(mllm, Layout.from_specs(mllm, specs, placement="shared"), timeout=120)
    given: dict[str, Any] = {"buffer": 3, "seed": 2, "options": StreamOptions(timeout=120)}
    with StreamLoader(Recorded(mllm, (6, 6, 6), tmp_path, broken=("0/3", "1/2")), parallel, 5, **given) as loader:
        expected = [batch_numbers(next(loader)) for _ in range(6)]
    stream = Recorded(mllm, (6, 6, 6), tmp_path, deadly={"1/2": 1000}, broken=("0/3",))
    parallel = parallelize(mllm, Layout.from_specs(mllm, specs, placement="shared"), timeout=120)
    with StreamLoader(
        stream, parallel, 5, ahead=ReadAhead(producers=lambda it: tasks(it, 0, deaths=1)), **given
    ) as loader:
        assert [batch_numbers(next(loader)) for _ in range(6)] == expected
    left = sorted(set(stream.left))
    assert left[0] == "0/3: 0/3: the disk is gone" and "1 workers were lost at 1/2 on the Ray cluster" in left[1]


def test_a_cluster_that_is_not_there_is_named(tmp_path, monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    ray.shutdown()  # shuts down the cluster of the other tests, if they ran before
    loader = Loader(Pictures(4, tmp_path), 2)
    with pytest.raises(RayError, match=r"no Ray cluster .* start one with `ray start --head`"):
        RayTasks(loader, "run", address="127.0.0.1:1")
    assert not ray.is_initialized()
