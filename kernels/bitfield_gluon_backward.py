"""Bitfield attention, backward, for Hopper in Gluon: dK/dV over the k-major lists, dQ over the q-major lists.

**Not yet run on a GPU.** Same plan, same slots and same arithmetic as `bitfield_backward`, for plans with bitmaps and
without a softcap. One block of 128 tokens stays in shared memory (dK/dV: K and V; dQ: Q and dO), and a producer warp
streams tiles of the other side by TMA (dK/dV: 64 queries of Q, dO, LSE and delta; dQ: keys of K and V). Each of two
consumer warpgroups takes 64 rows of the block that stays.

Who waits on what. Tile n is the n-th of the item, tiles of FULL blocks first; `stage_of` and the phases are those of
`bitfield_gluon_forward`, whose docstring says why they are right.

    barrier    count      producer, 1 warp                        consumer c = 0, 1 (rows c * 64 of the block)
    resident   1 + bytes  expect, 4 loads                         wait(0), once, even if there is no tile
    full[s]    1 + bytes  expect, loads of one stage              wait(round & 1), then S and dP of tile n
    empty[s]   2          wait(round & 1 ^ 1) before the loads    arrive(1) for tile n - 1 when S of tile n is complete

- wgmma completes in the order of issue. The last product of tile n - 1 (dK or dQ) is in flight while S and dP of tile n
  are issued; the wait for S leaves dP alone in flight, so then tile n - 1 has been read and its buffers go back.
- Operands in registers (P, dS) are passed to the wait that ends their product: they stay untouched until then.
- The LSE and delta of a tile are read from shared memory before the arrival, which follows a barrier of the warpgroup.

Rows that take no part may hold NaN or infinity, and TMA loads whole boxes. Consumers write zeros over such rows of
their own half of the block that stays, once, and over rows of a PARTIAL tile that the bitmap lets nobody see. Both
consumers write the same zeros, each before its own products, so neither waits for the other. FULL tiles hold no such
rows. What this costs is one test of the bitmap's last line per PARTIAL tile.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .bitfield_common import LOG2E, map_words, where_seen
from .bitfield_gluon_forward import BLOCK, HALF, empty_phase, full_phase, stage_of
from .gluon_compat import reinterpret, tma_load

# ---------------------------------------------------------------------- zeros for rows that take no part

PANEL = gl.constexpr(64)  # columns of 16 bits
PIECE = gl.constexpr(16)  # rows that a warpgroup cleans at a time, with one access of 16 bytes per thread


@gluon.jit
def _clean_resident(one, other, docs, length, BLOCK_D: gl.constexpr):
    """Zeros over rows of padding of a consumer's half of both tensors that stay; docs: of its `length` rows."""
    rows = gl.arange(0, HALF, layout=_row_layout())
    taking = gl.load(docs + rows, mask=rows < length, other=0)  # beyond the end TMA writes zeros
    todo = gl.where(gl.min(taking, 0) < 0, (1 << HALF // PIECE) - 1, 0)
    if todo != 0:
        _clean(one, other, todo, docs, length, HALF, BLOCK_D, False)


@gluon.jit
def _clean_streamed(one, other, union, ROWS: gl.constexpr, BLOCK_D: gl.constexpr):
    """Zeros over the rows of both tiles of a stage that nobody sees; union: words of the bitmap's last line."""
    todo = 0
    for i in gl.static_range(ROWS // 32):
        blind = ~gl.load(union + i)
        todo |= gl.where((blind & 0xFFFF) != 0, 1 << 2 * i, 0) | gl.where((blind >> 16) != 0, 2 << 2 * i, 0)
    if todo != 0:
        _clean(one, other, todo, union, ROWS, ROWS, BLOCK_D, True)


@gluon.jit
def _clean(
    one, other, todo, source, length, ROWS: gl.constexpr, BLOCK_D: gl.constexpr, MAPPED: gl.constexpr
):  # fmt: skip
    """Bit i of todo: rows PIECE * i and following. source: words of a bitmap if MAPPED, else documents of the rows.

    A tile is taken as [pieces, PIECE rows, 32 words]: in panels of 64 columns a row is 128 bytes. Swizzling moves
    values within these 128 bytes only, so it does not matter here.
    """
    PIECES: gl.constexpr = ROWS // PIECE
    PANELS: gl.constexpr = BLOCK_D // PANEL
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    ones = reinterpret(one, gl.int32, [PANELS * PIECES, PIECE, 32], plain)
    others = reinterpret(other, gl.int32, [PANELS * PIECES, PIECE, 32], plain)
    i = todo * 0
    while todo != 0:  # of a length that depends on data, or compilers would unroll it into the hot loop
        if (todo & 1) != 0:
            rows = i * PIECE + gl.arange(0, PIECE, layout=_row_layout())
            if MAPPED:
                inside = ((gl.load(source + rows // 32) >> (rows % 32)) & 1) != 0
            else:
                inside = gl.load(source + rows, mask=rows < length, other=0) >= 0
            for panel in gl.static_range(PANELS):
                _clean_piece(ones.index(panel * PIECES + i), inside)
                _clean_piece(others.index(panel * PIECES + i), inside)
        todo = todo >> 1
        i += 1
    fence_async_shared()


@gluon.jit
def _clean_piece(piece, inside):
    words = piece.load(_row_layout().parent)
    piece.store(gl.where(inside[:, None], words, 0))


@gluon.constexpr_function
def _row_layout():
    return gl.SliceLayout(1, gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0]))


# ---------------------------------------------------------------------- dK and dV


@gluon.jit
def _fetch_queries(
    q_desc, do_desc, lse2_desc, delta_desc, q_smem, do_smem, lse2_smem, delta_smem, full, empty,
    index, count, n, batch, head, row_at, STAGES: gl.constexpr,
):  # fmt: skip
    """The tiles of index[:count] for one query head, of which the first is tile n. row_at: of its first row."""
    for i in range(count * (BLOCK // HALF)):
        token = gl.load(index + i // (BLOCK // HALF)) * BLOCK + i % (BLOCK // HALF) * HALF
        stage = stage_of(n + i, STAGES)
        mbarrier.wait(empty.index(stage), empty_phase(n + i, STAGES))
        mbarrier.expect(full.index(stage), 2 * q_desc.block_type.nbytes + 2 * lse2_desc.block_type.nbytes)
        tma_load(q_desc, [batch, head, token, 0], full.index(stage), q_smem.index(stage))
        tma_load(lse2_desc, [row_at + token], full.index(stage), lse2_smem.index(stage))
        tma_load(do_desc, [batch, head, token, 0], full.index(stage), do_smem.index(stage))
        tma_load(delta_desc, [row_at + token], full.index(stage), delta_smem.index(stage))


@gluon.jit
def _produce_queries(
    q_desc, k_desc, v_desc, do_desc, lse2_desc, delta_desc,
    q_smem, k_smem, v_smem, do_smem, lse2_smem, delta_smem, resident, full, empty,
    full_list, full_count, part_list, part_count, batch, kv_head, group, head, plane, first, padded,
    STAGES: gl.constexpr,
):  # fmt: skip
    """FULL tiles of all heads of the group, then PARTIAL ones. head: the first query head; plane: its place among all
    heads of all batch rows, each with `padded` rows of the LSE and of delta."""
    mbarrier.expect(resident, 4 * k_desc.block_type.nbytes)
    for part in gl.static_range(BLOCK // HALF):
        tma_load(k_desc, [batch, kv_head, first + part * HALF, 0], resident, k_smem.index(part))
        tma_load(v_desc, [batch, kv_head, first + part * HALF, 0], resident, v_smem.index(part))
    for member in range(group):
        _fetch_queries(
            q_desc, do_desc, lse2_desc, delta_desc, q_smem, do_smem, lse2_smem, delta_smem, full, empty,
            full_list, full_count, member * full_count * (BLOCK // HALF),
            batch, head + member, (plane + member) * padded, STAGES,
        )  # fmt: skip
    for member in range(group):
        _fetch_queries(
            q_desc, do_desc, lse2_desc, delta_desc, q_smem, do_smem, lse2_smem, delta_smem, full, empty,
            part_list, part_count, (group * full_count + member * part_count) * (BLOCK // HALF),
            batch, head + member, (plane + member) * padded, STAGES,
        )  # fmt: skip


@gluon.jit
def _key_gradients(
    dk, dv, n, k_tile, v_tile, q_smem, do_smem, lse2_smem, delta_smem, full, empty,
    words, union, scale, BLOCK_D: gl.constexpr, STAGES: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """(dk, dv, ds16) after tile n of queries: dk in flight, with its operand ds16; dk not yet times scale.

    Of a MASKED tile, words: pointers to the words of its queries in the keys' lines of the bitmap; union: to those in
    the last line.
    """
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    d_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    query: gl.constexpr = gl.SliceLayout(0, s_layout)
    operand: gl.constexpr = gl.DotOperandLayout(0, d_layout, 2)
    stage = stage_of(n, STAGES)
    q_tile = q_smem.index(stage).reshape([HALF, BLOCK_D])
    do_tile = do_smem.index(stage).reshape([HALF, BLOCK_D])
    nothing = gl.full([HALF, HALF], 0.0, gl.float32, s_layout)
    mbarrier.wait(full.index(stage), full_phase(n, STAGES))
    if MASKED:
        _clean_streamed(q_smem.index(stage), do_smem.index(stage), union, HALF, BLOCK_D)
    s = warpgroup_mma(k_tile, q_tile.permute((1, 0)), nothing, use_acc=False, is_async=True)  # [keys, queries]
    dp = warpgroup_mma(v_tile, do_tile.permute((1, 0)), nothing, use_acc=False, is_async=True)
    s = warpgroup_mma_wait(1, deps=[s])

    lse2 = lse2_smem.index(stage).load(query)
    p = gl.exp2(s * (scale * LOG2E) - lse2[None, :])
    if MASKED:
        p = where_seen(p, 0.0, words, 0, gl.arange(0, HALF, layout=query)[None, :], HALF)
    p16 = gl.convert_layout(p.to(q_smem.dtype), operand)
    dv = warpgroup_mma(p16, do_tile, dv, is_async=True)
    dp = warpgroup_mma_wait(1, deps=[dp])
    delta = delta_smem.index(stage).load(query)
    ds16 = gl.convert_layout((p * (dp - delta[None, :])).to(q_smem.dtype), operand)
    dk = warpgroup_mma(ds16, q_tile, dk, is_async=True)
    dv, dk, _p16, _ds16 = warpgroup_mma_wait(0, deps=[dv, dk, p16, ds16])
    mbarrier.arrive(empty.index(stage), count=1)
    return dk, dv


@gluon.jit
def _consume_queries(
    k_smem, v_smem, q_smem, do_smem, lse2_smem, delta_smem, resident, full, empty,
    full_tiles, part_tiles, group, maps, k_doc, first, k_length, dk, dv, slot_dk, slot_dv, slot, to, scale,
    CONSUMER: gl.constexpr, HEAD_DIM: gl.constexpr, BLOCK_D: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """full_tiles: of all query heads of the group. part_tiles: of one of them. to: the block's first row in dk and
    dv, or in slot_dk and slot_dv."""
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    d_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    WORDS: gl.constexpr = map_words(BLOCK)
    TILES: gl.constexpr = BLOCK // HALF
    words = maps + (CONSUMER * HALF + gl.arange(0, HALF, layout=gl.SliceLayout(1, s_layout))) * WORDS
    k_tile = k_smem.index(CONSUMER).reshape([HALF, BLOCK_D])
    v_tile = v_smem.index(CONSUMER).reshape([HALF, BLOCK_D])
    acc_k = gl.full([HALF, BLOCK_D], 0.0, gl.float32, d_layout)
    acc_v = gl.full([HALF, BLOCK_D], 0.0, gl.float32, d_layout)
    mbarrier.wait(resident, 0)
    half = first + CONSUMER * HALF
    _clean_resident(k_smem.index(CONSUMER), v_smem.index(CONSUMER), k_doc + half, k_length - half, BLOCK_D)
    for n in range(full_tiles):
        acc_k, acc_v = _key_gradients(
            acc_k, acc_v, n, k_tile, v_tile, q_smem, do_smem, lse2_smem, delta_smem, full, empty,
            words, maps, scale, BLOCK_D, STAGES, False,
        )  # fmt: skip
    for member in range(group):
        for i in range(part_tiles):
            at = (i // TILES) * ((BLOCK + 1) * WORDS) + (i % TILES) * (WORDS // TILES)
            acc_k, acc_v = _key_gradients(
                acc_k, acc_v, full_tiles + member * part_tiles + i,
                k_tile, v_tile, q_smem, do_smem, lse2_smem, delta_smem, full, empty,
                words + at, maps + (at + BLOCK * WORDS), scale, BLOCK_D, STAGES, True,
            )  # fmt: skip
    acc_k = acc_k * scale

    local = CONSUMER * HALF + gl.arange(0, HALF, layout=gl.SliceLayout(1, d_layout))
    columns = gl.arange(0, BLOCK_D, layout=gl.SliceLayout(0, d_layout))
    written = (columns[None, :] < HEAD_DIM) & (local[:, None] >= 0)
    at = to * HEAD_DIM + local[:, None] * HEAD_DIM + columns[None, :]
    if slot < 0:
        written = written & (first + local[:, None] < k_length)
        gl.store(dk + at, acc_k.to(dk.dtype.element_ty), mask=written)
        gl.store(dv + at, acc_v.to(dv.dtype.element_ty), mask=written)
    else:
        gl.store(slot_dk + at, acc_k, mask=written)
        gl.store(slot_dv + at, acc_v, mask=written)


@gluon.jit(do_not_specialize=["heads", "group", "padded", "k_length", "k_blocks"])
def gluon_key_gradient_kernel(
    q_desc, k_desc, v_desc, do_desc, lse2_desc, delta_desc, dk, dv, slot_dk, slot_dv,
    full_ptr, full_idx, part_ptr, part_idx, part_map,
    work_row, work_start, work_stop, work_slot,
    k_doc, heads, group, padded, k_length, k_blocks, scale,
    HEAD_DIM: gl.constexpr, BLOCK_D: gl.constexpr, STAGES: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr, CONSUMER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """One program per (work item of the k-major list, key head); heads = Hkv.

    Descriptors: q, dO [B, Hq, Tq, D] and k, v [B, Hkv, Tk, D] in boxes of 64 rows, padded to BLOCK_D; lse2 and delta
    (fp32, `padded` per query head) in boxes of 64. Launched with 4 warps, which are consumer 0.
    """
    kv_head = gl.program_id(0) % heads
    item = gl.program_id(0) // heads
    row = gl.load(work_row + item)
    if row < 0:  # the list is padded to its capacity
        return
    batch = row // k_blocks
    first = (row % k_blocks) * BLOCK
    start = gl.load(work_start + item)
    stop = gl.load(work_stop + item)
    slot = gl.load(work_slot + item)
    full_from = gl.load(full_ptr + row)
    part_from = gl.load(part_ptr + row)
    full_blocks = gl.load(full_ptr + row + 1) - full_from
    full_list = full_idx + full_from + gl.minimum(start, full_blocks)
    full_count = gl.minimum(stop, full_blocks) - gl.minimum(start, full_blocks)
    part_from += gl.maximum(start - full_blocks, 0)
    part_list = part_idx + part_from
    part_count = gl.maximum(stop - full_blocks, 0) - gl.maximum(start - full_blocks, 0)
    maps = part_map + part_from * ((BLOCK + 1) * map_words(BLOCK))
    if slot < 0:
        to = (batch.to(gl.int64) * heads + kv_head) * k_length + first
    else:
        to = (slot.to(gl.int64) * heads + kv_head) * BLOCK

    k_smem = gl.allocate_shared_memory(k_desc.dtype, [2] + k_desc.block_type.shape, k_desc.layout)
    v_smem = gl.allocate_shared_memory(v_desc.dtype, [2] + v_desc.block_type.shape, v_desc.layout)
    q_smem = gl.allocate_shared_memory(q_desc.dtype, [STAGES] + q_desc.block_type.shape, q_desc.layout)
    do_smem = gl.allocate_shared_memory(do_desc.dtype, [STAGES] + do_desc.block_type.shape, do_desc.layout)
    lse2_smem = gl.allocate_shared_memory(lse2_desc.dtype, [STAGES] + lse2_desc.block_type.shape, lse2_desc.layout)
    delta_smem = gl.allocate_shared_memory(delta_desc.dtype, [STAGES] + delta_desc.block_type.shape, delta_desc.layout)
    resident = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(resident, count=1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=2)
    fence_async_shared()

    # The tuples are written in place: assigned to a name, their constexprs would become tensors.
    gl.warp_specialize(
        [
            (_consume_queries, (
                k_smem, v_smem, q_smem, do_smem, lse2_smem, delta_smem, resident, full, empty,
                group * full_count * (BLOCK // HALF), part_count * (BLOCK // HALF), group, maps,
                k_doc + batch.to(gl.int64) * k_length, first, k_length,
                dk, dv, slot_dk, slot_dv, slot, to, scale, gl.constexpr(0), HEAD_DIM, BLOCK_D, STAGES,
            )),
            (_consume_queries, (
                k_smem, v_smem, q_smem, do_smem, lse2_smem, delta_smem, resident, full, empty,
                group * full_count * (BLOCK // HALF), part_count * (BLOCK // HALF), group, maps,
                k_doc + batch.to(gl.int64) * k_length, first, k_length,
                dk, dv, slot_dk, slot_dv, slot, to, scale, gl.constexpr(1), HEAD_DIM, BLOCK_D, STAGES,
            )),
            (_produce_queries, (
                q_desc, k_desc, v_desc, do_desc, lse2_desc, delta_desc,
                q_smem, k_smem, v_smem, do_smem, lse2_smem, delta_smem, resident, full, empty,
                full_list, full_count, part_list, part_count, batch, kv_head, group, kv_head * group,
                (batch * heads + kv_head) * group, first, padded, STAGES,
            )),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip


# ---------------------------------------------------------------------- dQ


@gluon.jit
def _fetch_keys(
    k_desc, v_desc, k_smem, v_smem, full, empty, index, count, first, batch, head,
    KEYS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The tiles of index[:count], of which the first is tile `first`."""
    for i in range(count):
        token = gl.load(index + i) * BLOCK
        for part in gl.static_range(BLOCK // KEYS):
            n = first + i * (BLOCK // KEYS) + part
            stage = stage_of(n, STAGES)
            at = token + part * KEYS
            mbarrier.wait(empty.index(stage), empty_phase(n, STAGES))
            mbarrier.expect(full.index(stage), 2 * k_desc.block_type.nbytes)
            tma_load(k_desc, [batch, head, at, 0], full.index(stage), k_smem.index(stage))
            tma_load(v_desc, [batch, head, at, 0], full.index(stage), v_smem.index(stage))


@gluon.jit
def _produce_keys(
    q_desc, k_desc, v_desc, do_desc, q_smem, k_smem, v_smem, do_smem, resident, full, empty,
    full_list, full_count, part_list, part_count, batch, head, kv_head, first,
    KEYS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    mbarrier.expect(resident, 4 * q_desc.block_type.nbytes)
    for part in gl.static_range(BLOCK // HALF):
        tma_load(q_desc, [batch, head, first + part * HALF, 0], resident, q_smem.index(part))
        tma_load(do_desc, [batch, head, first + part * HALF, 0], resident, do_smem.index(part))
    _fetch_keys(k_desc, v_desc, k_smem, v_smem, full, empty, full_list, full_count, 0, batch, kv_head, KEYS, STAGES)
    _fetch_keys(
        k_desc, v_desc, k_smem, v_smem, full, empty, part_list, part_count, full_count * (BLOCK // KEYS),
        batch, kv_head, KEYS, STAGES,
    )  # fmt: skip


@gluon.jit
def _query_gradient(
    dq, n, q_tile, do_tile, k_smem, v_smem, full, empty, lse2, delta, words, union, scale,
    BLOCK_D: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """(dq, ds16) after tile n of keys: dq in flight, with its operand ds16, and not yet times scale.

    words, union as in `_key_gradients`, of queries.
    """
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    d_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    stage = stage_of(n, STAGES)
    k_tile = k_smem.index(stage).reshape([KEYS, BLOCK_D])
    v_tile = v_smem.index(stage).reshape([KEYS, BLOCK_D])
    nothing = gl.full([HALF, KEYS], 0.0, gl.float32, s_layout)
    mbarrier.wait(full.index(stage), full_phase(n, STAGES))
    if MASKED:
        _clean_streamed(k_smem.index(stage), v_smem.index(stage), union, KEYS, BLOCK_D)
    s = warpgroup_mma(q_tile, k_tile.permute((1, 0)), nothing, use_acc=False, is_async=True)
    dp = warpgroup_mma(do_tile, v_tile.permute((1, 0)), nothing, use_acc=False, is_async=True)
    s = warpgroup_mma_wait(1, deps=[s])

    p = gl.exp2(s * (scale * LOG2E) - lse2[:, None])
    if MASKED:
        keys = gl.arange(0, KEYS, layout=gl.SliceLayout(0, s_layout))
        p = where_seen(p, 0.0, words, 0, keys[None, :], KEYS)
    dp = warpgroup_mma_wait(0, deps=[dp])
    ds = p * (dp - delta[:, None])
    ds16 = gl.convert_layout(ds.to(k_smem.dtype), gl.DotOperandLayout(0, d_layout, 2))
    dq = warpgroup_mma(ds16, k_tile, dq, is_async=True)
    dq, _ds16 = warpgroup_mma_wait(0, deps=[dq, ds16])
    mbarrier.arrive(empty.index(stage), count=1)
    return dq


@gluon.jit
def _consume_keys(
    q_smem, do_smem, k_smem, v_smem, resident, full, empty, full_tiles, part_tiles, maps, q_doc, first, q_length,
    lse2, delta, dq, slot_dq, slot, to, scale,
    CONSUMER: gl.constexpr, HEAD_DIM: gl.constexpr, BLOCK_D: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """lse2, delta: pointers to those of the block's first row. to: this row in dq, or in slot_dq."""
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    d_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    WORDS: gl.constexpr = map_words(BLOCK)
    TILES: gl.constexpr = BLOCK // KEYS
    rows = CONSUMER * HALF + gl.arange(0, HALF, layout=gl.SliceLayout(1, s_layout))
    words = maps + rows * WORDS
    row_lse2 = gl.load(lse2 + rows)
    row_delta = gl.load(delta + rows)
    q_tile = q_smem.index(CONSUMER).reshape([HALF, BLOCK_D])
    do_tile = do_smem.index(CONSUMER).reshape([HALF, BLOCK_D])
    acc = gl.full([HALF, BLOCK_D], 0.0, gl.float32, d_layout)
    mbarrier.wait(resident, 0)
    half = first + CONSUMER * HALF
    _clean_resident(q_smem.index(CONSUMER), do_smem.index(CONSUMER), q_doc + half, q_length - half, BLOCK_D)
    for n in range(full_tiles):
        acc = _query_gradient(
            acc, n, q_tile, do_tile, k_smem, v_smem, full, empty, row_lse2, row_delta,
            words, maps, scale, BLOCK_D, KEYS, STAGES, False,
        )  # fmt: skip
    for i in range(part_tiles):
        at = (i // TILES) * ((BLOCK + 1) * WORDS) + (i % TILES) * (WORDS // TILES)
        acc = _query_gradient(
            acc, full_tiles + i, q_tile, do_tile, k_smem, v_smem, full, empty, row_lse2, row_delta,
            words + at, maps + (at + BLOCK * WORDS), scale, BLOCK_D, KEYS, STAGES, True,
        )  # fmt: skip
    acc = acc * scale

    local = CONSUMER * HALF + gl.arange(0, HALF, layout=gl.SliceLayout(1, d_layout))
    columns = gl.arange(0, BLOCK_D, layout=gl.SliceLayout(0, d_layout))
    written = (columns[None, :] < HEAD_DIM) & (local[:, None] >= 0)
    at = to * HEAD_DIM + local[:, None] * HEAD_DIM + columns[None, :]
    if slot < 0:
        gl.store(dq + at, acc.to(dq.dtype.element_ty), mask=written & (first + local[:, None] < q_length))
    else:
        gl.store(slot_dq + at, acc, mask=written)


@gluon.jit(do_not_specialize=["heads", "group", "padded", "q_length", "q_blocks"])
def gluon_query_gradient_kernel(
    q_desc, k_desc, v_desc, do_desc, lse2, delta, dq, slot_dq,
    full_ptr, full_idx, part_ptr, part_idx, part_map,
    work_row, work_start, work_stop, work_slot,
    q_doc, heads, group, padded, q_length, q_blocks, scale,
    HEAD_DIM: gl.constexpr, BLOCK_D: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr, CONSUMER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """One program per (work item, query head). Descriptors as in `gluon_key_gradient_kernel`, but those of k and v in
    boxes of KEYS rows."""
    head = gl.program_id(0) % heads
    item = gl.program_id(0) // heads
    row = gl.load(work_row + item)
    if row < 0:  # the list is padded to its capacity
        return
    batch = row // q_blocks
    first = (row % q_blocks) * BLOCK
    start = gl.load(work_start + item)
    stop = gl.load(work_stop + item)
    slot = gl.load(work_slot + item)
    full_from = gl.load(full_ptr + row)
    part_from = gl.load(part_ptr + row)
    full_blocks = gl.load(full_ptr + row + 1) - full_from
    full_list = full_idx + full_from + gl.minimum(start, full_blocks)
    full_count = gl.minimum(stop, full_blocks) - gl.minimum(start, full_blocks)
    part_from += gl.maximum(start - full_blocks, 0)
    part_list = part_idx + part_from
    part_count = gl.maximum(stop - full_blocks, 0) - gl.maximum(start - full_blocks, 0)
    maps = part_map + part_from * ((BLOCK + 1) * map_words(BLOCK))
    plane = batch.to(gl.int64) * heads + head
    rows_at = plane * padded + first
    if slot < 0:
        to = plane * q_length + first
    else:
        to = (slot.to(gl.int64) * heads + head) * BLOCK

    q_smem = gl.allocate_shared_memory(q_desc.dtype, [2] + q_desc.block_type.shape, q_desc.layout)
    do_smem = gl.allocate_shared_memory(do_desc.dtype, [2] + do_desc.block_type.shape, do_desc.layout)
    k_smem = gl.allocate_shared_memory(k_desc.dtype, [STAGES] + k_desc.block_type.shape, k_desc.layout)
    v_smem = gl.allocate_shared_memory(v_desc.dtype, [STAGES] + v_desc.block_type.shape, v_desc.layout)
    resident = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(resident, count=1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=2)
    fence_async_shared()

    # The tuples are written in place: assigned to a name, their constexprs would become tensors.
    gl.warp_specialize(
        [
            (_consume_keys, (
                q_smem, do_smem, k_smem, v_smem, resident, full, empty,
                full_count * (BLOCK // KEYS), part_count * (BLOCK // KEYS), maps,
                q_doc + batch.to(gl.int64) * q_length, first, q_length, lse2 + rows_at, delta + rows_at,
                dq, slot_dq, slot, to, scale, gl.constexpr(0), HEAD_DIM, BLOCK_D, KEYS, STAGES,
            )),
            (_consume_keys, (
                q_smem, do_smem, k_smem, v_smem, resident, full, empty,
                full_count * (BLOCK // KEYS), part_count * (BLOCK // KEYS), maps,
                q_doc + batch.to(gl.int64) * q_length, first, q_length, lse2 + rows_at, delta + rows_at,
                dq, slot_dq, slot, to, scale, gl.constexpr(1), HEAD_DIM, BLOCK_D, KEYS, STAGES,
            )),
            (_produce_keys, (
                q_desc, k_desc, v_desc, do_desc, q_smem, k_smem, v_smem, do_smem, resident, full, empty,
                full_list, full_count, part_list, part_count, batch, head, head // group, first, KEYS, STAGES,
            )),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip
