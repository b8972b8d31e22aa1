"""Helpers of test_elastic.py and of other tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.data.chat_families import pictures, trained
from tests.data.chat_faults import TEMPLATE


def write_chats(folder: Path) -> dict[str, Any]:
    """Writes chats of different lengths and a tokenizer to a new folder. Returns [data] of a config that packs them."""
    folder.mkdir()
    tokenizer = trained({}, ("<|im_start|>", "<|im_end|>"))
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder / "tokenizer")
    paths = pictures(folder / "pictures", 4)
    lines = []
    for number in range(60):
        turns = [("human", f"<image>\nWhat is {number}?"), ("gpt", "It is a red cat. " * (1 + number % 3))]
        record = {"conversations": [{"from": role, "value": text} for role, text in turns]}
        lines.append(json.dumps({**record, "images": [str(paths[number % 4].relative_to(folder))]}))
    (folder / "train.jsonl").write_text("\n".join(lines))
    (folder / "validation.jsonl").write_text("\n".join(lines[:8]))
    return {
        "dataset": "chats", "train": [str(folder / "train.jsonl")], "validation": [str(folder / "validation.jsonl")],
        "tokenizer": str(folder / "tokenizer"), "cache": str(folder / "cache"), "max_tokens": 128, "pack": True,
    }  # fmt: skip
