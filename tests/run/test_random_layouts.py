"""Random layouts, freezings, batches and tables: each gives the loss and gradients of one process, or is refused.

Tables include some that `interlace.run.tables.table` never makes: samples deferred to any later chunk, encoded in two
chunks or on two replicas, chunks in any order, replicas without chunks.
"""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.run.random_cases import PLACEMENTS, check_layout, check_table, sweep

SEEDS = st.integers(0, 1 << 30)
DUE = {*PLACEMENTS, "copies"}  # kinds of layouts that a sweep must cover; see `random_cases.sweep`
DUE |= {f"{side} {way}" for side in ("encoder", "language") for way in ("pp2", "pp3", "dp2", "dp3")}
RANDOM = settings(deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


@given(SEEDS)
@settings(RANDOM, max_examples=12)
def test_random_layouts_equal_one_process(seed: int) -> None:
    check_layout(seed)


@given(SEEDS)
@settings(RANDOM, max_examples=12)
def test_random_tables_run_or_are_refused(seed: int) -> None:
    check_table(seed)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_many_random_layouts_equal_one_process() -> None:
    sweep(check_layout, range(60), DUE)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_many_random_tables_run_or_are_refused() -> None:
    sweep(check_table, range(100), DUE | {"sound", "replica", "unread", "gap", "twice"})
