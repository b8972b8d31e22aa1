"""The pairs that an attention backend computes, when no plan has decided any block for it."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from interlace.attention import AttentionPlan
from interlace.attention.op import run_backward, run_forward
from interlace.masks import BitfieldMask


def undecided(queries: BitfieldMask, keys: BitfieldMask, block: int) -> AttentionPlan:
    """A plan that lists every block as PARTIAL, without bitmaps, and leaves documents as the masks have them."""
    plan = AttentionPlan.build(queries, keys, block=block)
    changes = {"q_doc": queries.tokens().doc, "k_doc": keys.tokens().doc}
    for side, mark, rows, columns in (
        ("q", "", plan.q_blocks, plan.k_blocks),
        ("k", "_k", plan.k_blocks, plan.q_blocks),
    ):
        count = plan.batch * rows
        lines = torch.arange(count, dtype=torch.int32)
        changes |= {
            f"full_{side}_ptr": torch.zeros(count + 1, dtype=torch.int32),
            f"full_{side}_idx": torch.full((2,), -1, dtype=torch.int32),
            f"part_{side}_ptr": torch.arange(0, (count + 1) * columns, columns, dtype=torch.int32),
            f"part_{side}_idx": torch.arange(columns, dtype=torch.int32).repeat(count),
            f"part_{side}_map": getattr(plan, f"part_{side}_map")[:0],
            f"work{mark}_row": lines,
            f"work{mark}_start": torch.zeros_like(lines),
            f"work{mark}_stop": torch.full_like(lines, columns),
            f"work{mark}_slot": torch.full_like(lines, -1),
        }
    return replace(plan, **changes)


def forward_sees(backend: str, queries: BitfieldMask, keys: BitfieldMask, block: int) -> Tensor:
    """bool [B, Tq, Tk]: with equal scores and one-hot values, out[i, j] > 0 where query i sees key j."""
    plan = undecided(queries, keys, block)
    q, k, values = _tensors(plan, plan.k_len)
    out, lse = run_forward(q, k, values, plan, 1.0, None, backend)
    seen = out[:, 0] > 0
    # Padding has no values, so it would show in the number of keys alone.
    assert torch.equal(lse[:, 0].exp().round().long(), seen.sum(-1)), "the LSE counts other keys than the output"
    return seen


def backward_sees(backend: str, queries: BitfieldMask, keys: BitfieldMask, block: int) -> Tensor:
    """bool [B, Tq, Tk]: with equal scores and one-hot gradients, dv[j, i] > 0 where query i sees key j."""
    plan = undecided(queries, keys, block)
    q, k, gradients = _tensors(plan, plan.q_len)
    values = torch.zeros(plan.batch, 1, plan.k_len, plan.q_len)
    lse = queries.to_dense(keys).sum(-1).float().log().unsqueeze(1)
    _, _, dv = run_backward(gradients, None, q, k, values, gradients * 0, lse, plan, 1.0, None, True, backend)
    return dv[:, 0].mT > 0


def _tensors(plan: AttentionPlan, columns: int) -> tuple[Tensor, Tensor, Tensor]:
    """q and k of zeros, and the rows of the identity."""
    q, k = (torch.zeros(plan.batch, 1, length, 16) for length in (plan.q_len, plan.k_len))
    return q, k, torch.eye(columns).expand(plan.batch, 1, columns, columns)
