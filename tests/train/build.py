"""Helpers of test_build.py and of other tests."""

from __future__ import annotations

import copy
from typing import Any

from interlace.data import ByteTokenizer
from interlace.train.config import load as configs
from interlace.train.models.build import build
from tests.digits import DATA

VISION = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}


LLAMA = VISION | {"num_key_value_heads": 1, "max_position_embeddings": 128}


AUDIO = {
    "d_model": 16,
    "encoder_layers": 2,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 24,
    "num_mel_bins": 8,
    "max_source_positions": 50,
}


TABLE: dict[str, Any] = {
    "run": {"name": "tiny"},
    "model": {
        "vision": {"architecture": "SiglipVisionModel", "config": VISION | {"image_size": 8, "patch_size": 4}},
        "audio": {"architecture": "WhisperEncoder", "config": AUDIO, "downsample": 2},
        "language_model": {"architecture": "LlamaForCausalLM", "config": LLAMA},
    },
    "data": {**DATA, "max_audio_seconds": 1.0},
    "train": {"steps": 40, "batch_size": 8},
}


def _config(*overrides: str) -> configs.Config:
    return configs.from_table(copy.deepcopy(TABLE), list(overrides), source="tiny.toml")


def _build(*overrides: str) -> Any:
    return build(_config(*overrides), ByteTokenizer(), source="tiny.toml")
