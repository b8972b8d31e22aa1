"""Block lists and bitmaps of a mask, for AttentionPlan: classes of all blocks, and the pairs of PARTIAL ones.

Built on CUDA devices in Triton (kernels/bitfield_plan.py), elsewhere in C++ (csrc/attention_cpu/block_lists.cpp).
Bounds per block (document, position and span ranges, OR and AND of the bits) decide most pairs of blocks. Only the rest
are tested token by token. The result is exact, however loose the bounds are.
"""

from __future__ import annotations

import importlib.util
import math
import os
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from interlace import _core
from interlace.masks import Tokens, visible
from interlace.masks.values import readable

HAS_TRITON = importlib.util.find_spec("triton") is not None


class BlockLists(NamedTuple):
    """Compressed rows, int32: row r of a list is idx[ptr[r] : ptr[r + 1]], ascending.

    q: key blocks of row b * q_blocks + i; k: query blocks of row b * k_blocks + j. q_doc [B, Tq], k_doc [B, Tk]: the
    documents, with -1 for queries that see nothing and for keys that no query sees.
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
    """Classify queries [B, Tq] against keys [B, Tk]. Fields are contiguous and on one device; so are the lists.

    also: computes further numbers, int64 [n], from full_q_ptr, part_q_ptr, full_k_ptr and part_k_ptr. They are returned
    as ints. They are read together with the lengths of the lists, so a GPU is synchronized only once (without Triton:
    at every copy).
    """
    device = q.bits.device
    if device.type == "cuda" and HAS_TRITON:
        from interlace.kernels.bitfield_plan import block_lists as build

        tensors, numbers = build(q, k, sinks, block, also)
        return BlockLists._make(tensors), numbers
    queries = [field.cpu().numpy() for field in q.of_queries()]
    keys = [field.cpu().numpy() for field in k.of_keys()]
    arrays = _core.attention_block_lists(queries, keys, sinks, block, torch.get_num_threads())
    lists = BlockLists._make(torch.from_numpy(array) for array in arrays)
    lists = lists._replace(q_doc=lists.q_doc.view(q.doc.shape), k_doc=lists.k_doc.view(k.doc.shape))
    numbers = also(lists.full_q_ptr, lists.part_q_ptr, lists.full_k_ptr, lists.part_k_ptr).tolist()
    return BlockLists._make(tensor.to(device) for tensor in lists), numbers


MAPPED_BLOCKS = 65_536
"""Maximum number of PARTIAL blocks of 128 tokens for which a plan has bitmaps: 258 MiB for both directions."""


def reads_maps(device: torch.device, block: int) -> bool:
    """True if kernels for plans on `device` read bitmaps: on GPUs, on meta, and on a CPU with Triton's interpreter."""
    interpreting = os.environ.get("TRITON_INTERPRET") == "1"
    read = device.type == "meta" or (HAS_TRITON and (device.type == "cuda" or interpreting))
    return read and block >= 16 and block & (block - 1) == 0


def fits_maps(blocks: int, block: int) -> bool:
    """True if bitmaps of `blocks` PARTIAL blocks may be made. Kernels count their words in int32."""
    return blocks * math.prod(map_shape(1, block)) <= MAPPED_BLOCKS * math.prod(map_shape(1, 128))


def map_shape(blocks: int, block: int) -> tuple[int, int, int]:
    """Shape of the bitmaps of `blocks` PARTIAL blocks: a line of words per token, then the union of the lines."""
    return (blocks, block + 1, max(1, block // 32))


NO_MAPS = (0, 1, 1)
"""Shape of the bitmaps of a plan without bitmaps."""


def block_maps(q: Tokens, k: Tokens, sinks: int, block: int, ptr: Tensor, idx: Tensor, of_queries: bool) -> Tensor:
    """Bitmaps of the PARTIAL blocks of a list (ptr, idx): int32 [len(idx), block + 1, block / 32], or NO_MAPS.

    Entry e belongs to block idx[e]. of_queries: line i is query i of the block, and bit j % 32 of word j // 32 is key
    j; otherwise lines are keys and bits are queries. The last line is the union of the others. Entries beyond ptr[-1]
    are undefined. Does not wait for a GPU.
    """
    wanted = reads_maps(idx.device, block) and fits_maps(idx.numel(), block)
    maps = idx.new_empty(map_shape(idx.numel(), block) if wanted else NO_MAPS)
    if maps.numel() == 0 or idx.device.type == "meta" or not readable(idx):
        return maps
    if idx.device.type == "cuda":
        from interlace.kernels.bitfield_launch import on_device
        from interlace.kernels.bitfield_plan import map_calls

        with on_device(idx.device):
            for call in map_calls(q, k, sinks, block, ptr, idx, maps, of_queries):
                call.run()
        return maps
    # On a CPU: evaluate the rule itself.
    blocks = -(-(q if of_queries else k).bits.shape[1] // block)
    queries, keys = (_by_block(tokens, block) for tokens in (q, k))
    weights = torch.tensor([1 << bit for bit in range(min(32, block))])
    for entry in range(int(ptr[-1])):
        row = int(torch.searchsorted(ptr[1:], entry, right=True))
        here, other = (row // blocks, row % blocks), (row // blocks, int(idx[entry]))
        one, two = (here, other) if of_queries else (other, here)
        query, key = Tokens(*(field[one] for field in queries)), Tokens(*(field[two] for field in keys))
        see = visible(query.rows(), key.columns(), sinks)
        lines = see if of_queries else see.T
        words = (lines.unflatten(1, (-1, len(weights))) * weights).sum(2)
        maps[entry, :block] = words.to(torch.int32)
        maps[entry, block] = (lines.any(0).view(-1, len(weights)) * weights).sum(1).to(torch.int32)
    return maps


def _by_block(tokens: Tokens, block: int) -> Tokens:
    """[B, T] -> [B, blocks, block]; positions beyond the end are padding."""
    short = -tokens.bits.shape[1] % block
    return tokens(lambda field: torch.nn.functional.pad(field, (0, short), value=-1).unflatten(1, (-1, block)))
