"""Fixtures of several tests of the trainer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.data.chat_families import pictures, trained
from tests.data.chat_faults import TEMPLATE
from tests.train.own_data import CONFIG


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
