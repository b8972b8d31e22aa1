"""Helpers of test_own_data.py and of other tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.data.chat_families import pictures, trained
from tests.data.chat_faults import TEMPLATE

CONFIG = """
[run]
name = "own"
folder = "{folder}/runs"

[model.vision]
architecture = "SiglipVisionModel"
downsample = 2

[model.vision.config]
hidden_size = 16
intermediate_size = 32
num_hidden_layers = 1
num_attention_heads = 2
image_size = 32
patch_size = 8

[model.language_model]
architecture = "LlamaForCausalLM"

[model.language_model.config]
hidden_size = 16
intermediate_size = 32
num_hidden_layers = 1
num_attention_heads = 2
num_key_value_heads = 1
max_position_embeddings = 512

[data]
dataset = "chats"
train = ["{folder}/train.jsonl"]
validation = ["{folder}/validation.jsonl"]
tokenizer = "{folder}/tokenizer"
cache = "{folder}/cache"
max_image_tokens = 32
max_tokens = 160

[train]
steps = 2
batch_size = 4
microbatches = 2
warmup_steps = 1
validation_samples = 4

[parallel]
ranks = 1

[log]
every = 1
trackers = []
trace_step = 0
samples = 3
max_new_tokens = 4

[checkpoint]
asynchronous = false
"""


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """A config, a tokenizer, images, and chats about them; two chats are broken and one is too long."""
    tokenizer = trained({}, ("<|im_start|>", "<|im_end|>"))
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    paths = [path.relative_to(tmp_path) for path in pictures(tmp_path / "pictures", 8)]
    lines = []
    for number in range(30):
        turns = [("human", f"<image>\nWhat is number {number}?"), ("gpt", f"It is a red cat, {number}.")] * (
            1 + number % 2
        )
        record: dict[str, Any] = {"conversations": [{"from": role, "value": text} for role, text in turns]}
        record["images"] = [str(paths[number % 8])] * (1 + number % 2)
        record |= {"kind": "cat"} if number % 2 == 0 else {}
        lines.append(json.dumps(record))
    lines[3] = "{"
    lines[4] = lines[4].replace("pictures/", "gone/")
    lines[5] = json.dumps(
        {"messages": [{"role": "user", "content": "x " * 300}, {"role": "assistant", "content": "y"}]}
    )
    (tmp_path / "train.jsonl").write_text("\n".join(lines))
    (tmp_path / "validation.jsonl").write_text("\n".join(lines[6:12]))
    (tmp_path / "own.toml").write_text(CONFIG.format(folder=tmp_path))
    return tmp_path


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trains in this process, like a rank under a launcher."""
    monkeypatch.delenv("INTERLACE_LAUNCHER", raising=False)
    for key, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(key, value)
