"""Elastic runs of tiny models over gloo: what they come to is what one process comes to that nothing happens to."""

from __future__ import annotations

from pathlib import Path

import pytest

from interlace.train.build import build
from interlace.train.checkpoint.folder import verify
from interlace.train.checkpoint.storage import read_manifest
from interlace.train.config import from_table
from interlace.train.texts import tokenizer_of
from tests.resilience.elastic_cluster import Cluster, table
from tests.resilience.sweep import check, play


def test_a_run_outlives_a_node(tmp_path: Path) -> None:
    made = table(tmp_path / "runs", train={"steps": 8, "validate_every": 0}, resilience={"nodes": 3})
    with Cluster(tmp_path, made, pace=0.3) as cluster:
        cluster.start("a", "b", "c")
        cluster.wait_for(cluster.reached(2), "step 2")
        cluster.kill("a")
        codes = cluster.end()
        assert (codes["b"], codes["c"]) == (0, 0), cluster.told()
    found = check(cluster, made, ["b", "c"])
    assert found["generations"] == 2 and found["false_alarms"] == 0


@pytest.mark.slow
def test_a_run_outlives_a_node_and_takes_another_in(tmp_path: Path) -> None:
    made = table(tmp_path / "runs", train={"steps": 90}, resilience={"nodes": 3})
    with Cluster(tmp_path, made, pace=0.3) as cluster:
        cluster.start("a", "b", "c")
        cluster.wait_for(cluster.reached(2), "step 2")
        cluster.kill("a")
        cluster.start("d")
        cluster.wait_for(lambda: len(cluster.events("generation")) > 2, "the generation that has d")
        cluster.slow(0.0)
        codes = cluster.end()
        assert [codes[name] for name in "bcd"] == [0, 0, 0], cluster.told()
    found = check(cluster, made, ["b", "c", "d"])
    assert found["generations"] >= 3 and found["false_alarms"] == 0
    page = (cluster.run_folder() / "recovery.html").read_text()
    assert "death" in page and "regroup" in page


@pytest.mark.slow
def test_faults_of_all_kinds_at_random_moments(tmp_path: Path) -> None:
    """An episode of the sweep on four nodes: pipelines of different depth, rank 0's node among those that die."""
    found = play(tmp_path, ["kill", "preempt", "stop"], seed=3, nodes=4, min_nodes=1, steps=150)
    assert found["generations"] >= 4


@pytest.mark.slow
def test_too_few_nodes_save_what_they_hold_and_stop(tmp_path: Path) -> None:
    """Of two pipelines one is left, with f = 1: it saves the whole model, of the last step that counted."""
    made = table(tmp_path / "runs", train={"steps": 200, "validate_every": 0})
    with Cluster(tmp_path, made, pace=0.3) as cluster:
        cluster.start("a", "b")
        cluster.wait_for(cluster.reached(2), "step 2")
        cluster.kill("a")
        assert cluster.end()["b"] == 0, cluster.told()
    assert cluster.events("generation")[-1]["of"] == "save"
    assert "too few nodes are left" in cluster.told()
    (saved,) = cluster.run_folder().glob("checkpoints/step-*")
    verify(saved)
    manifest = read_manifest(saved)
    assert manifest.step == max(each["step"] for each in cluster.steps())
    config = from_table(made)
    for name, parameter in build(config, tokenizer_of(config, source="test")).named_parameters():
        keys = ("model", "optimizer.exp_avg", "optimizer.exp_avg_sq", "optimizer.ema")
        assert all(manifest.tensors[f"{key}.{name}"].shape == list(parameter.shape) for key in keys)
