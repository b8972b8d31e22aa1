"""Config of a tiny run, shared by tests of the trainer on a GPU."""

from __future__ import annotations

from typing import Any

from tests.digits import DATA

STEPS = 30


TABLE: dict[str, Any] = {
    "run": {"name": "tiny", "seed": 3},
    "model": {
        "vision": {
            "architecture": "SiglipVisionModel",
            "config": {
                "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
                "image_size": 8, "patch_size": 4,
            },
        },
        "language_model": {
            "architecture": "LlamaForCausalLM",
            "config": {
                "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
                "num_key_value_heads": 1, "max_position_embeddings": 128,
            },
        },
    },
    "data": dict(DATA),
    "train": {"steps": STEPS, "batch_size": 8, "microbatches": 2, "lr": 5e-3, "warmup_steps": 5, "validate_every": 0},
    "parallel": {"ranks": 1, "threads": 1},
    "checkpoint": {"every": 0},
    "log": {"every": 1, "trackers": [], "trace_step": 3, "samples": 2, "accuracy_samples": 8},
}  # fmt: skip
