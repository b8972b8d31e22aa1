"""Bitfield attention, backward, for Hopper in Gluon: dK/dV over the k-major lists, dQ over the q-major lists.

**Not yet run on a GPU**: its own source was run on a CPU (tests/kernels). Plan, slots and arithmetic are those of
`bitfield_backward`; for plans with bitmaps and without a softcap. One block of 128 tokens is held in shared memory
(dK/dV: K and V; dQ: Q and dO), and a producer warp streams tiles of the other side by TMA (dK/dV: 64 queries of Q, dO,
LSE and delta; dQ: 64 keys of K and V). Each of two consumer warpgroups takes 64 rows of the held block.

Waits and arrivals. Tile n is the n-th of the item, FULL ones of all heads first; `stage_of` and the phases are the
forward's, and the docstring of `bitfield_gluon_forward` says why they are right.

    barrier    count      producer, 1 warp                        consumer c = 0, 1 (rows c * 64 of the block)
    resident   1 + bytes  expect, 4 loads                         wait(0), once, even if there is no tile
    full[s]    1 + bytes  expect, loads of one stage              wait(round & 1), then the products of tile n
    empty[s]   2          wait(round & 1 ^ 1) before the loads    arrive(1) when all products of tile n are complete

- In dK/dV S and dP are started together; P is computed beside dP, and dS beside the product of dV. dQ is in
  `bitfield_gluon_query_gradient`. A product with an operand in registers that is in flight when an iteration ends makes
  ptxas wait for each product on its own, so all are waited for there.
- Operands in registers (P, dS) are passed to the wait that ends their product: they stay untouched until then.
- LSE and delta of a tile are read from shared memory before the arrival, which follows a barrier of the warpgroup.

Rows that take no part may hold NaN or infinity, and TMA loads whole boxes. Consumers write zeros over such rows of
their own half of the held block, once, and over the rows of a PARTIAL tile that the last line of its bitmap hides. Both
consumers write the same zeros before the products that need them, so neither waits for the other; S may read a row
while it changes, whose scores the bitmap hides. FULL tiles have no such rows. Cost: a test of that line per PARTIAL
tile. A fence makes the zeros visible to wgmma; Triton puts a barrier of the warpgroup before the product.
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

from .bitfield_common import LOG2E, line_bits, map_words, where_bits
from .bitfield_gluon_producer import BLOCK, HALF, empty_phase, full_phase, products, stage_of
from .gluon_compat import reinterpret, tma_load

# ---------------------------------------------------------------------- zeros for rows that take no part

PANEL = gl.constexpr(64)  # columns of 16 bits
PIECE = gl.constexpr(16)  # rows that a warpgroup cleans at a time, with one access of 16 bytes per thread


@gluon.jit
def clean_held(tiles, one, other, docs, length, BLOCK_D: gl.constexpr):
    """Zeros over rows of padding of a consumer's half of both held tensors; docs: of its `length` rows."""
    rows = gl.arange(0, HALF, layout=gl.BlockedLayout([HALF // 32], [32], [4], [0]))  # all of them in each warp
    taking = gl.load(docs + rows, mask=rows < length, other=0)  # beyond the end TMA writes zeros
    todo = gl.where(gl.min(taking, 0) < 0, (1 << HALF // PIECE) - 1, 0)
    if todo != 0:
        _clean(tiles, one, other, todo, docs, length, 4, HALF, BLOCK_D, False)


@gluon.jit
def clean_streamed(tiles, one, other, union, COUNT: gl.constexpr, ROWS: gl.constexpr, BLOCK_D: gl.constexpr):
    """Zeros over the rows of both tiles of a stage that are not seen; union: words of the bitmap's last line."""
    todo = 0
    for i in gl.static_range(ROWS // 32):
        blind = ~gl.load(union + i)
        todo |= gl.where((blind & 0xFFFF) != 0, 1 << 2 * i, 0) | gl.where((blind >> 16) != 0, 2 << 2 * i, 0)
    if todo != 0:
        _clean(tiles, one, other, todo, union, ROWS, COUNT, ROWS, BLOCK_D, True)


@gluon.jit
def _clean(
    tiles, one, other, todo, source, length,
    COUNT: gl.constexpr, ROWS: gl.constexpr, BLOCK_D: gl.constexpr, MAPPED: gl.constexpr,
):  # fmt: skip
    """Zeros over rows of two of COUNT tiles. Bit i of todo: rows PIECE * i and following. source: words of a bitmap if
    MAPPED, else documents of the rows.

    A tile is taken as [pieces, PIECE rows, 32 words]: in panels of 64 columns a row is 128 bytes. Swizzling moves
    values within these 128 bytes only, so it does not matter here.
    """
    PIECES: gl.constexpr = ROWS // PIECE
    PANELS: gl.constexpr = BLOCK_D // PANEL
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    pieces = reinterpret(tiles, gl.int32, [COUNT * PANELS * PIECES, PIECE, 32], plain)
    i = todo * 0
    while todo != 0:  # of a length that depends on data, or compilers would unroll it into the hot loop
        if (todo & 1) != 0:
            rows = i * PIECE + gl.arange(0, PIECE, layout=gl.SliceLayout(1, _piece_layout()))
            if MAPPED:
                inside = ((gl.load(source + rows // 32) >> (rows % 32)) & 1) != 0
            else:
                inside = gl.load(source + rows, mask=rows < length, other=0) >= 0
            for panel in gl.static_range(PANELS):
                _clean_piece(pieces.index((one * PANELS + panel) * PIECES + i), inside)
                _clean_piece(pieces.index((other * PANELS + panel) * PIECES + i), inside)
        todo = todo >> 1
        i += 1
    fence_async_shared()


@gluon.jit
def _clean_piece(piece, inside):
    words = piece.load(_piece_layout())
    piece.store(gl.where(inside[:, None], words, 0))


@gluon.constexpr_function
def _piece_layout():
    return gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0])


# ---------------------------------------------------------------------- work items


@gluon.jit
def work(
    row, item, full_ptr, full_idx, part_ptr, part_idx, part_map, work_start, work_stop, work_slot,
    head, heads, length, blocks, TILES: gl.constexpr,
):  # fmt: skip
    """Of a work item and a head: batch row, first token of its block, index and number of tiles (TILES per block) of
    FULL and of PARTIAL blocks, these blocks' bitmaps, and where the first row goes: in the result or, as -1 - row, in
    the slots."""
    batch = row // blocks
    first = (row % blocks) * BLOCK
    start = gl.load(work_start + item)
    stop = gl.load(work_stop + item)
    slot = gl.load(work_slot + item)
    full_from = gl.load(full_ptr + row)
    full = gl.load(full_ptr + row + 1) - full_from
    part_from = gl.load(part_ptr + row) + gl.maximum(start - full, 0)
    full_count = gl.minimum(stop, full) - gl.minimum(start, full)
    part_count = gl.maximum(stop - full, 0) - gl.maximum(start - full, 0)
    maps = part_map + part_from * ((BLOCK + 1) * map_words(BLOCK))
    if slot < 0:
        to = (batch * heads + head) * length + first
    else:
        to = -1 - (slot * heads + head) * BLOCK
    full_list = full_idx + full_from + gl.minimum(start, full)
    return batch, first, full_list, full_count * TILES, part_idx + part_from, part_count * TILES, maps, to


@gluon.jit
def write(
    gradient, result, slots, to, rows, CONSUMER: gl.constexpr, HEAD_DIM: gl.constexpr, BLOCK_D: gl.constexpr
):  # fmt: skip
    """A consumer's half of a block. to: as `work` has it. rows: how many the result has from there on."""
    layout: gl.constexpr = products(BLOCK_D)
    local = CONSUMER * HALF + gl.arange(0, HALF, layout=gl.SliceLayout(1, layout))
    columns = gl.arange(0, BLOCK_D, layout=gl.SliceLayout(0, layout))
    inside = (columns[None, :] < HEAD_DIM) & (local[:, None] >= 0)
    tile = local[:, None] * HEAD_DIM + columns[None, :]
    if to >= 0:
        at = result + to.to(gl.int64) * HEAD_DIM
        gl.store(at + tile, gradient.to(result.dtype.element_ty), mask=inside & (local[:, None] < rows))
    else:
        gl.store(slots + (-1 - to).to(gl.int64) * HEAD_DIM + tile, gradient, mask=inside)


# ---------------------------------------------------------------------- dK and dV


@gluon.jit
def _fetch_queries(
    q_desc, do_desc, lse2_desc, delta_desc, streamed, lse2_smem, delta_smem, full, empty,
    index, tiles, n, batch, head, row_at, STAGES: gl.constexpr,
):  # fmt: skip
    """That many tiles of one query head, of the blocks at index, the first of them tile n. row_at: its first row."""
    for i in range(tiles):
        token = gl.load(index + i // (BLOCK // HALF)) * BLOCK + i % (BLOCK // HALF) * HALF
        stage = stage_of(n + i, STAGES)
        mbarrier.wait(empty.index(stage), empty_phase(n + i, STAGES))
        mbarrier.expect(full.index(stage), 2 * q_desc.block_type.nbytes + 2 * lse2_desc.block_type.nbytes)
        tma_load(q_desc, [batch, head, token, 0], full.index(stage), streamed.index(stage))
        tma_load(lse2_desc, [row_at + token], full.index(stage), lse2_smem.index(stage))
        tma_load(do_desc, [batch, head, token, 0], full.index(stage), streamed.index(STAGES + stage))
        tma_load(delta_desc, [row_at + token], full.index(stage), delta_smem.index(stage))


@gluon.jit
def _produce_queries(
    q_desc, k_desc, v_desc, do_desc, lse2_desc, delta_desc,
    held, streamed, lse2_smem, delta_smem, resident, full, empty,
    full_list, full_tiles, part_list, part_tiles, batch, kv_head, group, head, plane, first, padded,
    STAGES: gl.constexpr,
):  # fmt: skip
    """FULL tiles of all heads of the group, then PARTIAL ones. head: the first query head; plane: its place among all
    heads of all batch rows, each with `padded` rows of the LSE and of delta."""
    mbarrier.expect(resident, 4 * k_desc.block_type.nbytes)
    for part in gl.static_range(BLOCK // HALF):
        tma_load(k_desc, [batch, kv_head, first + part * HALF, 0], resident, held.index(part))
        tma_load(v_desc, [batch, kv_head, first + part * HALF, 0], resident, held.index(2 + part))
    for member in range(group):
        _fetch_queries(
            q_desc, do_desc, lse2_desc, delta_desc, streamed, lse2_smem, delta_smem, full, empty,
            full_list, full_tiles, member * full_tiles, batch, head + member, (plane + member) * padded, STAGES,
        )  # fmt: skip
    for member in range(group):
        _fetch_queries(
            q_desc, do_desc, lse2_desc, delta_desc, streamed, lse2_smem, delta_smem, full, empty,
            part_list, part_tiles, group * full_tiles + member * part_tiles, batch,
            head + member, (plane + member) * padded, STAGES,
        )  # fmt: skip


@gluon.jit
def _key_gradients(
    dk, dv, n, k_tile, v_tile, streamed, lse2_smem, delta_smem, full, empty,
    words, union, scale, BLOCK_D: gl.constexpr, STAGES: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """(dk, dv) after tile n of queries; dk not yet times scale.

    Of a MASKED tile, words: pointers to the words of its queries in the keys' lines of the bitmap; union: to those in
    the last line.
    """
    s_layout: gl.constexpr = products(HALF)
    d_layout: gl.constexpr = products(BLOCK_D)
    query: gl.constexpr = gl.SliceLayout(0, s_layout)
    operand: gl.constexpr = gl.DotOperandLayout(0, d_layout, 2)
    stage = stage_of(n, STAGES)
    q_tile = streamed.index(stage).reshape([HALF, BLOCK_D])
    do_tile = streamed.index(STAGES + stage).reshape([HALF, BLOCK_D])
    nothing = gl.full([HALF, HALF], 0.0, gl.float32, s_layout)
    mbarrier.wait(full.index(stage), full_phase(n, STAGES))
    s = warpgroup_mma(k_tile, q_tile.permute((1, 0)), nothing, use_acc=False, is_async=True)  # [keys, queries]
    if MASKED:
        clean_streamed(streamed, stage, STAGES + stage, union, 2 * STAGES, HALF, BLOCK_D)
    dp = warpgroup_mma(v_tile, do_tile.permute((1, 0)), nothing, use_acc=False, is_async=True)
    if MASKED:
        queries = gl.arange(0, HALF, layout=query)
        bits = line_bits(words, 0, queries[None, :], HALF)
    s = warpgroup_mma_wait(1, deps=[s])

    lse2 = lse2_smem.index(stage).load(query)
    p = gl.exp2(s * (scale * LOG2E) - lse2[None, :])
    if MASKED:
        p = where_bits(p, 0.0, bits, queries[None, :])
    p16 = gl.convert_layout(p.to(streamed.dtype), operand)
    dv = warpgroup_mma(p16, do_tile, dv, is_async=True)
    dp = warpgroup_mma_wait(1, deps=[dp])
    delta = delta_smem.index(stage).load(query)
    ds16 = gl.convert_layout((p * (dp - delta[None, :])).to(streamed.dtype), operand)
    dk = warpgroup_mma(ds16, q_tile, dk, is_async=True)
    dv, dk, _p16, _ds16 = warpgroup_mma_wait(0, deps=[dv, dk, p16, ds16])
    mbarrier.arrive(empty.index(stage), count=1)
    return dk, dv


@gluon.jit
def _consume_queries(
    held, streamed, lse2_smem, delta_smem, resident, full, empty,
    full_tiles, part_tiles, group, maps, docs, rows, dk, dv, slot_dk, slot_dv, to, scale,
    CONSUMER: gl.constexpr, HEAD_DIM: gl.constexpr, BLOCK_D: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """full_tiles, part_tiles: of one query head of the group. docs: of the block, which has `rows` keys; to: as `work`
    has it."""
    s_layout: gl.constexpr = products(HALF)
    d_layout: gl.constexpr = products(BLOCK_D)
    WORDS: gl.constexpr = map_words(BLOCK)
    TILES: gl.constexpr = BLOCK // HALF
    words = maps + (CONSUMER * HALF + gl.arange(0, HALF, layout=gl.SliceLayout(1, s_layout))) * WORDS
    k_tile = held.index(CONSUMER).reshape([HALF, BLOCK_D])
    v_tile = held.index(2 + CONSUMER).reshape([HALF, BLOCK_D])
    acc_k = gl.full([HALF, BLOCK_D], 0.0, gl.float32, d_layout)
    acc_v = gl.full([HALF, BLOCK_D], 0.0, gl.float32, d_layout)
    mbarrier.wait(resident, 0)
    clean_held(held, CONSUMER, 2 + CONSUMER, docs + CONSUMER * HALF, rows - CONSUMER * HALF, BLOCK_D)
    for n in range(group * full_tiles):
        acc_k, acc_v = _key_gradients(
            acc_k, acc_v, n, k_tile, v_tile, streamed, lse2_smem, delta_smem, full, empty,
            words, maps, scale, BLOCK_D, STAGES, False,
        )  # fmt: skip
    for member in range(group):
        for i in range(part_tiles):
            at = (i // TILES) * ((BLOCK + 1) * WORDS) + (i % TILES) * (WORDS // TILES)
            acc_k, acc_v = _key_gradients(
                acc_k, acc_v, group * full_tiles + member * part_tiles + i,
                k_tile, v_tile, streamed, lse2_smem, delta_smem, full, empty,
                words + at, maps + (at + BLOCK * WORDS), scale, BLOCK_D, STAGES, True,
            )  # fmt: skip
    write(acc_k * scale, dk, slot_dk, to, rows, CONSUMER, HEAD_DIM, BLOCK_D)
    write(acc_v, dv, slot_dv, to, rows, CONSUMER, HEAD_DIM, BLOCK_D)


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
    batch, first, full_list, full_tiles, part_list, part_tiles, maps, to = work(
        row, item, full_ptr, full_idx, part_ptr, part_idx, part_map, work_start, work_stop, work_slot,
        kv_head, heads, k_length, k_blocks, BLOCK // HALF,
    )  # fmt: skip
    docs = k_doc + batch * k_length + first

    held = gl.allocate_shared_memory(k_desc.dtype, [4] + k_desc.block_type.shape, k_desc.layout)
    streamed = gl.allocate_shared_memory(q_desc.dtype, [2 * STAGES] + q_desc.block_type.shape, q_desc.layout)
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
                held, streamed, lse2_smem, delta_smem, resident, full, empty,
                full_tiles, part_tiles, group, maps,
                docs, k_length - first, dk, dv, slot_dk, slot_dv, to, scale, gl.constexpr(0), HEAD_DIM, BLOCK_D, STAGES,
            )),
            (_consume_queries, (
                held, streamed, lse2_smem, delta_smem, resident, full, empty,
                full_tiles, part_tiles, group, maps,
                docs, k_length - first, dk, dv, slot_dk, slot_dv, to, scale, gl.constexpr(1), HEAD_DIM, BLOCK_D, STAGES,
            )),
            (_produce_queries, (
                q_desc, k_desc, v_desc, do_desc, lse2_desc, delta_desc,
                held, streamed, lse2_smem, delta_smem, resident, full, empty,
                full_list, full_tiles, part_list, part_tiles, batch, kv_head, group, kv_head * group,
                (batch * heads + kv_head) * group, first, padded, STAGES,
            )),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip
