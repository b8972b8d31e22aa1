"""Chunks of estimates."""

from __future__ import annotations

import pytest

from interlace.costs.step import Size
from interlace.run.tables.sizes import size_of
from interlace.train.auto.estimate import Estimator
from tests.train.auto import oracle


def test_samples_of_a_chunk_share_blocks_of_attention() -> None:
    """Blocks that several short samples share are computed whole, so together they cost more than one by one."""
    config, model, work, machine = oracle.case("equal modules")
    estimator = Estimator(config, model, work, machine)
    whole = [size_of(model, "language_model", batch).pairs for batch in work.batches]
    assert estimator.chunk_size("language_model", 1).pairs == pytest.approx(sum(whole) / len(whole), rel=0.1)
    for name in model.modules_order():
        alone = estimator.totals[name]
        for count in (1, 2, 4, 8, 16):
            result = estimator.chunk_size(name, count)
            assert (result.rows, result.targets) == pytest.approx((alone.rows / count, alone.targets / count))
            assert result.pairs >= alone.pairs / count * (1 - 1e-9)
        assert estimator.chunk_size(name, 16) == pytest.approx(Size(*(value / 16 for value in alone)))
