"""`interlace train` compared with a plain loop at a toy size: every layout trains, from the same loss."""

from __future__ import annotations

import json

import pytest

from bench import trainer
from tests.sampling import sample


@pytest.mark.slow
def test_layouts_beside_the_plain_loops(tmp_path, monkeypatch):
    monkeypatch.setattr(trainer, "LAYOUTS", dict(sample(list(trainer.LAYOUTS.items()), 1)))
    out = tmp_path / "trainer.json"
    arguments = ["--sizes", "1.6M", "--rounds", "1", "--steps", "3", "--microbatches", "2", "--dataset", "digits"]
    report = trainer.main([*arguments, "--out", str(out)])
    assert json.loads(out.read_text()) == json.loads(json.dumps(report))
    [part] = report["sizes"]
    assert [row["loop"] for row in part["rows"]] == [*trainer.LOOPS, *trainer.LAYOUTS]
    assert all(row["tokens_per_s"] > 0 for row in part["rows"])
    plain, *others = (row["first_loss"] for row in part["rows"])
    assert all(other == pytest.approx(plain, rel=1e-4) for other in others)  # digits have no speech


def test_the_sizes_are_what_they_are_called():
    result = [trainer.parameters_of(size) for size in trainer.SIZES]
    assert result == [pytest.approx(count, rel=0.1) for count in (1.6e6, 37e6, 150e6)]
