"""Helpers of test_sequence_parallel.py and of other tests."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from interlace.layout import Layout
from interlace.model import MultimodalModel
from interlace.run import ParallelModel, parallelize
from tests.run.parity import oracle
from tests.run.tensor_parallel import assert_gradient, norm_of


def check_step(mllm: MultimodalModel, batch: Any, layout: Layout, **options: Any) -> ParallelModel:
    """Asserts that a step in the layout equals that of one process."""
    loss, gradients = oracle(mllm, batch)
    mllm.zero_grad()
    parallel = parallelize(mllm, layout, timeout=30, **options)
    assert parallel.step(batch).loss == pytest.approx(loss, rel=1e-5)
    for name, parameter in mllm.named_parameters():
        assert_gradient(name, parameter.grad, gradients[name], norm_of(gradients, mllm))
    assert parallel.clip_grad_norm_(1e9) == pytest.approx(norm_of(gradients, mllm), rel=1e-6)
    return parallel


def mixing(mllm: MultimodalModel) -> None:
    """Makes the first block of the language model add the previous row to each row, as token shifts do."""
    layer = mllm.language_model.model.layers[0]
    kind = type(layer)

    class Mixing(kind):  # type: ignore[misc, valid-type]
        def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            return super().forward(hidden_states + 0.5 * hidden_states.roll(1, -2), *args, **kwargs)

    layer.__class__ = Mixing
