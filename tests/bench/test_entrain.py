"""Baselines match their descriptions; the committed table is the output of its command."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench import baselines, entrain
from bench.baselines import ENCODER, LLM, Problem
from bench.lengths import draw
from interlace.schedule import Op, check
from interlace.simulate import simulate

RESULTS = Path(entrain.__file__).parent / "results" / "entrain.json"
MEASURED = [RESULTS.with_name(f"entrain_measured{mix}.json") for mix in ("", "_synthchartnet")]


@st.composite
def problems(draw_: st.DrawFn) -> tuple[Problem, int]:
    n = draw_(st.integers(2, 20))
    costs = lambda low: np.array(draw_(st.lists(st.integers(low, 50), min_size=n, max_size=n)), float)  # noqa: E731
    encoder = costs(0)
    encoder[0] += 1  # some sample has media
    return Problem(encoder, costs(1), draw_(st.integers(2, 5))), draw_(st.integers(1, min(n, 8)))


@settings(max_examples=15)
@given(problems())
def test_baseline_schedules_compute_every_sample_once(case: tuple[Problem, int]) -> None:
    problem, count = case
    work = 3 * (problem.encoder.sum() + problem.llm.sum())
    for made in (baselines.static, baselines.disttrain, baselines.dip, baselines.optimus):
        step = made(problem, count)
        check(step.schedule)
        timeline = simulate(step.schedule, step.durations)
        assert sum(timeline.busy_per_rank) == pytest.approx(work)
        for module, costs in ((ENCODER, problem.encoder), (LLM, problem.llm)):
            result = sorted(s for c in step.schedule.table.chunks if c.module == module for s in c.samples.tolist())
            assert result == (np.flatnonzero(costs > 0) if module == ENCODER else np.arange(len(costs))).tolist()
    table = baselines.together(problem, baselines.one_by_one(problem, count))
    for in_flight in (1, 3, 20):
        check(baselines.eager(problem, table, in_flight).schedule)


def test_dip_goes_phase_by_phase_and_optimus_in_between() -> None:
    rng = np.random.default_rng(0)
    problem = Problem(rng.lognormal(0, 1, 32), rng.lognormal(0.5, 0.5, 32), 4)
    dip, optimus = baselines.dip(problem, 8, parts=2), baselines.optimus(problem, 8)
    assert len(dip.schedule.table.of(ENCODER, 0)) == 16 and len(optimus.schedule.table.of(ENCODER, 0)) == 8
    between = 0
    for rank in range(4):
        phases = [phase_of(a) for a in dip.schedule.actions[rank] if a.op in (Op.FORWARD, Op.BACKWARD)]
        assert phases == sorted(phases) and set(phases) == {0, 1, 2}
        mine = [a for a in optimus.schedule.actions[rank] if a.op in (Op.FORWARD, Op.BACKWARD)]
        # The language model as in 1F1B alone, with encoder work in between.
        alone = [a for a in mine if a.module == LLM]
        warm = 4 - rank
        assert [a.op for a in alone[:warm]] == [Op.FORWARD] * warm and alone[warm].op is Op.BACKWARD
        places = [i for i, a in enumerate(mine) if a.module == LLM]
        between += places[-1] - places[0] + 1 - len(alone)
    assert between > 0
    assert check(dip.schedule).peak_in_flight[0] > check(optimus.schedule).peak_in_flight[0]


def phase_of(action: Any) -> int:
    return 1 if action.module == LLM else 0 if action.op is Op.FORWARD else 2


def test_disttrain_puts_the_smallest_first_and_the_next_last() -> None:
    """Algorithm 3: a microbatch with the least work begins; those with the least work of the others end it."""
    sizes = np.array([5.0, 1.0, 4.0, 2.0, 6.0, 3.0])
    problem = Problem(sizes, np.full(6, 2.0), 3)
    table = baselines.disttrain(problem, 6).schedule.table
    order = [int(table.chunks[i].samples[0]) for i in table.of(LLM, 0)]
    assert order[0] == 1 and set(order[-2:]) == {3, 5}


def test_the_committed_table_is_what_its_command_gives() -> None:
    """Recomputes one mix and size, with all seeds and all methods."""
    report = json.loads(RESULTS.read_text())
    assert report["command"].startswith("python -m bench.entrain")
    rows = {
        row["way"]: row
        for row in report["simulated"]
        if (row["mix"], row["samples"], row["microbatches_asked"]) == ("audio", 64, 8)
    }
    seconds: dict[str, list[float]] = {}
    for seed in range(report["seeds"]):
        drawn = draw("audio", 64, seed=seed)
        problem = entrain.problem_of(drawn, "3b", 8)
        for name in ("static 1F1B", "DIP", "Optimus", "assign = 'entrain'", "assign = 'as_printed'"):
            made = entrain.ways(problem, drawn, 8)[name]
            seconds.setdefault(name, []).append(entrain.figures(made())["seconds"])
    for name, result in seconds.items():
        assert np.mean(result) == pytest.approx(rows[name]["seconds"], rel=1e-5), name


def test_committed_table_shows_lower_spread_and_shorter_steps() -> None:
    """Spread is 10 times below static assignment: on the dissertation's data, and with 8 samples per microbatch.

    Steps are never longer than those of static assignment or of assignment by tokens.
    """
    rows = json.loads(RESULTS.read_text())["simulated"]
    ours = [row for row in rows if row["way"] == "assign = 'entrain'"]
    assert {row["mix"] for row in ours} == set(entrain.MIXES)
    for row in ours:
        mine = (row["mix"], row["samples"], row["microbatches_asked"])
        beside = {r["way"]: r for r in rows if (r["mix"], r["samples"], r["microbatches_asked"]) == mine}
        assert row["seconds"] <= beside["assign = 'tokens'"]["seconds"] < beside["static 1F1B"]["seconds"]
        if row["mix"] in entrain.PRINTED or row["samples"] >= 8 * row["microbatches_asked"]:
            assert row["spread_lower"] >= 10, row
        # If a sample is larger than its share, no assignment is much better than this one.
        assert row["spread_lower"] >= min(10, 0.98 * entrain.at_best(rows, row)), row


def test_the_page_has_the_committed_table() -> None:
    page = RESULTS.parents[2] / "docs" / "who-computes-what.md"
    report = json.loads(RESULTS.read_text())
    steps = [entrain.measured_table(json.loads(path.read_text())) for path in MEASURED]
    for table in (entrain.docs_table(report), entrain.spread_table(report), *steps):
        assert table in page.read_text(), "python -m bench.entrain prints it"


def test_the_table_is_printed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(entrain, "SIZES", ((16, 4),))
    entrain.show(entrain.simulated(argparse.Namespace(mixes=["llava"], seeds=1, model="1b", ranks=4)))
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == "llava, 16 samples in 4 microbatches" and lines[3].startswith("static 1F1B") and len(lines) == 23
