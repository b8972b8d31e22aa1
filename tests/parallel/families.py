"""Tiny blocks and models of the families with ready plans, and the other inputs of their forward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    SiglipVisionConfig,
    SiglipVisionModel,
    WhisperConfig,
)
from transformers.models.whisper.modeling_whisper import WhisperEncoder

HIDDEN, MELS, VOCAB = 32, 6, 40


@dataclass
class Family:
    """model: two blocks and the modules around them. inputs(length): of its forward. output: of its result.

    block: its first block. surroundings(model, hidden): inputs of a block's forward besides hidden states.
    """

    model: Callable[..., nn.Module]
    inputs: Callable[[int], dict[str, Tensor]]
    block: Callable[[nn.Module], nn.Module]
    surroundings: Callable[[nn.Module, Tensor], dict[str, Any]]


def _language(config: Any, model: Any) -> Family:
    def make(**changes: Any) -> nn.Module:
        sizes = {
            "vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": 24, "num_hidden_layers": 2,
            "num_attention_heads": 8, "num_key_value_heads": 4, "tie_word_embeddings": False, "head_dim": 4,
            "attn_implementation": "eager", **changes,
        }  # fmt: skip
        return model(config(**sizes))

    def inputs(length: int) -> dict[str, Tensor]:
        return {"input_ids": torch.randint(0, VOCAB, (2, length)), "use_cache": False}  # type: ignore[dict-item]

    def surroundings(whole: nn.Module, hidden: Tensor) -> dict[str, Any]:
        length = hidden.shape[-2]
        positions = torch.arange(length)[None]
        mask = torch.full((length, length), float("-inf")).triu(1)[None, None]
        return {"position_embeddings": whole.model.rotary_emb(hidden, positions), "attention_mask": mask}  # type: ignore

    return Family(make, inputs, lambda whole: whole.model.layers[0], surroundings)  # type: ignore


def _siglip(**changes: Any) -> nn.Module:
    sizes = {
        "hidden_size": HIDDEN, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 8,
        "image_size": 16, "patch_size": 4, "attn_implementation": "eager", **changes,
    }  # fmt: skip
    return SiglipVisionModel(SiglipVisionConfig(**sizes))


def _siglip_block(model: nn.Module) -> nn.Module:
    return getattr(model, "vision_model", model).encoder.layers[0]  # nested in transformers 4


def _whisper(**changes: Any) -> nn.Module:
    sizes = {
        "d_model": HIDDEN, "encoder_layers": 2, "encoder_attention_heads": 8, "encoder_ffn_dim": 24,
        "num_mel_bins": MELS, "max_source_positions": 12, "attn_implementation": "eager", **changes,
    }  # fmt: skip
    return WhisperEncoder(WhisperConfig(**sizes))


def _whisper_surroundings(model: nn.Module, hidden: Tensor) -> dict[str, Any]:
    old = "layer_head_mask" in _names(model.layers[0])  # type: ignore[index]
    return {"attention_mask": None, **({"layer_head_mask": None} if old else {})}


def _names(module: nn.Module) -> set[str]:
    return set(module.forward.__code__.co_varnames)


FAMILIES = {
    "llama": _language(LlamaConfig, LlamaForCausalLM),
    "qwen2": _language(Qwen2Config, Qwen2ForCausalLM),
    "qwen3": _language(Qwen3Config, Qwen3ForCausalLM),
    "siglip": Family(
        _siglip,
        lambda length: {"pixel_values": torch.randn(2, 3, 16, 16)},
        _siglip_block,
        lambda model, hidden: {"attention_mask": None},
    ),
    "whisper": Family(
        _whisper,
        lambda length: {"input_features": torch.randn(2, MELS, 24)},
        lambda model: model.layers[0],  # type: ignore[index]
        _whisper_surroundings,
    ),
}


def randomize(module: nn.Module, seed: int = 0) -> nn.Module:
    """Randomizes every parameter, scaled to keep activations near 1: biases and norms would start at 0 and 1."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        scale = parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 0.3
        parameter.data = torch.randn(parameter.shape, generator=generator) * scale + (parameter.dim() == 1)
    return module.train()


def first_tensor(output: Any) -> Tensor:
    """The hidden states or logits that a forward returns."""
    if isinstance(output, Tensor):
        return output
    return output[0]
