"""Elastic runs that end and resume, or roll back, by a checkpoint: losses equal those of an uninterrupted run."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.resilience.elastic_cluster import Cluster, losses, table, uninterrupted
from tests.resilience.sweep import cut

pytestmark = pytest.mark.slow


def check_unbroken(made: Mapping[str, Any], *clusters: Cluster) -> None:
    """Losses of the run equal an uninterrupted run's, and so do the samples of every step, however often it was
    trained.
    """
    expected, samples = uninterrupted(made, clusters[0].folder / "alone")
    result = losses(clusters[-1].run_folder())
    assert result.keys() == expected.keys()
    assert max(abs(result[step] - expected[step]) for step in expected) < 1e-5
    steps = [step for cluster in clusters for step in cluster.steps()]
    assert {each["step"] for each in steps} == set(expected)
    assert all(each["samples"] == list(samples[each["step"]]) for each in steps)


def test_what_too_few_nodes_have_saved_goes_on_with_enough(tmp_path: Path) -> None:
    made = table(tmp_path / "runs", train={"steps": 10, "validate_every": 4})
    with Cluster(tmp_path / "first", made, hold=3) as first:
        first.start("a", "b")
        first.wait_for(first.reached(3), "step 3")
        first.kill("a")
        first.hold(None)
        assert first.end()["b"] == 1, first.told()
    (saved,) = first.checkpoints()
    with Cluster(tmp_path / "second", made, resume="") as second:
        second.start("c", "d", "e")
        assert set(second.end().values()) == {0}, second.told()
    assert f"going on from {saved}" in second.said()
    assert min(each["step"] for each in second.steps()) == max(each["step"] for each in first.steps()) + 1
    check_unbroken(made, first, second)


def test_killed_run_resumes_from_its_checkpoint(tmp_path: Path) -> None:
    made = table(tmp_path / "runs", train={"steps": 10}, checkpoint={"every": 2, "asynchronous": False})
    with Cluster(tmp_path / "first", made, hold=3) as first:
        first.start("a", "b")
        first.wait_for(lambda: len(first.checkpoints()) > 0, "a checkpoint")
    saved = first.checkpoints()[-1]
    with Cluster(tmp_path / "second", made, resume="") as second:
        second.start("c", "d")
        assert set(second.end().values()) == {0}, second.told()
    assert f"going on from {saved}" in second.said()
    assert min(each["step"] for each in second.steps()) == int(saved.name.removeprefix("step-")) + 1
    check_unbroken(made, first, second)


def test_nodes_that_are_all_told_to_go_save_and_the_run_goes_on(tmp_path: Path) -> None:
    made = table(tmp_path / "runs", train={"steps": 10})
    with Cluster(tmp_path / "first", made, hold=2) as first:
        first.start("a", "b")
        first.wait_for(first.reached(2), "step 2")
        first.preempt("a")
        first.preempt("b")
        first.wait_for(lambda: len(first.events("leaving")) == 2, "the word of both")
        first.hold(None)
        assert set(first.end().values()) == {128 + signal.SIGTERM}, first.told()
    (saved,) = first.checkpoints()
    with Cluster(tmp_path / "second", made, resume=str(saved)) as second:
        second.start("c", "d")
        assert set(second.end().values()) == {0}, second.told()
    check_unbroken(made, first, second)


@pytest.mark.parametrize(
    ("every", "lane"),
    [
        (2, {}),
        (0, {}),
        (2, {"tp": 2}),
        (2, {"cp": 2, "shard": "full", "shard_ranks": 2}),
    ],
    ids=["a checkpoint", "none", "a checkpoint of pieces", "a checkpoint of rows"],
)
def test_when_all_holders_of_a_layer_are_lost_the_run_goes_back(
    tmp_path: Path, every: int, lane: dict[str, Any]
) -> None:
    """To its last checkpoint. Without one the run ends, and the reason is reported on all ranks."""
    # One microbatch for each of f + 1 pipelines limits them to two, of four nodes.
    made = table(
        tmp_path / "runs", train={"steps": 12, "microbatches": 1}, resilience={"nodes": 4},
        checkpoint={"every": every, "asynchronous": False},
    )  # fmt: skip
    if lane:
        cut(made, lane)
    with Cluster(tmp_path / "run", made, hold=3) as cluster:
        cluster.start("a", "b", "c", "d")
        cluster.wait_for(cluster.reached(3), "step 3")
        cluster.wait_for(lambda: not every or len(cluster.checkpoints()) > 0, "a checkpoint")
        pipelines = cluster.events("generation")[-1]["pipelines"]
        assert len(pipelines) == 2
        lost = [pipeline[0].rpartition("-")[0] for pipeline in pipelines]  # both that have the first layer
        for name in lost:
            cluster.kill(name)
        cluster.hold(None)
        codes = [code for name, code in cluster.end().items() if name not in lost]
    if every:
        assert codes == [0, 0], cluster.told()
        assert f"going back to {cluster.run_folder()}" in cluster.said()
        saved = {int(path.name.removeprefix("step-")) for path in cluster.checkpoints()}
        before = [each["step"] for each in cluster.steps() if each["generation"] == 1]
        after = [each["step"] for each in cluster.steps() if each["generation"] > 1]
        assert min(after) <= max(before) and min(after) - 1 in range(0, 13, every) and max(saved) == 12
        check_unbroken(made, cluster)
    else:
        assert codes == [1, 1], cluster.told()
        assert "there is no checkpoint yet: start the run anew" in cluster.events("end")[0]["why"]
