"""Tiny models of many families, and their comparison with sharded copies on two ranks."""

from __future__ import annotations

import copy

import torch
import transformers
from transformers import AutoModelForCausalLM

from interlace.comm import run_local
from interlace.parallel import full_state_dict, tensor_parallel
from interlace.parallel.linear import ParallelLinear
from tests.attention.hf_models import qwen2_5_vl, qwen2_vl, random
from tests.model.encoders import internvit, pixtral, plain_siglip2, siglip2
from tests.model.zoo import clip
from tests.parallel.families import HIDDEN, VOCAB, first_tensor, randomize
from tests.parallel.tensor import assert_close

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


def language(name):
    torch.manual_seed(0)
    sizes = {**TEXT, **(LANGUAGE.get(name) or {})}
    config = transformers.CONFIG_MAPPING[name](**sizes)
    config.tie_word_embeddings = False
    return randomize(AutoModelForCausalLM.from_config(config, attn_implementation="eager")).eval()


def whole_gradients(module):
    """Full gradients, also of a sharded module. Collective."""
    owners = dict(module.named_modules())
    result = {}
    for name, parameter in module.named_parameters():
        path, _, key = name.rpartition(".")
        owner, gradient = owners[path], parameter.grad
        cut = gradient is not None and isinstance(owner, ParallelLinear)
        result[name] = owner.gather(key, gradient) if cut else gradient
    return result


def assert_same(model, call, *, sequence_parallel, plan=None):
    """Compares outputs, gradients and the ordinary checkpoint of `model` and of its shards on two ranks."""
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

    for y, result, given in run_local(2, rank):
        assert_close(y, out.detach())
        assert result.keys() == want.keys()
        for name, gradient in want.items():
            assert (gradient is None) == (result[name] is None), name
            if gradient is not None:
                assert_close(result[name], gradient, name)
        assert given.keys() == state.keys() and all(torch.equal(given[key], state[key]) for key in state)


def ids():
    return torch.randint(3, VOCAB, (2, 12), generator=torch.Generator().manual_seed(1))


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
