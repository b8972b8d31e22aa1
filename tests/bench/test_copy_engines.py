"""Copy-engine benchmark on a CPU at toy sizes: its report has every variant or the reason it is disabled."""

from __future__ import annotations

import json

import pytest

from bench import copy_engines, overlap_gpu


def test_dry_run_reports_every_arm(tmp_path, monkeypatch):
    monkeypatch.setenv("INTERLACE_BENCH_DEVICE", "cpu")
    out = tmp_path / "report.json"
    report = copy_engines.main(["--dry", "--out", str(out)])
    assert json.loads(out.read_text()) == report and report["dry"]
    (case,) = report["cases"]
    arms = {arm["arm"]: arm for arm in case["arms"]}
    assert set(arms) == {"plain", "engine", "to_host", "from_host"}
    assert arms["engine"]["missing"]
    for name in ("plain", "to_host", "from_host"):
        assert arms[name]["gb_per_s_alone"] > 0 and arms[name]["needs_no_sm"] is None


def test_without_a_gpu_it_is_refused(monkeypatch, capsys):
    monkeypatch.setenv("INTERLACE_BENCH_DEVICE", "cpu")
    with pytest.raises(SystemExit):
        copy_engines.main([])
    assert "--dry" in capsys.readouterr().err


def test_overlap_on_one_gpu_dry(tmp_path, monkeypatch):
    """The pipelines run against a mirror, on any device: a record per operation and number of chunks."""
    monkeypatch.setenv("INTERLACE_BENCH_DEVICE", "cpu")
    out = tmp_path / "report.json"
    report = overlap_gpu.main(["--dry", "--out", str(out)])
    assert json.loads(out.read_text()) == report
    assert set(report["missing"]) == {"engine", "sm_16"}
    assert [(row["copier"], row["operation"], row["chunks"]) for row in report["rows"]] == [
        ("plain", operation, chunks) for operation in overlap_gpu.OPERATIONS for chunks in (1, 2)
    ]
    assert all(row["bytes"] == 16 * 32 * 4 and row["copies_ms"] > 0 for row in report["rows"])
