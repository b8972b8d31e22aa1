"""plan.orchestrate against every integer solution of DistTrain's problem."""

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from interlace import plan


def divisors(n):
    return [d for d in range(1, n + 1) if n % d == 0]


def every_orchestration(works, backbone, gpus, batch, tp, vpp, memory):
    best = math.inf
    for dp in divisors(batch):
        per_module = []
        for m, work in enumerate(works):
            pps = [p for p in range(1, gpus + 1) if not work.layers or work.layers % (p * vpp) == 0]
            own = [dp] if m == backbone else divisors(dp)
            options = [(t, d, p) for t in range(len(tp)) for d in own for p in pps if tp[t] * d * p <= gpus]
            per_module.append(options)
        for choice in itertools.product(*per_module):
            if sum(tp[t] * d * p for t, d, p in choice) > gpus:
                continue
            microbatches = batch // dp
            down, fits = 0, True
            for work, (t, d, p) in reversed(list(zip(works, choice, strict=True))):
                down += p
                flight = min(microbatches, down if vpp == 1 else ((vpp + 1) * down - 1) / vpp)
                size = work.weight_bytes / (p * tp[t]) + work.optimizer_bytes / (p * tp[t] * d)
                size += dp // d * work.activation_bytes * flight / (p * tp[t])
                fits = fits and size <= memory
            if fits:
                warm = [dp // d * work.forward[t] for work, (t, d, p) in zip(works, choice, strict=True)]
                slowest = max(w / p for w, (_, _, p) in zip(warm, choice, strict=True))
                best = min(best, sum(warm) / vpp + (microbatches - 1) * slowest)
    return best


@st.composite
def problems(draw):
    count = draw(st.integers(1, 3))
    tp = draw(st.sampled_from([(1,), (1, 2), (2, 4)]))
    size = st.integers(0, 12)
    works = [
        plan.ModuleWork(
            draw(st.lists(st.integers(0, 20), min_size=len(tp), max_size=len(tp))),
            draw(st.sampled_from([0, 4, 6])),
            draw(size),
            draw(size),
            draw(size),
        )
        for _ in range(count)
    ]
    gpus = draw(st.integers(1, {1: 16, 2: 12, 3: 9}[count]))
    return (
        works,
        draw(st.integers(0, count - 1)),
        gpus,
        draw(st.integers(1, 8)),
        tp,
        draw(st.integers(1, 2)),
        draw(st.sampled_from([math.inf, 8, 20, 40.5])),
    )


def check(case):
    works, backbone, gpus, batch, tp, vpp, memory = case
    modules = {"language_model" if m == backbone else f"module{m}": work for m, work in enumerate(works)}
    best = every_orchestration(works, backbone, gpus, batch, tp, vpp, memory)
    if best == math.inf:
        with pytest.raises(ValueError, match="no degrees fit"):
            plan.orchestrate(modules, gpus, batch, tp=tp, vpp=vpp, gpu_memory=memory)
        return
    found = plan.orchestrate(modules, gpus, batch, tp=tp, vpp=vpp, gpu_memory=memory)
    assert found.iteration_time == pytest.approx(best, rel=1e-12)
    assert sum(found.gpus.values()) <= gpus


@settings(max_examples=120)
@given(problems())
def test_orchestration_is_the_best_of_all(case):
    check(case)


@pytest.mark.slow
@settings(max_examples=1200)
@given(problems())
def test_orchestration_is_the_best_of_all_in_many_cases(case):
    check(case)


@pytest.mark.parametrize(
    ("modules", "keywords", "message"),
    [
        ({}, {}, "no module 'language_model'"),
        ({"language_model": plan.ModuleWork([1, 2])}, {"tp": (1,)}, "2 times for 1 tensor-parallel sizes"),
        ({"language_model": plan.ModuleWork([1, math.nan])}, {"tp": (1, 2)}, r"forward\[0, 1\] is nan"),
        ({"language_model": plan.ModuleWork([1])}, {"tp": (0,)}, r"tp\[0\] is 0"),
        ({"language_model": plan.ModuleWork([1])}, {"tp": (1,), "vpp": 0}, "vpp must lie between 1 and"),
        ({"language_model": plan.ModuleWork([1])}, {"tp": (1,), "gpu_memory": math.nan}, "gpu_memory must be positive"),
        ({"language_model": plan.ModuleWork([1], weight_bytes=9)}, {"tp": (1,), "gpu_memory": 1}, "no degrees fit"),
    ],
)
def test_bad_input_is_named(modules, keywords, message):
    with pytest.raises(ValueError, match=message):
        plan.orchestrate(modules, 4, 8, **keywords)
