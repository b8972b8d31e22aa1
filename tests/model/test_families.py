"""Unknown families are also split into layers, and dtypes other than fp32 are preserved."""

from __future__ import annotations

import pytest
import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    ViTConfig,
    ViTModel,
)

from tests.model.zoo import COMMON, VOCAB, build, llama, loss_plain, plain, qwen2, sample, samples, siglip

SIZES = {**COMMON, "hidden_size": 24, "vocab_size": VOCAB}


def gemma3():
    """Layers of two kinds, each with its own rotary table, chosen by the layer's index."""
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    return Gemma3ForCausalLM(
        Gemma3TextConfig(**SIZES, num_key_value_heads=1, head_dim=12, sliding_window=64, layer_types=kinds)
    )


FAMILIES = {
    "gemma3": gemma3,
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES, num_key_value_heads=1, head_dim=12)),
    "gptneox": lambda: GPTNeoXForCausalLM(GPTNeoXConfig(**SIZES)),
    "qwen2 of mixed layers": lambda: qwen2(use_sliding_window=True, sliding_window=64, max_window_layers=2),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_other_language_models(family):
    mllm = build(audio=None, language=FAMILIES[family]).eval()
    g = torch.Generator().manual_seed(0)
    batch = [sample(mllm, g, 3, ("vision", 8, 12), 4), sample(mllm, g, 5)]
    output = mllm(**mllm.collate(batch))
    torch.testing.assert_close(output.loss, loss_plain(plain(mllm), batch), rtol=1e-5, atol=1e-6)
    inputs = mllm.collate_module("language_model", batch)
    inputs["features"] = mllm.encode({"vision": mllm.collate_module("vision", batch)})
    hidden = None
    for i in range(3):
        hidden = mllm.slice("language_model", i, i + 1)(inputs, hidden)
    torch.testing.assert_close(hidden / output.targets, output.loss, rtol=1e-6, atol=1e-6)


def test_a_vision_model_that_interpolates_or_not():
    torch.manual_seed(0)
    config = ViTConfig(hidden_size=16, image_size=16, patch_size=4, **COMMON)
    mllm = build(lambda: ViTModel(config, add_pooling_layer=False), None)
    encoder = mllm.encoders["vision"]
    assert encoder.prefix == 1
    images = [torch.randn(3, 16, 16), torch.randn(3, 8, 12)]
    expected = [
        plain(mllm).encoders["vision"].module(image[None], interpolate_pos_encoding=True).last_hidden_state[0, 1:]
        for image in images
    ]
    torch.testing.assert_close(
        encoder(pixel_values=images), encoder.projector(torch.cat(expected)), rtol=1e-5, atol=1e-5
    )


def test_a_model_that_cannot_start_in_the_middle_says_so():
    opt = OPTConfig(
        hidden_size=24, ffn_dim=24, num_hidden_layers=3, num_attention_heads=2, vocab_size=VOCAB, word_embed_proj_dim=24
    )
    mllm = build(None, None, language=lambda: OPTForCausalLM(opt))
    inputs = mllm.collate_module("language_model", [sample(mllm, torch.Generator().manual_seed(0), 5)])
    assert mllm.slice("language_model", 0, 3)(inputs).isfinite()
    for start, stop in ((0, 1), (1, 3)):  # for both stages: otherwise their ranks would wait for each other
        with pytest.raises(ValueError, match=r"cannot start after its first layers.*one stage"):
            mllm.slice("language_model", start, stop)


def test_bf16_autocast_and_bf16_weights():
    mllm = build(backend=None)
    batch = mllm.collate(samples(mllm))
    exact = mllm(**batch).loss
    with torch.autocast("cpu", torch.bfloat16):
        mixed = mllm(**batch).loss
    mixed.backward()
    assert mixed.dtype == torch.float32 and mllm.encoders["audio"].module.conv1.weight.grad.dtype == torch.float32
    torch.testing.assert_close(mixed, exact, rtol=3e-2, atol=0)
    half = mllm.to(torch.bfloat16)(**batch)
    assert half.logits.dtype == torch.bfloat16 and half.loss.dtype == torch.float32
    torch.testing.assert_close(half.loss, exact, rtol=5e-2, atol=0)


def test_attn_implementation_defaults_to_interlace():
    mllm = build(siglip, language=llama)
    modules = [mllm.encoders["vision"].module, mllm.encoders["audio"].module, mllm.language_model]
    assert [module.config._attn_implementation for module in modules] == ["interlace"] * 3
