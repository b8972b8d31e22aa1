"""The EMPTY / PARTIAL / FULL classification of a mask's blocks, as lists; AttentionPlan.build is its only caller.

On the CPU in C++ (csrc/attention_cpu/block_lists.cpp), for other devices there too, with the lists copied back: bounds
per block (document, position and span ranges, OR and AND of the bits) decide most pairs of blocks, groups of them at
once, and only the rest are looked at token by token. The result is exact however weak the bounds are.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from interlace import _core
from interlace.masks import Tokens


class BlockLists(NamedTuple):
    """Compressed rows, int32: row r of a list is idx[ptr[r] : ptr[r + 1]], ascending.

    q: key blocks of row b * q_blocks + i; k: query blocks of row b * k_blocks + j.
    """

    full_q_ptr: Tensor
    full_q_idx: Tensor
    part_q_ptr: Tensor
    part_q_idx: Tensor
    full_k_ptr: Tensor
    full_k_idx: Tensor
    part_k_ptr: Tensor
    part_k_idx: Tensor


def block_lists(q: Tokens, k: Tokens, sinks: int, block: int) -> BlockLists:
    """Classify queries [B, Tq] against keys [B, Tk]; fields contiguous, on one device, where the lists go too."""
    device = q.bits.device
    queries = [field.cpu().numpy() for field in q]
    keys = [field.cpu().numpy() for field in k[:4]]
    arrays = _core.attention_block_lists(queries, keys, sinks, block, torch.get_num_threads())
    return BlockLists(*(torch.from_numpy(array).to(device) for array in arrays))
