"""Plans that are derived, of many families: cut among two ranks and whole, a model gives the same, or it is refused."""

from __future__ import annotations

import copy
from collections import OrderedDict

import pytest
import torch
import transformers
from torch import nn
from transformers import AutoModelForCausalLM

from interlace.comm import run_local
from interlace.parallel import full_state_dict, plan_for, tensor_parallel
from interlace.parallel.linear import ColumnParallelLinear, ParallelLinear
from tests.attention.hf_models import FIVE, qwen2_5_vl, qwen2_vl, random
from tests.model.test_encoders import internvit, pixtral, plain_siglip2, siglip2
from tests.model.zoo import clip
from tests.parallel.families import HIDDEN, VOCAB, first_tensor, randomize
from tests.parallel.test_tensor import SEQUENCE, assert_close

TEXT = {
    "vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": 24, "num_hidden_layers": 2, "head_dim": 8,
    "num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
EXPERTS = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
WINDOW = {"sliding_window": 4}
LANGUAGE = {
    "mistral": WINDOW,
    "gemma": {},
    "gemma2": {**WINDOW, "query_pre_attn_scalar": 8},
    "gemma3_text": {**WINDOW, "query_pre_attn_scalar": 8},
    "granite": {"residual_multiplier": 0.5},
    "smollm3": {},
    "olmo": {},
    "cohere": {},
    "glm": {},
    "glm4": {},
    "starcoder2": {},
    "phi": {},
    "stablelm": {},
    "arcee": {},
    "exaone4": {"sliding_window": 4},
    "ministral": WINDOW,
    "mixtral": EXPERTS,
    "qwen3_moe": EXPERTS,
    "qwen2_moe": {**EXPERTS, "shared_expert_intermediate_size": 16},
}
REFUSED = {
    "phi3": "self_attn .Phi3Attention. has o_proj, qkv_proj, where q_proj, k_proj and v_proj are known",
    "olmo2": "q_norm .Olmo2RMSNorm. is not applied to each head alone",
    "gpt2": "attn .GPT2Attention. has c_attn, c_proj",
    "deepseek_v3": "DeepseekV3Attention. has q_a_proj, .*where q_proj, k_proj and v_proj are known",
    "mamba": "it has no attention",
}


def language(name):
    torch.manual_seed(0)
    sizes = {**TEXT, **(LANGUAGE.get(name) or {})}
    config = transformers.CONFIG_MAPPING[name](**sizes)
    config.tie_word_embeddings = False
    return randomize(AutoModelForCausalLM.from_config(config, attn_implementation="eager")).eval()


def whole_gradients(module):
    """Of a cut module too. Collective."""
    owners = dict(module.named_modules())
    found = {}
    for name, parameter in module.named_parameters():
        path, _, key = name.rpartition(".")
        owner, gradient = owners[path], parameter.grad
        cut = gradient is not None and isinstance(owner, ParallelLinear)
        found[name] = owner.whole(key, gradient) if cut else gradient
    return found


def assert_same(model, call, *, sequence_parallel, plan=None):
    """Outputs, gradients and the ordinary checkpoint of `model` and of its pieces on two ranks."""
    out = first_tensor(call(model))
    upstream = random(*out.shape, seed=3)
    (out * upstream).sum().backward()
    want, state = whole_gradients(model), {key: value.clone() for key, value in model.state_dict().items()}
    model.zero_grad()

    def rank(group):
        mine = tensor_parallel(copy.deepcopy(model), plan, group=group, sequence_parallel=sequence_parallel)
        assert any(isinstance(part, ParallelLinear) for part in mine.modules())
        y = first_tensor(call(mine))
        (y * upstream).sum().backward()
        return y.detach(), whole_gradients(mine), full_state_dict(mine)

    for y, found, given in run_local(2, rank):
        assert_close(y, out.detach())
        assert found.keys() == want.keys()
        for name, gradient in want.items():
            assert (gradient is None) == (found[name] is None), name
            if gradient is not None:
                assert_close(found[name], gradient, name)
        assert given.keys() == state.keys() and all(torch.equal(given[key], state[key]) for key in state)


def ids():
    return torch.randint(3, VOCAB, (2, 12), generator=torch.Generator().manual_seed(1))


FAST = ("gemma3_text", "glm4", "qwen3_moe", "cohere", "internvit", "pixtral", "qwen2_5_vl")


def some_slow(names):
    return [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in names]


@SEQUENCE
@pytest.mark.parametrize("name", some_slow(LANGUAGE))
def test_language_models(name, sequence_parallel):
    """Norms after, windows, gates and up-projections in one layer, parallel attention and MLP, experts left whole."""
    given = ids()
    if "experts" in repr(LANGUAGE[name]) and not FIVE:  # 4.57 has a module per expert
        with pytest.raises(ValueError, match="keeps its experts as modules, of which each rank would train others"):
            plan_for(language(name))
        return
    assert_same(language(name), lambda model: model(given, use_cache=False), sequence_parallel=sequence_parallel)


@pytest.mark.parametrize(("name", "reason"), REFUSED.items())
def test_what_is_not_known_is_named(name, reason):
    model = language(name)
    with pytest.raises(ValueError, match=f"no plan is known for {type(model).__name__}: .*{reason}.*Write one"):
        plan_for(model)


def test_transformers_own_plan_is_heeded():
    """A model that must not be cut for a reason that its parts do not show."""
    model = language("mistral")
    model.model.config.base_model_tp_plan = {"layers.*.self_attn.q_proj": "colwise_gather_output"}
    with pytest.raises(ValueError, match=r"layers.0.self_attn.q_proj is left whole by transformers' own plan"):
        plan_for(model)


@pytest.mark.skipif(not FIVE, reason="the experts of transformers 4.57 are modules anyway")
def test_experts_kept_as_modules_are_refused():
    model = language("mixtral")
    for layer in model.model.layers:
        layer.mlp.experts = nn.ModuleList([nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)])
    with pytest.raises(ValueError, match="keeps its experts as modules"):
        plan_for(model)


# ---------------------------------------------------------------------- layers in parts


def test_halves_in_checkpoints():
    whole = randomize(nn.Linear(6, 12))

    def rank(group):
        mine = ColumnParallelLinear.from_linear(whole, group, parts=2)
        assert torch.equal(mine.weight, torch.cat([half.chunk(2)[group.rank] for half in whole.weight.chunk(2)]))
        empty = ColumnParallelLinear(6, 12, group=group, parts=2)
        empty.load_state_dict(whole.state_dict())
        back = empty.to_linear()
        return torch.equal(back.weight, whole.weight) and torch.equal(back.bias, whole.bias)

    assert run_local(2, rank) == [True, True]


def test_parts_that_do_not_divide():
    module = nn.Sequential(OrderedDict(up=nn.Linear(4, 6), down=nn.Linear(6, 4)))
    with pytest.raises(ValueError, match="up: 6 outputs in 2 parts do not divide among 2"):
        run_local(2, lambda group: tensor_parallel(module, {"up": "column_halves", "down": "replicate"}, group))


# ---------------------------------------------------------------------- encoders


def dinov2(**changes):
    sizes = {
        "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "mlp_ratio": 2, "image_size": 16,
        "patch_size": 4, "layerscale_value": 0.5, **changes,
    }  # fmt: skip
    return transformers.Dinov2Model(transformers.Dinov2Config(**sizes))


def of_qwen(module):
    return module(random(24, 3 * 2 * 4 * 4), grid_thw=torch.tensor([[1, 4, 4], [1, 2, 4]]))


def of_images(module):
    return module(random(2, 3, 16, 16))


VISION = {
    "clip": (clip, of_images),
    "dinov2": (dinov2, of_images),
    "dinov2, gated": (lambda: dinov2(use_swiglu_ffn=True), of_images),
    "internvit": (internvit, of_images),
    "pixtral": (pixtral, of_images),
    "siglip2": (siglip2, lambda module: plain_siglip2(module, random(3, 16, 16))),
    "qwen2_vl": (lambda: qwen2_vl().model.visual, of_qwen),
    "qwen2_5_vl": (lambda: qwen2_5_vl().model.visual, of_qwen),
}
EVEN = ("pixtral", "siglip2", "qwen2_vl", "qwen2_5_vl")  # others have a class token beside 16 patches


@SEQUENCE
@pytest.mark.parametrize("name", some_slow(VISION))
def test_encoders(name, sequence_parallel):
    make, call = VISION[name]
    torch.manual_seed(0)
    model = randomize(make()).eval()
    model.set_attn_implementation("eager")
    if sequence_parallel and name not in EVEN:
        with pytest.raises(ValueError, match="17 tokens does not divide among 2 ranks"):
            assert_same(model, call, sequence_parallel=True)
        return
    assert_same(model, call, sequence_parallel=sequence_parallel)


def test_scales_of_a_block_itself():
    """InternViT's lambdas are parameters of the block, whose layers are cut."""
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
    for _, found in results:
        for name, gradient in want.items():
            assert_close(found[name], gradient, name)
