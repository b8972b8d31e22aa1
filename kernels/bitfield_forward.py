"""Bitfield attention, forward: one program per (subblock of a row of blocks, query head).

A row is a block of queries; the plan lists its FULL key blocks and, apart, its PARTIAL ones. A program walks its share
of both, FULL first without any mask arithmetic, then PARTIAL with their bitmaps, or by the predicate in plans without
bitmaps. A row that the plan split over several programs (Cornstarch, subblocks) writes normalised partial results to
slots, which ``bitfield_aggregate`` merges; every other row writes its result directly.

Softmax runs in base 2 and in float32. A query that sees nothing gets 0 and LSE -inf.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .bitfield_common import (
    LN2,
    LOG2E,
    allowed,
    cap,
    dot,
    first_block,
    key_terms,
    load_tile,
    map_words,
    query_terms,
    store_tile,
    takes_part,
    tile_offsets,
    union_word,
    where_seen,
)


@triton.jit
def _attend(
    acc, m, total, q,
    maps, lines, attends, q_doc, q_span, last, before,
    k_base, v_base, k_stride, v_stride,
    block_index, begin, end,
    k_bits, k_doc, k_span, k_pos,
    k_length, sinks, scale, softcap,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_V: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr, MAPPED: tl.constexpr, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Online softmax over the key blocks block_index[begin:end]; returns the new (acc, m, total).

    MASKED: the blocks are PARTIAL. MAPPED: `maps` points to the bitmap of block_index[0], and `lines` are the offsets
    of this program's rows in one.
    """
    tiles: tl.constexpr = BLOCK // BLOCK_N
    ENTRY: tl.constexpr = (BLOCK + 1) * map_words(BLOCK)
    columns = tl.arange(0, BLOCK_D)
    v_columns = tl.arange(0, BLOCK_V)
    k_tile = tile_offsets(k_stride, BLOCK_N, BLOCK_D)
    v_tile = tile_offsets(v_stride, BLOCK_N, BLOCK_V)
    following, last_tile = first_block(block_index, begin, end), end * tiles - 1
    if MASKED and MAPPED:
        following_any = union_word(maps + begin * ENTRY, 0, begin < end, BLOCK_N, BLOCK)
    for tile in range(begin * tiles, end * tiles):
        first = following * BLOCK + (tile % tiles) * BLOCK_N
        next_tile = tl.minimum(tile + 1, last_tile)
        following = tl.load(block_index + next_tile // tiles)
        keys = first + tl.arange(0, BLOCK_N)
        first64 = first.to(tl.int64)
        entry = maps + (tile // tiles) * ENTRY
        column = (tile % tiles) * BLOCK_N
        if not MASKED:
            inside = keys >= 0
        elif MAPPED:
            inside = ((following_any >> tl.arange(0, BLOCK_N)) & 1) != 0
            following_any = union_word(
                maps + (next_tile // tiles) * ENTRY, (next_tile % tiles) * BLOCK_N, True, BLOCK_N, BLOCK
            )
        else:
            inside = takes_part(k_doc, keys, k_length)
        k = load_tile(k_base + first64 * k_stride + k_tile, inside, columns, HEAD_DIM, BLOCK_D, MASKED)
        v = load_tile(v_base + first64 * v_stride + v_tile, inside, v_columns, VALUE_DIM, BLOCK_V, MASKED)
        s = dot(q, tl.trans(k), PRECISION, UPCAST)
        if SOFTCAP:
            s, _ = cap(s * scale, softcap)
            to_base_2 = LOG2E
        else:
            to_base_2 = scale * LOG2E
        if MASKED:
            if MAPPED:
                s = where_seen(s, float("-inf"), entry + lines, column, tl.arange(0, BLOCK_N)[None, :], BLOCK_N)
            else:
                stream, doc, span, pos, window_pos = key_terms(k_bits, k_doc, k_span, k_pos, keys, k_length, sinks)
                see = allowed(
                    attends[:, None], q_doc[:, None], q_span[:, None], last[:, None], before[:, None],
                    stream[None, :], doc[None, :], span[None, :], pos[None, :], window_pos[None, :],
                )  # fmt: skip
                s = tl.where(see, s, float("-inf"))
        m_new = tl.maximum(m, tl.max(s, 1) * to_base_2)
        if MASKED:
            shift = tl.where(m_new == float("-inf"), 0.0, m_new)  # a row that has seen nothing yet: exp2(-inf - 0) = 0
        else:
            shift = m_new
        p = tl.exp2(s * to_base_2 - shift[:, None])
        decay = tl.exp2(m - shift)
        total = total * decay + tl.sum(p, 1)
        acc = acc * decay[:, None] + dot(p.to(v.dtype), v, PRECISION, UPCAST)
        m = m_new
    return acc, m, total


@triton.jit(do_not_specialize=["heads", "group", "q_length", "k_length", "q_blocks", "sinks"])
def forward_kernel(
    q, k, v, out, lse, slot_out, slot_lse,
    full_ptr, full_idx, part_ptr, part_idx, part_map,
    work_row, work_start, work_stop, work_slot,
    q_bits, q_doc, q_span, q_pos, q_window, k_bits, k_doc, k_span, k_pos,
    q_stride_b, q_stride_h, q_stride_t, k_stride_b, k_stride_h, k_stride_t, v_stride_b, v_stride_h, v_stride_t,
    heads, group, q_length, k_length, q_blocks, sinks, scale, softcap,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_V: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    ALIGN: tl.constexpr, MAPPED: tl.constexpr, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    # Heads vary fastest: programs that run side by side share a mask row, and the heads of a group share keys.
    head = tl.program_id(0) % heads
    item = tl.program_id(0) // heads
    parts: tl.constexpr = BLOCK // BLOCK_M
    within = (item % parts) * BLOCK_M  # first row of this program inside its block of queries
    item = item // parts
    row = tl.load(work_row + item)
    if row < 0:  # the list is padded to its capacity
        return
    batch = row // q_blocks
    first = (row % q_blocks) * BLOCK + within
    if first >= q_length:
        return
    rows = first + tl.arange(0, BLOCK_M)
    local = tl.arange(0, BLOCK_M)
    columns = tl.arange(0, BLOCK_D)
    batch64 = batch.to(tl.int64)
    kv_head = (head // group).to(tl.int64)

    # Strides come divided by ALIGN, so that the compiler knows how far they can be vectorised.
    q_base = q + (batch64 * q_stride_b + head.to(tl.int64) * q_stride_h + first.to(tl.int64) * q_stride_t) * ALIGN
    q_tile = load_tile(
        q_base + tile_offsets(q_stride_t * ALIGN, BLOCK_M, BLOCK_D), rows < q_length, columns, HEAD_DIM, BLOCK_D, True
    )  # fmt: skip
    k_base = k + (batch64 * k_stride_b + kv_head * k_stride_h) * ALIGN
    v_base = v + (batch64 * v_stride_b + kv_head * v_stride_h) * ALIGN
    qm = batch64 * q_length  # the words of this batch row
    km = batch64 * k_length
    attends, doc, span, last, before = query_terms(
        q_bits + qm, q_doc + qm, q_span + qm, q_pos + qm, q_window + qm, rows, q_length
    )

    # [start, stop) counts through the row's FULL blocks first and its PARTIAL blocks after them.
    start = tl.load(work_start + item)
    stop = tl.load(work_stop + item)
    full_from = tl.load(full_ptr + row)
    part_from = tl.load(part_ptr + row)
    full = tl.load(full_ptr + row + 1) - full_from
    maps = part_map + part_from * ((BLOCK + 1) * map_words(BLOCK))
    lines = (within + local) * map_words(BLOCK)

    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    acc, m, total = _attend(
        acc, m, total, q_tile, maps, lines, attends, doc, span, last, before,
        k_base, v_base, k_stride_t * ALIGN, v_stride_t * ALIGN,
        full_idx + full_from, tl.minimum(start, full), tl.minimum(stop, full),
        k_bits + km, k_doc + km, k_span + km, k_pos + km, k_length, sinks, scale, softcap,
        HEAD_DIM, BLOCK_D, VALUE_DIM, BLOCK_V, BLOCK, BLOCK_N, False, MAPPED, SOFTCAP, PRECISION, UPCAST,
    )  # fmt: skip
    acc, m, total = _attend(
        acc, m, total, q_tile, maps, lines, attends, doc, span, last, before,
        k_base, v_base, k_stride_t * ALIGN, v_stride_t * ALIGN,
        part_idx + part_from, tl.maximum(start - full, 0), tl.maximum(stop - full, 0),
        k_bits + km, k_doc + km, k_span + km, k_pos + km, k_length, sinks, scale, softcap,
        HEAD_DIM, BLOCK_D, VALUE_DIM, BLOCK_V, BLOCK, BLOCK_N, True, MAPPED, SOFTCAP, PRECISION, UPCAST,
    )  # fmt: skip

    acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    lse2 = tl.where(total == 0.0, float("-inf"), m + tl.log2(tl.where(total == 0.0, 1.0, total)))
    v_columns = tl.arange(0, BLOCK_V)
    slot = tl.load(work_slot + item)
    if slot < 0:
        at = (batch64 * heads + head) * q_length
        tl.store(lse + at + rows, lse2 * LN2, mask=rows < q_length)
        out_tile = out + (at + first) * VALUE_DIM + local[:, None] * VALUE_DIM + v_columns[None, :]
        store_tile(out_tile, acc, rows, v_columns, q_length, VALUE_DIM, BLOCK_V)
    else:
        at = (slot.to(tl.int64) * heads + head) * BLOCK + within
        tl.store(slot_lse + at + local, lse2)
        slot_tile = slot_out + at * VALUE_DIM + local[:, None] * VALUE_DIM + v_columns[None, :]
        store_tile(slot_tile, acc, local, v_columns, BLOCK_M, VALUE_DIM, BLOCK_V)
