"""Interface of attention backends. A backend is a module of this package with these functions:

unsupported(q, v) -> str | None     reason why it cannot run tensors like q and v on this machine; None if it can
forward(job) -> out, lse        lse: natural log of the sums of exponentials; -inf in a row that sees nothing
backward(job, out, lse, dout, dlse, wide) -> dq, dk, dv
                                in the inputs' dtypes, given the gradients of out and of lse (may be None); wide: dk and
                                dv in `accumulate_dtype`, for callers that add more to them
atomic_backward                 optional: as backward, but its last bits change from run to run
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from interlace.attention.plan import AttentionPlan


class Attention(NamedTuple):
    """q [B, Hq, Tq, D], k [B, Hkv, Tk, D], v [B, Hkv, Tk, Dv] under a plan; out is [B, Hq, Tq, Dv], lse [B, Hq, Tq]."""

    q: Tensor
    k: Tensor
    v: Tensor
    plan: AttentionPlan
    scale: float
    softcap: float | None


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """Dtype of scores, LSE and sums for inputs of `dtype`: fp64 for fp64, else fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32
