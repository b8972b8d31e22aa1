"""plan.orchestrate against every integer solution of DistTrain's problem."""

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from interlace import plan


def divisors(n):
    return [d for d in range(1, n + 1) if n % d == 0]


def every_orchestration(works, backbone, gpus, batch, tp, vpp, memory, stage_link, data_link):
    best = math.inf
    for dp in divisors(batch):
        per_module = []
        for m, work in enumerate(works):
            pps = [p for p in range(1, gpus + 1) if not work.layers or work.layers % (p * vpp) == 0]
            own = [dp] if m == backbone else [d for d in divisors(batch) if d <= dp]
            options = [(t, d, p) for t in range(len(tp)) for d in own for p in pps if tp[t] * d * p <= gpus]
            per_module.append(options)
        for choice in itertools.product(*per_module):
            if sum(tp[t] * d * p for t, d, p in choice) <= gpus:
                time = iteration(works, choice, tp, dp, batch // dp, vpp, memory, stage_link, data_link)
                best = min(best, time)
    return best


def iteration(works, choice, tp, dp, microbatches, vpp, memory, stage_link, data_link):
    """Seconds of one iteration with these (index of tp, dp, pp); infinite if the memory does not suffice."""
    samples = [max(len(range(replica, dp, d)) for replica in range(d)) for _, d, _ in choice]  # assigned round-robin
    down = 0
    for work, (t, d, p), most in reversed(list(zip(works, choice, samples, strict=True))):
        down += p
        flight = min(microbatches, down if vpp == 1 else ((vpp + 1) * down - 1) / vpp)
        size = work.weight_bytes / (p * tp[t]) + work.optimizer_bytes / (p * tp[t] * d)
        if size + most * work.activation_bytes * flight / (p * tp[t]) > memory:
            return math.inf
    warm = [most * work.forward[t] for work, (t, _, _), most in zip(works, choice, samples, strict=True)]
    slowest = max(w / p for w, (_, _, p) in zip(warm, choice, strict=True))
    # One microbatch, stage by stage, from the first to the last.
    stages = [m for m, (_, _, p) in enumerate(choice) for _ in range(p)]
    filling = 0.0
    for here, there in itertools.pairwise(stages):
        parts = [samples[m] * works[here].output_bytes / tp[choice[m][0]] for m in (here, there)]
        filling += stage_link.transfer(max(parts))
    sums = [data_link.all_reduce(w.gradient_bytes / (p * tp[t]), d) for w, (t, d, p) in zip(works, choice, strict=True)]
    return sum(warm) / vpp + (microbatches - 1) * slowest + filling + max(sums)


@st.composite
def problems(draw):
    count = draw(st.integers(1, 3))
    tp = draw(st.sampled_from([(1,), (1, 2), (2, 4)]))
    size = st.integers(0, 12)
    works = [
        plan.ModuleWork(
            draw(st.lists(st.integers(0, 20), min_size=len(tp), max_size=len(tp))),
            draw(st.sampled_from([0, 4, 6])),
            *(draw(size) for _ in range(5)),
        )
        for _ in range(count)
    ]
    link = st.builds(plan.LinkModel, st.sampled_from([0.0, 0.5]), st.sampled_from([0.0, 0.25, 3.0]))
    gpus = draw(st.integers(1, {1: 16, 2: 12, 3: 9}[count]))
    return (
        works,
        draw(st.integers(0, count - 1)),
        gpus,
        draw(st.integers(1, 8)),
        tp,
        draw(st.integers(1, 2)),
        draw(st.sampled_from([math.inf, 8, 20, 40.5])),
        draw(link),
        draw(link),
    )


def check(case):
    works, backbone, gpus, batch, tp, vpp, memory, stage_link, data_link = case
    links = {"stage_link": stage_link, "data_link": data_link}
    modules = {"language_model" if m == backbone else f"module{m}": work for m, work in enumerate(works)}
    best = every_orchestration(works, backbone, gpus, batch, tp, vpp, memory, stage_link, data_link)
    if best == math.inf:
        with pytest.raises(ValueError, match="no degrees fit"):
            plan.orchestrate(modules, gpus, batch, tp=tp, vpp=vpp, gpu_memory=memory, **links)
        return
    result = plan.orchestrate(modules, gpus, batch, tp=tp, vpp=vpp, gpu_memory=memory, **links)
    assert result.iteration_time == pytest.approx(best, rel=1e-12)
    assert sum(result.gpus.values()) <= gpus
    choice = [(tp.index(spec.tp), spec.dp, spec.pp) for spec in result.specs.values()]
    dp = result.specs["language_model"].dp
    given = iteration(works, choice, tp, dp, batch // dp, vpp, memory, stage_link, data_link)
    assert result.iteration_time == pytest.approx(given, rel=1e-12)


@settings(max_examples=120)
@given(problems())
def test_orchestration_is_the_best_of_all(case):
    check(case)


@pytest.mark.slow
@settings(max_examples=400)
@given(problems())
def test_orchestration_is_the_best_of_all_in_many_cases(case):
    check(case)


def test_communication_changes_the_answer():
    """Many replicas are best while their gradient sums are free, then a pipeline, then one GPU."""
    work = plan.ModuleWork([1.0], layers=8, gradient_bytes=8e9, output_bytes=1e6)
    modules = {"language_model": work}
    link = plan.LinkModel(1e-5, 1e-9)
    degrees = []
    for links in ({}, {"data_link": link}, {"data_link": link, "stage_link": plan.LinkModel(1e-5, 1e-4)}):
        result = plan.orchestrate(modules, 8, 8, tp=(1,), **links)
        degrees.append((result.specs["language_model"].dp, result.specs["language_model"].pp))
    assert degrees == [(8, 1), (1, 8), (1, 1)]


def test_replicas_need_not_divide_those_of_the_language_model():
    """DistTrain 4.1's own example: 2 replicas of the encoder for 3 of the language model."""
    modules = {"vision": plan.ModuleWork([1.0]), "language_model": plan.ModuleWork([2.0])}
    result = plan.orchestrate(modules, 5, 6, tp=(1,))
    assert (result.specs["vision"].dp, result.specs["language_model"].dp) == (2, 3)
    assert result.iteration_time == 2 + 2 + (6 / 3 - 1) * 2  # a replica of the encoder has 2 of 3 samples


@pytest.mark.parametrize(
    ("modules", "keywords", "message"),
    [
        ({}, {}, "no module 'language_model'"),
        ({"language_model": plan.ModuleWork([1, 2])}, {"tp": (1,)}, "forward has 2 times, but tp has 1 sizes"),
        ({"language_model": plan.ModuleWork([1, math.nan])}, {"tp": (1, 2)}, r"forward\[0, 1\] is nan"),
        ({"language_model": plan.ModuleWork([1])}, {"tp": (0,)}, r"tp\[0\] is 0"),
        ({"language_model": plan.ModuleWork([1])}, {"tp": (1,), "vpp": 0}, "vpp must lie between 1 and"),
        ({"language_model": plan.ModuleWork([1])}, {"tp": (1,), "gpu_memory": math.nan}, "gpu_memory must be positive"),
        ({"language_model": plan.ModuleWork([1], weight_bytes=9)}, {"tp": (1,), "gpu_memory": 1}, "no degrees fit"),
        (
            {"language_model": plan.ModuleWork([1], output_bytes=-1)},
            {"tp": (1,)},
            r"bytes\[0, 4\] is -1",
        ),
        (
            {"language_model": plan.ModuleWork([1])},
            {"tp": (1,), "data_link": plan.LinkModel(math.nan)},
            "data_link has latency nan",
        ),
        (
            {"language_model": plan.ModuleWork([1], output_bytes=1e300)},
            {"tp": (1,), "stage_link": plan.LinkModel(0, 1e10)},
            "the time of a transfer overflows",
        ),
    ],
)
def test_bad_input_is_named(modules, keywords, message):
    with pytest.raises(ValueError, match=message):
        plan.orchestrate(modules, 4, 8, **keywords)
