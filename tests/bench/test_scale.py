"""Benchmark of large clusters at its smallest size; its cluster sizes are possible ones."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from bench import scale
from interlace.schedule import Action, Op, StageGraph, StepTable, one_f_one_b
from interlace.simulate import simulate_arrays


@pytest.mark.parametrize("gpus", scale.SIZES)
def test_modules_fill_the_cluster(gpus: int) -> None:
    (vision, audio, language), (tp, pp) = scale.SIZES[gpus]
    assert vision + audio + language * tp * pp == gpus


def test_every_replica_has_lengths_of_its_own() -> None:
    samples = scale.drawn(3000, seed=1)
    tokens = samples.lengths.tokens
    assert len(tokens) == 3000 and len(np.unique(tokens)) > 500
    assert (tokens == scale.drawn(3000, seed=1).lengths.tokens).all()
    assert (tokens != scale.drawn(3000, seed=2).lengths.tokens).any()
    assert (samples.rows["language_model"] == tokens).all()
    for name in ("vision", "audio"):  # half or more of the samples lack the modality, so no rows of it are read
        assert ((samples.rows[name] > 0) == (samples.lengths.rows[name] > 0)).all()
        assert 0.2 < (samples.rows[name] > 0).mean() < 0.8


def test_a_gradient_sum_lasts_from_when_the_last_rank_is_there() -> None:
    """Two replicas of one stage: one has computed after 3 s, the other after 30 s, and the sum itself takes 2 s."""
    graph = StageGraph.build({"m": [0]}, [], replicas=2)
    table = StepTable.aligned((), [["m"]], replicas=2)
    schedule = one_f_one_b(graph, table)
    seconds = {Op.FORWARD: 1.0, Op.BACKWARD: 2.0}

    def cost(action: Action) -> float:
        if action.op is Op.REDUCE_GRAD:
            return 2.0
        return seconds.get(action.op, 0.0) * (10.0 if table.chunks[action.chunk].replica else 1.0)

    costs = np.array([cost(action) for actions in schedule.actions for action in actions])
    result = simulate_arrays(schedule, costs)
    assert result.makespan == 32.0
    assert scale.longest_sum(schedule, result) == 2.0


@pytest.mark.slow
def test_eight_gpus(tmp_path: Path) -> None:
    report = scale.main(
        ["--gpus", "8", "--without-seconds", "--out", str(tmp_path / "a.json"), "--keep", str(tmp_path)]
    )
    assert json.loads((tmp_path / "a.json").read_text()) == json.loads(json.dumps(report))
    [row] = report["sizes"]
    assert row["gpus"] == 8 and row["samples"] == 128 and "seconds" not in row
    assert 0 < row["longest_gradient_sum_seconds"] < row["makespan_seconds"] and 0 < row["bubble"] < 1
    assert row["peak_gibibytes"] < 4
    assert {path.name for path in (tmp_path / "8").iterdir()} == {"timeline.html", "timeline.png", "trace.json"}
