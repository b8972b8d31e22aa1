"""The Triton backend against dense attention, in Triton's interpreter; see `interpreter` for the cases themselves."""

from __future__ import annotations

import os

import pytest
import torch

from interlace.attention import AttentionPlan, bitfield_attention
from interlace.attention.op import unsupported
from interlace.masks import BitfieldMask
from tests.attention import interpreter

pytest.importorskip("triton")


@pytest.fixture(scope="module")
def worker():
    with interpreter.Worker() as worker:
        yield worker


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in interpreter.SLOW)) for name in interpreter.CASES]
)
def test_interpreted(worker, name):
    if problem := worker.run(name):
        pytest.fail(problem, pytrace=False)


@pytest.mark.slow
@pytest.mark.parametrize("name", interpreter.LONG_CASES)
def test_long_cases(worker, name):
    if problem := worker.run(name):
        pytest.fail(problem, pytrace=False)


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="this process interprets")
def test_cpu_tensor_without_triton_interpreter_is_refused():
    q = torch.zeros(1, 1, 16, 16)
    assert "TRITON_INTERPRET=1" in str(unsupported("triton", q))
    with pytest.raises(ValueError, match="TRITON_INTERPRET=1"):
        bitfield_attention(q, q, q, AttentionPlan.build(BitfieldMask.full(1, 16)), backend="triton")
