"""Helpers of test_resume_ranks.py and of other tests."""

from __future__ import annotations

from tests.digits import DATA

TABLE = {
    "run": {"name": "dropout"},
    "model": {
        "vision": {
            "architecture": "SiglipVisionModel",
            "config": {
                "hidden_size": 16,
                "intermediate_size": 24,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "image_size": 8,
                "patch_size": 4,
            },
        },
        "language_model": {
            "architecture": "LlamaForCausalLM",
            "config": {
                "hidden_size": 16,
                "intermediate_size": 24,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "num_key_value_heads": 1,
                "max_position_embeddings": 64,
                "tie_word_embeddings": True,
            },
        },
    },
    "data": {**DATA, "options": {"jitter": 1.0}},
    "train": {"steps": 6, "batch_size": 8, "microbatches": 2, "warmup_steps": 2, "validate_every": 3},
    "parallel": {"placement": "colocated", "timeout": 30.0},
    "checkpoint": {"every": 0},
    "log": {"every": 1, "trackers": [], "trace_step": 0},
}
