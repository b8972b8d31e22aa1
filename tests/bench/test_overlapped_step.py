"""Benchmark of whole steps over an emulated link, at a toy size: every layout, its operations and its step."""

from __future__ import annotations

import json

import pytest

from bench import overlapped_step


@pytest.mark.slow
def test_quick_run(tmp_path):
    out = tmp_path / "overlapped_step.json"
    report = overlapped_step.main(["--quick", "--rounds", "1", "--repeats", "1", "--out", str(out)])
    assert json.loads(out.read_text()) == json.loads(json.dumps(report))
    assert [row["layout"] for row in report["rows"]] == list(overlapped_step.LAYOUTS)
    for row in report["rows"]:
        assert 0 < row["in_layers"] <= 1 + 1e-9
        assert row["communication_ms"] == pytest.approx(sum(o["link_ms"] for o in row["operations"]))
        assert all(operation["batches"] > 0 and operation["bytes"] > 0 for operation in row["operations"])
        if row["layout"] == "cp = 2":
            assert {o["operation"] for o in row["operations"]} == {"context_parallel_attention"}
            assert row["in_layers"] == pytest.approx(1)
    heads = [[single["operation"].split(",")[0] for single in row["single"]] for row in report["rows"]]
    assert [len(names) for names in heads] == [8, 4, 2]
    assert set(heads[1]) == {"copied_products backward", "sum_of_products forward"}
