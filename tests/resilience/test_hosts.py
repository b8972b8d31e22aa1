"""Nodes on separate hosts, made of network namespaces. The coordinator and its store are on another host."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from interlace.resilience.settings import Settings
from tests.resilience.cluster import cluster, vote_on_steps
from tests.resilience.elastic import write_chats
from tests.resilience.elastic_cluster import Cluster, table
from tests.resilience.hosts import Hosts, hosts_of_namespaces
from tests.resilience.sweep import check

pytestmark = pytest.mark.slow


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    with hosts_of_namespaces(4) as made:
        yield made


def test_a_cut_cable_is_found_by_heartbeat(tmp_path: Path, hosts: Hosts) -> None:
    settings = Settings(nodes=3, faults=1, min_nodes=1, heartbeat=3.0, gather=60.0)
    with cluster(tmp_path, settings, (vote_on_steps, 0, 0.05), 0, host=hosts.switch) as run:
        run.go_on()
        nodes = run.start(3, networks=hosts.names)
        run.until(lambda: len(run.ranks()) == 3, "three nodes that train, over the network")
        before = run.ranks()
        hosts.cut(1)  # no shutdown message, and no connection is closed
        second = run.until(lambda: run.generations()[1:], "generation without the node")[0]
        lost = second["cause"][0].removeprefix("death ")
        assert "no sign of life from its supervisor for 3 s" in run.journal("lost")[0]["detail"]
        nodes[1].join(60.0)
        assert nodes[1].exitcode == 1  # it has lost the coordinator, and ends its ranks
        output = "".join(path.read_text() for path in tmp_path.glob("supervisor-*"))
        assert f"it lost the coordinator at {hosts.switch}" in output
        assert not Path(f"/proc/{before[lost][0]}").exists()
        steps = run.finish()
        assert run.end() == 0
        run.check_votes(steps)
        assert {node: processes for node, processes in run.ranks().items() if node != lost} == {
            node: processes for node, processes in before.items() if node != lost
        }
        assert [nodes[0].exitcode, nodes[2].exitcode] == [0, 0]


def test_training_continues_while_a_host_is_cut_off_and_returns(tmp_path: Path, hosts: Hosts) -> None:
    """The host of rank 0 reads data from its own disk; only run.folder is shared by all hosts."""
    made = table(
        tmp_path / "runs",
        train={"steps": 12, "batch_size": 6, "microbatches": 6, "validate_every": 0},
        resilience={"nodes": 3, "heartbeat": 4.0},
    )
    made["data"] |= write_chats(tmp_path / "chats")
    made["model"]["language_model"]["config"]["max_position_embeddings"] = made["data"]["max_tokens"]
    with Cluster(tmp_path, made, hold=2, hosts=hosts, own=tmp_path / "chats") as run:
        run.start("a", "b", "c")
        run.wait_for(run.reached(2), "step 2")
        first = run.events("generation")[0]["pipelines"][0][0].rpartition("-")[0]
        hosts.cut(run.places[first])  # no shutdown message, and no connection is closed
        run.hold(5)
        run.wait_for(lambda: len(run.events("generation")) > 1, "the generation without the host")
        assert "no sign of life from its supervisor for 4 s" in run.events("lost")[0]["detail"]
        run.nodes[first].join(60.0)
        assert run.nodes[first].exitcode == 1 and not any(Path(f"/proc/{pid}").exists() for pid in run.ranks(first))
        hosts.mend(run.places[first])
        run.start("d", on=run.places[first])
        run.wait_for(run.ready("d"), "node d")
        run.hold(None)
        codes = run.end()
        living = sorted({"a", "b", "c", "d"} - {first})
        assert {codes[name] for name in living} == {0}, run.told()
    result = check(run, made, living)
    assert result["generations"] == 3 and result["false_alarms"] == 0
    # Every host has read its own disk, and has written its index there.
    assert all(any((tmp_path / f"disk-{place}" / "cache").iterdir()) for place in range(3))


def test_new_coordinator_resumes_after_its_host_was_cut_off(tmp_path: Path, hosts: Hosts) -> None:
    """Connections to the old coordinator are never closed: supervisors inform the ranks that wait for its answer."""
    made = table(tmp_path / "runs", train={"steps": 12, "validate_every": 0}, resilience={"nodes": 3, "heartbeat": 2.0})
    with Cluster(tmp_path, made, hold=2, hosts=hosts, state=True) as run:
        run.start("a", "b", "c")
        run.wait_for(run.reached(2, ranks=3), "step 2 on all ranks")
        hosts.cut(3)
        run.kill_coordinator()  # its last messages do not arrive
        run.hold(None)
        time.sleep(6.0)  # supervisors consider it gone after three heartbeats
        hosts.mend(3)
        run.start_coordinator()
        codes = run.end()
        assert codes == {"a": 0, "b": 0, "c": 0}, run.told()
        assert run.events("lost") == [] and len(run.events("taken up")) == 1
    result = check(run, made, ["a", "b", "c"])
    assert result["generations"] == 1 and result["false_alarms"] == 0
