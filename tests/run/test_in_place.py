"""The local transport trains the given model in place, in any layout. Unsupported cases are refused."""

from __future__ import annotations

import copy
import dataclasses
import itertools

import pytest
import torch
from hypothesis import strategies as st

from interlace.estimate.traced import weights_of
from interlace.layout import Lane, Layout, ParallelSpec, Pipeline, Stage
from interlace.model import Media
from interlace.plan.memory import summed_bytes
from interlace.run import PipelineError, parallelize
from tests.run.parity import assert_same_gradient, oracle
from tests.sampling import given_by_tier
from tests.tiny import random_microbatches, tiny_mllm

LLM = "language_model"
LAYOUTS = {
    "one rank": {"ranks": 1},
    "pipeline": {"pp": 2},
    "replicas": {"dp": 2},
    "replicated encoders": {"pp": 2, "placement": "replicated"},
}


def make(mllm, ranks=None, pp=1, dp=1, placement="parallel"):
    specs = {name: ParallelSpec(dp=dp) for name in mllm.encoders}
    specs["language_model"] = ParallelSpec(pp=pp, dp=dp)
    return Layout.from_specs(mllm, specs, placement=placement, ranks=ranks)


@pytest.mark.parametrize("name", LAYOUTS)
def test_optimizer_over_the_model_trains_like_one_process(name):
    mllm = tiny_mllm(tied=True)
    alone = copy.deepcopy(mllm)
    batch = random_microbatches(mllm, "no_image")
    parallel = parallelize(mllm, make(mllm, **LAYOUTS[name]), timeout=30)
    ours, theirs = (torch.optim.SGD(model.parameters(), lr=0.5) for model in (mllm, alone))
    losses = []
    for _ in range(3):
        loss, _ = oracle(alone, batch)
        theirs.step()
        result = parallel.step(batch)
        assert result.loss == pytest.approx(loss, rel=1e-4)
        norm = sum(float(p.grad.double().square().sum()) for p in alone.parameters() if p.grad is not None) ** 0.5
        assert parallel.clip_grad_norm_(1e9) == pytest.approx(norm, rel=1e-4)
        ours.step()
        ours.zero_grad()
        losses.append(loss)
    assert losses[2] < losses[0]
    for (name, mine), other in zip(mllm.named_parameters(), alone.parameters(), strict=True):
        assert torch.allclose(mine, other, atol=1e-5), name
    assert {id(p) for _, p in parallel.named_parameters()} == {id(p) for p in mllm.parameters()}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n in ("one rank", "replicas"))) for n in LAYOUTS]
)
def test_parameters_that_no_step_would_train_are_refused(name):
    """An optimizer over the model would get no gradients for them."""
    mllm = tiny_mllm()
    parallel = parallelize(mllm, make(mllm, **LAYOUTS[name]), timeout=30)
    batch = random_microbatches(mllm, "all")
    parallel.step(batch)
    norm = mllm.language_model.model.norm
    before = norm.weight
    norm.weight = torch.nn.Parameter(before.detach().clone())
    with pytest.raises(ValueError, match=r"parameters were replaced since parallelize\(\).* parallelize again"):
        parallel.step(batch)
    norm.weight = before
    norm.register_parameter("adapter", torch.nn.Parameter(torch.zeros(2)))
    with pytest.raises(ValueError, match=r"parameters were replaced since parallelize\(\)"):
        parallel.step(batch)
    del norm.adapter
    parallel.step(batch)


def test_weights_that_were_replaced_are_followed():
    mllm = tiny_mllm()
    parallel = parallelize(mllm, make(mllm, dp=2), timeout=30)
    batch = random_microbatches(mllm, "all")
    parallel.step(batch)
    for parameter in mllm.parameters():
        parameter.data = torch.randn_like(parameter) * 0.1
    loss, gradients = oracle(mllm, batch)
    mllm.zero_grad()
    assert parallel.step(batch).loss == pytest.approx(loss, rel=1e-5)
    for name, parameter in mllm.named_parameters():
        assert_same_gradient(name, parameter.grad, gradients[name])


def test_clipping_scales_gradients_and_refuses_a_stale_norm():
    mllm = tiny_mllm()
    batch = random_microbatches(mllm, "all")
    _, gradients = oracle(mllm, batch)
    norm = sum(float(g.double().square().sum()) for g in gradients.values() if g is not None) ** 0.5
    mllm.zero_grad()
    parallel = parallelize(mllm, make(mllm, pp=2), timeout=30)
    with pytest.raises(ValueError, match="no gradient norm yet"):
        parallel.clip_grad_norm_(1.0)
    parallel.step(batch)
    parallel.evaluate(batch)  # leaves gradients unchanged
    assert parallel.clip_grad_norm_(norm / 4) == pytest.approx(norm, rel=1e-5)
    for name, parameter in mllm.named_parameters():
        if gradients[name] is not None:
            assert torch.allclose(parameter.grad, gradients[name] / 4, rtol=1e-4, atol=1e-8)
    assert parallel.clip_grad_norm_(1e9) == pytest.approx(norm / 4, rel=1e-4)
    for parameter in mllm.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(2)
    with pytest.raises(ValueError, match="recompute=True"):
        parallel.clip_grad_norm_(1.0)
    assert parallel.clip_grad_norm_(1e9, recompute=True) == pytest.approx(norm / 2, rel=1e-4)


def test_dropout_is_refused_in_threads_and_allowed_on_one_rank():
    mllm = tiny_mllm(encoders=())
    mllm.language_model.config.attention_dropout = 0.0

    class Noisy(torch.nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, *args, **kwargs):
            return torch.nn.functional.dropout(self.inner(*args, **kwargs), 0.5, self.training)

    for layer in mllm.language_model.model.layers:
        layer.mlp = Noisy(layer.mlp)
    mllm.train()
    batch = random_microbatches(mllm, "text")
    with pytest.raises(PipelineError, match=r"draws random numbers .dropout.*process per rank"):
        parallelize(mllm, make(mllm, pp=2), timeout=30).step(batch)
    parallelize(mllm, make(mllm), timeout=30).step(batch)


def test_full_gradients_are_those_of_the_model():
    mllm = tiny_mllm()
    batch = random_microbatches(mllm, "text")
    _, gradients = oracle(mllm, batch)
    mllm.zero_grad()
    parallel = parallelize(mllm, make(mllm, pp=2, dp=2), timeout=30)
    parallel.step(batch)
    result = parallel.full_gradients()
    assert set(result) == {name for name, _ in mllm.named_parameters()}
    for name, gradient in result.items():
        assert_same_gradient(name, gradient, gradients[name])


CUTS = st.lists(st.integers(1, 2), unique=True, max_size=2).map(sorted)  # of three layers


@given_by_tier(
    10,
    40,
    replicas=st.lists(st.tuples(CUTS, st.booleans()), min_size=1, max_size=4),
    lane=st.sampled_from([(1, 1), (1, 1), (2, 1), (1, 2)]),
    frozen=st.booleans(),
)
def test_tied_weights_may_be_split_in_some_replicas_only(replicas, lane, frozen):
    """replicas: the cuts of each, and whether its stages are on one lane. frozen: nothing else of the layers trains."""
    tp, cp = lane
    mllm = tiny_mllm(tied=True, encoders=(), layers=3, kv_heads=2)
    for path in ("language_model.model.layers", "language_model.model.norm") if frozen else ():
        mllm.freeze(path)
    batch = random_microbatches(mllm, "text", count=6)
    _, gradients = oracle(mllm, batch)
    mllm.zero_grad()
    pipelines, ranks, ends = [], 0, set()
    for number, (cuts, together) in enumerate(replicas):
        bounds = [0, *cuts, 3]
        lanes = [range(ranks + (0 if together else i * tp * cp), ranks + tp * cp * (1 if together else i + 1))
                 for i in range(len(cuts) + 1)]  # fmt: skip
        stages = [Stage(LLM, i, bounds[i], bounds[i + 1], Lane(tuple(lanes[i]))) for i in range(len(cuts) + 1)]
        pipelines.append(Pipeline(LLM, number, tuple(stages)))
        ends.add((bool(cuts), len({stage.lane for stage in (stages[0], stages[-1])})))
        ranks = lanes[-1].stop
    spec = ParallelSpec(tp=tp, cp=cp, pp=max(len(each.stages) for each in pipelines), dp=len(pipelines))
    layout = Layout({LLM: (spec, tuple(pipelines))}, ranks)
    parallel = parallelize(mllm, layout, timeout=30)
    assert bool(parallel.graph.uneven) == (len(ends) > 1)
    for number in parallel.graph.uneven:
        holders = {rank for p in pipelines for s in (p.stages[0], p.stages[-1]) for rank in s.ranks}
        sums = [each.ranks for each in parallel.graph.reductions if each.tied == number]
        assert len(sums) == tp and set().union(*sums) == holders
    weights = weights_of(mllm, layout)
    for reduction in parallel.graph.reductions:  # predicted traffic equals the traffic of the ranks
        for rank in map(parallel._ranks.__getitem__, reduction.ranks):
            brought = sum(p.nbytes for p in rank.parameters(reduction) if p.requires_grad)
            assert summed_bytes(layout, weights, reduction) == brought
    parallel.step(batch)
    for name, gradient in parallel.full_gradients().items():
        assert_same_gradient(name, gradient, gradients[name])
    if len(ends) > 1:
        sharded = Layout({LLM: (dataclasses.replace(spec, shard="optimizer"), tuple(pipelines))}, ranks)
        with pytest.raises(ValueError, match=r"is on one stage, or one rank, of some.*place all replicas the same way"):
            parallelize(mllm, sharded, timeout=30)


@pytest.mark.parametrize(
    "cuts", [([1], [1]), ([1], [2]), ([], [1, 2]), ([1], [1, 2])], ids=["alike", "two each", "together", "more apart"]
)
def test_several_weights_that_are_the_same_in_three_layers(cuts):
    """All are summed once, also if each replica has two stages with different groups of layers."""
    mllm = tiny_mllm(encoders=(), layers=3)
    layers = mllm.language_model.model.layers
    layers[1].mlp = layers[2].mlp = layers[0].mlp
    batch = random_microbatches(mllm, "text", count=4)
    _, gradients = oracle(mllm, batch)
    mllm.zero_grad()
    pipelines, rank = [], itertools.count()
    for number, bounds in enumerate([0, *own, 3] for own in cuts):
        stages = [Stage(LLM, i, *ends, Lane((next(rank),))) for i, ends in enumerate(itertools.pairwise(bounds))]
        pipelines.append(Pipeline(LLM, number, tuple(stages)))
    spec = ParallelSpec(pp=max(len(each.stages) for each in pipelines), dp=2)
    parallel = parallelize(mllm, Layout({LLM: (spec, tuple(pipelines))}, next(rank)), timeout=30)
    assert bool(parallel.graph.uneven) == (cuts[0] != cuts[1])
    parallel.step(batch)
    for name, gradient in parallel.full_gradients().items():
        assert_same_gradient(name, gradient, gradients[name])


def test_a_failed_step_leaves_no_gradients_behind():
    mllm = tiny_mllm()
    parallel = parallelize(mllm, make(mllm, dp=2), timeout=30)
    good, bad = random_microbatches(mllm, "all"), random_microbatches(mllm, "all")

    def unreadable():
        raise OSError("the file is gone")

    image = bad[2][0].media["vision"][0]
    bad[2][0].media["vision"][0] = Media(image.shape, image.tokens, load=unreadable)
    with pytest.raises(PipelineError, match="the file is gone"):
        parallel.step(bad)
    parallel.zero_grad()
    parallel.step(good)
    ours = {id(p) for p in mllm.parameters()}
    left = [
        p for stages in parallel.stages.values() for s in stages.values() for p in s.parameters() if id(p) not in ours
    ]
    assert left and all(p.grad is None for p in left)
