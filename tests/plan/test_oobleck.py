"""Pipeline templates, their combinations and batch shares against enumeration and the dissertation's own figures."""

import functools
import itertools
import math
import operator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.printed_oobleck import combinations, divide_and_conquer, iteration_time
from interlace import plan
from tests.plan.oobleck import every_template, stage_widths


@st.composite
def templates(draw):
    gpus = draw(st.integers(1, 3))
    nodes = draw(st.integers(1, 3 if gpus < 3 else 2))
    layers = draw(st.integers(nodes, 6))
    widths = sorted(draw(st.sets(st.integers(1, gpus), min_size=1)))
    row = st.lists(st.integers(0, 20), min_size=len(widths), max_size=len(widths))
    return draw(st.lists(row, min_size=layers, max_size=layers)), nodes, gpus, widths, draw(st.integers(1, 5))


def check_template(case):
    costs, nodes, gpus, widths, per_stage = case
    best = every_template(costs, nodes, gpus, widths, per_stage)
    if best == math.inf:
        with pytest.raises(ValueError, match="no stages use all"):
            plan.pipeline_template(costs, nodes, gpus, widths=widths, microbatches_per_stage=per_stage)
        return
    result = plan.pipeline_template(costs, nodes, gpus, widths=widths, microbatches_per_stage=per_stage)
    assert result.iteration_time == best
    assert result.boundaries[0] == 0 and result.boundaries[-1] == len(costs) and (np.diff(result.boundaries) > 0).all()
    assert tuple(result.gpus) in set(stage_widths(nodes, gpus, widths))
    table = np.array(costs)
    stages = [
        float(table[a:b, widths.index(w)].sum())
        for a, b, w in zip(result.boundaries, result.boundaries[1:], result.gpus, strict=False)
    ]
    assert iteration_time(stages, per_stage * len(stages)) == best


@given(templates())
def test_template_is_the_best_of_all(case):
    check_template(case)


@pytest.mark.slow
@settings(max_examples=500)
@given(templates())
def test_template_is_the_best_of_all_in_many_cases(case):
    check_template(case)


@st.composite
def deep_templates(draw):
    """Many layers, so that a stage can end at many of them; few stages, so that all cuts can be tested."""
    gpus, widths = draw(st.sampled_from([(1, [1]), (2, [1, 2]), (3, [1, 2])]))
    layers = draw(st.integers(40, 60))
    kinds = [st.just(1), st.integers(0, 1), st.integers(1, 9), st.sampled_from([0, 1, 50])]
    costs = draw(st.lists(draw(st.sampled_from(kinds)), min_size=layers, max_size=layers))
    speeds = [draw(st.sampled_from([1.0, 0.75, 0.5])) for _ in widths]
    return [[cost * speed for speed in speeds] for cost in costs], gpus, widths, draw(st.integers(1, 5))


def best_deep_template(costs, gpus, widths, per_stage):
    best = math.inf
    sums = np.vstack([np.zeros(len(widths)), np.cumsum(costs, axis=0)])
    for sequence in stage_widths(1, gpus, widths):
        inner = np.array(list(itertools.combinations(range(1, len(costs)), len(sequence) - 1)), int)
        ends = np.hstack([np.zeros((len(inner), 1), int), inner, np.full((len(inner), 1), len(costs))])
        columns = [widths.index(width) for width in sequence]
        stages = np.stack([sums[ends[:, s + 1], w] - sums[ends[:, s], w] for s, w in enumerate(columns)], axis=1)
        slow = stages.argmax(axis=1)
        after = np.where(np.arange(len(sequence)) >= slow[:, None], stages, 0).sum(axis=1)
        times = stages.sum(axis=1) + ((per_stage - 1) * len(sequence) + slow - 1) * stages.max(axis=1) + after
        best = min(best, times.min())
    return best


@settings(max_examples=40)
@given(deep_templates())
def test_deep_template_is_the_best_of_all(case):
    costs, gpus, widths, per_stage = case
    result = plan.pipeline_template(costs, 1, gpus, widths=widths, microbatches_per_stage=per_stage)
    assert result.iteration_time == best_deep_template(costs, gpus, widths, per_stage)


def test_template_of_a_thousand_gpus_per_node_takes_seconds():
    """A quarter of 1,600 layers on 2,000 GPUs: slow if each pass looks at every stage."""
    rng = np.random.default_rng(0)
    costs = rng.lognormal(0, 0.3, (400, 1)) / np.array([1, 2, 4, 8]) ** 0.8
    result = plan.pipeline_template(costs, 2, 250, widths=[1, 2, 4, 8])
    assert result.gpus.sum() == 500 and result.boundaries[-1] == 400
    with pytest.raises(ValueError, match=r"256 layers on 131072 GPUs with 500 widths are more than 2\^28 steps"):
        plan.pipeline_template(np.ones((256, 500)), 128, 1024, widths=range(1, 501))


def test_template_is_never_worse_than_divide_and_conquer():
    rng = np.random.default_rng(3)
    beaten = 0
    for _ in range(150):
        layers, nodes = int(rng.integers(6, 12)), int(rng.integers(3, 6))
        costs = rng.integers(1, 30, (layers, 1))
        ours, theirs = plan.pipeline_template(costs, nodes, 1).iteration_time, divide_and_conquer(costs, nodes, 1)
        assert ours <= theirs
        beaten += ours < theirs
    assert beaten > 0


def test_large_template_is_sound_and_repeatable():
    rng = np.random.default_rng(0)
    costs = rng.lognormal(0, 0.3, (96, 1)) / np.arange(1, 9) ** 0.8
    first, second = (plan.pipeline_template(costs, 24, 8) for _ in range(2))
    assert first.iteration_time == second.iteration_time and (first.boundaries == second.boundaries).all()
    assert first.gpus.sum() == 24 * 8
    stages = [costs[a:b, w - 1].sum() for a, b, w in zip(first.boundaries, first.boundaries[1:], first.gpus)]
    assert iteration_time(stages, 4 * len(stages)) == pytest.approx(first.iteration_time, rel=1e-12)


def test_node_counts_cover_every_number_of_nodes_up_to_500():
    """Theorem 1: for any (f + 1) n_0 .. N remaining nodes, at least f + 1 pipelines use them all."""
    for nodes in range(1, 501):
        for faults, least in {(0, 1), (1, 1), (1, 3), (2, 4), (3, 7), (1, nodes // 2), (0, nodes)}:
            if least < 1 or nodes < (faults + 1) * least:
                continue
            sizes = plan.node_counts(nodes, faults, least)
            assert sizes[0] == least and sizes[-1] == nodes - faults * least and (np.diff(sizes) == 1).all()
            if nodes > 60:  # by the construction that the docstring names; below, by enumerating sums
                rest = np.arange((faults + 1) * least, nodes + 1) - faults * least
                assert np.isin(rest, sizes).all()
                continue
            reach = 1  # bit r: r nodes are the sum of as many pipelines as the loop has counted
            for _ in range(faults + 1):
                reach = functools.reduce(operator.or_, (reach << int(size) for size in sizes))
            assert all(reach >> left & 1 for left in range((faults + 1) * least, nodes + 1))


def test_figure_2_7():
    assert set(combinations([2, 3, 4], 7)) == {(2, 1, 0), (0, 1, 1)}
    assert list(combinations([2, 3, 4], 7, 3)) == [(2, 1, 0)]
    result = plan.instantiate([2, 3, 4], [6.0, 4.0, 3.0], 7, faults=2, microbatches=12)
    assert tuple(result.counts) == (2, 1, 0) and result.microbatches.sum() == 12


def every_split(times, microbatches, objective):
    best = math.inf
    for cuts in itertools.combinations(range(1, microbatches), len(times) - 1):
        counts = np.diff([0, *cuts, microbatches])
        best = min(best, objective(counts * np.asarray(times)))
    return best


def spread(loads):
    return float(((loads - loads.mean()) ** 2).sum())


@st.composite
def splits(draw):
    time = draw(st.sampled_from([st.integers(1, 9), st.integers(1, 1000), st.floats(0.01, 10)]))
    times = draw(st.lists(time, min_size=1, max_size=4))
    return times, draw(st.integers(len(times), 16))


def check_split(case):
    times, microbatches = case
    for objective, measure in (("min_max", np.max), ("variance", spread)):
        counts = plan.split_batch(times, microbatches, objective=objective)
        assert counts.sum() == microbatches and counts.min() >= 1
        result, best = measure(counts * np.asarray(times)), every_split(times, microbatches, measure)
        assert result == best if objective == "min_max" else result <= best * (1 + 1e-9) + 1e-12


@given(splits())
def test_split_is_the_best_of_all(case):
    check_split(case)


@pytest.mark.slow
@settings(max_examples=500)
@given(splits())
def test_split_is_the_best_of_all_in_many_cases(case):
    check_split(case)


@st.composite
def instances(draw):
    sizes = draw(st.lists(st.integers(1, 5), min_size=1, max_size=4, unique=True))
    times = draw(st.lists(st.integers(1, 12), min_size=len(sizes), max_size=len(sizes)))
    return sizes, times, draw(st.integers(1, 9)), draw(st.integers(0, 3)), draw(st.integers(1, 12))


def check_instantiate(case):
    sizes, times, nodes, faults, microbatches = case
    best = math.inf
    for counts in combinations(sizes, nodes, faults + 1):
        each = np.repeat(times, counts)
        if 0 < len(each) <= microbatches:
            best = min(best, (plan.split_batch(each, microbatches) * each).max())
    if best == math.inf:
        with pytest.raises(ValueError, match="no combination"):
            plan.instantiate(sizes, times, nodes, faults=faults, microbatches=microbatches)
        return
    result = plan.instantiate(sizes, times, nodes, faults=faults, microbatches=microbatches)
    assert result.time == best and result.counts @ np.array(sizes) == nodes and result.counts.sum() > faults
    assert result.microbatches.sum() == microbatches and result.microbatches.min() >= 1
    assert (result.microbatches * np.repeat(times, result.counts)).max() == best


@given(instances())
def test_instantiation_is_the_best_of_all(case):
    check_instantiate(case)


@pytest.mark.slow
@settings(max_examples=500)
@given(instances())
def test_instantiation_is_the_best_of_all_in_many_cases(case):
    check_instantiate(case)


def least_time(sizes, times, nodes, pipelines, microbatches):
    """Least time, by a table of the most microbatches that c pipelines run on n nodes within each candidate time."""
    candidates = np.unique(np.outer(times, np.arange(1, microbatches + 1)))
    low, high = 0, len(candidates)
    while low < high:
        middle = (low + high) // 2
        runs = [int((np.arange(1, microbatches + 1) * t <= candidates[middle]).sum()) for t in times]
        best = np.full(nodes + 1, -np.inf)
        best[0] = 0
        result = False
        for count in range(1, microbatches + 1):
            after = np.full(nodes + 1, -np.inf)
            for size, run in zip(sizes, runs, strict=True):
                if run and size <= nodes:
                    after[size:] = np.maximum(after[size:], best[: nodes + 1 - size] + run)
            best = after
            result = result or (count >= pipelines and best[nodes] >= microbatches)
        low, high = (low, middle) if result else (middle + 1, high)
    return candidates[low] if low < len(candidates) else math.inf


def check_many_pipelines(seed):
    """Few microbatches for many nodes: the possible number of pipelines decides."""
    rng = np.random.default_rng(seed)
    nodes, count = int(rng.integers(20, 80)), int(rng.integers(1, 12))
    sizes = rng.choice(np.arange(1, 16), count, replace=False)
    times = np.round(100 / sizes ** rng.uniform(0.3, 1.5) * rng.uniform(1, 1.3, count), int(rng.integers(0, 3))) + 1
    pipelines, microbatches = int(rng.integers(1, 6)), int(rng.integers(5, 40))
    best = least_time(sizes, times, nodes, pipelines, microbatches)
    if best == math.inf:
        with pytest.raises(ValueError, match="no combination"):
            plan.instantiate(sizes, times, nodes, faults=pipelines - 1, microbatches=microbatches)
        return
    result = plan.instantiate(sizes, times, nodes, faults=pipelines - 1, microbatches=microbatches)
    assert result.time == best and result.counts @ sizes == nodes
    assert pipelines <= result.counts.sum() <= microbatches
    assert (result.microbatches * np.repeat(times, result.counts)).max() == best


@pytest.mark.parametrize("seed", range(40))
def test_instantiation_with_few_microbatches_is_optimal(seed):
    check_many_pipelines(seed)


@pytest.mark.slow
def test_instantiation_with_few_microbatches_many_seeds():
    for seed in range(1000, 2000):
        check_many_pipelines(seed)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: plan.node_counts(5, 2, 2), "at least 6 nodes"),
        (lambda: plan.node_counts(5, -1, 2), "faults must be at least 0"),
        (lambda: plan.pipeline_template([[1.0, math.nan]], 1, 2), r"costs\[0, 1\] is nan"),
        (lambda: plan.pipeline_template([[1.0]], 2, 1), "at most 1"),
        (lambda: plan.pipeline_template([[1.0]], 1, 2, widths=[3]), r"widths\[0\] is 3"),
        (lambda: plan.pipeline_template([1.0], 1, 1), "two dimensions"),
        (lambda: plan.pipeline_template([[1.0, 1.0]], 1, 2, widths=[1, 1]), r"widths\[1\] repeats 1"),
        (lambda: plan.pipeline_template([[1.0]], 1, 1, microbatches_per_stage=0), "microbatches_per_stage"),
        (lambda: plan.split_batch([1.0, 0.0], 4), r"times\[1\] is 0"),
        (lambda: plan.split_batch([1.0, 2.0], 1), "batch of at least 2"),
        (lambda: plan.split_batch([1e308, 1], 4), "overflow"),
        (lambda: plan.split_batch([1, 2e6], 4, objective="variance"), r"times\[1\] is .*more than 1e6 times"),
        (lambda: plan.split_batch([1.0], 4, objective="max"), "unknown objective"),
        (lambda: plan.instantiate([2, 2], [1, 1], 4, faults=0, microbatches=4), r"node_counts\[1\] repeats 2"),
        (lambda: plan.instantiate([2, 0], [1, 1], 4, faults=0, microbatches=4), r"node_counts\[1\] is 0"),
        (lambda: plan.instantiate([2], [1, 1], 4, faults=0, microbatches=4), "times has 2 templates"),
        (lambda: plan.instantiate([2], [1], 5, faults=0, microbatches=4), "no combination"),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
