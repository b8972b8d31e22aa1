"""Memory of the loss, at a size that takes seconds."""

from __future__ import annotations

import json

import pytest

from bench import loss_memory


@pytest.mark.slow
def test_chunks_take_less_than_whole_logits(tmp_path):
    out = tmp_path / "loss_memory.json"
    report = loss_memory.main(["--rows", "2560", "--words", "64000", "--hidden", "4", "--out", str(out)])
    assert json.loads(out.read_text()) == json.loads(json.dumps(report))
    chunked, lane, whole = report["rows"]
    for part in (chunked, lane):
        assert part["loss"] == pytest.approx(whole["loss"], rel=1e-6)
        assert part["gradient"] == pytest.approx(whole["gradient"], rel=1e-5)
        # In pieces: 256 MiB of logits and their exponentials. Whole logits: 625 MiB, some of which may be reused.
        assert part["peak_mib"] < 700 < whole["peak_mib"]
