"""Tiny Gemma-3 with an odd vocabulary."""

from __future__ import annotations

from transformers import Gemma3ForCausalLM, Gemma3TextConfig


def gemma3(**changes):
    sizes = {"hidden_size": 24, "head_dim": 6, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = {"intermediate_size": 24, "num_hidden_layers": 2, "vocab_size": 41, "pad_token_id": 0, **sizes, **changes}
    return Gemma3ForCausalLM(Gemma3TextConfig(**config))
