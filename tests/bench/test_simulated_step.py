"""The simulator's benchmark at a toy size: every case runs and is predicted."""

from __future__ import annotations

import json

import pytest

from bench import simulated_step
from interlace.schedule import GENERATORS


@pytest.mark.slow
def test_every_layout_and_schedule(tmp_path):
    out = tmp_path / "simulated_step.json"
    arguments = [
        "--rounds",
        "1",
        "--steps",
        "4",
        "--hidden",
        "32",
        "--samples",
        "4",
        "--patience",
        "0",
        "--budget",
        "0",
    ]
    report = simulated_step.main([*arguments, "--microbatches", "2", "--out", str(out)])
    assert json.loads(out.read_text()) == json.loads(json.dumps(report))
    assert len(report["layouts"]) + len(report["left_out"]) == 5 + len(GENERATORS) - 1  # 1F1B on all layouts
    [result] = report["rounds"]
    for name, row in report["layouts"].items():
        assert len(result[name]["seconds"]) == 2  # every other step is profiled
        # At this size much of a step is in no list, and the machine may be busy: figures are for the benchmark.
        assert row["predicted_seconds"] > 0.0 and row["median_seconds"] > 0.0, name
        assert row["fitted_seconds"] > 0.0
