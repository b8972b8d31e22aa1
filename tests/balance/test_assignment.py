"""balance.assign and balance.lower_bound against all assignments of small inputs."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.scheduling_bounds import least_spread
from interlace import balance
from tests.balance.assignment import best_assignment, capped, fractions, makespan, weight_lists, whole

METHODS = tuple(balance.METHODS)
BLIND = ("ring", "zigzag", "random")


def best_in_order(weights, bins, capacity):
    """The same over assignments whose bin numbers never decrease along the items."""
    return min(
        makespan(weights, bin_of, bins)
        for bin_of in itertools.combinations_with_replacement(range(bins), len(weights))
        if max(map(bin_of.count, range(bins))) <= capacity
    )


@settings(max_examples=300)
@given(weight_lists, st.integers(1, 3))
def test_lpt_keeps_grahams_bound(weights, bins):
    best = best_assignment(weights, bins)
    for method in ("lpt", "lpt_greedy"):
        bin_of = balance.assign(weights, bins, method=method)
        assert bin_of.dtype == np.int32 and bin_of.shape == (len(weights),)
        assert bin_of.min() >= 0 and bin_of.max() < bins
        assert makespan(weights, bin_of, bins) <= (4 / 3 - 1 / (3 * bins)) * best * (1 + 1e-12)


@pytest.mark.parametrize("shape", [(40, 4), (200, 7), (300, 64), (1000, 3)])
@pytest.mark.parametrize("capped", [False, True])
def test_refinement_is_never_worse_and_often_better(shape, capped):
    items, bins = shape
    rng = np.random.default_rng(items)
    better = 0
    for weights in (
        rng.random(items),
        rng.lognormal(2, 1, items),
        rng.integers(0, 30, items),
        rng.integers(1, 5, items),
    ):
        capacity = -(-items // bins) if capped else None
        greedy, refined = (
            makespan(weights, balance.assign(weights, bins, method=method, capacity=capacity), bins)
            for method in ("lpt_greedy", "lpt")
        )
        assert refined <= greedy * (1 + 1e-12)
        better += refined < greedy
    assert better >= (1 if items <= 100 * bins else 0)  # greedy is within the tolerance already


@pytest.mark.parametrize(
    ("weights", "bins", "greedy", "best"), [([3, 3, 2, 2, 2], 2, 7, 6), ([5, 5, 4, 4, 3, 3, 3], 3, 11, 9)]
)
def test_refinement_mends_grahams_worst_cases(weights, bins, greedy, best):
    for method, heaviest in (("lpt_greedy", greedy), ("lpt", best), ("exact", best)):
        assert makespan(weights, balance.assign(weights, bins, method=method), bins) == heaviest


@given(st.integers(1, 50), st.integers(1, 9), st.integers(0, 2**64 - 1))
def test_blind_methods_deal_evenly(items, bins, seed):
    for method in BLIND:
        bin_of = balance.assign(np.ones(items), bins, method=method, seed=seed if method == "random" else 0)
        assert np.ptp(np.bincount(bin_of, minlength=bins)) <= 1
    ring = balance.assign(np.ones(items), bins, method="ring")
    assert [part.tolist() for part in np.array_split(np.arange(items), bins)] == [
        np.flatnonzero(ring == b).tolist() for b in range(bins)
    ]


def test_random_is_seeded_and_the_same_everywhere():
    assert balance.assign(np.ones(12), 3, method="random").tolist() == [1, 1, 0, 1, 0, 2, 2, 2, 0, 0, 1, 2]
    first, again, other = (balance.assign(np.ones(500), 7, method="random", seed=seed) for seed in (5, 5, 6))
    assert (first == again).all() and (first != other).any()
    # Every item sees every bin about equally often.
    counts = np.zeros((6, 3))
    for seed in range(600):
        counts[np.arange(6), balance.assign(np.ones(6), 3, method="random", seed=seed)] += 1
    assert (np.abs(counts - 200) < 60).all()
    for seed in (-1, 2**64):
        with pytest.raises(ValueError, match="seed must lie between"):
            balance.assign([1.0], 1, method="random", seed=seed)
    with pytest.raises(ValueError, match="takes no seed: leave it out, or use method 'random'"):
        balance.assign([1.0], 1, seed=3)


@pytest.mark.parametrize("items", [255, 256, 1000])
def test_order_of_every_kind_of_double(items):
    """The radix sort against numpy's: subnormals, negative zero, huge values and ties in the upper halves."""
    rng = np.random.default_rng(items)
    kinds = [
        rng.random(items),
        1 + rng.integers(0, 5, items) * 2.0**-52,
        np.ldexp(rng.random(items), rng.integers(-1074, 1000, items)),
        np.where(rng.random(items) < 0.5, -0.0, 0.0),
        rng.integers(0, 3, items) * 5e-324,
    ]
    for weights in kinds:
        bin_of = balance.assign(weights, items, method="lpt_greedy")
        # One item per bin, heaviest first; items of weight 0 go to the first bin with load 0.
        order = np.lexsort((np.arange(items), -weights))
        filled = int((weights > 0).sum())
        assert bin_of[order[:filled]].tolist() == list(range(filled))


@given(st.lists(whole | fractions, min_size=1, max_size=60), st.integers(1, 9), st.data())
def test_lpt_is_what_its_definition_says(weights, bins, data):
    capacity = data.draw(st.none() | st.integers(math.ceil(len(weights) / bins), len(weights)))
    loads, counts, expected = [0.0] * bins, [0] * bins, [0] * len(weights)
    for item in sorted(range(len(weights)), key=lambda i: (-weights[i], i)):
        bin_ = min((b for b in range(bins) if counts[b] != capacity), key=lambda b: (loads[b], b))
        loads[bin_] += weights[item]
        counts[bin_] += 1
        expected[item] = bin_
    assert balance.assign(weights, bins, method="lpt_greedy", capacity=capacity).tolist() == expected


@given(capped())
def test_capacity_is_respected_and_nothing_beats_the_optimum(case):
    weights, bins, capacity = case
    best = best_assignment(weights, bins, capacity)
    for method in METHODS:
        bin_of = balance.assign(weights, bins, method=method, capacity=capacity)
        assert np.bincount(bin_of, minlength=bins).max() <= capacity
        assert makespan(weights, bin_of, bins) >= best * (1 - 1e-12)


def check_contiguous(case):
    weights, bins, capacity = case
    bin_of = balance.assign(weights, bins, method="contiguous", capacity=capacity)
    assert (np.diff(bin_of) >= 0).all()
    best = best_in_order(weights, bins, capacity)
    assert makespan(weights, bin_of, bins) == pytest.approx(best, rel=1e-12, abs=1e-9)


@settings(max_examples=300)
@given(capped())
def test_contiguous_is_the_best_that_keeps_the_order(case):
    check_contiguous(case)


@pytest.mark.slow
@settings(max_examples=500)
@given(capped())
def test_contiguous_is_the_best_that_keeps_the_order_on_many(case):
    check_contiguous(case)


def check_lower_bound(case):
    weights, bins, capacity = case
    for cap in (None, capacity):
        bound = balance.lower_bound(weights, bins, capacity=cap)
        assert bound <= best_assignment(weights, bins, cap) * (1 + 1e-12)
        assert bound >= max(max(weights), math.fsum(weights) / bins * (1 - 1e-12))


@settings(max_examples=300)
@given(capped())
def test_lower_bound_holds(case):
    check_lower_bound(case)


@pytest.mark.slow
@settings(max_examples=500)
@given(capped())
def test_lower_bound_holds_on_many(case):
    check_lower_bound(case)


@pytest.mark.parametrize(
    ("weights", "bins", "capacity", "bound"),
    [
        ([3, 3, 2, 2, 2], 2, None, 6),  # the total
        ([9, 1, 1], 3, None, 9),  # the largest item
        ([5, 5, 5, 4], 3, None, 9),  # two of the four largest share a bin
        ([2] * 7, 3, None, 6),  # three of the seven do
        ([1, 1, 1], 2, None, 2),  # integer weights: 1.5 is unreachable
        ([0.5, 0.5, 0.5], 2, None, 1.0),
        ([9, 1, 1, 1], 2, 2, 10),  # with two per bin, the 9 cannot be alone
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
    items = 40 if method == "exact" else 500
    weights = np.random.default_rng(0).integers(0, 9, items)  # many ties
    first = balance.assign(weights, 7, method=method)
    for dtype in (np.int8, np.uint16, np.int64, np.float16, np.float32, np.float64):
        assert (balance.assign(weights.astype(dtype), 7, method=method) == first).all()
    assert (balance.assign(np.repeat(weights, 2)[::2], 7, method=method) == first).all()  # strided
    assert (balance.assign(weights.tolist(), 7, method=method) == first).all()


@pytest.mark.parametrize("method", METHODS)
def test_more_bins_than_items(method):
    bin_of = balance.assign([1.0, 2.0, 3.0], 10, method=method)
    assert len(set(bin_of.tolist())) == 3 and 0 <= bin_of.min() and bin_of.max() < 10
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
    with pytest.raises(ValueError, match=r"unknown method 'greedy'.*'lpt', 'even', 'lpt_greedy'.*'zigzag'"):
        balance.assign([1.0], 1, method="greedy")
    with pytest.raises(TypeError):
        balance.assign([1.0], 1.5)


@pytest.mark.slow
def test_lpt_is_close_to_the_bound_at_scale():
    """Empirical: within a per cent of the bound from 16 items per bin on, also with equal counts."""
    rng = np.random.default_rng(0)
    for items, bins in ((512, 8), (8192, 16), (153_600, 2560)):
        weights = rng.lognormal(5.8, 1.0, items)
        for capacity in (None, -(-items // bins)):
            loads = np.bincount(balance.assign(weights, bins, capacity=capacity), weights=weights)
            assert loads.max() <= 1.02 * balance.lower_bound(weights, bins, capacity=capacity)


@pytest.mark.parametrize("method", METHODS)
def test_extreme_arguments_neither_crash_nor_take_memory(method):
    for weights in ([1.0], [0.0, 0.0], [1e307, 1e307, 5e-324], np.full(300, 1e305)):
        for bins in (1, 3, 2**30 - 1):
            for capacity in (None, len(weights), 2**63 - 1):
                bin_of = balance.assign(weights, bins, method=method, capacity=capacity)
                assert 0 <= bin_of.min() and bin_of.max() < bins
    for bins, capacity in ((-1, None), (2**63, None), (2**70, None), (-(2**70), None), (1, -(2**63)), (1, 2**70)):
        with pytest.raises(ValueError):
            balance.assign([1.0], bins, method=method, capacity=capacity)
    for weights in ([2**70], [[1], [2, 3]], [None], np.array([1, 2], "m8[s]"), np.array(["x"]), 3.0):
        with pytest.raises(ValueError):
            balance.assign(weights, 1, method=method)


def deviation(weights, bin_of, bins):
    return float(np.bincount(bin_of, weights, bins).std())


@settings(max_examples=150)
@given(capped())
def test_even_is_never_heavier_nor_less_even_than_lpt(case):
    weights, bins, capacity = case
    start, even = (balance.assign(weights, bins, method=m, capacity=capacity) for m in ("lpt", "even"))
    assert np.bincount(even, minlength=bins).max() <= capacity
    assert makespan(weights, even, bins) <= makespan(weights, start, bins) * (1 + 1e-12)
    assert deviation(weights, even, bins) <= deviation(weights, start, bins) * (1 + 1e-9) + 1e-9


@settings(max_examples=100)
@given(weight_lists, st.integers(1, 3))
def test_least_spread_is_below_every_assignment(weights, bins):
    """Checks a lower bound against all assignments. It is reached if too large items leave one bin for the others."""
    best = min(deviation(weights, np.array(b), bins) for b in itertools.product(range(bins), repeat=len(weights)))
    bound = least_spread(weights, bins)
    assert bound <= best * (1 + 1e-9) + 1e-9 * max(weights, default=0.0) + 1e-12
    if bins == 2 and 2 * max(weights) > sum(weights):
        assert bound == pytest.approx(best, rel=1e-9)


@pytest.mark.parametrize(
    ("items", "bins", "near"), [(128, 32, 1e-3), (512, 128, 1e-3), (64, 8, 1e-3), (4096, 64, 1e-4)]
)
def test_even_comes_near_the_least_spread(items, bins, near):
    """Four items per bin: the spread is almost zero if no item is larger than its share, else near the bound."""
    rng = np.random.default_rng(items)
    for sigma in (0.25, 0.4, 1.0):
        weights = rng.lognormal(6, sigma, items)
        loads = np.bincount(balance.assign(weights, bins, method="even"), weights, bins)
        bound = least_spread(weights, bins)
        assert loads.std() <= 1.1 * bound + near * loads.mean(), (sigma, loads.std() / loads.mean())
        assert (bound > 0) == (weights.max() > weights.sum() / bins)
