"""balance.assign_exact against all assignments, a dynamic programme and a MILP solver."""

import math
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from interlace import balance
from tests.balance.assignment import best_assignment, capped, makespan


def check(case):
    weights, bins, capacity = case
    for cap in (None, capacity):
        result = balance.assign_exact(weights, bins, capacity=cap)
        best = best_assignment(weights, bins, cap)
        assert result.proven
        assert result.makespan == pytest.approx(best, rel=1e-12, abs=1e-300)
        assert result.bound == result.makespan
        assert makespan(weights, result.bins, bins) == pytest.approx(result.makespan, rel=1e-12, abs=1e-300)
        assert np.bincount(result.bins, minlength=bins).max() <= (cap or len(weights))


@given(capped())
def test_exact_is_optimal(case):
    check(case)


@pytest.mark.slow
@settings(max_examples=500)
@given(capped())
def test_exact_is_optimal_on_many(case):
    check(case)


@settings(max_examples=60)
@given(st.lists(st.integers(0, 30), min_size=9, max_size=12), st.integers(2, 3), st.data())
def test_exact_keeps_its_word_beyond_enumeration(weights, bins, data):
    capacity = data.draw(st.none() | st.integers(math.ceil(len(weights) / bins), len(weights)))
    result = balance.assign_exact(weights, bins, capacity=capacity)
    assert result.proven
    assert result.makespan == reachable_optimum(weights, bins, capacity or len(weights))


def reachable_optimum(weights, bins, capacity):
    """Optimum over the sets of sorted (load, items) vectors that some assignment of a prefix reaches."""
    states = {((0, 0),) * bins}
    for weight in weights:
        states = {
            tuple(sorted([*state[:b], (state[b][0] + weight, state[b][1] + 1), *state[b + 1 :]]))
            for state in states
            for b in range(bins)
            if state[b][1] < capacity
        }
    return min(max(load for load, _ in state) for state in states)


def test_the_budget_is_kept_and_the_bound_holds():
    rng = np.random.default_rng(3)
    weights = rng.integers(10**8, 10**9, 48)
    few = balance.assign_exact(weights, 9, nodes=1000)
    assert not few.proven and few.bound < few.makespan
    assert few.bound == balance.lower_bound(weights, 9)
    more = balance.assign_exact(weights, 9, nodes=100_000)
    assert more.makespan <= few.makespan
    assert few.makespan <= makespan(weights, balance.assign(weights, 9), 9)
    again = balance.assign_exact(weights, 9, nodes=100_000)
    assert (again.bins == more.bins).all()
    assert not balance.assign_exact(weights, 9, nodes=0).proven
    with pytest.raises(ValueError, match="nodes must not be negative"):
        balance.assign_exact(weights, 9, nodes=-1)


def test_search_timeout_reports_nodes_makespan_and_bound():
    weights = np.random.default_rng(3).integers(10**8, 10**9, 48)
    with pytest.raises(TimeoutError, match=r"looked at \d+ of 4611686018427387904 nodes in 0.05 s") as given_up:
        balance.assign_exact(weights, 9, nodes=2**62, seconds=0.05)
    nodes = int(re.search(r"use nodes=(\d+)", str(given_up.value))[1])
    makespan, bound = map(float, re.search(r"bin is (\S+), none can be below (\S+):", str(given_up.value)).groups())
    result = balance.assign_exact(weights, 9, nodes=nodes)  # the workaround in the message
    assert (result.makespan, result.bound, result.proven) == (makespan, bound, False)
    for seconds in (0.0, -1.0, math.nan):
        with pytest.raises(ValueError, match="seconds must be more than 0"):
            balance.assign_exact(weights, 9, seconds=seconds)


def test_the_default_budget_is_one_of_work_not_of_nodes():
    """The cost of a node grows with the number of bins: 20 million nodes take hours on 100,000 bins."""
    weights = np.random.default_rng(0).random(3000)
    result = balance.assign_exact(weights, 1000, seconds=30.0)
    assert not result.proven and result.bound <= result.makespan


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
def test_exact_agrees_with_a_milp_solver(seed):
    scipy = pytest.importorskip("scipy.optimize")
    rng = np.random.default_rng(seed)
    n, bins = int(rng.integers(10, 22)), int(rng.integers(2, 5))
    weights = rng.integers(1, 100, n)
    capacity = int(rng.integers(-(-n // bins), n + 1))
    # x[i, b], then the makespan.
    each = np.hstack([np.kron(np.eye(n), np.ones(bins)), np.zeros((n, 1))])
    load = np.hstack([np.kron(weights[None], np.eye(bins)), -np.ones((bins, 1))])
    count = np.hstack([np.kron(np.ones((1, n)), np.eye(bins)), np.zeros((bins, 1))])
    solved = scipy.milp(
        np.eye(n * bins + 1)[-1],
        constraints=[
            scipy.LinearConstraint(each, 1, 1),
            scipy.LinearConstraint(load, -np.inf, 0),
            scipy.LinearConstraint(count, 0, capacity),
        ],
        integrality=np.ones(n * bins + 1),
        bounds=scipy.Bounds(0, np.append(np.ones(n * bins), np.inf)),
    )
    result = balance.assign_exact(weights, bins, capacity=capacity)
    assert result.proven and result.makespan == pytest.approx(solved.fun, abs=1e-4)
