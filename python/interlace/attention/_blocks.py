"""The EMPTY / PARTIAL / FULL classification of a mask's blocks, as lists; AttentionPlan.build is its only caller.

On CUDA devices in Triton (kernels/bitfield_plan.py), elsewhere in C++ (csrc/attention_cpu/block_lists.cpp): bounds per
block (document, position and span ranges, OR and AND of the bits) decide most pairs of blocks, and only the rest are
looked at token by token. The result is exact however weak the bounds are.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from interlace import _core
from interlace.masks import Tokens


class BlockLists(NamedTuple):
    """Compressed rows, int32: row r of a list is idx[ptr[r] : ptr[r + 1]], ascending.

    q: key blocks of row b * q_blocks + i; k: query blocks of row b * k_blocks + j. q_doc [B, Tq], k_doc [B, Tk]: the
    documents, but -1 for queries that see nothing and for keys that nobody sees.
    """

    full_q_ptr: Tensor
    full_q_idx: Tensor
    part_q_ptr: Tensor
    part_q_idx: Tensor
    full_k_ptr: Tensor
    full_k_idx: Tensor
    part_k_ptr: Tensor
    part_k_idx: Tensor
    q_doc: Tensor
    k_doc: Tensor


def block_lists(
    q: Tokens, k: Tokens, sinks: int, block: int, also: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
) -> tuple[BlockLists, list[int]]:
    """Classify queries [B, Tq] against keys [B, Tk]; fields contiguous, on one device, where the lists go too.

    also: further numbers, int64 [n], of full_q_ptr, part_q_ptr, full_k_ptr and part_k_ptr; they come back as ints, read
    together with the lengths of the lists: a GPU is waited for once (without Triton, for every copy).
    """
    device = q.bits.device
    if device.type == "cuda" and _has_triton():
        from interlace.kernels.bitfield_plan import block_lists as build

        tensors, numbers = build(q, k, sinks, block, also)
        return BlockLists._make(tensors), numbers
    queries = [field.cpu().numpy() for field in q]
    keys = [field.cpu().numpy() for field in k[:4]]
    arrays = _core.attention_block_lists(queries, keys, sinks, block, torch.get_num_threads())
    lists = BlockLists._make(torch.from_numpy(array) for array in arrays)
    lists = lists._replace(q_doc=lists.q_doc.view(q.doc.shape), k_doc=lists.k_doc.view(k.doc.shape))
    numbers = also(lists.full_q_ptr, lists.part_q_ptr, lists.full_k_ptr, lists.part_k_ptr).tolist()
    return BlockLists._make(tensor.to(device) for tensor in lists), numbers


@cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None
