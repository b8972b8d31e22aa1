"""Classes of blocks: of a dense mask, and as listed in a plan."""

from __future__ import annotations

import torch

from interlace.attention import AttentionPlan

EMPTY, PARTIAL, FULL = 0, 1, 2


def states(dense: torch.Tensor, block: int) -> torch.Tensor:
    """[B, q_blocks, k_blocks] of EMPTY / PARTIAL / FULL; a short block is never FULL."""
    short = (0, -dense.shape[2] % block, 0, -dense.shape[1] % block)
    tiles = torch.nn.functional.pad(dense, short).unflatten(2, (-1, block)).unflatten(1, (-1, block))
    some, every = tiles.any(4).any(2), tiles.all(4).all(2)  # padding is not visible, so a short block is not FULL
    return torch.where(every, FULL, torch.where(some, PARTIAL, EMPTY))


def listed(plan: AttentionPlan, side: str) -> torch.Tensor:
    """The classes that a plan's q-major or k-major lists say, [B, q_blocks, k_blocks]."""
    shape = (plan.batch, plan.q_blocks, plan.k_blocks)
    out = torch.zeros(shape if side == "q" else (shape[0], shape[2], shape[1]), dtype=torch.int64).flatten(0, 1)
    for kind, value in (("full", FULL), ("part", PARTIAL)):
        ptr, idx = getattr(plan, f"{kind}_{side}_ptr").tolist(), getattr(plan, f"{kind}_{side}_idx").tolist()
        assert len(ptr) == out.shape[0] + 1 and ptr[0] == 0 and len(idx) == max(2, ptr[-1])
        for r in range(out.shape[0]):
            row = idx[ptr[r] : ptr[r + 1]]
            assert row == sorted(set(row))
            out[r, row] += value
    out = out.unflatten(0, (shape[0], shape[1] if side == "q" else shape[2]))
    return out if side == "q" else out.mT
