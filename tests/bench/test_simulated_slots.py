"""Benchmark of sleeping ranks at a toy size: its cases, and some of each kind are predicted."""

from __future__ import annotations

import json

import pytest

from bench import simulated_slots
from bench.simulated_step import build_model
from interlace.schedule import GENERATORS, Op, StageGraph, StepTable, one_f_one_b

ONLY = ("2 replicas, replicated", "4 replicas, sharded", "zb_v: shared")


def test_there_are_four_layouts_and_every_schedule():
    chosen, left_out = simulated_slots.cases(build_model(32))
    assert {schedule for _, schedule in chosen.values()} | left_out.keys() == set(GENERATORS)
    assert len(chosen) + len(left_out) == 4 + len(GENERATORS) - 1 and set(ONLY) < chosen.keys()
    assert all(layout.world == simulated_slots.RANKS for layout, _ in chosen.values())


def test_the_busiest_rank_is_the_one_with_most_slots():
    graph = StageGraph.build({"m": [0, 1]})
    lists = one_f_one_b(graph, StepTable.aligned((), [["m"]] * 2), reduce_grad=False)
    jobs = {
        (op, "m", stage, chunk): 1.0 + 2.0 * stage
        for op in (Op.FORWARD, Op.BACKWARD)
        for stage in (0, 1)
        for chunk in (0, 1)
    }
    assert simulated_slots.busiest(lists, jobs) == 4 * 3.0


@pytest.mark.slow
def test_cases_are_predicted(tmp_path):
    out = tmp_path / "slots.json"
    words = ["--steps", "1", "--samples", "4", "--microbatches", "2", "--slot", "0.05", "--out", str(out)]
    report = simulated_slots.main([*words, "--only", *ONLY])
    assert json.loads(out.read_text()) == json.loads(json.dumps(report))
    assert tuple(report["rows"]) == ONLY
    for name, row in report["rows"].items():
        # Slots are a lower bound of a step's time on any machine. The excess of the step and of its profile depends
        # on the load of the machine, so the benchmark tests it instead.
        floor = row["busiest_rank_seconds"]
        assert 0.05 < floor <= row["median_seconds"], name
        assert 0.999 * floor < row["predicted_seconds"], name
