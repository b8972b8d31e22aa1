"""The EMPTY / PARTIAL / FULL classification of a mask's blocks, as lists; AttentionPlan.build is its only caller.

On CUDA devices in Triton (kernels/bitfield_plan.py), elsewhere in C++ (csrc/attention_cpu/block_lists.cpp): bounds per
block (document, position and span ranges, OR and AND of the bits) decide most pairs of blocks, and only the rest are
looked at token by token. The result is exact however weak the bounds are.
"""

from __future__ import annotations

import importlib.util
from functools import cache
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
    if device.type == "cuda" and _has_triton():
        from interlace.kernels.bitfield_plan import block_lists as build

        return BlockLists(*build(q, k, sinks, block))
    queries = [field.cpu().numpy() for field in q]
    keys = [field.cpu().numpy() for field in k[:4]]
    arrays = _core.attention_block_lists(queries, keys, sinks, block, torch.get_num_threads())
    return BlockLists(*(torch.from_numpy(array).to(device) for array in arrays))


@cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None
