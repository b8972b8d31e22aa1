"""The simulator's benchmark at a toy size: five layouts run, each is predicted from its own profile."""

from __future__ import annotations

import json

import pytest

from bench import simulated_step


@pytest.mark.slow
@pytest.mark.timeout(280)
def test_five_layouts(tmp_path):
    out = tmp_path / "simulated_step.json"
    arguments = ["--rounds", "1", "--steps", "4", "--hidden", "32", "--samples", "4", "--patience", "0"]
    report = simulated_step.main([*arguments, "--microbatches", "2", "--out", str(out)])
    assert json.loads(out.read_text()) == json.loads(json.dumps(report))
    assert len(report["layouts"]) == 5
    [found] = report["rounds"]
    for name, row in report["layouts"].items():
        assert len(found[name]["seconds"]) == 2  # every other step is profiled
        # At this size much of a step is in no list, and the machine may be busy: figures are for the benchmark.
        assert 0.0 < row["predicted_seconds"] < 2 * row["median_seconds"], name
