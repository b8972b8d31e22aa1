"""The dense oracle: plain torch, any floating dtype, T x T memory. All other backends are tested against it.

It computes in fp32 (fp64 for fp64 inputs). Its backward is the explicit formula, so gradcheck can test it, and it can
test the other backends. Weights are divided by their sum, forward and backward. The kernels' backward computes
exp(score - LSE) instead, since they store only the LSE. That has the rounding error of the LSE: 0.4 % where scores
reach 80,000. Query heads are grouped by their shared key head, which is never repeated in memory.
"""

from __future__ import annotations

import torch
from torch import Tensor

from interlace.attention.backend import Attention, accumulate_dtype
from interlace.masks import visible

INF = float("inf")


def unsupported(q: Tensor, v: Tensor) -> str | None:
    """Reason why this backend cannot run on `q` and `v`: always None, since it can."""
    return None


def forward(job: Attention) -> tuple[Tensor, Tensor]:
    """See backend.py."""
    q, k, v, plan, scale, softcap = job
    seen = visible(plan.queries().rows(), plan.keys().columns(), plan.sinks)
    scores, _ = _scores(q, k, seen, scale, softcap)
    lse = scores.logsumexp(-1) if scores.shape[-1] else scores.new_full(scores.shape[:-1], -INF)
    out = _probabilities(scores)[0] @ _part_of(seen.any(1), v).to(scores.dtype).unsqueeze(2)
    return out.reshape(*q.shape[:3], v.shape[3]).to(q.dtype), lse.reshape(q.shape[:3])


def backward(
    job: Attention, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None, wide: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """See backend.py."""
    q, k, v, plan, scale, softcap = job
    seen = visible(plan.queries().rows(), plan.keys().columns(), plan.sinks)
    rows, columns = seen.any(2), seen.any(1)
    q, dout, out = (_part_of(rows, x) for x in (q, dout, out))
    k, v = (_part_of(columns, x) for x in (k, v))
    scores, slope = _scores(q, k, seen, scale, softcap)
    grouped = scores.shape[:-1]
    p, empty = _probabilities(scores)
    do = dout.to(scores.dtype).reshape(*grouped, v.shape[3]).masked_fill(empty, 0.0)  # 0 * inf would be NaN
    dp = do @ v.to(scores.dtype).unsqueeze(2).mT
    # d lse / d score is also p, so its gradient is part of the row's correction term.
    correction = (do * out.to(scores.dtype).reshape(do.shape)).sum(-1, keepdim=True)
    if dlse is not None:
        correction = correction - _part_of(rows, dlse).to(scores.dtype).reshape(grouped).unsqueeze(-1)
    ds = p * (dp - correction) * slope
    dq = ds @ k.to(scores.dtype).unsqueeze(2)
    dk = (ds.mT @ q.to(scores.dtype).reshape(*grouped, q.shape[3])).sum(2)
    dv = (p.mT @ do).sum(2)
    dk, dv = (dk, dv) if wide else (dk.to(k.dtype), dv.to(v.dtype))
    return dq.reshape(q.shape).to(q.dtype), dk, dv


def _part_of(seen: Tensor, x: Tensor) -> Tensor:
    """x [B, H, T, ...], zero for tokens that are not `seen` [B, T]: 0 times their values could be NaN."""
    return x.masked_fill(~seen.view(seen.shape[0], 1, seen.shape[1], *(1,) * (x.dim() - 3)), 0.0)


def _scores(q: Tensor, k: Tensor, seen: Tensor, scale: float, softcap: float | None) -> tuple[Tensor, Tensor | float]:
    """Scores [B, Hkv, G, Tq, Tk], -inf where not `seen` [B, Tq, Tk], and their derivative by the raw products q . k."""
    dtype = accumulate_dtype(q.dtype)
    grouped = q.to(dtype).reshape(*k.shape[:2], q.shape[1] // k.shape[1], *q.shape[2:])
    scores = grouped @ k.to(dtype).unsqueeze(2).mT * scale
    slope: Tensor | float = scale
    if softcap is not None:
        squashed = torch.tanh(scores / softcap)
        scores, slope = softcap * squashed, scale * (1 - squashed * squashed)
    return scores.masked_fill(~seen[:, None, None], -INF), slope


def _probabilities(scores: Tensor) -> tuple[Tensor, Tensor]:
    """Softmax over the last dimension (0 instead of NaN in an empty row), and a mask of empty rows."""
    empty = (scores == -INF).all(-1, keepdim=True)
    return scores.softmax(-1).masked_fill(empty, 0.0), empty
