"""How results in 16 bits are judged, wherever they are: by the error of torch in the same dtype, both against fp64.

A fixed tolerance is either too wide (3e-2 lets a result pass that is 1 % too large everywhere) or too narrow. As in
FlashAttention's tests, the largest error may be twice torch's, plus what rounding values of that size costs; and so may
the root of the mean square, in which an error that all entries share cannot hide behind the roundings of a few.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

FLOOR = 1e-5  # where torch happens to be exact, for inputs of size 1


def judge(what: str, got: Tensor, torchs: Tensor | Sequence[Tensor], exact: Tensor) -> None:
    """Raises AssertionError where `got` errs more than that; infinities must be the same, and NaN is never right.

    torchs: the result of torch's own operators in the dtype of `got`, or several that round otherwise where there are
    too few values to tell from one. exact: in fp64.
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
    spare = 2 * float(((rounded + 0.3 - 0.3) - rounded).abs().max())  # as FlashAttention has it
    allowed = 2 * torchs_largest + spare + FLOOR
    assert largest <= allowed, (
        f"{what} is off by {largest:.2e} at most, torch by {torchs_largest:.2e}: over {allowed:.2e}"
    )
    # One rounding may be an eighth of the last bit on average; of few values, each may be half of one.
    spare = torch.finfo(got.dtype).eps * (1 / 8 + 0.5 * exact.numel() ** -0.5) * _mean(exact)
    allowed = 2 * torchs_mean + spare + FLOOR
    assert mean <= allowed, f"{what} is off by {mean:.2e} on average, torch by {torchs_mean:.2e}: over {allowed:.2e}"


def _errors(got: Tensor, exact: Tensor) -> tuple[float, float]:
    error = got.double() - exact
    return float(error.abs().max()), _mean(error)


def _mean(x: Tensor) -> float:
    """The root of the mean square."""
    return float(x.norm() / x.numel() ** 0.5)
