"""Overlap benchmark at toy sizes: real processes, an emulated link, every operation, and its picture."""

from __future__ import annotations

import json

import pytest

from bench import overlap


@pytest.mark.slow
def test_quick_run(tmp_path):
    out, picture = tmp_path / "overlap.json", tmp_path / "overlap.png"
    arguments = ["--quick", "--chunks", "2", "--repeats", "2", "--out", str(out), "--picture", str(picture)]
    report = overlap.main(arguments)
    assert json.loads(out.read_text()) == json.loads(json.dumps(report))
    operations = [row["operation"] for row in report["rows"]]
    assert len(operations) == 6 and len(set(operations)) == 6
    for row in report["rows"]:
        assert row["bytes"] > 0 and row["serial_ms"] > row["communication_ms"] * 0.9  # it waited for the link
    for events in report["timeline"].values():
        assert {"compute", "copy"} <= {kind for kind, *_ in events}
    assert {row["operation"] for row in report["peers"]} == {"all_gather_matmul", "matmul_reduce_scatter"}
    assert picture.stat().st_size > 1000
