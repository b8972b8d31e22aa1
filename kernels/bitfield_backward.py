"""Bitfield attention, backward: delta, then dQ over the q-major lists, then dK and dV over the k-major lists.

With P = exp(S - LSE), D = rowsum(dO * O) - dLSE and dS = P * (dO V^T - D): dQ = scale dS K, dK = scale dS^T Q,
dV = P^T dO. dQ and dK/dV are separate kernels that each own what they write, so there are no atomics and the bits
repeat; the price is 7 matrix products instead of 5. With FUSED the dK/dV kernel adds dQ by fp32 atomics as well, in
whatever order its programs arrive: 5 products, one walk over the blocks, and bits that do not repeat. The heads of a
GQA group are looped over inside the dK/dV kernel.

dK/dV works on transposed scores from the start (K Q^T): transposing the cast result of a wgmma gave wrong gradients on
Hopper (flash-linear-attention #826). Only tiles that come straight from memory are transposed here; so FUSED computes
dQ^T = K^T dS^T, which takes the transposed dS as it is, and it is the addresses of the atomics that are transposed.

Work items, slots and longest-first order are as in the forward. A query that saw nothing has LSE -inf, which the delta
kernel turns into +inf: P is then exactly 0, and so are its gradients.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .bitfield_common import (
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


@triton.jit(do_not_specialize=["heads", "length", "padded"])
def delta_kernel(
    out, dout, lse, dlse, delta, lse2, q_doc, dout_stride_b, dout_stride_h, dout_stride_t, heads, length, padded,
    VALUE_DIM: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_M: tl.constexpr,
    ALIGN: tl.constexpr, HAS_DLSE: tl.constexpr,
):  # fmt: skip
    """delta[b, h, t] = sum_d(dout * out) - dlse; 0 where the row saw nothing, whatever these hold there.

    lse2[b, h, t] = the LSE in base 2, but +inf where the row saw nothing, so that exp2(s - lse2) is the probability.
    Both have `padded` rows, a multiple of the plan's block; those beyond `length` count as rows that saw nothing.
    """
    tiles = tl.cdiv(padded, BLOCK_M)
    rows = (tl.program_id(0) % tiles) * BLOCK_M + tl.arange(0, BLOCK_M)
    plane = tl.program_id(0) // tiles  # b * heads + h
    batch = (plane // heads).to(tl.int64)
    head = (plane % heads).to(tl.int64)
    columns = tl.arange(0, BLOCK_V)
    at = plane.to(tl.int64) * length
    o_tile = out + at * VALUE_DIM + rows.to(tl.int64)[:, None] * VALUE_DIM + columns[None, :]
    do_base = dout + (batch * dout_stride_b + head * dout_stride_h) * ALIGN
    do_tile = do_base + rows.to(tl.int64)[:, None] * (dout_stride_t * ALIGN) + columns[None, :]
    inside = rows < length
    o = load_tile(o_tile, inside, columns, VALUE_DIM, BLOCK_V, True).to(tl.float32)
    do = load_tile(do_tile, inside, columns, VALUE_DIM, BLOCK_V, True).to(tl.float32)
    value = tl.sum(o * do, 1)
    if HAS_DLSE:
        value -= tl.load(dlse + at + rows, mask=inside, other=0.0)
    natural = tl.load(lse + at + rows, mask=inside, other=0.0)
    doc = tl.load(q_doc + batch * length + rows, mask=inside, other=-1)
    seen = (doc >= 0) & (natural != float("-inf"))
    to = plane.to(tl.int64) * padded + rows
    tl.store(delta + to, tl.where(seen, value, 0.0), mask=rows < padded)
    tl.store(lse2 + to, tl.where(seen, natural * LOG2E, float("inf")), mask=rows < padded)


@triton.jit
def _query_gradient(
    dq, q, do, lse2, delta,
    maps, lines, attends, q_doc, q_span, last, before,
    k_base, v_base, k_stride, v_stride,
    block_index, begin, end,
    k_bits, k_doc, k_span, k_pos,
    k_length, sinks, scale, softcap,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_V: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr, MAPPED: tl.constexpr, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """dq + the contribution of the key blocks block_index[begin:end] (not yet times scale); MASKED, MAPPED, maps and
    lines as in the forward.
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
    for tile in tl.range(begin * tiles, end * tiles, disable_licm=True):
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
        dp = dot(do, tl.trans(v), PRECISION, UPCAST)
        if SOFTCAP:
            s, slope = cap(s * scale, softcap)
            p = tl.exp2(s * LOG2E - lse2[:, None])
        else:
            p = tl.exp2(s * (scale * LOG2E) - lse2[:, None])
        if MASKED:
            if MAPPED:
                p = where_seen(p, 0.0, entry + lines, column, tl.arange(0, BLOCK_N)[None, :], BLOCK_N)
            else:
                stream, doc, span, pos, window_pos = key_terms(k_bits, k_doc, k_span, k_pos, keys, k_length, sinks)
                see = allowed(
                    attends[:, None], q_doc[:, None], q_span[:, None], last[:, None], before[:, None],
                    stream[None, :], doc[None, :], span[None, :], pos[None, :], window_pos[None, :],
                )  # fmt: skip
                p = tl.where(see, p, 0.0)
        ds = p * (dp - delta[:, None])
        if SOFTCAP:
            ds = ds * slope
        dq += dot(ds.to(k.dtype), k, PRECISION, UPCAST)
    return dq


@triton.jit(do_not_specialize=["heads", "group", "q_length", "k_length", "q_blocks", "sinks"])
def query_gradient_kernel(
    q, k, v, dout, lse2, delta, dq, slot_dq,
    full_ptr, full_idx, part_ptr, part_idx, part_map,
    work_row, work_start, work_stop, work_slot,
    q_bits, q_doc, q_span, q_pos, q_window, k_bits, k_doc, k_span, k_pos,
    q_stride_b, q_stride_h, q_stride_t, k_stride_b, k_stride_h, k_stride_t, v_stride_b, v_stride_h, v_stride_t,
    dout_stride_b, dout_stride_h, dout_stride_t,
    heads, group, q_length, k_length, q_blocks, sinks, scale, softcap,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_V: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    ALIGN: tl.constexpr, MAPPED: tl.constexpr, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """dQ: one program per (work item, part of a block of queries, query head), as in the forward."""
    head = tl.program_id(0) % heads
    item = tl.program_id(0) // heads
    parts: tl.constexpr = BLOCK // BLOCK_M
    within = (item % parts) * BLOCK_M
    item = item // parts
    row = tl.load(work_row + item)
    if row < 0:
        return
    batch = (row // q_blocks).to(tl.int64)
    first = (row % q_blocks) * BLOCK + within
    if first >= q_length:
        return
    local = tl.arange(0, BLOCK_M)
    rows = first + local
    columns = tl.arange(0, BLOCK_D)
    head64 = head.to(tl.int64)
    kv_head = (head // group).to(tl.int64)
    first64 = first.to(tl.int64)

    qm = batch * q_length
    km = batch * k_length
    attends, doc, span, last, before = query_terms(
        q_bits + qm, q_doc + qm, q_span + qm, q_pos + qm, q_window + qm, rows, q_length
    )
    inside = doc >= 0
    v_columns = tl.arange(0, BLOCK_V)
    q_base = q + (batch * q_stride_b + head64 * q_stride_h + first64 * q_stride_t) * ALIGN
    do_base = dout + (batch * dout_stride_b + head64 * dout_stride_h + first64 * dout_stride_t) * ALIGN
    q_tile = load_tile(
        q_base + tile_offsets(q_stride_t * ALIGN, BLOCK_M, BLOCK_D), inside, columns, HEAD_DIM, BLOCK_D, True
    )
    do_tile = load_tile(
        do_base + tile_offsets(dout_stride_t * ALIGN, BLOCK_M, BLOCK_V), inside, v_columns, VALUE_DIM, BLOCK_V, True
    )
    at = (batch * heads + head) * q_length
    row_at = (batch * heads + head) * (tl.cdiv(q_length, BLOCK) * BLOCK) + rows
    row_lse2 = tl.load(lse2 + row_at)
    row_delta = tl.load(delta + row_at)
    k_base = k + (batch * k_stride_b + kv_head * k_stride_h) * ALIGN
    v_base = v + (batch * v_stride_b + kv_head * v_stride_h) * ALIGN

    start = tl.load(work_start + item)
    stop = tl.load(work_stop + item)
    full_from = tl.load(full_ptr + row)
    part_from = tl.load(part_ptr + row)
    full = tl.load(full_ptr + row + 1) - full_from
    maps = part_map + part_from * ((BLOCK + 1) * map_words(BLOCK))
    lines = (within + local) * map_words(BLOCK)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    acc = _query_gradient(
        acc, q_tile, do_tile, row_lse2, row_delta, maps, lines, attends, doc, span, last, before,
        k_base, v_base, k_stride_t * ALIGN, v_stride_t * ALIGN,
        full_idx + full_from, tl.minimum(start, full), tl.minimum(stop, full),
        k_bits + km, k_doc + km, k_span + km, k_pos + km, k_length, sinks, scale, softcap,
        HEAD_DIM, BLOCK_D, VALUE_DIM, BLOCK_V, BLOCK, BLOCK_N, False, MAPPED, SOFTCAP, PRECISION, UPCAST,
    )  # fmt: skip
    acc = _query_gradient(
        acc, q_tile, do_tile, row_lse2, row_delta, maps, lines, attends, doc, span, last, before,
        k_base, v_base, k_stride_t * ALIGN, v_stride_t * ALIGN,
        part_idx + part_from, tl.maximum(start - full, 0), tl.maximum(stop - full, 0),
        k_bits + km, k_doc + km, k_span + km, k_pos + km, k_length, sinks, scale, softcap,
        HEAD_DIM, BLOCK_D, VALUE_DIM, BLOCK_V, BLOCK, BLOCK_N, True, MAPPED, SOFTCAP, PRECISION, UPCAST,
    )  # fmt: skip
    acc *= scale

    slot = tl.load(work_slot + item)
    if slot < 0:
        dq_tile = dq + (at + first) * HEAD_DIM + local[:, None] * HEAD_DIM + columns[None, :]
        store_tile(dq_tile, acc, rows, columns, q_length, HEAD_DIM, BLOCK_D)
    else:
        slot_at = (slot.to(tl.int64) * heads + head) * BLOCK + within
        slot_tile = slot_dq + slot_at * HEAD_DIM + local[:, None] * HEAD_DIM + columns[None, :]
        store_tile(slot_tile, acc, local, columns, BLOCK_M, HEAD_DIM, BLOCK_D)


@triton.jit
def _key_gradients(
    dk, dv, k, v, keys, dq,
    q_base, do_base, q_stride, do_stride, lse2, delta,
    block_index, begin, end, maps, lines,
    q_bits, q_doc, q_span, q_pos, q_window, k_bits, k_doc, k_span, k_pos,
    q_length, k_length, sinks, scale, softcap,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_V: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_M: tl.constexpr,
    MASKED: tl.constexpr, MAPPED: tl.constexpr, SOFTCAP: tl.constexpr, FUSED: tl.constexpr,
    OF_KEYS: tl.constexpr, OF_VALUES: tl.constexpr,
    PRECISION: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """(dk, dv) + the contribution of the query blocks block_index[begin:end] of one head (dk not yet times scale).

    MASKED, MAPPED, maps and lines as in the forward, of keys. FUSED: dq, fp32 [T, HEAD_DIM] of this head, gets the
    contribution of these keys, already times scale.
    """
    tiles: tl.constexpr = BLOCK // BLOCK_M
    ENTRY: tl.constexpr = (BLOCK + 1) * map_words(BLOCK)
    columns = tl.arange(0, BLOCK_D)
    v_columns = tl.arange(0, BLOCK_V)
    q_tile = tile_offsets(q_stride, BLOCK_M, BLOCK_D)
    do_tile = tile_offsets(do_stride, BLOCK_M, BLOCK_V)
    if MASKED and not MAPPED:
        stream, key_doc, key_span, key_pos, window_pos = key_terms(k_bits, k_doc, k_span, k_pos, keys, k_length, sinks)
    following, last_tile = first_block(block_index, begin, end), end * tiles - 1
    if MASKED and MAPPED:
        following_any = union_word(maps + begin * ENTRY, 0, begin < end, BLOCK_M, BLOCK)
    for tile in tl.range(begin * tiles, end * tiles, disable_licm=True):
        first = following * BLOCK + (tile % tiles) * BLOCK_M
        next_tile = tl.minimum(tile + 1, last_tile)
        following = tl.load(block_index + next_tile // tiles)
        rows = first + tl.arange(0, BLOCK_M)
        first64 = first.to(tl.int64)
        entry = maps + (tile // tiles) * ENTRY
        column = (tile % tiles) * BLOCK_M
        if not MASKED:
            inside = rows >= 0
        elif MAPPED:
            inside = ((following_any >> tl.arange(0, BLOCK_M)) & 1) != 0
            following_any = union_word(
                maps + (next_tile // tiles) * ENTRY, (next_tile % tiles) * BLOCK_M, True, BLOCK_M, BLOCK
            )
        else:
            inside = takes_part(q_doc, rows, q_length)
        q = load_tile(q_base + first64 * q_stride + q_tile, inside, columns, HEAD_DIM, BLOCK_D, MASKED)
        do = load_tile(do_base + first64 * do_stride + do_tile, inside, v_columns, VALUE_DIM, BLOCK_V, MASKED)
        row_lse2 = tl.load(lse2 + rows)
        row_delta = tl.load(delta + rows)
        s = dot(k, tl.trans(q), PRECISION, UPCAST)  # transposed: [keys, queries]
        if SOFTCAP:
            s, slope = cap(s * scale, softcap)
            p = tl.exp2(s * LOG2E - row_lse2[None, :])
        else:
            p = tl.exp2(s * (scale * LOG2E) - row_lse2[None, :])
        if MASKED:
            if MAPPED:
                p = where_seen(p, 0.0, entry + lines, column, tl.arange(0, BLOCK_M)[None, :], BLOCK_M)
            else:
                attends, doc, span, last, before = query_terms(q_bits, q_doc, q_span, q_pos, q_window, rows, q_length)
                see = allowed(
                    attends[None, :], doc[None, :], span[None, :], last[None, :], before[None, :],
                    stream[:, None], key_doc[:, None], key_span[:, None], key_pos[:, None], window_pos[:, None],
                )  # fmt: skip
                p = tl.where(see, p, 0.0)
        if OF_VALUES:
            dv += dot(p.to(do.dtype), do, PRECISION, UPCAST)
        if OF_KEYS:
            if SOFTCAP:
                p = p * slope
            dp = dot(v, tl.trans(do), PRECISION, UPCAST)
            ds = p * (dp - row_delta[None, :])
            ds = ds.to(q.dtype)
            dk += dot(ds, q, PRECISION, UPCAST)
        if FUSED:
            dq_t = dot(tl.trans(k), ds, PRECISION, UPCAST) * scale
            to = dq + first64 * HEAD_DIM + tl.arange(0, BLOCK_M)[None, :] * HEAD_DIM + columns[:, None]
            written = rows[None, :] < q_length
            if HEAD_DIM != BLOCK_D:
                written = written & (columns[:, None] < HEAD_DIM)
            tl.atomic_add(to, dq_t, mask=written, sem="relaxed")
    return dk, dv


@triton.jit(do_not_specialize=["heads", "group", "q_length", "k_length", "k_blocks", "sinks"])
def key_gradient_kernel(
    q, k, v, dout, lse2, delta, dq, dk, dv, slot_dk, slot_dv,
    full_ptr, full_idx, part_ptr, part_idx, part_map,
    work_row, work_start, work_stop, work_slot,
    q_bits, q_doc, q_span, q_pos, q_window, k_bits, k_doc, k_span, k_pos,
    q_stride_b, q_stride_h, q_stride_t, k_stride_b, k_stride_h, k_stride_t, v_stride_b, v_stride_h, v_stride_t,
    dout_stride_b, dout_stride_h, dout_stride_t,
    heads, group, q_length, k_length, k_blocks, sinks, scale, softcap,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_V: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    ALIGN: tl.constexpr, MAPPED: tl.constexpr, SOFTCAP: tl.constexpr, FUSED: tl.constexpr,
    OF_KEYS: tl.constexpr, OF_VALUES: tl.constexpr,
    PRECISION: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """dK and dV: one program per (work item of the k-major list, part of a block of keys, key head); heads = Hkv.

    OF_KEYS, OF_VALUES: one of the two alone where both accumulators do not fit the registers: 5 products in place of 4.

    FUSED: also dQ, added to ``dq`` (fp32, zeroed by the caller); else ``dq`` is not touched.
    """
    kv_head = tl.program_id(0) % heads
    item = tl.program_id(0) // heads
    parts: tl.constexpr = BLOCK // BLOCK_N
    within = (item % parts) * BLOCK_N
    item = item // parts
    row = tl.load(work_row + item)
    if row < 0:
        return
    batch = (row // k_blocks).to(tl.int64)
    first = (row % k_blocks) * BLOCK + within
    if first >= k_length:
        return
    local = tl.arange(0, BLOCK_N)
    keys = first + local
    columns = tl.arange(0, BLOCK_D)
    v_columns = tl.arange(0, BLOCK_V)
    kv64 = kv_head.to(tl.int64)
    first64 = first.to(tl.int64)
    km = batch * k_length
    qm = batch * q_length
    inside = takes_part(k_doc + km, keys, k_length)

    k_base = k + (batch * k_stride_b + kv64 * k_stride_h + first64 * k_stride_t) * ALIGN
    v_base = v + (batch * v_stride_b + kv64 * v_stride_h + first64 * v_stride_t) * ALIGN
    k_tile = load_tile(
        k_base + tile_offsets(k_stride_t * ALIGN, BLOCK_N, BLOCK_D), inside, columns, HEAD_DIM, BLOCK_D, True
    )
    v_tile = load_tile(
        v_base + tile_offsets(v_stride_t * ALIGN, BLOCK_N, BLOCK_V), inside, v_columns, VALUE_DIM, BLOCK_V, True
    )

    start = tl.load(work_start + item)
    stop = tl.load(work_stop + item)
    full_from = tl.load(full_ptr + row)
    part_from = tl.load(part_ptr + row)
    full = tl.load(full_ptr + row + 1) - full_from
    maps = part_map + part_from * ((BLOCK + 1) * map_words(BLOCK))
    lines = (within + local) * map_words(BLOCK)
    acc_k = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    acc_v = tl.zeros([BLOCK_N, BLOCK_V], tl.float32)
    for member in tl.range(0, group, disable_licm=True):
        head = kv64 * group + member
        q_base = q + (batch * q_stride_b + head * q_stride_h) * ALIGN
        do_base = dout + (batch * dout_stride_b + head * dout_stride_h) * ALIGN
        plane = batch * heads * group + head
        row_at = plane * (tl.cdiv(q_length, BLOCK) * BLOCK)
        acc_k, acc_v = _key_gradients(
            acc_k, acc_v, k_tile, v_tile, keys, dq + plane * q_length * HEAD_DIM,
            q_base, do_base, q_stride_t * ALIGN, dout_stride_t * ALIGN, lse2 + row_at, delta + row_at,
            full_idx + full_from, tl.minimum(start, full), tl.minimum(stop, full), maps, lines,
            q_bits + qm, q_doc + qm, q_span + qm, q_pos + qm, q_window + qm,
            k_bits + km, k_doc + km, k_span + km, k_pos + km, q_length, k_length, sinks, scale, softcap,
            HEAD_DIM, BLOCK_D, VALUE_DIM, BLOCK_V, BLOCK, BLOCK_M, False, MAPPED, SOFTCAP, FUSED, OF_KEYS, OF_VALUES,
            PRECISION, UPCAST,
        )  # fmt: skip
        acc_k, acc_v = _key_gradients(
            acc_k, acc_v, k_tile, v_tile, keys, dq + plane * q_length * HEAD_DIM,
            q_base, do_base, q_stride_t * ALIGN, dout_stride_t * ALIGN, lse2 + row_at, delta + row_at,
            part_idx + part_from, tl.maximum(start - full, 0), tl.maximum(stop - full, 0), maps, lines,
            q_bits + qm, q_doc + qm, q_span + qm, q_pos + qm, q_window + qm,
            k_bits + km, k_doc + km, k_span + km, k_pos + km, q_length, k_length, sinks, scale, softcap,
            HEAD_DIM, BLOCK_D, VALUE_DIM, BLOCK_V, BLOCK, BLOCK_M, True, MAPPED, SOFTCAP, FUSED, OF_KEYS, OF_VALUES,
            PRECISION, UPCAST,
        )  # fmt: skip
    acc_k *= scale

    slot = tl.load(work_slot + item)
    k_tile = local[:, None] * HEAD_DIM + columns[None, :]
    v_tile = local[:, None] * VALUE_DIM + v_columns[None, :]
    if slot < 0:
        to = (batch * heads + kv_head) * k_length + first
        if OF_KEYS:
            store_tile(dk + to * HEAD_DIM + k_tile, acc_k, keys, columns, k_length, HEAD_DIM, BLOCK_D)
        if OF_VALUES:
            store_tile(dv + to * VALUE_DIM + v_tile, acc_v, keys, v_columns, k_length, VALUE_DIM, BLOCK_V)
    else:
        to = (slot.to(tl.int64) * heads + kv_head) * BLOCK + within
        if OF_KEYS:
            store_tile(slot_dk + to * HEAD_DIM + k_tile, acc_k, local, columns, BLOCK_N, HEAD_DIM, BLOCK_D)
        if OF_VALUES:
            store_tile(slot_dv + to * VALUE_DIM + v_tile, acc_v, local, v_columns, BLOCK_N, VALUE_DIM, BLOCK_V)
