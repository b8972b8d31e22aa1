"""Elastic runs of tiny models whose coordinator is killed and started again."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.resilience.elastic_cluster import Cluster, table
from tests.resilience.sweep import check

pytestmark = pytest.mark.slow


def test_the_coordinator_dies_in_steps_and_in_votes(tmp_path: Path) -> None:
    """Nobody is lost, nothing is copied, processes stay, and losses are those of one process."""
    made = table(tmp_path / "runs", train={"steps": 14}, resilience={"nodes": 3})
    with Cluster(tmp_path, made, pace=0.4, state=True) as cluster:
        cluster.start("a", "b", "c")
        for step in (2, 5, 8):
            cluster.wait_for(cluster.reached(step), f"step {step}")
            time.sleep(0.1 * step)  # ranks wait 0.4 s after a vote: into that, or into the step that follows
            cluster.kill_coordinator()
            time.sleep(0.2 * step)  # all stand still in the vote
            cluster.start_coordinator()
        codes = cluster.end()
        assert codes == {"a": 0, "b": 0, "c": 0}, cluster.told()
        assert len(cluster.events("taken up")) == 3 and cluster.events("lost") == []
    found = check(cluster, made, ["a", "b", "c"])
    assert found["generations"] == 1 and found["false_alarms"] == 0


def test_a_node_dies_while_the_coordinator_is_away(tmp_path: Path) -> None:
    """It does not come back, by which it is noticed; the others train the step that it left anew."""
    made = table(tmp_path / "runs", train={"steps": 10}, resilience={"nodes": 4, "coordinator_patience": 4.0})
    with Cluster(tmp_path, made, pace=0.3, state=True) as cluster:
        cluster.start("a", "b", "c", "d")
        cluster.wait_for(cluster.reached(3), "step 3")
        cluster.kill_coordinator()
        cluster.kill("b")
        time.sleep(0.5)
        cluster.start_coordinator()
        codes = cluster.end()
        assert [codes[name] for name in "acd"] == [0, 0, 0], cluster.told()
        (lost,) = cluster.events("lost")
        assert "not come back in the 4 s since the coordinator was started again" in lost["detail"]
    found = check(cluster, made, ["a", "c", "d"])
    assert found["generations"] == 2 and found["false_alarms"] == 0
