"""Context-parallel benchmark: its counts and models, against a second way of counting."""

from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from bench import context_parallel
from bench.attention_masks import MASKS
from bench.context_parallel import NAMES, draw
from bench.context_parallel_report import chart, lines
from bench.context_parallel_report import main as show
from interlace.attention import AttentionPlan
from interlace.attention.plan import PARTIAL_COST
from interlace.masks import BitfieldMask


def blocks_of(mask, size=128):
    """bool [blocks, blocks]: non-empty blocks, from the dense mask."""
    dense = mask.to_dense()[0]
    n = -(-mask.length // size)
    padded = torch.zeros(n * size, n * size, dtype=torch.bool)
    padded[: mask.length, : mask.length] = dense
    return padded.view(n, size, n, size).any(3).any(1)


def test_counted_is_the_dense_count():
    options = SimpleNamespace(lengths=[1500], ranks=[2, 3])
    rows = context_parallel.counted(options)
    assert [(row["mask"], row["ranks"]) for row in rows] == [(name, ranks) for name in NAMES for ranks in (2, 3)]
    for row in rows:
        work = blocks_of(MASKS[NAMES[row["mask"]]](1500))
        assert row["density"] == pytest.approx(work.double().mean())
        runs = work.sum(1).double().view(row["ranks"], -1).sum(1)  # 12 blocks divide by 2 and 3
        assert row["slowest_over_mean"]["contiguous"] == pytest.approx(float(runs.max() / runs.mean()))
        assert row["slowest_over_mean"]["lpt"] <= min(row["slowest_over_mean"].values()) + 1e-12


def test_drawn_masks_have_their_length_and_differ(monkeypatch):
    rng = np.random.default_rng(0)
    for kind in NAMES:
        masks = [draw(kind, 777, rng) for _ in range(4)]
        assert {mask.length for mask in masks} == {777}
        assert len({tuple(mask.bits[0].tolist()) for mask in masks}) == 4
        assert (masks[0].doc is None or len(masks[0].doc.unique()) == 1) == (kind != "MP")
    monkeypatch.setattr(context_parallel, "PRINTED", {(1024, "EE"): (2.0, 2.1, 3.0, 2.5)})
    (row,) = context_parallel.drawn(SimpleNamespace(lengths=[1024], draws=3), ranks=2)
    assert row["printed_time_over_lpt"] == {"contiguous": 1.5, "zigzag": 1.25, "random": 1.05}
    assert row["slowest_over_lpt"]["lpt"] == 1 and row["most_over_lpt"]["zigzag"] >= row["slowest_over_lpt"]["zigzag"]
    assert context_parallel.drawn(SimpleNamespace(lengths=[512], draws=3)) == []


def test_the_model_of_one_launch():
    """A causal mask of four rows: 1, 1 + 1, 2 + 1 and 3 + 1 blocks, the diagonal ones PARTIAL."""
    whole = AttentionPlan.build(BitfieldMask.causal(1, 512), cap=1 << 30)
    assert context_parallel.makespan(whole, 1, servers=4) == pytest.approx(3 + PARTIAL_COST)  # the longest row
    assert context_parallel.makespan(whole, 2, servers=1) == pytest.approx(2 * (6 + 4 * PARTIAL_COST))
    split = AttentionPlan.build(BitfieldMask.causal(1, 512), cap=1)
    assert context_parallel.makespan(split, 1, servers=10) == pytest.approx(PARTIAL_COST)


def test_subblocks_are_what_makes_balance_between_ranks_count():
    """One head per launch, more multiprocessors than rows: the longest row decides, on any rank."""
    rows = context_parallel.ablation(SimpleNamespace(modelled=8192, multiprocessors=64), ranks=2)
    for row in rows:
        speed = row["speedup_over_zigzag_whole"]
        assert speed["zigzag, whole"] == 1
        if row["heads"] == "1:1":
            assert speed["lpt, whole"] == pytest.approx(1) and speed["lpt, subblocks"] > 1.2


@pytest.mark.slow
def test_the_whole_benchmark(tmp_path, capsys):
    out, picture = tmp_path / "report.json", tmp_path / "chart.png"
    report = context_parallel.main(["--preset", "smoke", "--out", str(out), "--chart", str(picture)])
    assert json.loads(out.read_text()) == json.loads(json.dumps(report))
    assert report["command"].startswith("python -m bench.context_parallel --preset smoke")
    assert {"machine", "versions", "settings"} <= set(report) and picture.stat().st_size > 1000
    row = report["parts"]["ranks"][0]
    assert set(row["rank_ms"]) == {f"{method}, whole" for method in context_parallel.METHODS}  # on a CPU
    for arm, times in row["rank_ms"].items():
        assert len(times) == 2 and row["slowest_ms"][arm] == max(times) > 0
        assert row["slowest_over_mean"][arm] == pytest.approx(max(times) / (sum(times) / 2))
    processes = report["parts"]["processes"]
    assert processes["transport"] in ("shm", "gloo")
    for row in processes["rows"]:
        for method in context_parallel.METHODS:
            assert len(row["attention_ms"][method]) == 2
            assert row["whole_ms"][method] > 0 and row["slowest_ms"][method] == max(row["attention_ms"][method])
    printed = capsys.readouterr().out
    show([str(out), str(tmp_path / "again.png")])
    assert capsys.readouterr().out == printed
    assert (tmp_path / "again.png").exists() and "two processes over" in printed


def test_a_chart_needs_the_counts(tmp_path):
    rows = [{"mask": "EE", "length": 9, "ranks": 2, "slowest_over_mean": dict.fromkeys(context_parallel.METHODS, 1.1)}]
    chart({"parts": {"counted": rows}}, tmp_path / "one.png")
    assert (tmp_path / "one.png").exists()
    assert len(lines("counted", [{**rows[0], "lpt_above_bound": 0.0}])) == 2
