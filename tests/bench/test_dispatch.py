"""Dispatch benchmark at a toy size: its checks of padded batches, and its measured steps end."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench import dispatch
from interlace.run.tables.dispatch import BALANCES


def least(costs: list[int], ranks: int) -> int:
    """Smallest cost of the costliest of `ranks` padded batches, over all assignments."""
    result = sum(costs) * len(costs)
    for dealt in itertools.product(range(ranks), repeat=len(costs)):
        batches = [[cost for cost, at in zip(costs, dealt, strict=True) if at == rank] for rank in range(ranks)]
        result = min(result, max(len(batch) * max(batch, default=0) for batch in batches))
    return result


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 12), min_size=1, max_size=6), st.integers(1, 3))
def test_fewer_batches_cannot_stay_below_a_limit(costs: list[int], ranks: int) -> None:
    best = least(costs, ranks)
    assert dispatch.batches_needed(np.array(costs, float), best) <= ranks
    if best > max(costs):
        assert dispatch.batches_needed(np.array(costs, float), best - 0.5) > ranks
    with pytest.raises(ValueError, match="an item costs"):
        dispatch.batches_needed(np.array(costs, float), max(costs) - 0.5)


def test_padded_batches_are_as_cheap_as_can_be() -> None:
    result = dispatch.padded_least(8, 0)
    assert result["batches_needed_at_it"] <= 8 < result["batches_needed_below_it"]
    assert result["costliest_over_mean"] > 1.0 and result["padding"] > 0.0


def test_measured_samples_are_those_of_the_mix() -> None:
    mllm = dispatch.model_of(dispatch.NARROW)
    samples = dispatch.build_samples(mllm, 2, 6, 3)
    tokens = dispatch.drawn(dispatch.MODELS["MLLM-10B"], 2, 6, 3).tokens
    assert [bool(sample.media.get("vision")) for sample in samples] == (tokens["vision"] > 0).tolist()
    assert [bool(sample.media.get("audio")) for sample in samples] == (tokens["audio"] > 0).tolist()
    for sample, whole in zip(samples, tokens["llm"], strict=True):
        assert abs(len(sample) - whole / dispatch.SMALLER) < 24  # pictures are whole rows of patches
    ordered = dispatch.build_samples(mllm, 2, 6, 3, "by task")
    assert [bool(s.media.get("vision")) for s in ordered] == sorted((tokens["vision"] > 0).tolist(), reverse=True)


@pytest.mark.slow
def test_measured_steps_are_told(tmp_path: Path) -> None:
    out = tmp_path / "dispatch.json"
    words = ["--ranks", "8", "--measured", "--batches", "1", "--each", "2", "--slot", "0.05", "--hidden", "32"]
    report = dispatch.main([*words, "--budget", "0", "--out", str(out)])
    assert json.loads(out.read_text()) == json.loads(json.dumps(report))
    measured = report["measured"]
    for what in ("slept", "real"):
        assert set(measured[what]["rows"]) == set(measured["faster"][what]) == set(dispatch.ORDERS)
        for rows in measured[what]["rows"].values():
            assert set(rows) == set(BALANCES) and all(len(row["seconds"]) == 1 for row in rows.values())
    by_task = measured["slept"]["rows"]["by task"]
    assert by_task["none"]["imbalance"]["vision"][0] > by_task["per_module"]["imbalance"]["vision"][0]
