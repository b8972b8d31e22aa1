"""A backward in two halves equals a whole one, at a size that takes seconds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import split_backward


def test_halves_have_the_flops_and_the_bits_of_whole_backwards(tmp_path: Path) -> None:
    """Also if layers are recomputed, except their last product; `main` compares FLOPs and bits itself."""
    out = tmp_path / "split_backward.json"
    options = {"layers": 2, "hidden": 32, "tokens": 16, "repeats": 1}
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    report = split_backward.main([*words, "--out", str(out)])
    assert json.loads(out.read_text()) == json.loads(json.dumps(report))
    product = 2 * 16 * 32 * 32  # of 16 rows with a weight [32, 32]; a layer has 4, and 3 of 4 times the size
    recomputed = {"none": 0, "full": 12, "selective": 0}  # of a layer, without its last product
    for row in report["rows"]:
        flops = row["gflops"]
        assert flops["weight"] * 1e9 == pytest.approx(2 * 16 * product)
        assert flops["input"] * 1e9 == pytest.approx(2 * (16 + recomputed[row["checkpointing"]]) * product)
    none, full, _ = report["rows"]
    assert full["forward_mib"] < none["between_mib"] == full["between_mib"] < none["forward_mib"]
