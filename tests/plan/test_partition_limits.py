"""plan.partition with memory limits and speeds per stage, against every cut."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from interlace import plan


def bottleneck(costs, speeds, cuts):
    prefix = np.concatenate([[0.0], np.cumsum(np.asarray(costs, dtype=np.float64))])
    return ((prefix[list(cuts[1:])] - prefix[list(cuts[:-1])]) / np.asarray(speeds, dtype=np.float64)).max()


def keeps(memory, limits, cuts):
    prefix = np.concatenate([[0.0], np.cumsum(np.asarray(memory, dtype=np.float64))])
    return bool((prefix[list(cuts[1:])] - prefix[list(cuts[:-1])] <= np.asarray(limits)).all())


@st.composite
def rows(draw):
    layers = draw(st.integers(1, 8))
    stages = draw(st.integers(1, layers))
    number = draw(st.sampled_from([st.integers(0, 9), st.floats(0, 1), st.sampled_from([0, 1, 50])]))
    each = st.lists(number, min_size=layers, max_size=layers)
    speeds = st.lists(st.sampled_from([0.5, 1, 3, 0.1]), min_size=stages, max_size=stages)
    limits = st.lists(st.integers(0, 30), min_size=stages, max_size=stages)
    return draw(each), draw(each), draw(limits), draw(speeds)


def check(case):
    costs, memory, limits, speeds = case
    stages = len(speeds)
    every = [(0, *inner, len(costs)) for inner in itertools.combinations(range(1, len(costs)), stages - 1)]
    best = min((bottleneck(costs, speeds, cuts) for cuts in every if keeps(memory, limits, cuts)), default=math.inf)
    if best == math.inf:
        with pytest.raises(ValueError, match="no cut keeps"):
            plan.partition(costs, stages, memory=memory, memory_limits=limits, speeds=speeds)
    else:
        cuts = plan.partition(costs, stages, memory=memory, memory_limits=limits, speeds=speeds)
        assert (np.diff(cuts) >= 1).all() and cuts[0] == 0 and cuts[-1] == len(costs)
        assert keeps(memory, limits, cuts) and bottleneck(costs, speeds, cuts) == best
    cuts = plan.partition(costs, stages, speeds=speeds)
    assert bottleneck(costs, speeds, cuts) == min(bottleneck(costs, speeds, each) for each in every)


@settings(max_examples=200)
@given(rows())
@example(([1, 9, 1, 1], [1, 9, 1, 1], [10, 1, 1], [1, 1, 1]))  # ends of stage 0 are not one interval for stage 1
def test_bottleneck_is_exactly_the_optimum(case):
    check(case)


@pytest.mark.slow
@settings(max_examples=1000)
@given(rows())
def test_bottleneck_is_exactly_the_optimum_in_many_cases(case):
    check(case)


def test_without_limits_it_is_the_plain_partition():
    costs = np.random.default_rng(0).lognormal(size=400)
    plain, limited = plan.partition(costs, 37), plan.partition(costs, 37, speeds=np.ones(37))
    assert bottleneck(costs, np.ones(37), plain) == bottleneck(costs, np.ones(37), limited)


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"memory": [1, 1]}, "belong together"),
        ({"speeds": [1]}, r"speeds must have shape \(2,\)"),
        ({"speeds": [1, 0]}, r"speeds\[1\] is 0"),
        ({"speeds": [1, 1e-320]}, r"speeds\[1\].*overflows"),
        ({"memory": [1, 1], "memory_limits": [1, 1, 1]}, "memory_limits has 3 stages"),
        ({"memory": [1], "memory_limits": 1}, "memory has 1 layers"),
        ({"memory": [1, math.inf], "memory_limits": 1}, r"memory\[1\] is inf"),
        ({"memory": [1, 2], "memory_limits": 1}, "no cut keeps"),
    ],
)
def test_bad_input_is_named(keywords, message):
    with pytest.raises(ValueError, match=message):
        plan.partition([1e9, 1e9], 2, **keywords)
