"""Derived plans of many families: a model sharded over two ranks equals the unsharded one, or is refused."""

from __future__ import annotations

import copy
from collections import OrderedDict

import pytest
import torch
from torch import nn

from interlace.comm import run_local
from interlace.parallel import plan_for, tensor_parallel
from interlace.parallel.linear import ColumnParallelLinear
from tests.attention.hf_models import FIVE, random
from tests.model.encoders import internvit
from tests.parallel.families import HIDDEN, randomize
from tests.parallel.families_cases import (
    EVEN,
    LANGUAGE,
    VISION,
    assert_same,
    ids,
    language,
    whole_gradients,
)
from tests.parallel.tensor import SEQUENCE, assert_close, whole_linear

REFUSED = {
    "phi3": "self_attn .Phi3Attention. has the layers o_proj, qkv_proj; supported are q_proj, k_proj and v_proj",
    "olmo2": "q_norm .Olmo2RMSNorm. is not applied per head",
    "gpt2": "attn .GPT2Attention. has the layers c_attn, c_proj",
    "deepseek_v3": "DeepseekV3Attention. has the layers q_a_proj, .*; supported are q_proj, k_proj and v_proj",
    "mamba": "it has no attention",
}


FAST = ("gemma3_text", "glm4", "qwen3_moe", "cohere", "internvit", "pixtral", "qwen2_5_vl")


def some_slow(names):
    return [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in names]


@SEQUENCE
@pytest.mark.parametrize("name", some_slow(LANGUAGE))
def test_language_models(name, sequence_parallel):
    """Norms after, windows, gates and up-projections in one layer, parallel attention and MLP, unsharded experts."""
    given = ids()
    if "experts" in repr(LANGUAGE[name]) and not FIVE:  # 4.57 has a module per expert
        with pytest.raises(ValueError, match="has its experts as separate modules: each rank would train others"):
            plan_for(language(name))
        return
    assert_same(language(name), lambda model: model(given, use_cache=False), sequence_parallel=sequence_parallel)


@pytest.mark.parametrize(("name", "reason"), REFUSED.items())
def test_what_is_not_known_is_named(name, reason):
    model = language(name)
    with pytest.raises(
        ValueError, match=f"no tensor-parallel plan for {type(model).__name__}: .*{reason}.*Write a plan"
    ):
        plan_for(model)


def test_transformers_own_plan_is_heeded():
    """A model that must not be sharded, for a reason that its modules do not show."""
    model = language("mistral")
    model.model.config.base_model_tp_plan = {"layers.*.self_attn.q_proj": "colwise_gather_output"}
    with pytest.raises(ValueError, match=r"layers.0.self_attn.q_proj is not sharded by transformers' own plan"):
        plan_for(model)


@pytest.mark.skipif(not FIVE, reason="the experts of transformers 4.57 are modules anyway")
def test_experts_kept_as_modules_are_refused():
    model = language("mixtral")
    for layer in model.model.layers:
        layer.mlp.experts = nn.ModuleList([nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)])
    with pytest.raises(ValueError, match="has its experts as separate modules"):
        plan_for(model)


# ---------------------------------------------------------------------- layers in parts


def test_halves_in_checkpoints():
    whole = randomize(nn.Linear(6, 12))

    def rank(group):
        mine = ColumnParallelLinear.from_linear(whole, group, parts=2)
        assert torch.equal(mine.weight, torch.cat([half.chunk(2)[group.rank] for half in whole.weight.chunk(2)]))
        empty = ColumnParallelLinear(6, 12, group=group, parts=2)
        empty.load_state_dict(whole.state_dict())
        back = whole_linear(empty)
        return torch.equal(back.weight, whole.weight) and torch.equal(back.bias, whole.bias)

    assert run_local(2, rank) == [True, True]


def test_parts_that_do_not_divide():
    module = nn.Sequential(OrderedDict(up=nn.Linear(4, 6), down=nn.Linear(6, 4)))
    with pytest.raises(ValueError, match="up: 6 outputs in 2 parts are not divisible by 2 ranks"):
        run_local(2, lambda group: tensor_parallel(module, {"up": "column_halves", "down": "replicate"}, group))


# ---------------------------------------------------------------------- encoders


@SEQUENCE
@pytest.mark.parametrize("name", some_slow(VISION))
def test_encoders(name, sequence_parallel):
    make, call = VISION[name]
    torch.manual_seed(0)
    model = randomize(make()).eval()
    model.set_attn_implementation("eager")
    if sequence_parallel and name not in EVEN:
        with pytest.raises(ValueError, match="17 tokens is not divisible by 2 ranks"):
            assert_same(model, call, sequence_parallel=True)
        return
    assert_same(model, call, sequence_parallel=sequence_parallel)


def test_scales_of_a_block_itself():
    """InternViT's lambdas are parameters of the block, whose layers are sharded."""
    block = randomize(internvit()).encoder.layer[0]
    plan = plan_for(block)
    assert plan[""] == "sequence" and plan["attention"] == "gather" and plan["mlp.fc1"] == "column"
    hidden = random(2, 12, 16)
    out = block(hidden)
    upstream = random(*out.shape, seed=1)
    (out * upstream).sum().backward()
    want = whole_gradients(block)
    block.zero_grad()

    def rank(group):
        mine, rows = tensor_parallel(copy.deepcopy(block), None, group), slice(6 * group.rank, 6 * group.rank + 6)
        y = mine(hidden[:, rows])
        (y * upstream[:, rows]).sum().backward()
        return y.detach(), whole_gradients(mine)

    results = run_local(2, rank)
    assert_close(torch.cat([y for y, _ in results], 1), out.detach())
    for _, result in results:
        for name, gradient in want.items():
            assert_close(result[name], gradient, name)
