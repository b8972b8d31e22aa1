"""Helpers of test_context_parallel.py and of other tests."""

from __future__ import annotations

import numpy as np

from interlace.attention import AttentionPlan
from interlace.balance import TokenShards, distribute_tokens
from interlace.masks import BitfieldMask


def snake(work, ranks, each):
    """Custom balancer: blocks sorted by decreasing work, dealt in snake order."""
    turn = np.arange(len(work)) % (2 * ranks)
    bins = np.empty(len(work), int)
    bins[np.argsort(-work, kind="stable")] = np.minimum(turn, 2 * ranks - 1 - turn)
    return bins


METHODS = {name: name for name in ("contiguous", "zigzag", "ring", "random", "lpt")} | {"own": snake}


def dealt(mask: BitfieldMask, ranks: int, method="lpt", block: int = 16) -> TokenShards:
    blocks = AttentionPlan.build(mask, block=block).row_blocks()
    return distribute_tokens(blocks, ranks, block=block, lengths=mask.length, method=method)
