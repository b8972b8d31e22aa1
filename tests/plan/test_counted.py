"""Counted costs of chunks of any size: equal to `analytic_costs`, and exchanged between the ranks of a lane."""

from __future__ import annotations

import numpy as np
import pytest

from interlace.costs.counted import counted_costs
from interlace.costs.links import Link
from interlace.costs.step import PARTS, Size
from interlace.estimate.sample_sizes import key_bytes_of
from interlace.plan import LinkModel, analytic_costs
from tests.train.build import _build

NAMES = ("vision", "audio", "language_model")


@pytest.mark.parametrize(("rows", "keys"), [(100.0, 50.0), (7.0, 1.0), (4096.0, 2048.5)])
def test_a_chunk_costs_its_flops(rows: float, keys: float) -> None:
    model = _build()
    counted = counted_costs(model, 1e9, tp={"language_model": 2})
    want = analytic_costs(model, dict.fromkeys(NAMES, rows), context=dict.fromkeys(NAMES, keys))
    for name in NAMES:
        tp = 2 if name == "language_model" else 1
        result = counted.of(name, Size(rows, rows * keys), tp)
        times = want[name].per_layer(trainable_before=True) / 1e9 / tp
        assert np.allclose(result.per_layer(trainable_before=True), times, rtol=1e-12)
        forward = np.bincount(want[name].layer, want[name].times.forward) / 1e9 / tp
        assert np.allclose(result.times.forward, forward, rtol=1e-12)


def test_ranks_of_a_lane_gather_and_scatter_rows() -> None:
    model = _build()
    free = counted_costs(model, 1e9, tp={"language_model": 4}, row_bytes={"language_model": 32.0})
    link = Link(LinkModel(1.0, 0.5))
    size = Size(10.0, 20.0)
    alone, joined = (free.of("language_model", size, 4, 1, each) for each in (Link(), link))
    # Rings of 3 messages; in each of them a rank sends 3 quarters of 10 rows of 32 bytes.
    ring = 3 * 1.0 + 0.75 * 320 * 0.5
    assert np.allclose(joined.times.forward - alone.times.forward, 4 * ring)
    assert np.allclose(joined.times.input_grad - alone.times.input_grad, 5 * ring)


def test_speeds_that_are_none_are_refused() -> None:
    with pytest.raises(ValueError, match=r"flops is 0: it must be above 0 \(FLOP/s"):
        counted_costs(_build(), 0)


def test_every_tp_that_is_asked_for_is_counted() -> None:
    model, rows = _build(), {"language_model": 32.0}
    several = counted_costs(model, 1e9, tp={"language_model": (1, 2, 4)}, row_bytes=rows)
    link, size = Link(LinkModel(1.0, 0.5)), Size(10.0, 20.0)
    for tp in (1, 2, 4):
        alone = counted_costs(model, 1e9, tp={"language_model": tp}, row_bytes=rows)
        result, want = (each.of("language_model", size, tp, 1, link).times for each in (several, alone))
        assert all(np.array_equal(getattr(result, part), getattr(want, part)) for part in PARTS)


def test_context_parallel_ranks_tell_each_other_keys_and_values() -> None:
    """Forward: each rank sends its 5 rows to 3 others. Backward: it sends them again, and returns partial gradients."""
    model = _build()
    counted = counted_costs(model, 1e9, tp={"language_model": (1, 2)}, key_bytes={"language_model": 32.0})
    link, size = Link(LinkModel(1.0, 0.5)), Size(20.0, 40.0)
    for tp in (1, 2):
        alone, joined = (counted.of("language_model", size, tp, 4, each).times for each in (Link(), link))
        told = 3 * (1.0 + 5 * 32 / tp * 0.5)
        lane = 4 * (tp - 1) * 1.0  # only tp; its rows have no bytes here
        assert np.allclose(joined.forward - alone.forward, told + lane)
        assert np.allclose(joined.input_grad - alone.input_grad, 2 * told + 1.25 * lane)
        assert np.allclose(joined.weight_only - alone.weight_only, 2 * told + 1.25 * lane)
        assert np.array_equal(joined.weight_grad, alone.weight_grad)
    assert np.array_equal(
        counted.of("language_model", size, 1, 1, link).times.forward, counted.of("language_model", size).times.forward
    )


def test_keys_and_values_are_as_wide_as_the_config_says() -> None:
    model = _build()
    config = model.language_model.config
    assert (config.hidden_size, config.num_attention_heads, config.num_key_value_heads) == (16, 2, 1)
    assert key_bytes_of(model) == {"vision": 2 * 2 * 16.0, "audio": 2 * 2 * 16.0, "language_model": 2 * 2 * 8.0}
    assert key_bytes_of(model, itemsize=4)["language_model"] == 4 * 2 * 8.0
    config.head_dim = 32
    assert key_bytes_of(model)["language_model"] == 2 * 2 * 32.0
    config.kv_lora_rank, config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim = 4, 6, 2, 5
    assert key_bytes_of(model)["language_model"] == 2 * 2.0 * (6 + 2 + 5.0)
