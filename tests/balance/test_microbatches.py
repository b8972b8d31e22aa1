"""Subset sums, bottleneck matching and Entrain's microbatches against brute force, SciPy and plain transcriptions."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from interlace import _core, balance
from tests.balance.assignment import items_of

INF = math.inf
whole = st.integers(0, 30)
fractions = st.floats(0, 1e6, allow_subnormal=False)
COSTS = st.integers(1, 8).flatmap(
    lambda n: st.lists(whole, min_size=n, max_size=n) | st.lists(fractions, min_size=n, max_size=n)
)


def all_sums(weights):
    """The sum of every subset."""
    sums = np.zeros(1)
    for weight in weights:
        sums = np.concatenate([sums, sums + weight])
    return sums


# --- subset_sum


def check_whole_subset(weights, share, scale):
    weights = [weight * scale for weight in weights]
    target = share * (sum(weights) + 1)
    chosen = balance.subset_sum(weights, target)
    assert chosen.dtype == np.int32 and (np.diff(chosen) > 0).all()
    assert all(weights[i] > 0 for i in chosen)
    best = min(all_sums(weights), key=lambda s: (abs(s - target), s))
    assert sum(weights[i] for i in chosen) == best


whole_subsets = (st.lists(whole, min_size=1, max_size=12), st.floats(0, 1.2), st.sampled_from([1, 7, 1024, 2**40]))


@given(*whole_subsets)
def test_subset_sum_is_exact_for_whole_numbers(weights, share, scale):
    check_whole_subset(weights, share, scale)


@pytest.mark.slow
@settings(max_examples=700)
@given(*whole_subsets)
def test_subset_sum_is_exact_for_many_whole_numbers(weights, share, scale):
    check_whole_subset(weights, share, scale)


@given(st.lists(fractions, min_size=1, max_size=12), st.floats(0, 1.2), st.sampled_from([None, 1e-2, 0.5]))
def test_subset_sum_of_fractions_is_off_by_few_units(weights, share, relative):
    total = math.fsum(weights)
    target = share * total
    resolution = relative * total if relative and total else None
    chosen = balance.subset_sum(weights, target, resolution=resolution)
    unit = resolution or total / 2**16
    best = min(abs(s - target) for s in all_sums(weights))
    assert abs(math.fsum(weights[i] for i in chosen) - target) <= best + len(weights) * unit + 1e-9 * total


def test_subset_sum_halves_a_large_partition():
    rng = np.random.default_rng(0)
    weights = rng.integers(1, 4000, 500)
    chosen = balance.subset_sum(weights, weights.sum() // 2)
    assert weights[chosen].sum() == weights.sum() // 2
    lognormal = rng.lognormal(5.8, 1.0, 100_000)
    near = lognormal[balance.subset_sum(lognormal, lognormal.sum() / 3)].sum()
    assert near == pytest.approx(lognormal.sum() / 3, rel=1e-6)


def test_subset_sum_by_hand():
    assert balance.subset_sum([5, 3, 2], 4).tolist() == [1]  # 3 and 5 are equally near: the smaller
    assert balance.subset_sum([5, 3, 1], 7).tolist() == [0, 2]  # 6 and 8 are
    assert balance.subset_sum([0, 3, 0], 100).tolist() == [1]
    assert balance.subset_sum([0.0], 1).tolist() == []
    assert balance.subset_sum([1, 2], 0).tolist() == []
    assert balance.subset_sum([5e-324, 5e-324], 5e-324).size <= 1
    assert balance.subset_sum([1e308], 1e308).tolist() == [0]
    assert balance.subset_sum([3.0] * 10, 14).tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("weights", "target", "resolution", "message"),
    [
        ([], 1, None, "weights is empty"),
        ([1, -2], 1, None, r"weights\[1\] is -2"),
        ([1, math.nan], 1, None, r"weights\[1\] is nan"),
        ([1], -1, None, r"target is -1"),
        ([1], math.nan, None, "target is nan"),
        ([1], INF, None, "target is inf"),
        ([1], 1, 0.0, "resolution is 0"),
        ([1], 1, math.nan, "resolution is nan"),
        ([[1]], 1, None, "one dimension"),
        (["a"], 1, None, "real numbers"),
    ],
)
def test_bad_subset_sums_are_named(weights, target, resolution, message):
    with pytest.raises(ValueError, match=message):
        balance.subset_sum(weights, target, resolution=resolution)


# --- bottleneck_match


def least_bottleneck(cost, alone):
    """Smallest bottleneck over all ways to pair distinct columns with rows or leave rows unpaired."""
    m, k = cost.shape
    best = INF
    for choice in itertools.product(range(-1, k), repeat=m):
        used = [c for c in choice if c >= 0]
        if len(set(used)) == len(used):
            best = min(best, max(alone[i] if c < 0 else cost[i, c] for i, c in enumerate(choice)))
    return best


def check_match(cost, alone, expected):
    if expected == INF:
        with pytest.raises(ValueError, match="no matching is allowed"):
            balance.bottleneck_match(cost, alone)
        return
    threshold, partner = balance.bottleneck_match(cost, alone)
    assert threshold == expected
    assert partner.dtype == np.int32 and partner.shape == (len(alone),)
    used = partner[partner >= 0]
    assert len(set(used.tolist())) == len(used)
    for row, column in enumerate(partner):
        # Only rows that exceed the threshold alone are paired.
        assert (alone[row] <= threshold) if column < 0 else (cost[row, column] <= threshold < alone[row])


@st.composite
def matchings(draw, most=4):
    m, k = draw(st.integers(1, most)), draw(st.integers(0, most))
    entry = st.integers(-3, 9) | st.floats(-5, 5) | st.just(INF)
    cost = np.array(draw(st.lists(entry, min_size=m * k, max_size=m * k)), np.float64).reshape(m, k)
    return cost, np.array(draw(st.lists(entry, min_size=m, max_size=m)), np.float64)


@given(matchings())
def test_bottleneck_match_equals_brute_force(case):
    check_match(*case, least_bottleneck(*case))


@pytest.mark.slow
@settings(max_examples=700)
@given(matchings())
def test_bottleneck_match_equals_brute_force_often(case):
    check_match(*case, least_bottleneck(*case))


def scipy_bottleneck(cost, alone):
    """The same by SciPy: binary search over the values, maximum_bipartite_matching as the probe."""
    csgraph = pytest.importorskip("scipy.sparse.csgraph")
    sparse = pytest.importorskip("scipy.sparse")
    values = np.unique(np.concatenate([cost.ravel(), alone]))
    low, high = 0, len(values) - 1
    while low < high:
        middle = (low + high) // 2
        rows = alone > values[middle]
        graph = sparse.csr_matrix(cost[rows] <= values[middle])
        matched = csgraph.maximum_bipartite_matching(graph, perm_type="column") if rows.any() else np.zeros(0)
        low, high = (low, middle) if (matched >= 0).all() else (middle + 1, high)
    return values[low]


def check_against_scipy(seed):
    rng = np.random.default_rng(seed)
    m, k = rng.integers(1, 200, 2)
    kind = rng.integers(3)
    cost = rng.integers(0, [10, 1000, 10**6][kind], (m, k)) / (1.0 if kind < 2 else 7.0)
    # A structure that misleads greedy pairing: rows equal in their cheap columns.
    if rng.random() < 0.5:
        cost = np.add.outer(np.arange(m), np.arange(k)) % max(1, min(m, k)) + cost * 1e-3
    alone = cost.max() * rng.random(m) * 1.5
    check_match(cost, alone, scipy_bottleneck(cost, alone))


@pytest.mark.parametrize("seed", range(40))
def test_bottleneck_match_equals_scipy(seed):
    check_against_scipy(seed)


@pytest.mark.slow
def test_bottleneck_match_equals_scipy_often():
    for seed in range(1000, 2000):
        check_against_scipy(seed)


def test_figure_4_10_has_one_matching():
    """Rows MB3, MB4, MB6, columns MB1, MB2, MB5 of the dissertation's figure: 3-2, 4-5, 6-1 at 6."""
    cost = np.maximum([[6, 6, 6], [6, 6, 6], [6, 7, 9]], [[5, 6, 8], [3, 4, 6], [6, 6, 6]])
    assert cost.tolist() == [[6, 6, 8], [6, 6, 6], [6, 7, 9]]
    threshold, partner = balance.bottleneck_match(cost, [INF, INF, INF])
    assert threshold == 6 and partner.tolist() == [1, 2, 0]
    # Loads implied by the matrix: MB4 alone has 6, so it need not defer (section 4.5.2).
    threshold, partner = balance.bottleneck_match(cost, [8, 6, 9])
    assert threshold == 6 and partner.tolist() == [1, -1, 0]


def test_figure_4_10_from_its_samples():
    """Loads 8, 6, 9 and 3, 4, 6, and the transfers that the figure's table implies.

    MB6 can give 2 (to MB2) and 3 (to MB1). So 2 to MB5 makes 7 and 8: the printed 9 and 6 is not the least. The
    matching does not change.
    """
    cost = _core.deferral_costs([np.array([2, 6]), np.array([6]), np.array([2, 3, 4])], np.array([3, 4, 6]))
    assert cost.tolist() == [[6, 6, 8], [6, 6, 6], [6, 7, 8]]
    threshold, partner = balance.bottleneck_match(cost, [8, 6, 9])
    assert threshold == 6 and partner.tolist() == [1, -1, 0]


@pytest.mark.parametrize(
    ("cost", "alone", "message"),
    [
        ([[1.0, math.nan]], [1.0], r"cost\[0, 1\] is nan"),
        ([[1.0], [-INF]], [1.0, 2.0], r"cost\[1, 0\] is -inf"),
        ([[1.0]], [math.nan], r"alone\[0\] is nan"),
        ([[1.0]], [1.0, 2.0], r"alone must have shape \(1,\)"),
        ([1.0], [1.0], "cost must have two dimensions, got 1"),
        (np.zeros((0, 3)), [], "cost has no rows"),
        ([["a"]], [1.0], "real numbers"),
        ([[INF, 1.0], [INF, 1.0]], [INF, INF], "no matching is allowed"),
    ],
)
def test_bad_matchings_are_named(cost, alone, message):
    with pytest.raises(ValueError, match=message):
        balance.bottleneck_match(cost, alone)


# --- assign_replicas


@given(COSTS, st.integers(1, 4), st.booleans(), st.randoms(use_true_random=False))
def test_replicas_are_what_section_4_3_says(encoder, replicas, equal, random):
    llm = [random.choice([0, 1, 2, 2.5, 7]) for _ in encoder]
    loads, counts, extra = [0.0] * replicas, [0] * replicas, len(encoder) % replicas
    expected = [0] * len(encoder)
    for sample in sorted(range(len(encoder)), key=lambda i: (-encoder[i], i)):
        share = len(encoder) // replicas
        # One more than the share, for as many replicas as the remainder.
        above = sum(count > share for count in counts)
        open_ = [r for r in range(replicas) if not equal or counts[r] < share + (above < extra)]
        replica = min(open_, key=lambda r: (loads[r], r))
        loads[replica] += llm[sample]
        counts[replica] += 1
        expected[sample] = replica
    replica_of = balance.assign_replicas(encoder, llm, replicas, equal_counts=equal, as_printed=True)
    assert replica_of.dtype == np.int32 and replica_of.tolist() == expected
    if equal:
        assert np.ptp(np.bincount(replica_of, minlength=replicas)) <= 1
    exchanged = balance.assign_replicas(encoder, llm, replicas, equal_counts=equal)
    assert np.bincount(exchanged, minlength=replicas).tolist() == np.bincount(replica_of, minlength=replicas).tolist()
    assert distance(exchanged, encoder, llm, replicas) <= distance(replica_of, encoder, llm, replicas) + 1e-9


def distance(replica_of, encoder, llm, replicas):
    """Squared relative deviations of the replicas' costs from their means."""
    loads = [np.bincount(replica_of, costs, replicas) for costs in (encoder, llm)]
    return sum(((load / load.mean() - 1) ** 2).sum() for load in loads if load.any())


@settings(max_examples=60)
@given(
    st.integers(2, 8).flatmap(
        lambda n: st.lists(st.tuples(st.integers(0, 30), st.integers(1, 30)), min_size=n, max_size=n)
    )
)
def test_no_single_exchange_brings_replicas_closer(costs):
    """Against all exchanges of two samples between any two replicas."""
    encoder, llm = np.array(costs, float).T
    replica_of = balance.assign_replicas(encoder, llm, 3)
    replicas = min(3, len(costs))
    here = distance(replica_of, encoder, llm, replicas)
    for i, j in itertools.combinations(range(len(costs)), 2):
        other = replica_of.copy()
        other[[i, j]] = other[[j, i]]
        # Replicas within 0.01 % of each other are left as they are.
        assert distance(other, encoder, llm, replicas) >= here * (1 - 1e-5) - 4e-8


# --- assign_microbatches


def stratified(encoder, llm, count):
    """Section 4.5.1 as a plain loop: the samples of each encoder microbatch."""
    n = len(encoder)
    coarse = set(sorted(range(n), key=lambda i: (-llm[i], i))[: (n + 1) // 2])
    members, loads, other = [[] for _ in range(count)], [0.0] * count, [0.0] * count
    for own in (coarse, set(range(n)) - coarse):
        for i in sorted(own, key=lambda i: (-encoder[i], i)):
            key = (lambda m: (loads[m], other[m], m)) if encoder[i] > 0 else (lambda m: (other[m], m))
            m = min(range(count), key=key)
            members[m].append(i)
            loads[m] += encoder[i]
            other[m] += llm[i]
    return members


def least_deferral(members, llm):
    """Smallest maximum LLM microbatch over all pairings and all subsets."""
    loads = [float(sum(llm[i] for i in own)) for own in members]
    order = sorted(range(len(members)), key=lambda m: (-loads[m], m))
    over, under = order[: (len(order) + 1) // 2], order[(len(order) + 1) // 2 :]
    cost = np.array(
        [
            [min(max(loads[i] - s, loads[j] + s) for s in all_sums([llm[x] for x in members[i]])) for j in under]
            for i in over
        ]
    ).reshape(len(over), len(under))
    return least_bottleneck(cost, np.array([loads[i] for i in over]))


def check_plan(encoder, llm, microbatches, shrink):
    printed = balance.assign_microbatches(encoder, llm, microbatches, shrink=shrink, as_printed=True)
    wanted = stratified(encoder, llm, printed.microbatches)
    assert sorted(own.tolist() for own in items_of(printed.encoder_of, printed.microbatches)) == sorted(
        sorted(own) for own in wanted
    )
    check_deferral(printed, encoder, llm, microbatches, shrink)
    plan = balance.assign_microbatches(encoder, llm, microbatches, shrink=shrink)
    check_deferral(plan, encoder, llm, microbatches, shrink)
    assert plan.encoder_loads.max() <= printed.encoder_loads.max() * (1 + 1e-12)
    assert plan.llm_bottleneck <= printed.llm_bottleneck * (1 + 1e-12)


def check_deferral(plan, encoder, llm, microbatches, shrink):
    """The deferral is valid, and no other deferral of these encoder microbatches is better."""
    count = min(microbatches, len(encoder))
    if shrink and max(encoder) > 0:
        count = max(1, min(count, math.floor(sum(encoder) / max(encoder) * (1 + 1e-12))))
    assert plan.microbatches == count == len(plan.encoder_loads) == len(plan.llm_loads)
    step = plan.llm_of - plan.encoder_of
    assert ((step == 0) | (step == 1)).all()  # deferred by one microbatch at most
    assert plan.deferred == {i: plan.encoder_of[i] + 1 for i in np.flatnonzero(step)}
    giving = {plan.encoder_of[i] for i in plan.deferred}
    assert not giving & {m + 1 for m in giving}  # no microbatch both gives and takes
    assert sorted(np.concatenate(items_of(plan.llm_of, plan.microbatches)).tolist()) == list(range(len(llm)))
    for loads, own, costs in (
        (plan.encoder_loads, items_of(plan.encoder_of, plan.microbatches), encoder),
        (plan.llm_loads, items_of(plan.llm_of, plan.microbatches), llm),
    ):
        assert loads == pytest.approx([math.fsum(costs[i] for i in microbatch) for microbatch in own])
    assert plan.llm_bottleneck == plan.llm_loads.max() >= plan.llm_bound * (1 - 1e-12)
    assert plan.encoder_loads.max() >= plan.encoder_bound * (1 - 1e-12)
    best = least_deferral(items_of(plan.encoder_of, plan.microbatches), llm)
    if all(float(cost).is_integer() for cost in llm):
        assert plan.llm_bottleneck == best
    else:
        assert plan.llm_bottleneck <= best + len(llm) * sum(llm) / 2**14 + 1e-9


@st.composite
def minibatches(draw):
    llm = draw(COSTS)
    encoder = draw(st.lists(st.just(0) | whole | fractions, min_size=len(llm), max_size=len(llm)))
    return encoder, llm, draw(st.integers(1, 6)), draw(st.booleans())


@given(minibatches())
def test_plans_are_no_worse_than_a_transcription_and_defer_best(case):
    check_plan(*case)


@pytest.mark.slow
@settings(max_examples=500)
@given(minibatches())
def test_many_plans_match_the_transcription_or_beat_it(case):
    check_plan(*case)


def test_deferral_balances_the_totals_of_figure_4_8():
    """18 units of encoder work and 36 of LLM work in 6 microbatches; its samples are not in the text."""
    encoder = [3, 3, 3, 2, 2, 2, 1, 1, 1]
    llm = [5, 4, 3, 6, 5, 7, 2, 2, 2]
    plan = balance.assign_microbatches(encoder, llm, 6)
    assert plan.microbatches == 6 and plan.encoder_loads.tolist() == [3] * 6
    assert plan.llm_bottleneck <= 7
    before = np.bincount(plan.encoder_of, weights=llm)
    assert before.max() == 9


def test_number_of_microbatches_shrinks_to_the_largest_sample():
    assert balance.assign_microbatches([6, 3, 3], [1, 1, 1], 3).microbatches == 2
    assert balance.assign_microbatches([6, 3, 3], [1, 1, 1], 3, shrink=False).microbatches == 3
    assert balance.assign_microbatches([0.1] * 6, [1] * 6, 6).microbatches == 6  # 0.1 six times is below 0.6
    assert balance.assign_microbatches([0, 0, 0], [1, 1, 1], 3).microbatches == 3
    assert balance.assign_microbatches([1], [1], 2**62).microbatches == 1


def test_text_only_samples_are_spread():
    """With encoder load alone, all eight would be in one microbatch."""
    plan = balance.assign_microbatches([4, 4, 4, 4] + [0] * 8, [1] * 12, 4)
    assert plan.llm_loads.tolist() == [3, 3, 3, 3] and not plan.deferred


def test_deferral_is_near_the_bound_at_scale():
    rng = np.random.default_rng(0)
    encoder, llm = rng.lognormal(5, 1, 512), rng.lognormal(6, 0.7, 512)
    printed = balance.assign_microbatches(encoder, llm, 16, as_printed=True)
    before = np.bincount(printed.encoder_of, weights=llm).max()
    assert printed.llm_bottleneck < 1.05 * printed.llm_bound < before
    assert printed.encoder_loads.max() < 1.05 * printed.encoder_bound
    plan = balance.assign_microbatches(encoder, llm, 16)
    assert plan.llm_bottleneck < 1.005 * plan.llm_bound
    assert plan.encoder_loads.max() < 1.001 * plan.encoder_bound


def test_plans_are_frozen_and_repeatable():
    rng = np.random.default_rng(1)
    encoder, llm = rng.integers(0, 5, 200), rng.integers(0, 5, 200)
    first = balance.assign_microbatches(encoder, llm, 32)
    second = balance.assign_microbatches(encoder.tolist(), llm.astype(np.float32), 32)
    assert (first.encoder_of == second.encoder_of).all() and (first.llm_of == second.llm_of).all()
    with pytest.raises(AttributeError):
        first.microbatches = 3


@pytest.mark.parametrize("call", [balance.assign_microbatches, balance.assign_replicas])
@pytest.mark.parametrize(
    ("encoder", "llm", "count", "message"),
    [
        ([], [], 1, "encoder_cost is empty"),
        ([1, math.nan], [1, 1], 1, r"encoder_cost\[1\] is nan"),
        ([1, 1], [1, -1], 1, r"llm_cost\[1\] is -1"),
        ([1, 1], [1], 1, "llm_cost has 1 samples, encoder_cost has 2"),
        ([1], [1], 0, "(microbatches|replicas) must"),
        ([1], [INF], 1, r"llm_cost\[0\] is inf"),
        ([1e308, 1e308], [1, 1], 1, "the sum of encoder_cost overflows"),
    ],
)
def test_bad_costs_are_named(call, encoder, llm, count, message):
    with pytest.raises(ValueError, match=message):
        call(encoder, llm, count)


def test_tables_that_no_memory_holds_are_refused():
    """A table of all pairs: 40 GB for 100,000 microbatches."""
    costs = np.random.default_rng(0).random(200_000)
    with pytest.raises(ValueError, match=r"\d+ overloaded and \d+ underloaded microbatches have more than 2\^26"):
        balance.assign_microbatches(costs, costs, 100_000)
    with pytest.raises(ValueError, match="1001 overloaded and 99000 underloaded microbatches"):
        _core.deferral_costs([np.ones(1)] * 1001, np.ones(99_000))


numbers = (
    st.floats() | st.sampled_from([0.0, 5e-324, 1e-300, 1e300, 1.7e308, math.nan, INF, -1.0]) | st.integers(0, 2**53)
)


@settings(max_examples=200)
@given(st.lists(numbers, max_size=8), st.lists(numbers, max_size=8), st.integers(-2, 9), numbers)
def test_fuzzed_input_never_crashes(first, second, count, target):
    a, b = np.array(first, np.float64), np.array(second, np.float64)
    for call in (
        lambda: balance.subset_sum(a, target),
        lambda: balance.subset_sum(a, target, resolution=target),
        lambda: balance.assign_microbatches(a, b[: len(a)], count),
        lambda: balance.assign_replicas(a, b[: len(a)], count),
        lambda: balance.bottleneck_match(np.outer(np.nan_to_num(a), np.ones(len(b))), np.abs(a)),
        lambda: balance.bottleneck_match(np.tile(b, (len(a), 1)), a),
        lambda: _core.deferral_costs([a, b], a),
    ):
        try:
            call()
        except ValueError:
            pass
