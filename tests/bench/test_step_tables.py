"""Benchmark of tables and executors: it runs, and its steps are those of the current runtime."""

from __future__ import annotations

import json

import pytest

from bench import step_tables


@pytest.mark.slow
def test_one_repeat(tmp_path):
    out = tmp_path / "step_tables.json"
    report = step_tables.main(["--repeats", "1", "--out", str(out)])
    assert json.loads(out.read_text()) == json.loads(json.dumps(report))
    assert [row["encoder_chunks"] for row in report["tables_ms"]] == [None, 64, 256]
    assert [(row["ranks"], row["actions"]) for row in report["executor"]] == [(1, 256), (2, 1280)]
