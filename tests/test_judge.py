"""Judge of 16-bit results: detects errors that a tolerance of 3e-2 accepts."""

from __future__ import annotations

import pytest
import torch

from tests.attention import cases
from tests.attention.backends import directions
from tests.judge import judge

NAMES = ("out", "lse", "dq", "dk", "dv")


def results(name, dtype, dim=32):
    """(torch's results in the dtype, those in fp64 from the same inputs) of attention under a known mask."""
    mask, keys = cases.masks()[name]
    inputs = [x.detach() for x in cases.tensors(mask, keys, 4, 2, dim, dtype)]
    dense, scale = mask.to_dense(keys), dim**-0.5
    dout, dlse = directions(inputs[0], inputs[0][..., 0].float())
    exact = [x.double().requires_grad_() for x in inputs]
    out, lse = cases.oracle(*exact, dense, scale)
    seen = lse > -torch.inf
    loss = (out * dout.double()).sum() + (lse[seen] * dlse.double()[seen]).sum()
    grads = torch.autograd.grad(loss, exact)
    return cases.renderings(*inputs, dense, scale, None, dout, dlse), [out.detach(), lse.detach(), *grads]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["packed", "empty rows", "113 x 203", "full", "1 x 50", "window"])
def test_one_percent_too_much_or_too_little_is_noticed(name, dtype):
    for what, torchs, exact in zip(NAMES, *results(name, dtype)):
        if what == "lse":
            continue
        rounded = exact.to(dtype)
        judge(what, rounded, torchs, exact)
        judge(what, torchs[0], torchs, exact)
        for factor in (1.01, 0.99):
            wrong = (exact * factor).to(dtype)
            assert (wrong.double() - exact).abs().max() <= 3e-2 * max(1.0, exact.abs().max())  # once accepted
            with pytest.raises(AssertionError, match=f"{what} is off by"):
                judge(what, wrong, torchs, exact)


def test_one_wrong_entry_infinity_and_nan_are_noticed():
    generator = torch.Generator().manual_seed(0)
    exact = torch.randn(4096, generator=generator, dtype=torch.float64)
    right = exact.bfloat16()
    judge("x", right, right, exact)
    for value in (right[7] + 0.25, torch.inf, torch.nan):
        wrong = right.clone()
        wrong[7] = value
        with pytest.raises(AssertionError, match="x"):
            judge("x", wrong, right, exact)
    infinite = exact.clone()
    infinite[7] = torch.inf
    judge("x", infinite.bfloat16(), right, infinite)
    judge("nothing", right[:0], right[:0], exact[:0])
