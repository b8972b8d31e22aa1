"""balance.assign and balance.lower_bound against all assignments of small inputs."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from interlace import balance

METHODS = ("lpt", "contiguous", "zigzag")


def makespan(weights, bin_of, bins):
    return max(math.fsum(w for w, b in zip(weights, bin_of) if b == bin_) for bin_ in range(bins))


def best_assignment(weights, bins, capacity=None):
    """The lightest heaviest bin over all assignments that respect the capacity."""
    capacity = capacity or len(weights)
    every = np.array(list(itertools.product(range(bins), repeat=len(weights))))
    members = every[:, :, None] == np.arange(bins)  # [assignments, items, bins]
    loads = (members * np.asarray(weights, dtype=np.float64)[:, None]).sum(1).max(1)
    return loads[members.sum(1).max(1) <= capacity].min()


def best_in_order(weights, bins, capacity):
    """The same over assignments whose bins never fall along the items."""
    return min(
        makespan(weights, bin_of, bins)
        for bin_of in itertools.combinations_with_replacement(range(bins), len(weights))
        if max(map(bin_of.count, range(bins))) <= capacity
    )


whole = st.integers(0, 30)
fractions = st.floats(0, 1e6, allow_subnormal=False)
# The length is drawn first, so that long lists are as likely as short ones.
weight_lists = st.integers(1, 8).flatmap(
    lambda n: st.lists(whole, min_size=n, max_size=n) | st.lists(fractions, min_size=n, max_size=n)
)


@st.composite
def capped(draw):
    weights, bins = draw(weight_lists), draw(st.integers(1, 3))
    return weights, bins, draw(st.integers(math.ceil(len(weights) / bins), len(weights)))


@settings(max_examples=300)
@given(weight_lists, st.integers(1, 3))
def test_lpt_keeps_grahams_bound(weights, bins):
    bin_of = balance.assign(weights, bins)
    assert bin_of.dtype == np.int32 and bin_of.shape == (len(weights),)
    assert bin_of.min() >= 0 and bin_of.max() < bins
    best = best_assignment(weights, bins)
    assert makespan(weights, bin_of, bins) <= (4 / 3 - 1 / (3 * bins)) * best * (1 + 1e-12)


@given(st.lists(whole | fractions, min_size=1, max_size=60), st.integers(1, 9), st.data())
def test_lpt_is_what_its_definition_says(weights, bins, data):
    capacity = data.draw(st.none() | st.integers(math.ceil(len(weights) / bins), len(weights)))
    loads, counts, expected = [0.0] * bins, [0] * bins, [0] * len(weights)
    for item in sorted(range(len(weights)), key=lambda i: (-weights[i], i)):
        bin_ = min((b for b in range(bins) if counts[b] != capacity), key=lambda b: (loads[b], b))
        loads[bin_] += weights[item]
        counts[bin_] += 1
        expected[item] = bin_
    assert balance.assign(weights, bins, capacity=capacity).tolist() == expected


@given(capped())
def test_capacity_is_respected_and_nothing_beats_the_optimum(case):
    weights, bins, capacity = case
    best = best_assignment(weights, bins, capacity)
    for method in METHODS:
        bin_of = balance.assign(weights, bins, method=method, capacity=capacity)
        assert np.bincount(bin_of, minlength=bins).max() <= capacity
        assert makespan(weights, bin_of, bins) >= best * (1 - 1e-12)


@settings(max_examples=300)
@given(capped())
def test_contiguous_is_the_best_that_keeps_the_order(case):
    weights, bins, capacity = case
    bin_of = balance.assign(weights, bins, method="contiguous", capacity=capacity)
    assert (np.diff(bin_of) >= 0).all()
    best = best_in_order(weights, bins, capacity)
    assert makespan(weights, bin_of, bins) == pytest.approx(best, rel=1e-12, abs=1e-9)


@settings(max_examples=300)
@given(capped())
def test_lower_bound_holds(case):
    weights, bins, capacity = case
    for cap in (None, capacity):
        bound = balance.lower_bound(weights, bins, capacity=cap)
        assert bound <= best_assignment(weights, bins, cap) * (1 + 1e-12)
        assert bound >= max(max(weights), math.fsum(weights) / bins * (1 - 1e-12))


@pytest.mark.parametrize(
    ("weights", "bins", "capacity", "bound"),
    [
        ([3, 3, 2, 2, 2], 2, None, 6),  # the total
        ([9, 1, 1], 3, None, 9),  # the largest item
        ([5, 5, 5, 4], 3, None, 9),  # two of the four largest share a bin
        ([2] * 7, 3, None, 6),  # three of the seven do
        ([1, 1, 1], 2, None, 2),  # whole weights: 1.5 is out of reach
        ([0.5, 0.5, 0.5], 2, None, 1.0),
        ([9, 1, 1, 1], 2, 2, 10),  # with two to a bin, the 9 cannot stand alone
    ],
)
def test_lower_bound_by_hand(weights, bins, capacity, bound):
    assert balance.lower_bound(weights, bins, capacity=capacity) == bound
    assert best_assignment(weights, bins, capacity) == bound


@pytest.mark.parametrize(("items", "bins"), [(16, 4), (17, 4), (3, 4), (1, 1), (8, 1), (1000, 7)])
def test_zigzag_pairs_early_with_late_chunks(items, bins):
    bin_of = balance.assign(np.ones(items), bins, method="zigzag")
    assert np.ptp(np.bincount(bin_of, minlength=bins)) <= 1
    chunks = np.array_split(np.arange(items), 2 * bins)
    for bin_ in range(bins):
        own = np.concatenate([chunks[bin_], chunks[-1 - bin_]])
        assert np.flatnonzero(bin_of == bin_).tolist() == own.tolist()


def test_zigzag_balances_causal_rows():
    rows = np.arange(1, 129)
    loads = np.bincount(balance.assign(rows, 8, method="zigzag"), weights=rows)
    assert np.ptp(loads) == 0


@pytest.mark.parametrize("method", METHODS)
def test_same_input_same_answer_for_every_dtype(method):
    weights = np.random.default_rng(0).integers(0, 9, 500)  # many ties
    first = balance.assign(weights, 7, method=method)
    for dtype in (np.int8, np.uint16, np.int64, np.float16, np.float32, np.float64):
        assert (balance.assign(weights.astype(dtype), 7, method=method) == first).all()
    assert (balance.assign(np.repeat(weights, 2)[::2], 7, method=method) == first).all()  # strided
    assert (balance.assign(weights.tolist(), 7, method=method) == first).all()


@pytest.mark.parametrize("method", METHODS)
def test_more_bins_than_items(method):
    bin_of = balance.assign([1.0, 2.0, 3.0], 10, method=method)
    assert len(set(bin_of.tolist())) == 3
    assert balance.lower_bound([1.0, 2.0, 3.0], 10) == 3.0


@pytest.mark.parametrize("call", [balance.assign, balance.lower_bound])
@pytest.mark.parametrize(
    ("weights", "bins", "capacity", "message"),
    [
        ([1, math.nan], 2, None, r"weights\[1\] is nan"),
        ([1, 2, -3.5], 2, None, r"weights\[2\] is -3.5"),
        ([math.inf], 2, None, r"weights\[0\] is inf"),
        ([], 2, None, "weights is empty"),
        ([[1.0, 2.0]], 2, None, "one dimension, got 2"),
        (["a"], 2, None, "real numbers"),
        ([1j], 2, None, "real numbers.*complex"),
        ([True], 2, None, "real numbers.*bool"),
        ([1e308, 1e308], 2, None, "overflows"),
        ([1], 0, None, "bins must lie between 1 and"),
        ([1], 2**40, None, "bins must lie between 1 and"),
        ([1, 2, 3], 2, 0, "capacity must be at least 1, got 0"),
        ([1, 2, 3], 2, 1, "3 items do not fit 2 bins of 1: capacity must be at least 2"),
    ],
)
def test_bad_input_is_named(call, weights, bins, capacity, message):
    with pytest.raises(ValueError, match=message):
        call(weights, bins, capacity=capacity)


def test_unknown_method_lists_the_known():
    with pytest.raises(ValueError, match=r"unknown method 'greedy'.*'lpt', 'contiguous', 'zigzag'"):
        balance.assign([1.0], 1, method="greedy")
    with pytest.raises(TypeError):
        balance.assign([1.0], 1.5)


@pytest.mark.slow
def test_lpt_is_close_to_the_bound_at_scale():
    """Field experience: within a per cent of the bound from 16 items per bin on, also with equal counts."""
    rng = np.random.default_rng(0)
    for items, bins in ((512, 8), (8192, 16), (153_600, 2560)):
        weights = rng.lognormal(5.8, 1.0, items)
        for capacity in (None, -(-items // bins)):
            loads = np.bincount(balance.assign(weights, bins, capacity=capacity), weights=weights)
            assert loads.max() <= 1.02 * balance.lower_bound(weights, bins, capacity=capacity)
