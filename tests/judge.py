"""Tolerance of 16-bit results: the error of torch in the same dtype, both measured against fp64.

A fixed tolerance is either too wide (3e-2 accepts a result that is 1 % too large everywhere) or too narrow. As in
FlashAttention's tests, the largest error may be twice torch's, plus the rounding error of values of that size. The same
limit applies to the root mean square, where an error common to all entries is not hidden by a few large roundings.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

FLOOR = 1e-5  # where torch happens to be exact, for inputs of size 1


def judge(what: str, got: Tensor, torchs: Tensor | Sequence[Tensor], exact: Tensor) -> None:
    """Raises AssertionError if `got` has a larger error. Infinities must be equal, and NaN always fails.

    torchs: the result of torch's own operators in the dtype of `got`, or several with different rounding if there are
    too few values for one to be representative. exact: in fp64.
    """
    torchs = torch.stack([torchs] if isinstance(torchs, Tensor) else list(torchs))
    assert got.dtype == torchs.dtype and exact.dtype == torch.float64
    assert got.shape == exact.shape and torch.equal(got.isinf(), exact.isinf()), what
    if not exact.numel():
        return
    got, torchs, exact = (x.detach().masked_fill(exact.isinf(), 0) for x in (got, torchs, exact))
    rounded = exact.to(got.dtype)
    largest, mean = _errors(got, exact)
    torchs_largest, torchs_mean = _errors(torchs, exact)
    spare = 2 * float(((rounded + 0.3 - 0.3) - rounded).abs().max())  # as in FlashAttention
    allowed = 2 * torchs_largest + spare + FLOOR
    assert largest <= allowed, (
        f"{what} is off by {largest:.2e} at most, torch by {torchs_largest:.2e}: over {allowed:.2e}"
    )
    # One rounding error averages up to an eighth of the last bit; with few values, each may be half of the last bit.
    spare = torch.finfo(got.dtype).eps * (1 / 8 + 0.5 * exact.numel() ** -0.5) * _mean(exact)
    allowed = 2 * torchs_mean + spare + FLOOR
    assert mean <= allowed, f"{what} is off by {mean:.2e} on average, torch by {torchs_mean:.2e}: over {allowed:.2e}"


def _errors(got: Tensor, exact: Tensor) -> tuple[float, float]:
    error = got.double() - exact
    return float(error.abs().max()), _mean(error)


def _mean(x: Tensor) -> float:
    """Root mean square."""
    return float(x.norm() / x.numel() ** 0.5)
