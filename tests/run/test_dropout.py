"""Random numbers in lanes of several ranks: refused where ranks would draw different ones, and only there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from interlace.layout import Layout, ParallelSpec
from interlace.model import MultimodalModel
from interlace.run import PipelineError, parallelize
from tests.comm.pool import Pool
from tests.model import zoo
from tests.run.parity import oracle
from tests.run.tensor_parallel import LLM, assert_gradient, model, norm_of
from tests.tiny import random_microbatches


def drop(mllm: MultimodalModel, rate: float) -> None:
    for layer in mllm.language_model.model.layers:
        layer.mlp.act_fn = nn.Sequential(layer.mlp.act_fn, nn.Dropout(rate))


def layout_of(mllm: MultimodalModel, **specs: ParallelSpec) -> Layout:
    return Layout.from_specs(mllm, {name: specs.get(name, ParallelSpec()) for name in mllm.modules_order()})


@pytest.mark.parametrize("degree", ["tp", "cp"])
def test_dropout_in_a_lane_is_refused_before_any_step(degree: str) -> None:
    mllm = model(encoders=("vision",))
    drop(mllm, 0.25)
    mllm.train()
    several = layout_of(mllm, **{LLM: ParallelSpec(**{degree: 2})})
    what = r"language_model.model.layers.0.mlp.act_fn.1 has p = 0.25"
    with pytest.raises(ValueError, match=rf"language_model has dropout .*{what}.*{degree} = 2.*set it to 0, freeze"):
        parallelize(mllm, several)
    parallelize(mllm, layout_of(mllm, **{"vision": ParallelSpec(**{degree: 2}), LLM: ParallelSpec(pp=2)}))
    parallelize(mllm.eval(), several)  # for evaluation
    mllm.freeze(LLM)
    parallelize(mllm.train(), several)  # frozen modules have no dropout
    mllm.unfreeze(LLM)
    drop(mllm, 0.0)
    for layer in mllm.language_model.model.layers:
        layer.mlp.act_fn[0][1].p = 0.0
    parallelize(mllm.train(), several)


def test_rates_of_a_config_are_seen() -> None:
    """Also outside of modules: HuggingFace keeps some rates as numbers, e.g. for attention."""
    for changes, key in (({"dropout": 0.1}, "dropout"), ({"activation_dropout": 0.2}, "activation_dropout")):
        mllm = zoo.build(vision=None, audio=lambda made=changes: zoo.whisper(**made)).train()
        with pytest.raises(ValueError, match=rf"audio has dropout .*encoders.audio.* has {key} = 0\.[12]"):
            parallelize(mllm, layout_of(mllm, audio=ParallelSpec(tp=2)))
    mllm = zoo.build(vision=None, audio=None, language=zoo.qwen2, attention_dropout=0.1).train()
    with pytest.raises(ValueError, match=r"self_attn has attention_dropout = 0.1"):
        parallelize(mllm, layout_of(mllm, **{LLM: ParallelSpec(tp=2)}))


class Drawing(nn.Module):
    """Draws random numbers without any effect, so one process is the oracle. It has no dropout rate."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        out = self.inner(*args, **kwargs)
        return out + 0 * torch.rand_like(out) if self.training else out


def in_processes(rank: int) -> str:
    mllm = model(encoders=("vision",))
    for layer in mllm.encoders["vision"].module.encoder.layers:
        layer.mlp.fc1 = Drawing(layer.mlp.fc1)
    batch = random_microbatches(mllm.train(), "all")
    loss, gradients = oracle(mllm, batch)
    mllm.zero_grad()
    specs = {"vision": ParallelSpec(dp=2), LLM: ParallelSpec(tp=2)}
    shared = Layout.from_specs(mllm, specs, placement="shared")  # random numbers in a module of a single rank
    parallel = parallelize(mllm, shared, transport="distributed", timeout=30)
    assert parallel.step(batch).loss == pytest.approx(loss, rel=1e-5)
    for name, gradient in parallel.full_gradients().items():
        assert_gradient(name, gradient, gradients[name], norm_of(gradients, mllm))
    for layer in mllm.language_model.model.layers:
        layer.mlp.act_fn = Drawing(layer.mlp.act_fn)
    noisy = parallelize(mllm, shared, transport="distributed", timeout=30)
    with pytest.raises(PipelineError, match=r"rank 0, 1 drew random numbers .*tp > 1 or cp > 1.*set its dropout"):
        noisy.step(batch)
    return "done"


def test_dropout_is_allowed_on_one_rank_and_refused_in_a_lane(pool: Pool) -> None:
    outcomes = pool.run(2, in_processes)
    assert [outcome.value for outcome in outcomes] == ["done"] * 2
