"""Planners return a result or raise ValueError for any input."""

import math
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from interlace import plan

odd = st.sampled_from([0, -1, 1, 2, 7, 1e-320, 1e-9, 0.5, 1e9, 1e154, 1e300, 1e308, math.nan, math.inf, -math.inf])
row = st.lists(odd, max_size=6)
table = st.integers(0, 3).flatmap(lambda width: st.lists(st.lists(odd, min_size=width, max_size=width), max_size=5))
count = st.sampled_from([-1, 0, 1, 2, 3, 5, 8, 2**20])
few = st.sampled_from([-1, 0, 1, 2, 3, 5, 8])
modules = st.builds(
    lambda times, sizes: {"language_model": plan.ModuleWork(times, 0, *sizes)},
    st.lists(odd, min_size=2, max_size=2),
    st.tuples(*[odd] * 5),
)


def search(rows, degrees, counts, options):
    """plan.search_configuration with the same odd rows for two modules."""
    times = dict.fromkeys(degrees, rows[0])
    module = plan.SearchModule(times, times, *rows[1:6], tensor_reduces=rows[6])
    return partial(
        plan.search_configuration, {"vision": module, "language_model": module}, *counts, **options, recompute=[False]
    )


sized_rows = st.integers(1, 3).flatmap(
    lambda size: st.tuples(*[st.lists(odd, min_size=size, max_size=size).map(lambda row: np.array(row, float))] * 7)
)
links = st.builds(plan.LinkModel, odd, odd)
searches = st.builds(
    search,
    sized_rows | st.tuples(*[row.map(lambda row: np.array(row, float))] * 7),
    st.lists(st.tuples(few, few), max_size=2),
    st.tuples(few, few, few),
    st.fixed_dictionaries({"gpu_memory": odd, "stage_link": links, "tensor_link": links, "data_link": links}),
)
objectives = st.sampled_from(["min_max", "variance"])
calls = st.one_of(
    st.builds(partial, st.just(plan.pipeline_template), table, few, few, microbatches_per_stage=count),
    st.builds(partial, st.just(plan.instantiate), st.lists(few, max_size=4), row, few, faults=few, microbatches=count),
    st.builds(partial, st.just(plan.split_batch), row, count, objective=objectives),
    st.builds(partial, st.just(plan.partition), row, few, memory=row, memory_limits=row, speeds=row),
    searches,
    st.builds(
        partial,
        st.just(plan.orchestrate),
        modules,
        count,
        few,
        tp=st.just((1, 2)),
        vpp=few,
        gpu_memory=odd,
        stage_link=links,
        data_link=links,
    ),
)


def check(call):
    try:
        call()
    except (ValueError, OverflowError):
        pass


@settings(max_examples=300)
@given(calls)
def test_odd_input_never_crashes(call):
    check(call)


@pytest.mark.slow
@settings(max_examples=1700)
@given(calls)
def test_much_odd_input_never_crashes(call):
    check(call)
