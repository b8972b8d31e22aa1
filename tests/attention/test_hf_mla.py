"""Multi-head latent attention in the HuggingFace drop-in: the head dimension of values differs from queries and keys.

Tiny models of the families, with head dimensions such as 24 and 20, against their own eager attention.
"""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
import transformers

from interlace.attention import hf
from tests.attention.hf_models import TEXT, text_ids
from tests.attention.hf_pairs import Watch, assert_same, assert_same_generation

LATENT = {
    **{name: value for name, value in TEXT.items() if name != "head_dim"},
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 20,
}
EXPERTS = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
FAMILIES = {
    "DeepseekV2": {**LATENT, **EXPERTS},
    "DeepseekV3": {**LATENT, **EXPERTS},
    "Glm4MoeLite": {**LATENT, **EXPERTS},
    "MiniCPM3": LATENT,
}


@pytest.fixture(params=FAMILIES)
def models(request, monkeypatch):
    """The model on bitfield attention, and its copy on eager attention. A dense mask fails the test."""
    name = request.param
    if not hasattr(transformers, f"{name}ForCausalLM"):
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**FAMILIES[name])
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # attention is far from uniform, and every mask matters
            parameter.add_(torch.randn_like(parameter) * 0.2)
    other = copy.deepcopy(model)
    other.set_attn_implementation("eager")
    model.set_attn_implementation(hf.NAME)
    hf._warned.clear()
    watch = Watch(monkeypatch)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="interlace:")
        yield model, other
    assert watch.sparse > 0 and watch.dense == 0


@pytest.mark.parametrize("side", ["right", "left"])
def test_padding(models, side):
    ids, mask = text_ids(2, 9), torch.ones(2, 9, dtype=torch.long)
    mask[1, 6:] = 0
    if side == "left":
        mask = mask.flip(1)
    assert_same(*models, {"input_ids": ids, "attention_mask": mask}, mask.bool())


def test_packing(models):
    positions = torch.cat([torch.arange(9), torch.arange(5)])[None]
    inputs = {"input_ids": text_ids(1, 14), "position_ids": positions, "use_cache": False}
    assert_same(*models, inputs)
    alone = [models[0](part).logits for part in inputs["input_ids"].split([9, 5], dim=1)]
    torch.testing.assert_close(models[0](**inputs).logits, torch.cat(alone, dim=1), rtol=1e-4, atol=1e-5)


def test_generation(models):
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[1, :4] = 0
    assert_same_generation(*models, {"input_ids": text_ids(2, 9), "attention_mask": mask})
