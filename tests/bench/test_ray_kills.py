"""bench.ray_kills says which kills a run has survived, and compares its losses; the kills themselves are tested in
tests/data/test_ray_tasks.py, without a run around them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("ray", reason="interlace[ray] is not installed")

from bench import ray_kills


@pytest.mark.slow
def test_a_run_on_ray_has_the_losses_of_a_run_in_its_thread(tmp_path: Path) -> None:
    out = tmp_path / "ray_kills.json"
    given = ["--kind", "worker", "--kills", "1", "--steps", "9", "--samples", "40", "--side", "200", "--nodes", "1"]
    ray_kills.main([*given, "--out", str(out)])
    thread, row = json.loads(out.read_text())["rows"]
    assert thread["steps"] == row["steps"] == 9 and row["losses_bit_equal"] and not row["blank_items"]
    assert row["kills"] <= 1
