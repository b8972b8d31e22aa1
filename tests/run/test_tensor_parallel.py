"""Tensor parallelism inside the lanes of a pipeline: loss, gradients and norm equal those of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from interlace.layout import Lane, Layout, ParallelSpec, Pipeline, Stage
from interlace.run import PipelineError, parallelize
from tests.distributed.workers import run_ranks
from tests.model import zoo
from tests.run.parity import oracle
from tests.run.random_cases import sweep
from tests.run.tensor_parallel import (
    DUE,
    LLM,
    assert_gradient,
    check_case,
    encoder_and_model,
    model,
    no_memory,
    norm_of,
    pieces,
)
from tests.tiny import random_microbatches, random_sample, tiny_mllm

SEEDS = 5
DUE |= {f"{side} {degree}" for side in ("encoder", "language") for degree in ("tp2", "tp3", "pp2", "dp2")}


@pytest.mark.parametrize("seed", range(SEEDS))
def test_random_layouts_equal_one_process(seed: int) -> None:
    check_case(seed)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_many_random_layouts_equal_one_process() -> None:
    sweep(check_case, range(SEEDS, SEEDS + 51), DUE)


@pytest.mark.parametrize(
    ("encoder", "language"),
    [(3, 2), *(pytest.param(*each, marks=pytest.mark.slow) for each in ((1, 2), (2, 1), (2, 3)))],
)
def test_lanes_that_do_not_divide_and_fewer_rows_than_ranks(encoder: int, language: int) -> None:
    """Chunks of 1, 2, 3, ... rows of an image's features: parts of all sizes, also empty ones."""
    mllm = model(encoders=("vision",))
    generator = torch.Generator().manual_seed(encoder)
    batch = [[random_sample(mllm, generator, images=1, text=2)] for _ in range(6)]
    loss, gradients = oracle(mllm, batch)
    mllm.zero_grad()
    parallel = parallelize(mllm, encoder_and_model(mllm, encoder, language, pp=2), timeout=30)
    assert parallel.step(batch).loss == pytest.approx(loss, rel=1e-5)
    for name, parameter in mllm.named_parameters():
        assert_gradient(name, parameter.grad, gradients[name], norm_of(gradients, mllm))


def test_a_batch_of_text_leaves_the_encoders_untouched() -> None:
    mllm = model()
    batch = random_microbatches(mllm, "text")
    loss, gradients = oracle(mllm, batch)
    mllm.zero_grad()
    specs = {"vision": ParallelSpec(tp=2), "audio": ParallelSpec(tp=2), LLM: ParallelSpec(tp=3)}
    parallel = parallelize(mllm, Layout.from_specs(mllm, specs), timeout=30)
    assert parallel.step(batch).loss == pytest.approx(loss, rel=1e-5)
    for name, parameter in mllm.named_parameters():
        assert_gradient(name, parameter.grad, gradients[name], norm_of(gradients, mllm))
        assert parameter.grad is None or name.startswith(LLM)


def test_optimizer_over_the_model_trains_like_one_process() -> None:
    mllm, alone = (model(tied=True, encoders=("vision",)) for _ in range(2))
    batch = random_microbatches(mllm, "all")
    parallel = parallelize(mllm, encoder_and_model(mllm, 2, 2, dp=1), timeout=30)
    assert {id(p) for _, p in parallel.named_parameters()} == {id(p) for p in mllm.parameters()}
    ours, theirs = (torch.optim.SGD(m.parameters(), lr=0.5) for m in (mllm, alone))
    for _ in range(3):
        loss, _ = oracle(alone, batch)
        theirs.step()
        assert parallel.step(batch).loss == pytest.approx(loss, rel=1e-4)
        ours.step()
        ours.zero_grad()
    for (name, mine), other in zip(mllm.named_parameters(), alone.parameters(), strict=True):
        assert torch.allclose(mine, other, atol=1e-5), name
        mine.data = torch.randn_like(mine) * 0.1  # replaced weights are used
    loss, gradients = oracle(mllm, batch)
    mllm.zero_grad()
    assert parallel.step(batch).loss == pytest.approx(loss, rel=1e-5)
    for name, parameter in mllm.named_parameters():
        assert_gradient(name, parameter.grad, gradients[name], norm_of(gradients, mllm))


def test_step_after_a_failed_step_is_correct() -> None:
    mllm = model(encoders=("vision",))
    batch = random_microbatches(mllm, "all")
    loss, gradients = oracle(mllm, batch)
    mllm.zero_grad()
    parallel = parallelize(mllm, encoder_and_model(mllm, 2, 3), timeout=30)

    broken = parallel.stages[3][LLM, 0].register_forward_pre_hook(no_memory)
    with pytest.raises(PipelineError, match=r"rank 3, FORWARD language_model\[0\] chunk \d+: OSError: no memory"):
        parallel.step(batch)
    broken.remove()
    parallel.zero_grad()
    assert parallel.step(batch).loss == pytest.approx(loss, rel=1e-5)
    for name, parameter in mllm.named_parameters():
        assert_gradient(name, parameter.grad, gradients[name], norm_of(gradients, mllm))
    assert oracle(mllm, batch)[0] == pytest.approx(loss, rel=1e-6)


def test_norms_within_heads_are_summed_over_the_lane_only() -> None:
    """Qwen3's, with a CLIP encoder; the given model stays unchanged for its owner."""

    def qwen3(**changes: Any) -> Qwen3ForCausalLM:
        sizes = {"hidden_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6}
        return Qwen3ForCausalLM(Qwen3Config(**{**zoo.COMMON, **sizes, "vocab_size": zoo.VOCAB, **changes}))

    mllm = zoo.build(vision=zoo.clip, audio=None, language=qwen3)
    generator = torch.Generator().manual_seed(0)
    batch = [[zoo.sample(mllm, generator, 3, ("vision", 8, 12), 4), zoo.sample(mllm, generator, 6)]]
    loss, gradients = oracle(mllm, batch)
    mllm.zero_grad()
    parallel = parallelize(mllm, encoder_and_model(mllm, 2, 2, pp=2), timeout=30)
    assert parallel.step(batch[0], microbatches=2).loss == pytest.approx(loss, rel=1e-5)
    for name, parameter in mllm.named_parameters():
        assert_gradient(name, parameter.grad, gradients[name], norm_of(gradients, mllm))
    assert "language_model.model.layers.0.self_attn.q_norm.weight" in gradients
    assert not any(parameter._backward_hooks for parameter in mllm.parameters())
    assert oracle(mllm, batch)[0] == pytest.approx(loss, rel=1e-6)


@pytest.mark.parametrize("sequence_parallel", [True, False], ids=["sequence", "whole rows"])
def test_autocast_inside_lanes(sequence_parallel: bool) -> None:
    mllm = model(encoders=("vision",))
    batch = random_microbatches(mllm, "all")
    loss, gradients = oracle(mllm, batch)
    mllm.zero_grad()
    layout = encoder_and_model(mllm, 3, 2)
    options = {"checkpointing": "full", "sequence_parallel": sequence_parallel}
    parallel = parallelize(mllm, layout, autocast=torch.bfloat16, timeout=30, **options)
    result = parallel.step(batch)
    assert result != loss and abs(result - loss) <= 2e-2 * loss  # bf16 has 8 bits of mantissa
    for name, parameter in mllm.named_parameters():
        if gradients[name].norm() > 1e-3:
            assert parameter.grad.dtype is torch.float32
            assert (parameter.grad - gradients[name]).norm() <= 0.15 * gradients[name].norm(), name


def test_what_cannot_be_cut_is_refused_and_says_what_to_choose() -> None:
    mllm = tiny_mllm(encoders=("vision",))
    with pytest.raises(
        ValueError,
        match=r"language_model does not support tp = 2: .*k_proj has 1 heads.* use tp = 1 for language_model",
    ):
        parallelize(mllm, encoder_and_model(mllm, 1, 2))
    with pytest.raises(ValueError, match=r"vision does not support tp = 3: .*q_proj has 2 heads"):
        parallelize(mllm, encoder_and_model(mllm, 3, 1))
    unknown = model(encoders=("vision",))
    unknown.language_model.model.layers[1].self_attn.out = unknown.language_model.model.layers[1].self_attn.o_proj
    del unknown.language_model.model.layers[1].self_attn.o_proj
    with pytest.raises(ValueError, match=r"does not support tp = 2: no rule for language_model.model.layers.1.self"):
        parallelize(unknown, encoder_and_model(unknown, 1, 2))


def test_lanes_that_this_version_does_not_run_are_refused() -> None:
    mllm = model(encoders=())
    stage = Stage(LLM, 0, 0, 2, Lane((1, 0)))
    layout = Layout({LLM: (ParallelSpec(tp=2), (Pipeline(LLM, 0, (stage,)),))}, 2)
    with pytest.raises(ValueError, match=r"on ranks 1\+0: name the ranks of a lane in ascending order"):
        parallelize(mllm, layout)
    tied = model(tied=True, encoders=())
    stages = (Stage(LLM, 0, 0, 1, Lane((0, 1))), Stage(LLM, 1, 1, 2, Lane((1, 2))))
    layout = Layout({LLM: (ParallelSpec(tp=2, pp=2), (Pipeline(LLM, 0, stages),))}, 3)
    with pytest.raises(ValueError, match=r"embed_tokens.weight is on lanes that share some of their ranks \(0\+1 and"):
        parallelize(tied, layout)


# ---------------------------------------------------------------------- between processes


def distributed(rank: int, seeds: list[int]) -> int:
    return sum(bool(check_case(seed, "distributed", range(4, 5))) for seed in seeds)


@pytest.mark.parametrize(
    "seeds", [[102, 104, 105], pytest.param(list(range(106, 116)), marks=pytest.mark.slow)], ids=["three", "ten"]
)
def test_four_processes_equal_one(seeds: list[int]) -> None:
    results = run_ranks(4, distributed, seeds)
    assert results == [("returned", len(seeds))] * 4, results


def test_processes_hold_shards_under_the_names_of_the_model() -> None:
    whole = {name: list(parameter.shape) for name, parameter in model(encoders=("vision",)).named_parameters()}
    seen: dict[str, int] = {}
    for kind, value in run_ranks(4, pieces):
        assert kind == "returned", value
        for name, shape in value:
            cut = [a // b for a, b in zip(whole[name], shape, strict=True)]
            assert max(cut) <= 2 and cut.count(2) <= 1
            seen[name] = seen.get(name, 0) + 1
    assert seen == dict.fromkeys(whole, 2)


def fail(rank: int) -> str:
    mllm = model(encoders=())
    parallel = parallelize(
        mllm, Layout.from_specs(mllm, {LLM: ParallelSpec(tp=2)}), transport="distributed", timeout=20
    )
    if rank == 1:
        parallel.stages[1][LLM, 0].language_model.model.layers[1].register_forward_pre_hook(no_memory)
    try:
        parallel.step(random_microbatches(mllm, "text"))
    except PipelineError as error:
        return str(error)
    return "no error"


def test_a_rank_that_fails_in_its_lane_is_named_at_once() -> None:
    (_, other), (_, failed) = run_ranks(2, fail)
    assert failed == "rank 1, FORWARD language_model[0] chunk 0: OSError: no memory"
    assert other.startswith("rank 0, FORWARD language_model[0] chunk 0, in the lane of ranks 0, 1: ")
    assert failed in other
