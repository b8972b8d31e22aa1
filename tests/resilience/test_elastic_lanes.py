"""Elastic runs on nodes of several ranks: a stage per rank, or lanes that share layers, tokens or state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from interlace.train.checkpoint.folder import verify
from interlace.train.checkpoint.storage import read_manifest
from interlace.train.config.load import from_table
from interlace.train.data.texts import tokenizer_of
from interlace.train.models.build import build
from tests.resilience.elastic_cluster import Cluster, table
from tests.resilience.sweep import check, cut, play

LANES = {
    "pieces": {"tp": 2},
    "rows of the state": {"cp": 2, "shard": "optimizer", "shard_ranks": 2},
    "rows of all": {"cp": 2, "shard": "full", "shard_ranks": 2},
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "lane", ["pieces", "rows of all", pytest.param("rows of the state", marks=pytest.mark.every_case)]
)
def test_all_fault_kinds_with_layers_shared_within_a_node(tmp_path: Path, lane: str) -> None:
    """Pipelines of two and of three nodes, each with two ranks that share each of its layers."""
    faults = ["kill", "stop", "preempt"] if lane == "pieces" else ["kill", "preempt"]
    result = play(tmp_path, faults, seed=5, nodes=5, min_nodes=2, steps=60, lane=LANES[lane])
    assert result["generations"] >= 4 and result["copied_mib"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("lane", [{}, {"tp": 2}], ids=["ranks", "lanes"])
def test_tied_embedding_on_one_rank_or_two_of_a_pipeline(tmp_path: Path, lane: dict[str, int]) -> None:
    """Two microbatches limit pipelines to two: three nodes make one of one node and one of two."""
    made = table(tmp_path / "runs", train={"steps": 12, "microbatches": 1}, resilience={"nodes": 3})
    cut(made, lane)
    made["model"]["language_model"]["config"]["tie_word_embeddings"] = True
    with Cluster(tmp_path, made, hold=3) as cluster:
        cluster.start(*"abc")
        cluster.wait_for(cluster.reached(3), "step 3")
        (alone,) = next(p for p in cluster.events("generation")[-1]["pipelines"] if len(p) == 1)
        victim = alone.rpartition("-")[0]
        cluster.kill(victim)  # its replacement copies from two others
        cluster.hold(5)
        cluster.wait_for(cluster.reached(5, 2), "a step without it")
        cluster.start("d")
        cluster.wait_for(cluster.ready("d"), "node d")
        cluster.hold(None)
        living = [name for name in "abcd" if name != victim]
        codes = cluster.end()
        assert [codes[name] for name in living] == [0, 0, 0], cluster.told()
    result = check(cluster, made, living)
    assert result["steps_of_depths"].keys() & {"1+2", "2+1"} and result["copied_mib"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("lane", [{}, *LANES.values()], ids=["whole", *LANES])
def test_too_few_nodes_save_what_they_hold_and_stop(tmp_path: Path, lane: dict[str, Any]) -> None:
    """With f = 1, one of two pipelines is left: it saves the whole model of the last counted step."""
    made = table(tmp_path / "runs", train={"steps": 200, "validate_every": 0})
    cut(made, lane)
    with Cluster(tmp_path, made, hold=2) as cluster:
        cluster.start("a", "b")
        cluster.wait_for(cluster.reached(2), "step 2")
        cluster.kill("a")
        cluster.hold(None)
        assert cluster.end()["b"] == 1, cluster.told()
    assert cluster.events("generation")[-1]["of"] == "save"
    assert "too few nodes remain" in cluster.told()
    (saved,) = cluster.run_folder().glob("checkpoints/step-*")
    verify(saved)
    manifest = read_manifest(saved)
    assert manifest.step == max(each["step"] for each in cluster.steps())
    config = from_table(made)
    for name, parameter in build(config, tokenizer_of(config, source="test")).named_parameters():
        keys = ("model", "optimizer.exp_avg", "optimizer.exp_avg_sq", "optimizer.ema")
        assert all(manifest.tensors[f"{key}.{name}"].shape == list(parameter.shape) for key in keys)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "faults", "names", "lane"),
    [
        pytest.param(2, 1, "abc", {}, id="two ranks a node"),
        pytest.param(1, 0, "a", {}, id="one node, no fault"),
        pytest.param(2, 1, "abc", {"cp": 2}, id="a node shares the tokens"),
        pytest.param(4, 1, "abc", {"tp": 2, "cp": 2}, id="a node shares tokens and layers"),
        pytest.param(4, 1, "abc", {"tp": 2}, id="two lanes a node"),
    ],
)
def test_nodes_of_several_ranks_and_one_alone(
    tmp_path: Path, ranks: int, faults: int, names: str, lane: dict[str, int]
) -> None:
    made = table(tmp_path / "runs", train={"steps": 10}, resilience={"nodes": len(names), "faults": faults})
    cut(made, lane)
    made["resilience"]["ranks_per_node"] = ranks
    with Cluster(tmp_path, made, hold=2 if faults else None) as cluster:
        cluster.start(*names)
        if faults:
            cluster.wait_for(cluster.reached(2), "step 2")
            cluster.kill("a")
            cluster.hold(None)
        living = list(names[faults:])
        codes = cluster.end()
        assert [codes[name] for name in living] == [0] * len(living), cluster.told()
    result = check(cluster, made, living)
    assert result["generations"] == 1 + faults
