"""bench.data_wait runs, and its figures are consistent shares of its counts."""

from __future__ import annotations

import json
from pathlib import Path

from bench import data_wait
from tests import forkserver


def test_every_way_of_decoding_is_measured(tmp_path: Path) -> None:
    forkserver.context()  # its server has imported torch
    out = tmp_path / "data_wait.json"
    given = ["--batch", "2", "--decode", "0.001", "--step", "0.002", "--steps", "3", "--out", str(out)]
    assert data_wait.main(given) == 0
    report = json.loads(out.read_text())
    assert report["benchmark"] == "data_wait" and report["enough_workers"] == 2
    names = [row["producers"] for row in report["rows"]]
    assert names == ["thread", "1 workers", "2 workers", "2 workers, nothing kept", "1 worker, decoded before"]
    for row in report["rows"]:
        total = row["waited_s"] + 3 * 0.002
        assert abs(row["wait_share_percent"] - 100 * row["waited_s"] / total) < 1e-6
        assert abs(row["items_per_second"] - 6 / total) < 1e-6 and row["slowest_wait_s"] <= row["waited_s"]
