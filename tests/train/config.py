"""Helpers of test_config.py and of other tests."""

from __future__ import annotations

import copy
from typing import Any

from interlace.train.config import load as config
from tests.digits import DATA

BASE: dict[str, Any] = {
    "run": {"name": "tiny"},
    "model": {
        "vision": {"architecture": "SiglipVisionModel", "config": {"hidden_size": 32}},
        "language_model": {"architecture": "LlamaForCausalLM", "config": {"rope_parameters": {"rope_theta": 1e4}}},
    },
    "data": dict(DATA),
    "train": {"steps": 100, "batch_size": 8},
}


def _load(*overrides: str, **replace: Any) -> config.Config:
    return config.from_table(copy.deepcopy(BASE) | replace, list(overrides), source="tiny.toml")
