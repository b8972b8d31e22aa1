"""Merging the partial results of split rows, always in the order of their slots, so that bits repeat.

``merge_kernel`` joins partial outputs by their LSE (forward); ``sum_kernel`` adds partial gradients (backward). Both
run one program per (slot, part of a block, head) of which only the first slot of each row does anything: the number of
split rows is known on the device alone, and reading it back would stall the stream.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .bitfield_common import LN2, store_tile


@triton.jit(do_not_specialize=["heads", "length", "blocks"])
def merge_kernel(
    slot_out, slot_lse, out, lse, row_slots, slot_row, heads, length, blocks,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """out = sum_i w_i out_i / sum_i w_i, w_i = exp2(lse_i - max lse); slots hold base-2 LSEs, ``lse`` is natural."""
    head = tl.program_id(0) % heads
    item = tl.program_id(0) // heads
    parts: tl.constexpr = BLOCK // BLOCK_M
    within = (item % parts) * BLOCK_M
    item = item // parts
    row = tl.load(slot_row + item)
    if row < 0:  # the list is padded
        return
    begin = tl.load(row_slots + row)
    end = tl.load(row_slots + row + 1)
    if begin != item:
        return
    local = tl.arange(0, BLOCK_M)
    columns = tl.arange(0, BLOCK_D)
    inside = columns[None, :] < HEAD_DIM

    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    for slot in range(begin, end):
        m = tl.maximum(m, tl.load(slot_lse + (slot * heads.to(tl.int64) + head) * BLOCK + within + local))
    shift = tl.where(m == float("-inf"), 0.0, m)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for slot in range(begin, end):
        at = (slot * heads.to(tl.int64) + head) * BLOCK + within
        weight = tl.exp2(tl.load(slot_lse + at + local) - shift)
        part = tl.load(slot_out + (at + local)[:, None] * HEAD_DIM + columns[None, :], mask=inside, other=0.0)
        total += weight
        acc += weight[:, None] * part
    safe = tl.where(total == 0.0, 1.0, total)

    first = (row % blocks) * BLOCK + within
    rows = first + local
    at = ((row // blocks).to(tl.int64) * heads + head) * length
    merged = tl.where(total == 0.0, float("-inf"), m + tl.log2(safe))
    tl.store(lse + at + rows, merged * LN2, mask=rows < length)
    out_tile = out + (at + first) * HEAD_DIM + local[:, None] * HEAD_DIM + columns[None, :]
    store_tile(out_tile, acc / safe[:, None], rows, columns, length, HEAD_DIM, BLOCK_D)


@triton.jit(do_not_specialize=["heads", "length", "blocks"])
def sum_kernel(
    slot_grad, grad, row_slots, slot_row, heads, length, blocks,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """grad of each split row = the sum of its slots."""
    head = tl.program_id(0) % heads
    item = tl.program_id(0) // heads
    parts: tl.constexpr = BLOCK // BLOCK_M
    within = (item % parts) * BLOCK_M
    item = item // parts
    row = tl.load(slot_row + item)
    if row < 0:
        return
    begin = tl.load(row_slots + row)
    end = tl.load(row_slots + row + 1)
    if begin != item:
        return
    local = tl.arange(0, BLOCK_M)
    columns = tl.arange(0, BLOCK_D)
    inside = columns[None, :] < HEAD_DIM
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for slot in range(begin, end):
        at = (slot * heads.to(tl.int64) + head) * BLOCK + within
        acc += tl.load(slot_grad + (at + local)[:, None] * HEAD_DIM + columns[None, :], mask=inside, other=0.0)
    first = (row % blocks) * BLOCK + within
    at = ((row // blocks).to(tl.int64) * heads + head) * length
    grad_tile = grad + (at + first) * HEAD_DIM + local[:, None] * HEAD_DIM + columns[None, :]
    store_tile(grad_tile, acc, first + local, columns, length, HEAD_DIM, BLOCK_D)
