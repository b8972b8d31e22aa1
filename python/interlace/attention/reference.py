"""The dense oracle: plain torch, any floating dtype, T x T memory. Every other backend is tested against it.

It computes in fp32 (fp64 for fp64 inputs), and its backward is the written-out formula, so gradcheck tests it and it
tests the others. Query heads are grouped by the key head that they share, which is never repeated in memory.
"""

from __future__ import annotations

import torch
from torch import Tensor

from interlace.attention.plan import AttentionPlan
from interlace.masks import visible

INF = float("inf")


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype that scores, LSE and sums have for inputs of `dtype`: fp64 for fp64, else fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def why_not(q: Tensor) -> str | None:
    """Why this backend cannot run on `q`: it always can."""
    return None


def forward(
    q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan, scale: float, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """q [B, Hq, Tq, D], k and v [B, Hkv, Tk, D] -> out like q, lse [B, Hq, Tq] (natural log; -inf = empty row)."""
    scores, _ = _scores(q, k, plan, scale, softcap)
    lse = scores.logsumexp(-1) if scores.shape[-1] else scores.new_full(scores.shape[:-1], -INF)
    out = _probabilities(scores, lse) @ v.to(scores.dtype).unsqueeze(2)
    return out.reshape(q.shape).to(q.dtype), lse.reshape(q.shape[:-1])


def backward(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    plan: AttentionPlan,
    scale: float,
    softcap: float | None,
    wide: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k, v in their dtypes, given those of out and (or None) of lse; wide: dk, dv as summed."""
    scores, slope = _scores(q, k, plan, scale, softcap)
    grouped = scores.shape[:-1]
    p = _probabilities(scores, lse.reshape(grouped))
    do = dout.to(scores.dtype).reshape(*grouped, q.shape[-1])
    do = do.masked_fill(lse.reshape(grouped).unsqueeze(-1) == -INF, 0.0)  # an empty row: 0 * inf would be NaN
    dp = do @ v.to(scores.dtype).unsqueeze(2).mT
    # d lse / d score is p as well, so its gradient joins the row's correction term.
    correction = (do * out.to(scores.dtype).reshape(do.shape)).sum(-1, keepdim=True)
    if dlse is not None:
        correction = correction - dlse.to(scores.dtype).reshape(grouped).unsqueeze(-1)
    ds = p * (dp - correction) * slope
    dq = ds @ k.to(scores.dtype).unsqueeze(2)
    dk = (ds.mT @ q.to(scores.dtype).reshape(do.shape)).sum(2)
    dv = (p.mT @ do).sum(2)
    dk, dv = (dk, dv) if wide else (dk.to(k.dtype), dv.to(v.dtype))
    return dq.reshape(q.shape).to(q.dtype), dk, dv


def _scores(
    q: Tensor, k: Tensor, plan: AttentionPlan, scale: float, softcap: float | None
) -> tuple[Tensor, Tensor | float]:
    """Masked scores [B, Hkv, G, Tq, Tk], and their derivative by the raw products q . k."""
    dtype = accumulate_dtype(q.dtype)
    grouped = q.to(dtype).reshape(*k.shape[:2], q.shape[1] // k.shape[1], *q.shape[2:])
    scores = grouped @ k.to(dtype).unsqueeze(2).mT * scale
    slope: Tensor | float = scale
    if softcap is not None:
        squashed = torch.tanh(scores / softcap)
        scores, slope = softcap * squashed, scale * (1 - squashed * squashed)
    seen = visible(plan.queries().rows(), plan.keys().columns(), plan.sinks)
    return scores.masked_fill(~seen[:, None, None], -INF), slope


def _probabilities(scores: Tensor, lse: Tensor) -> Tensor:
    """exp(scores - lse), with 0 rather than exp(-inf + inf) in a row that sees nothing."""
    return torch.exp(scores - lse.masked_fill(lse == -INF, 0.0).unsqueeze(-1))
