"""The shipped config of the digits, run as a user runs it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

CONFIG = Path(__file__).parents[2] / "configs/digits.toml"


@pytest.mark.slow
def test_the_digits_are_learned(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "interlace", "train", str(CONFIG)]
    command += ["--set", f"run.folder={tmp_path}", "--set", f"data.cache={tmp_path}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (summary,) = tmp_path.rglob("summary.json")
    rows = json.loads(summary.read_text())
    # A support vector machine classifies 97.6 % of the 334 held-out images; a point is 3 of them.
    assert rows["data"] == "chats" and rows["digit_accuracy"] >= 0.95, rows
