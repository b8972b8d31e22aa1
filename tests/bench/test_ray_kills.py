"""bench.ray_kills trains twice in a row and reports the failures that a run on Ray survived.

First, two ranks read a stream that their own threads decode. Then they read one that a cluster decodes, while its
keeper and a node are killed.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("ray", reason="interlace[ray] is not installed")

from bench import ray_kills


@pytest.mark.slow
@pytest.mark.every_case
@pytest.mark.timeout(600)
def test_training_on_a_ray_stream_equals_local_decoding(tmp_path: Path) -> None:
    out = tmp_path / "ray_kills.json"
    given = ["--reading", "stream", "--ranks", "2", "--kind", "both", "--kills", "1", "--nodes", "1"]
    given += ["--steps", "12", "--samples", "40", "--side", "200", "--out", str(out)]
    assert ray_kills.main(given) == 0
    thread, row = json.loads(out.read_text())["rows"]
    assert thread["steps"] == row["steps"] == 12 and row["kills"] == 1 and thread["MiB_moved"] > 0
    assert row["losses_bit_equal"] and row["bytes_moved_equal"] and not row["blank_items"]
    assert row["answers_lost_and_asked_for_again"] >= 1
