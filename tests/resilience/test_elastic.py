"""Elastic runs of tiny models over gloo: results equal an uninterrupted run in one process."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from interlace.train.report.metrics import LOSS
from interlace.train.report.recovery import PARTS
from interlace.train.runfolder import json_lines
from tests.resilience.elastic import write_chats
from tests.resilience.elastic_cluster import Cluster, table
from tests.resilience.sweep import KINDS, TABLE, check, play


def test_a_run_outlives_a_node(tmp_path: Path) -> None:
    """Also a node that dies after all have measured a step, before it alone has written the line. Every other step is
    the last of an epoch, with one sample for all pipelines.
    """
    train = {"steps": 8, "batch_size": 9, "validate_every": 0}
    made = table(tmp_path / "runs", train=train, data={"held_out": 0.995}, resilience={"nodes": 3})
    with Cluster(tmp_path, made) as cluster:
        cluster.kill_before_line(3)
        cluster.start("a", "b", "c")
        codes = cluster.end()
        living = [name for name in "abc" if codes[name] == 0]
        assert len(living) == 2, cluster.told()
    result = check(cluster, made, living)
    assert result["generations"] == 2 and result["false_alarms"] == 0


@pytest.mark.slow
def test_a_run_outlives_a_node_and_takes_another_in(tmp_path: Path) -> None:
    made = table(tmp_path / "runs", train={"steps": 12}, resilience={"nodes": 3}, log={"trackers": ["tensorboard"]})
    with Cluster(tmp_path, made, hold=2) as cluster:
        cluster.start("a", "b", "c")
        cluster.wait_for(cluster.reached(2), "step 2")
        cluster.kill("a")
        cluster.hold(5)
        cluster.wait_for(cluster.reached(5, 2), "a step without a")
        cluster.start("d")
        cluster.wait_for(cluster.ready("d"), "node d")
        cluster.hold(None)
        codes = cluster.end()
        assert [codes[name] for name in "bcd"] == [0, 0, 0], cluster.told()
    result = check(cluster, made, ["b", "c", "d"])
    assert result["generations"] == 3 and result["false_alarms"] == 0
    folder = cluster.run_folder()
    page, lines = (folder / "recovery.html").read_text(), json_lines(folder / "recovery.jsonl")
    bars = Bars(page)
    assert bars.open == [] and bars.parts == list(PARTS) * (result["generations"] - 1)
    assert "death" in page and "join" in page
    curves = scalars(folder)
    changes = [line for line in lines if line["split"]]
    for part in (*PARTS, "lost"):
        expected = {line["step"]: {**line["split"], "lost": line["lost"]}[part] for line in changes}
        assert curves[f"recovery/{part}(s)"] == pytest.approx(expected, rel=1e-5)
    assert set(curves[LOSS]) == set(range(1, 13))


def scalars(folder: Path) -> dict[str, dict[int, float]]:
    """TensorBoard data of a run folder: curve -> step -> value."""
    loading = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    loaded = loading.EventAccumulator(str(next(folder.rglob("events.out*")).parent), size_guidance={"scalars": 0})
    loaded.Reload()
    return {tag: {each.step: each.value for each in loaded.Scalars(tag)} for tag in loaded.Tags()["scalars"]}


def test_the_table_of_the_sweep_has_what_the_page_says() -> None:
    """`check` and `play` list the checks of an episode."""
    episodes = [row for run in json.loads(TABLE.read_text())["runs"] for row in run["episodes"]]
    counts = {kind: sum(row["faults"].get(kind, 0) for row in episodes) for kind in KINDS}
    assert counts["kill"] >= 50 and counts["stop"] >= 10 and counts["preempt"] >= 10
    assert all(row["nodes"] == 8 and row["fewest_pipelines"] >= 3 for row in episodes)
    assert all(row["worst_loss_difference"] < 1e-5 and row["false_alarms"] == 0 for row in episodes)
    uneven = sum(steps for row in episodes for shape, steps in row["steps_of_depths"].items() if len(set(shape)) > 2)
    worst = max(row["worst_loss_difference"] for row in episodes)
    medians = [lost["median"] for row in episodes if (lost := row["lost_seconds"].get("death"))]
    page = (Path(__file__).parents[2] / "docs" / "when-nodes-fail.md").read_text()
    assert f"{counts['kill']} kills, {counts['stop']} hangs and {counts['preempt']} preemptions" in page
    assert f"{uneven:,} of {sum(row['steps'] for row in episodes):,} steps" in page
    assert f"no loss was more than {worst:.1e} off" in page
    assert f"a death cost {min(medians):.1f} to {max(medians):.1f} s" in page


@pytest.mark.slow
def test_faults_of_all_kinds_at_random_moments(tmp_path: Path) -> None:
    """An episode of the sweep on four nodes: pipelines of different depth; rank 0's node is among those that die."""
    result = play(tmp_path, ["kill", "preempt", "stop"], seed=3, nodes=4, min_nodes=1, steps=150)
    assert result["generations"] >= 4


@pytest.mark.slow
def test_packed_rows_outlive_a_node(tmp_path: Path) -> None:
    """The rows of a batch are redistributed when a pipeline is lost. Every other batch has one row."""
    made = table(tmp_path / "runs", train={"steps": 8, "batch_size": 6, "microbatches": 6}, resilience={"nodes": 3})
    made["data"] |= write_chats(tmp_path / "chats") | {"limit": 20}
    made["model"]["language_model"]["config"]["max_position_embeddings"] = made["data"]["max_tokens"]
    with Cluster(tmp_path, made, hold=2) as cluster:
        cluster.start("a", "b", "c")
        cluster.wait_for(cluster.reached(2), "step 2")
        cluster.kill("a")
        cluster.hold(None)
        codes = cluster.end()
        assert (codes["b"], codes["c"]) == (0, 0), cluster.told()
    result = check(cluster, made, ["b", "c"])
    assert result["generations"] == 2


class Bars(HTMLParser):
    """Contents of recovery.html: the parts of its bars, in order, and the unclosed elements."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.parts: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        if tag not in ("meta", "th", "td", "tr", "p"):  # HTML closes these itself
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag in ("p", "tr"):
            return
        assert self.open.pop() == tag, self.getpos()

    def handle_data(self, data: str) -> None:
        if self.open[-2:] == ["rect", "title"]:
            self.parts.append(data.partition(":")[0])
