"""Output of bench/reproduce_frozen_table.py about dissertation table 3.2."""

import pytest

from bench.reproduce_frozen_table import TABLE, llm_stage_counts, reason, simulate_row, simulate_table


def test_all_but_the_small_language_model_are_reproduced():
    rows = simulate_table()
    for each in rows:
        assert each.reproduced == (each.row.model[-1] != "S")
        assert bool(reason(each)) != each.reproduced


def test_simulation_is_sum_of_stages_plus_11_times_slowest():
    row = next(row for row in TABLE if row.model == "LLM" and row.aware)
    assert simulate_row(row, 6, 6) == pytest.approx(6 * 2.20406 + 17 * 4.39933, abs=1e-3)


def test_stage_counts_follow_from_ratios():
    counts = llm_stage_counts([row for row in TABLE if row.model[-1] == "L"])
    assert sorted(set(counts.values())) == [4, 6, 10]
    assert llm_stage_counts([row for row in TABLE if row.model[-1] == "S"]) is None
