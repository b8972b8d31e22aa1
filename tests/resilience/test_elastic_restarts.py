"""Elastic runs of tiny models with a coordinator that is killed and restarted."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.resilience.elastic_cluster import Cluster, table
from tests.resilience.sweep import check

pytestmark = pytest.mark.slow


def test_the_coordinator_dies_in_steps_and_in_votes(tmp_path: Path) -> None:
    """No node is lost, nothing is copied, processes stay, and losses equal those of one process."""
    made = table(tmp_path / "runs", train={"steps": 14}, resilience={"nodes": 3})
    with Cluster(tmp_path, made, hold=2, state=True) as cluster:
        cluster.start("a", "b", "c")
        for step, following in ((2, 5), (5, 8), (8, None)):
            cluster.wait_for(cluster.reached(step, ranks=3), f"step {step} on all ranks")
            cluster.kill_coordinator()
            cluster.hold(following)
            cluster.wait_for(lambda step=step: cluster.voting(step + 1) == 3, "votes that nobody counts")  # type: ignore[misc]
            cluster.start_coordinator()
        codes = cluster.end()
        assert codes == {"a": 0, "b": 0, "c": 0}, cluster.told()
        assert len(cluster.events("taken up")) == 3 and cluster.events("lost") == []
    result = check(cluster, made, ["a", "b", "c"])
    assert result["generations"] == 1 and result["false_alarms"] == 0


def test_a_node_dies_while_the_coordinator_is_away(tmp_path: Path) -> None:
    """The lost node is noticed as it does not reconnect. The others repeat its unfinished step."""
    made = table(tmp_path / "runs", train={"steps": 10}, resilience={"nodes": 4, "coordinator_patience": 8.0})
    with Cluster(tmp_path, made, hold=3, state=True) as cluster:
        cluster.start("a", "b", "c", "d")
        cluster.wait_for(cluster.reached(3, ranks=4), "step 3 on all ranks")
        cluster.kill_coordinator()
        cluster.kill("b")
        cluster.hold(None)
        cluster.start_coordinator()
        codes = cluster.end()
        assert [codes[name] for name in "acd"] == [0, 0, 0], cluster.told()
        (lost,) = cluster.events("lost")
        assert "did not reconnect within 8 s after the restart of the coordinator" in lost["detail"]
    result = check(cluster, made, ["a", "c", "d"])
    assert result["generations"] == 2 and result["false_alarms"] == 0
