"""Data prepared on a local Ray cluster: the bits of the thread, each item once in the cluster, nodes that die."""

from __future__ import annotations

import random
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

ray = pytest.importorskip("ray", reason="interlace[ray] is not installed")

from interlace.data import Loader  # noqa: E402
from interlace.data.ray_tasks import RayError, RayTasks  # noqa: E402
from tests.data.pictures import Pictures  # noqa: E402
from tests.data.test_workers import numbers, seen, take  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A head without CPUs, as a rank's node is, and two nodes that decode."""
    from ray.cluster_utils import Cluster

    memory = {"object_store_memory": 100_000_000}
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False, **memory})
    for _ in range(2):
        made.add_node(num_cpus=1, **memory)
    yield made
    for node in [*(node for node in made.list_all_nodes() if node is not made.head_node), made.head_node]:
        made.remove_node(node, allow_graceful=False)  # to drain one may take minutes


@pytest.fixture
def tasks(cluster: Any, tmp_path: Path) -> Iterator[Any]:
    """What asks the cluster, as a rank that is its only driver does."""
    yield lambda loader, limit=1 << 26, **more: RayTasks(
        loader, str(tmp_path), address=cluster.address, limit=limit, **more
    )
    ray.shutdown()


@pytest.mark.parametrize("limit", [0, 20_000, 1 << 26])
def test_the_bits_are_those_of_the_thread(tasks, tmp_path, limit):
    with Loader(Pictures(20, tmp_path), 6, seed=1, wanted=seen) as loader:
        expected = take(loader, 8)
    before = signal.getsignal(signal.SIGTERM)
    with Loader(Pictures(20, tmp_path), 6, seed=1, wanted=seen, producers=lambda it: tasks(it, limit)) as loader:
        assert take(loader, 8) == expected
        assert signal.getsignal(signal.SIGTERM) is before  # a rank saves and leaves at it
        batch = next(loader)
        sound = batch[1].media["audio"][0]
        assert not sound.loaded and sound.data.shape == sound.shape  # nobody had asked for it


def test_ranks_that_share_a_cluster_decode_an_item_once(tasks, tmp_path):
    sets = [Pictures(24, tmp_path, seconds=0.02) for _ in range(2)]
    loaders = [Loader(one, 6, seed=1, producers=tasks) for one in sets]
    found: dict[int, list[Any]] = {}

    def run(rank: int) -> None:
        found[rank] = take(loaders[rank], 8)

    for loader in loaders:
        loader.begin()
    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert found[0] == found[1]
    every = [line[:1] + line[2:4] for line in sets[0].decoded()]
    assert len(every) == len(set(every)) == sum(index % 3 + 1 for index in range(24))
    assert sets[0].read_items + sets[1].read_items == len(every)
    for loader in reversed(loaders):
        loader.close()


def test_errors_and_broken_samples_are_those_of_the_thread(tasks, tmp_path):
    dataset = Pictures(6, tmp_path, broken=(1,), deadly={4: 1000, 3: 1})
    with Loader(Pictures(6, tmp_path), 6, shuffle=False) as loader:
        (expected,) = take(loader, 1)
    with Loader(dataset, 6, shuffle=False, prefetch=1, producers=tasks) as loader:
        batch = next(loader)
    for at in (1, 4):
        assert not any(item.data.any() for items in batch[at].media.values() for item in items)
    assert [numbers(batch)[at] for at in (0, 2, 3, 5)] == [expected[at] for at in (0, 2, 3, 5)]
    assert "3 workers were lost at sample 4" in dataset.failures["pictures:4"]
    assert "the disk is gone" in dataset.failures["pictures:1"] and loader.producers.restarts >= 4


def test_a_node_that_dies_costs_nothing(cluster, tasks, tmp_path):
    """Twice, with all that it had decoded and was about to."""
    with Loader(Pictures(60, tmp_path), 5, seed=4) as loader:
        expected = take(loader, 18)
    dataset = Pictures(60, tmp_path, seconds=0.03)
    with Loader(dataset, 5, seed=4, producers=tasks) as loader:
        found = []
        for step in range(18):
            found.append(numbers(next(loader)))
            if step in (3, 9):
                mine = {cluster.head_node.node_id, ray.get_runtime_context().get_node_id()}  # a driver needs its node
                workers = [node for node in cluster.list_all_nodes() if node.node_id not in mine]
                cluster.remove_node(random.Random(step).choice(workers), allow_graceful=False)
                cluster.add_node(num_cpus=1, object_store_memory=100_000_000)
        assert found == expected and dataset.blank_items == 0


def test_a_keeper_that_dies_costs_nothing(tasks, tmp_path):
    with Loader(Pictures(30, tmp_path), 5, seed=4) as loader:
        expected = take(loader, 12)
    with Loader(Pictures(30, tmp_path), 5, seed=4, producers=tasks) as loader:
        found = []
        for step in range(12):
            found.append(numbers(next(loader)))
            if step in (2, 6):
                ray.kill(loader.producers.keeper, no_restart=False)
        assert found == expected


def test_in_flight_is_bounded(tasks, tmp_path):
    dataset = Pictures(60, tmp_path)
    with Loader(dataset, 3, shuffle=False, prefetch=2, producers=tasks) as loader:
        next(loader)
        time.sleep(2)
        assert max(int(line[0]) for line in dataset.decoded()) < 3 * (1 + 2 + 2)


def test_a_cluster_that_is_not_there_is_named(tmp_path, monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    loader = Loader(Pictures(4, tmp_path), 2)
    with pytest.raises(RayError, match=r"no Ray cluster .* start one with `ray start --head`"):
        RayTasks(loader, "run", address="127.0.0.1:1")
    assert torch.get_num_threads() >= 1 and not ray.is_initialized()
