"""The CPU backend: torch operations over the non-empty blocks only, forward and hand-written backward.

A row of query blocks takes its key blocks in ascending order, in chunks of a bounded number of keys whose scores fit
in cache; adjacent key blocks are one slice of k and v (no copy), others are gathered. Each chunk is one batched matmul
over the key heads, with the query heads that share a key head stacked as rows. Full blocks get no mask arithmetic.
Chunks of a row are merged by the online softmax in a fixed order: results are repeatable for a given thread count.

Memory beyond inputs and outputs: a few score chunks (SCORES elements each), and fp32 copies of bf16/fp16 tensors, which
are computed in fp32. Nothing of T x T, nor of T x block, is made.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from interlace.attention.plan import AttentionPlan
from interlace.attention.reference import INF, accumulate_dtype
from interlace.masks import visible

SCORES = 1 << 20  # elements of a score chunk: 4 MB of fp32, about an L2 cache's worth


def why_not(q: Tensor) -> str | None:
    """Why this backend cannot run on `q`; None when it can."""
    if q.device.type != "cpu":
        return f"it runs on CPU tensors and q is on {q.device}"
    return None


def forward(
    q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan, scale: float, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """q [B, Hq, Tq, D], k and v [B, Hkv, Tk, D] -> out like q, lse [B, Hq, Tq] (natural log; -inf = empty row)."""
    dtype = accumulate_dtype(q.dtype)
    out = torch.zeros(q.shape, dtype=q.dtype)
    lse = torch.full(q.shape[:-1], -INF, dtype=dtype)
    k, v = k.to(dtype), v.to(dtype)
    work = _Workspace(q, k, plan, count=1)
    for row in _rows(plan, work.keys_at_once):
        if not row.chunks:
            continue
        queries = work.stack(q, row).mul_(scale)
        acc = torch.zeros_like(queries)
        top = acc.new_full((*acc.shape[:2], 1), -INF)
        total = torch.zeros_like(top)
        for chunk in row.chunks:
            scores = torch.bmm(queries, chunk.take(k[row.b]).mT, out=work.scores(0, queries, chunk))
            if softcap is not None:
                scores.div_(softcap).tanh_().mul_(softcap)
            _hide(scores, plan, row, chunk)
            best = torch.maximum(top, scores.amax(-1, keepdim=True))
            shift = best.masked_fill(best == -INF, 0.0)  # nothing seen yet: exp(-inf - 0) = 0 where -inf + inf is NaN
            p, keep = scores.sub_(shift).exp_(), torch.exp(top - shift)
            total.mul_(keep).add_(p.sum(-1, keepdim=True))
            acc.mul_(keep).baddbmm_(p, chunk.take(v[row.b]))
            top = best
        acc = acc / total.masked_fill(total == 0, 1.0)
        out[row.b, :, row.start : row.stop] = acc.view(q.shape[1], -1, q.shape[3])
        lse[row.b, :, row.start : row.stop] = (top + total.log()).view(q.shape[1], -1)
    return out, lse


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
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k, v in their dtypes, given those of out and (or None) of lse."""
    dtype = accumulate_dtype(q.dtype)
    dq, dk, dv = (
        torch.zeros(q.shape, dtype=q.dtype),
        torch.zeros(k.shape, dtype=dtype),
        torch.zeros(v.shape, dtype=dtype),
    )
    kv_dtype = k.dtype
    k, v = k.to(dtype), v.to(dtype)
    work = _Workspace(q, k, plan, count=2 if softcap is None else 3)
    for row in _rows(plan, work.keys_at_once):
        if not row.chunks:
            continue
        queries, do = work.stack(q, row).mul_(scale), work.stack(dout, row)
        shift = work.stack(lse.unsqueeze(-1), row)
        shift = shift.masked_fill(shift == -INF, 0.0)
        correction = (do * work.stack(out, row)).sum(-1, keepdim=True)
        if dlse is not None:
            # d lse / d score is the probability too, so its gradient joins the row's correction term.
            correction -= work.stack(dlse.unsqueeze(-1), row)
        dqueries = torch.zeros_like(queries)
        for chunk in row.chunks:
            keys, values = chunk.take(k[row.b]), chunk.take(v[row.b])
            scores = torch.bmm(queries, keys.mT, out=work.scores(0, queries, chunk))
            slope = None
            if softcap is not None:
                squashed = scores.div_(softcap).tanh_()
                slope = torch.mul(squashed, squashed, out=work.scores(2, queries, chunk)).neg_().add_(1.0)
                scores.mul_(softcap)
            _hide(scores, plan, row, chunk)
            p = scores.sub_(shift).exp_()
            chunk.add(dv[row.b], p, do)
            ds = torch.bmm(do, values.mT, out=work.scores(1, queries, chunk)).sub_(correction).mul_(p)
            if slope is not None:
                ds.mul_(slope)
            dqueries.baddbmm_(ds, keys)
            chunk.add(dk[row.b], ds, queries)
        dq[row.b, :, row.start : row.stop] = dqueries.mul_(scale).view(q.shape[1], -1, q.shape[3])
    return dq, dk.to(kv_dtype), dv.to(kv_dtype)


class _Run(NamedTuple):
    """Adjacent key blocks of one kind: keys start..stop, at `column` of their chunk."""

    start: int
    stop: int
    column: int
    partial: bool


class _Chunk(NamedTuple):
    runs: list[_Run]
    spans: list[tuple[int, int]]  # the same keys, adjacent runs of both kinds joined
    width: int

    def take(self, x: Tensor) -> Tensor:
        """The chunk's keys of x [Hkv, Tk, D]: a view when they are adjacent."""
        if len(self.spans) == 1:
            return x[:, self.spans[0][0] : self.spans[0][1]]
        return torch.cat([x[:, start:stop] for start, stop in self.spans], dim=1)

    def add(self, grad: Tensor, weights: Tensor, rows: Tensor) -> None:
        """grad [Hkv, Tk, D] += weights^T [Hkv, width, rows] @ rows [Hkv, rows, D], at the chunk's keys."""
        column = 0
        for start, stop in self.spans:
            grad[:, start:stop] += torch.bmm(weights[..., column : column + stop - start].mT, rows)
            column += stop - start


class _Row(NamedTuple):
    b: int
    start: int
    stop: int
    chunks: list[_Chunk]


def _rows(plan: AttentionPlan, keys_at_once: int) -> Iterator[_Row]:
    """Query-block rows with their non-empty key blocks, in chunks of at most `keys_at_once` keys (or one block)."""
    full_ptr, full_idx = plan.full_q_ptr.tolist(), plan.full_q_idx.tolist()
    part_ptr, part_idx = plan.part_q_ptr.tolist(), plan.part_q_idx.tolist()
    size, at_once = plan.block, max(1, keys_at_once // plan.block)
    for r in range(plan.batch * plan.q_blocks):
        b, i = divmod(r, plan.q_blocks)
        blocks = [(j, False) for j in full_idx[full_ptr[r] : full_ptr[r + 1]]]
        blocks += [(j, True) for j in part_idx[part_ptr[r] : part_ptr[r + 1]]]
        blocks.sort()
        pieces = [blocks[at : at + at_once] for at in range(0, len(blocks), at_once)]
        chunks = [_chunk(piece, size, plan.k_len) for piece in pieces]
        yield _Row(b, i * size, min((i + 1) * size, plan.q_len), chunks)


def _chunk(blocks: list[tuple[int, bool]], size: int, length: int) -> _Chunk:
    runs: list[_Run] = []
    spans: list[tuple[int, int]] = []
    column = 0
    for j, partial in blocks:
        start, stop = j * size, min((j + 1) * size, length)
        if runs and runs[-1].stop == start and runs[-1].partial == partial:
            runs[-1] = runs[-1]._replace(stop=stop)
        else:
            runs.append(_Run(start, stop, column, partial))
        if spans and spans[-1][1] == start:
            spans[-1] = (spans[-1][0], stop)
        else:
            spans.append((start, stop))
        column += stop - start
    return _Chunk(runs, spans, column)


def _hide(scores: Tensor, plan: AttentionPlan, row: _Row, chunk: _Chunk) -> None:
    """Set the invisible scores [Hkv, G * n, width] of partial blocks to -inf."""
    for run in chunk.runs:
        if not run.partial:
            continue
        queries = plan.queries()(lambda field: field[row.b, row.start : row.stop])
        keys = plan.keys()(lambda field, run=run: field[row.b, run.start : run.stop])  # type: ignore[misc]
        hidden = ~visible(queries.rows(), keys.columns(), plan.sinks)
        part = scores[..., run.column : run.column + run.stop - run.start]
        part.view(part.shape[0], -1, *hidden.shape).masked_fill_(hidden, -INF)


class _Workspace:
    """`count` reusable score buffers, and the stacking of the query heads that share a key head."""

    def __init__(self, q: Tensor, k: Tensor, plan: AttentionPlan, count: int) -> None:
        self.dtype = k.dtype
        self.kv_heads = k.shape[1]
        self.keys_at_once = SCORES // (q.shape[1] * plan.block)
        self.buffers = [torch.empty(0, dtype=k.dtype) for _ in range(count)]

    def stack(self, x: Tensor, row: _Row) -> Tensor:
        """Rows of x [B, Hq, Tq, D] as a fresh [Hkv, G * n, D] in the computing dtype."""
        part = x[row.b, :, row.start : row.stop].to(self.dtype, copy=True, memory_format=torch.contiguous_format)
        return part.view(self.kv_heads, -1, x.shape[3])

    def scores(self, which: int, queries: Tensor, chunk: _Chunk) -> Tensor:
        shape = (*queries.shape[:2], chunk.width)
        size = shape[0] * shape[1] * shape[2]
        if self.buffers[which].numel() < size:
            self.buffers[which] = torch.empty(size, dtype=self.dtype)
        return self.buffers[which][:size].view(shape)
