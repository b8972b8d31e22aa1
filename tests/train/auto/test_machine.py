"""Counted costs of GPUs that are not present, for every degree of the candidates."""

from __future__ import annotations

import numpy as np
import pytest

from interlace.costs.counted import counted_costs
from interlace.costs.links import Link
from interlace.costs.step import PARTS, Size
from interlace.train.auto.machine import ASSUMED, counted
from tests.train.auto import oracle


def test_absent_gpus_cost_what_is_counted() -> None:
    """A layer's traffic is counted once for any number of parts, and attention cost uses pairs."""
    config = oracle.config_of((2, 2))
    model = oracle.model_of(config)
    costs = counted(config, model, tflops=1.0, memory=1e9, how="as given").costs_of(6)
    element = 4  # fp32
    want = counted_costs(
        model, 1e12, tp={"language_model": 4}, row_bytes={"language_model": 16.0 * element},
        key_bytes={"language_model": 2 * 16.0 * element},
    )  # fmt: skip
    size = Size(512, 512 * 300)
    result, expected = (each.of("language_model", size, 4, 2, ASSUMED.host).times for each in (costs, want))
    assert all(np.allclose(getattr(result, part), getattr(expected, part), rtol=1e-12) for part in PARTS)
    few, many = (costs.of("vision", Size(512, pairs)).times.forward for pairs in (1e3, 1e6))
    assert (many > few).all()
    for tp in range(1, 7):  # not only divisors: modules may split the ranks unevenly
        costs.of("vision", size, tp)
    with pytest.raises(ValueError, match="tp = 7"):
        costs.of("vision", size, 7)
    assert costs.optimizer.transfer(1e9) == pytest.approx(7e-3)
    assert (
        costs.of("vision", size, 1, 2, ASSUMED.host).times.forward
        > costs.of("vision", size, 1, 2, Link()).times.forward
    ).all()
