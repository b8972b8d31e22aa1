"""plan.partition against the dynamic programming of dissertation eq. 3.5."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from interlace import plan


def dynamic_programming(costs, stages):
    """Eq. 3.5 as printed: D(i, s) over the prefix sums P. Returns D(N, S)."""
    prefix = np.concatenate([[0.0], np.cumsum(np.asarray(costs, dtype=np.float64))])
    n = len(costs)
    best = {(i, 1): prefix[i] for i in range(1, n + 1)}
    for s in range(2, stages + 1):
        for i in range(s, n + 1):
            best[i, s] = min(max(best[j, s - 1], prefix[i] - prefix[j]) for j in range(s - 1, i))
    return best[n, stages]


def bottleneck(costs, cuts):
    prefix = np.concatenate([[0.0], np.cumsum(np.asarray(costs, dtype=np.float64))])
    return np.diff(prefix[cuts]).max()


numbers = st.sampled_from(
    [st.integers(0, 50), st.floats(0, 1e9), st.floats(0, 1).map(lambda x: 10 ** (40 * x - 20))]  # last: all magnitudes
)
costs_and_stages = (
    st.tuples(numbers, st.integers(1, 14))
    .flatmap(lambda case: st.lists(case[0], min_size=case[1], max_size=case[1]))
    .flatmap(lambda costs: st.tuples(st.just(costs), st.integers(1, len(costs))))
)


@settings(max_examples=500)
@given(costs_and_stages)
@example(([0, 0, 0], 2))
@example(([0.1] * 9, 4))  # sums of 0.1 round differently along the row
@example(([1e16, 1.0, 1.0, 1e16], 3))
@example(([5e-324] * 5, 3))
@example(([0.3, 0.9, 0.7, 1.0, 0.8, 0.7, 0.5], 6))  # the search ends on two neighbouring doubles
def test_bottleneck_is_exactly_the_optimum(case):
    check(case)


@pytest.mark.slow
@settings(max_examples=700)
@given(costs_and_stages)
def test_bottleneck_is_exactly_the_optimum_in_many_cases(case):
    check(case)


def check(case):
    costs, stages = case
    cuts = plan.partition(costs, stages)
    assert cuts.dtype == np.int32 and cuts.shape == (stages + 1,)
    assert cuts[0] == 0 and cuts[-1] == len(costs) and (np.diff(cuts) >= 1).all()
    assert bottleneck(costs, cuts) == dynamic_programming(costs, stages)  # to the last bit, also for fractions


@given(st.lists(st.integers(0, 9), min_size=1, max_size=8), st.data())
def test_against_every_cut(costs, data):
    stages = data.draw(st.integers(1, len(costs)))
    every = itertools.combinations(range(1, len(costs)), stages - 1)
    best = min(bottleneck(costs, np.array([0, *inner, len(costs)])) for inner in every)
    assert bottleneck(costs, plan.partition(costs, stages)) == best


@given(st.integers(1, 200), st.data())
def test_equal_layers_are_cut_evenly(layers, data):
    stages = data.draw(st.integers(1, layers))
    sizes = np.diff(plan.partition(np.ones(layers), stages))
    assert sizes.max() == math.ceil(layers / stages)
    assert sizes.min() == layers // stages


def test_long_row():
    costs = np.random.default_rng(0).lognormal(size=300)
    assert bottleneck(costs, plan.partition(costs, 24)) == dynamic_programming(costs, 24)


@pytest.mark.slow
def test_many_random_rows():
    rng = np.random.default_rng(1)
    for repetition in range(20_000):
        layers = int(rng.integers(1, 80 if repetition % 50 == 0 else 9))
        stages = int(rng.integers(1, layers + 1))
        costs = rng.choice(
            [
                rng.lognormal(size=layers),
                rng.integers(0, 1000, layers),
                rng.random(layers) ** 9,
                np.round(rng.random(layers), 1),
            ]
        )
        assert bottleneck(costs, plan.partition(costs, stages)) == dynamic_programming(costs, stages)


@pytest.mark.parametrize(
    ("costs", "stages", "message"),
    [
        ([1, 2], 3, "2 layers into 3 stages.*at most 2 stages"),
        ([1, 2], 0, "stages must be at least 1, got 0"),
        ([1, 2], -1, "stages must be at least 1, got -1"),
        ([], 1, "costs is empty"),
        ([1, math.nan, 1], 2, r"costs\[1\] is nan"),
        ([1, 1, -2], 2, r"costs\[2\] is -2"),
        ([[1, 2]], 2, "one dimension"),
        (["x", "y"], 2, "real numbers"),
    ],
)
def test_bad_input_is_named(costs, stages, message):
    with pytest.raises(ValueError, match=message):
        plan.partition(costs, stages)
