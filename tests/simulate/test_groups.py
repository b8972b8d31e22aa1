"""Groups of ranks: members, utilization, and their display in page, picture and trace."""

from __future__ import annotations

import base64
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from interlace.layout import Lane, Layout, ParallelSpec, Pipeline, Stage
from interlace.schedule import Op, Schedule, StageGraph, StepTable, one_f_one_b
from interlace.schedule.actions import CODES, COMPUTE, OP
from interlace.simulate import Simulated, simulate_arrays
from interlace.simulate.groups import RankGroups, Utilisation, spread_over
from interlace.simulate.pictures.overview import plot_overview, write_overview
from interlace.simulate.sampled_trace import timeline_of, write_sampled_trace
from tests.simulate.cases import random_schedule

LLM = "language_model"


def cluster(encoders: int, replicas: int, tp: int = 2, pp: int = 3) -> Layout:
    """`encoders` ranks of an encoder, then `replicas` of a language model."""
    vision = tuple(Pipeline("vision", r, (Stage("vision", 0, 0, 2, Lane((r,))),)) for r in range(encoders))
    language = []
    for replica in range(replicas):
        first = encoders + replica * tp * pp
        lanes = [Lane(tuple(range(first + i * tp, first + (i + 1) * tp))) for i in range(pp)]
        stages = tuple(Stage(LLM, i, i, i + 1, lane) for i, lane in enumerate(lanes))
        language.append(Pipeline(LLM, replica, stages))
    modules = {"vision": (ParallelSpec(dp=encoders), vision), LLM: (ParallelSpec(tp, 1, pp, replicas), tuple(language))}
    return Layout(modules, encoders + replicas * tp * pp)


def played(schedule: Schedule, seed: int = 0) -> Simulated:
    seconds = np.where(schedule.rows[:, OP] <= CODES[Op.BACKWARD_WEIGHT], 1.0, 0.01)
    return simulate_arrays(schedule, seconds * np.random.default_rng(seed).random(len(seconds)), transfer=0.1)


def uniform(encoders: int = 5, replicas: int = 4) -> tuple[Schedule, Simulated]:
    layout = cluster(encoders, replicas)
    graph = StageGraph(layout, (("vision", LLM),), {"vision": (True,) * 2, LLM: (True,) * 3})
    table = StepTable.aligned(graph.links, [{LLM}] * 4, replicas=replicas)
    schedule = one_f_one_b(graph, table)
    return schedule, played(schedule)


def test_replicas_are_groups_and_small_ones_join() -> None:
    groups = RankGroups.of(cluster(20, 3))
    assert groups.names == (
        "vision 0-5",
        "vision 6-11",
        "vision 12-17",
        "vision 18-19",
        f"{LLM} 0",
        f"{LLM} 1",
        f"{LLM} 2",
    )
    assert groups.sizes.tolist() == [6, 6, 6, 2, 6, 6, 6]
    alike = RankGroups.of(cluster(3, 3))  # a replica of the whole model, on any ranks
    assert alike.names == ("replica 0", "replica 1", "replica 2")
    assert alike.ranks(1).tolist() == [1, 9, 10, 11, 12, 13, 14]
    assert len(RankGroups.of(cluster(1000, 1000), max_groups=16).names) <= 17
    one = RankGroups.of(cluster(1, 1))
    assert one.names == ("replica 0",) and one.sizes.tolist() == [7]


@pytest.mark.parametrize("seed", range(30))
def test_utilisation_is_what_a_walk_finds(seed: int) -> None:
    rng = np.random.default_rng(seed)
    schedule = random_schedule(rng)
    result = played(schedule, seed)
    ranks = schedule.graph.layout.world
    _, of_rank = np.unique(rng.integers(0, 3, ranks), return_inverse=True)
    names = tuple(map(str, range(int(of_rank.max()) + 1)))
    groups, bins = RankGroups(names, of_rank), int(rng.integers(1, 9))
    used = Utilisation.of(schedule, result, groups, bins)
    busy = np.zeros((len(names), len(schedule.graph.modules), bins))
    width = result.makespan / bins
    for rank, actions in enumerate(schedule.actions):
        for place, action in enumerate(actions, int(schedule.first[rank])):
            for b in range(bins if action.op in COMPUTE else 0):
                inside = min(result.finish[place], (b + 1) * width) - max(result.start[place], b * width)
                busy[of_rank[rank], schedule.graph.modules.index(action.module), b] += max(inside, 0.0)
    share = busy / (groups.sizes[:, None, None] * width)
    assert np.allclose(used.over_time, share, atol=1e-9)
    for group in range(len(names)):
        each = result.rank_busy[of_rank == group] / result.makespan
        assert np.allclose(
            [used.least[group], used.mean[group], used.most[group]], [each.min(), each.mean(), each.max()]
        )


def test_spread_over_takes_the_ends() -> None:
    assert spread_over([1.0, 5.0, 3.0, 4.0, 2.0], 3) == [1, 2, 0]
    assert spread_over([1.0, 5.0, 3.0], 9) == [1, 2, 0]
    assert spread_over([2.0, 1.0], 1) == [0]


def data_of(page: Path) -> dict[str, Any]:
    text = page.read_text(encoding="utf-8")
    result = re.search(r'id="data">(.*?)</script>', text, re.S)
    assert result is not None and "@" not in re.sub(r"[\w.]+@[\w.]+", "", text.split("<script")[0])
    assert not re.search(r'(src|href)="', text)  # no input from other groups
    return json.loads(result[1])


def test_page_holds_every_action_of_every_lane(tmp_path: Path) -> None:
    schedule, result = uniform()
    groups = RankGroups.of(schedule.graph.layout)
    used = Utilisation.of(schedule, result, groups, 40)
    named = write_overview(schedule, result, groups, used, tmp_path / "a.html", title="<b>&</script>")
    assert named == list(groups.names)
    assert "&lt;b&gt;&amp;" in (tmp_path / "a.html").read_text()
    data = data_of(tmp_path / "a.html")
    heat = np.frombuffer(base64.b64decode(data["heat"]), np.uint8)
    assert np.abs(heat.reshape(used.over_time.shape) / 255 - used.over_time).max() <= 0.5 / 255 + 1e-12
    lanes = {lane["name"].split()[-1]: lane for row in data["groups"] for lane in row["full"]["lanes"]}
    assert len(lanes) == len(schedule.graph.layout.lanes())
    for lane in schedule.graph.layout.lanes():
        rank = lane.ranks[0]
        own = lanes[str(rank) if len(lane.ranks) == 1 else f"{rank}+{len(lane.ranks) - 1}"]
        start, length = (np.frombuffer(base64.b64decode(own[key]), "<f4") for key in ("start", "length"))
        kind, chunk = np.frombuffer(base64.b64decode(own["kind"]), np.uint8), base64.b64decode(own["chunk"])
        actions = schedule.actions[rank]
        at = [i for i, action in enumerate(actions) if action.op in COMPUTE]
        places = np.array(at, int) + int(schedule.first[rank])
        assert np.allclose(start, result.start[places], rtol=1e-6)
        assert np.allclose(start + length, result.finish[places], rtol=1e-6)
        assert [k & 3 for k in kind.tolist()] == [CODES[actions[i].op] for i in at]
        assert np.frombuffer(chunk, "<u4").tolist() == [schedule.table.chunks[actions[i].chunk].index for i in at]


def test_a_title_is_not_taken_for_a_place_to_fill(tmp_path: Path) -> None:
    schedule, result = uniform()
    groups = RankGroups.of(schedule.graph.layout)
    used = Utilisation.of(schedule, result, groups, 40)
    write_overview(schedule, result, groups, used, tmp_path / "a.html", title="@DATA@ of @TITLE@")
    page = (tmp_path / "a.html").read_text(encoding="utf-8")
    assert page.count("<title>@DATA@ of @TITLE@</title>") == 1 and page.count('"makespan"') == 1


def test_a_page_of_too_many_actions_keeps_the_ends(tmp_path: Path) -> None:
    schedule, result = uniform()
    groups = RankGroups.of(schedule.graph.layout)
    used = Utilisation.of(schedule, result, groups, 40)
    named = write_overview(schedule, result, groups, used, tmp_path / "a.html", title="t", most_boxes=2 * 24)
    order = np.argsort(-used.mean, kind="stable")
    assert set(named) == {groups.names[order[0]], groups.names[order[-1]]}
    assert [("full" in row) for row in data_of(tmp_path / "a.html")["groups"]] == [n in named for n in groups.names]


def test_picture(tmp_path: Path) -> None:
    schedule, result = uniform(encoders=300, replicas=3)
    groups = RankGroups.of(schedule.graph.layout, max_groups=100)
    used = Utilisation.of(schedule, result, groups)
    plot_overview(schedule, result, groups, used, tmp_path / "a.png", title="t")
    from matplotlib import image

    pixels = image.imread(tmp_path / "a.png")
    blue = (np.abs(pixels[..., :3] - np.array([0x3B, 0x6F, 0xB6]) / 255) < 0.02).all(axis=-1)
    assert pixels.shape[1] == 1440 and blue.sum() > 500


def test_trace_has_some_groups_in_full_and_all_summed_up(tmp_path: Path) -> None:
    schedule, result = uniform()
    groups = RankGroups.of(schedule.graph.layout)
    used = Utilisation.of(schedule, result, groups, 10)
    per_group = int(np.bincount(groups.of_rank, np.diff(schedule.first)).max())
    full = write_sampled_trace(schedule, result, groups, used, tmp_path / "t.json", most_rows=2 * per_group)
    order = np.argsort(-used.mean, kind="stable")
    assert full == [groups.names[order[0]], groups.names[order[-1]]]
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert all(
        names[g].startswith(f"{name}: ") and ("in full" in names[g]) == (name in full)
        for g, name in enumerate(groups.names)
    )
    assert sum(e["name"] == "ranks computing" for e in events) == 10 * len(groups.names)
    threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    for group, name in enumerate(groups.names):
        wanted = []
        for rank in groups.ranks(group).tolist() if name in full else []:
            for place, action in enumerate(schedule.actions[rank], int(schedule.first[rank])):
                if action.op in COMPUTE:
                    wanted.append((f"rank {rank}: compute", str(action), result.start[place] * 1e6))
        seen = [
            (threads[group, e["tid"]], e["name"], e["ts"])
            for e in events
            if e["ph"] == "X" and e["pid"] == group and e["cat"] in ("forward", "backward")
        ]
        assert [(a, b) for a, b, _ in sorted(seen)] == [(a, b) for a, b, _ in sorted(wanted)]
        assert np.allclose([t for *_, t in sorted(seen)], [t for *_, t in sorted(wanted)], atol=1e-3)


def test_a_timeline_of_some_ranks(tmp_path: Path) -> None:
    schedule, result = uniform()
    timeline = timeline_of(schedule, result, [7, 3])
    assert timeline.actions == [schedule.actions[7], schedule.actions[3]]
    assert timeline.start[0] == result.start[schedule.first[7] : schedule.first[8]].tolist()


@pytest.mark.parametrize("replicas", [2, 10])
def test_a_cluster_is_its_replicas_and_the_sums_between_them(replicas: int) -> None:
    """If replicas exchange only gradient sums, each has bitwise equal times alone and in the whole.

    A sum ends its duration after its last rank has arrived.
    """
    encoders = replicas
    layout = cluster(encoders, replicas)
    trained = {"vision": (True,) * 2, LLM: (True,) * 3}
    presence = [{LLM, "vision"}, {LLM}, {"vision", LLM}, {LLM}]
    graph = StageGraph(layout, (("vision", LLM),), trained)
    whole = one_f_one_b(graph, StepTable.aligned(graph.links, presence, replicas=replicas))
    rng = np.random.default_rng(replicas)
    sums = whole.rows[:, OP] == CODES[Op.REDUCE_GRAD]
    seconds = rng.random(len(whole.rows))
    seconds[sums] = rng.random(len(graph.reductions))[whole.rows[sums, 4]]
    result = simulate_arrays(whole, seconds, transfer=0.25)
    reached: dict[int, float] = {}
    for row, start in zip(whole.rows[sums].tolist(), result.start[sums].tolist(), strict=True):
        reached[row[4]] = max(reached.get(row[4], 0.0), start)
    alone = StageGraph(cluster(1, 1), (("vision", LLM),), trained)
    table = StepTable.aligned(alone.links, presence)
    single = one_f_one_b(alone, table)
    for replica in range(replicas):
        ranks = [replica, *range(encoders + 6 * replica, encoders + 6 * (replica + 1))]
        parts = [np.arange(whole.first[r], whole.first[r + 1]) for r in ranks]
        own = np.concatenate([part[~sums[part]] for part in parts])
        assert (whole.rows[own][:, [0, 1, 2]] == single.rows[:, [0, 1, 2]]).all()
        played_alone = simulate_arrays(single, seconds[own], transfer=0.25)
        assert played_alone.start.tolist() == result.start[own].tolist()
        assert played_alone.finish.tolist() == result.finish[own].tolist()
    for place in np.flatnonzero(sums).tolist():
        number = int(whole.rows[place, 4])
        assert result.finish[place] == reached[number] + seconds[place]  # no two sums have the same ranks here
