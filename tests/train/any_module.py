"""Helpers of test_any_module.py and of other tests."""

from __future__ import annotations

import json
from typing import Any

from interlace.train.config import load as configs
from tests.digits import DATA

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}


TEXT = SIZES | {"num_key_value_heads": 2, "vocab_size": 300, "max_position_embeddings": 512}


def config_with(**modules: dict[str, Any]) -> configs.Config:
    modules.setdefault("language_model", {"architecture": "LlamaForCausalLM", "config": dict(TEXT)})
    table = {
        "run": {"name": "mine"}, "model": modules, "data": dict(DATA),
        "train": {"steps": 2, "batch_size": 4, "warmup_steps": 1},
        "parallel": {"timeout": 60.0, "placement": "parallel", "language_model": {"pp": 2}},
    }  # fmt: skip
    return configs.from_table(json.loads(json.dumps(table)), source="mine.toml")
