"""Helpers of test_packing.py and of other tests."""

from __future__ import annotations

from transformers import (
    Lfm2Config,
    Lfm2ForCausalLM,
    Qwen2AudioEncoder,
    Qwen2AudioEncoderConfig,
)

from tests.model.zoo import (
    COMMON,
    MELS,
    VOCAB,
)

SIZES = {**COMMON, "hidden_size": 24, "vocab_size": VOCAB, "num_key_value_heads": 1}


def lfm2(**changes):
    kinds = ["conv", "full_attention", "conv"]
    return Lfm2ForCausalLM(Lfm2Config(**{**SIZES, "layer_types": kinds, "conv_L_cache": 3, **changes}))


def qwen2_audio():
    """Pools pairs of tokens after its layers."""
    config = Qwen2AudioEncoderConfig(
        d_model=16,
        encoder_layers=2,
        encoder_attention_heads=2,
        encoder_ffn_dim=24,
        num_mel_bins=MELS,
        max_source_positions=16,
    )
    return Qwen2AudioEncoder(config)
