"""Bitfield attention, backward, for Hopper in Gluon: dQ over the q-major lists. See `bitfield_gluon_backward`.

Q and dO of 128 queries are held, K and V come in tiles of 64 keys, two per block. Each half of a block has a product in
flight beside every step: S of the next tile is started before P of this one is computed, and carried to the next block.
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
from .bitfield_gluon_backward import clean_held, clean_streamed, work, write
from .bitfield_gluon_producer import BLOCK, HALF, empty_phase, full_phase, products, stage_of
from .gluon_compat import tma_load


@gluon.jit
def _fetch_keys(
    k_desc, v_desc, streamed, full, empty, index, tiles, n, batch, head,
    STAGES: gl.constexpr,
):  # fmt: skip
    """That many tiles, of the blocks at index, the first of them tile n."""
    for i in range(tiles):
        token = gl.load(index + i // (BLOCK // HALF)) * BLOCK + i % (BLOCK // HALF) * HALF
        stage = stage_of(n + i, STAGES)
        mbarrier.wait(empty.index(stage), empty_phase(n + i, STAGES))
        mbarrier.expect(full.index(stage), 2 * k_desc.block_type.nbytes)
        tma_load(k_desc, [batch, head, token, 0], full.index(stage), streamed.index(stage))
        tma_load(v_desc, [batch, head, token, 0], full.index(stage), streamed.index(STAGES + stage))


@gluon.jit
def _produce_keys(
    q_desc, k_desc, v_desc, do_desc, held, streamed, resident, full, empty,
    full_list, full_tiles, part_list, part_tiles, batch, head, kv_head, first,
    STAGES: gl.constexpr,
):  # fmt: skip
    mbarrier.expect(resident, 4 * q_desc.block_type.nbytes)
    for part in gl.static_range(BLOCK // HALF):
        tma_load(q_desc, [batch, head, first + part * HALF, 0], resident, held.index(part))
        tma_load(do_desc, [batch, head, first + part * HALF, 0], resident, held.index(2 + part))
    _fetch_keys(k_desc, v_desc, streamed, full, empty, full_list, full_tiles, 0, batch, kv_head, STAGES)
    _fetch_keys(k_desc, v_desc, streamed, full, empty, part_list, part_tiles, full_tiles, batch, kv_head, STAGES)


@gluon.jit
def _key_scores(n, q_tile, streamed, full, BLOCK_D: gl.constexpr, STAGES: gl.constexpr):
    """Begins S of tile n, once it is there."""
    stage = stage_of(n, STAGES)
    mbarrier.wait(full.index(stage), full_phase(n, STAGES))
    nothing = gl.full([HALF, HALF], 0.0, gl.float32, products(HALF))
    k_tile = streamed.index(stage).reshape([HALF, BLOCK_D])
    return warpgroup_mma(q_tile, k_tile.permute((1, 0)), nothing, use_acc=False, is_async=True)


@gluon.jit
def _value_products(n, do_tile, streamed, BLOCK_D: gl.constexpr, STAGES: gl.constexpr):
    """Begins dP of tile n, which is there."""
    nothing = gl.full([HALF, HALF], 0.0, gl.float32, products(HALF))
    v_tile = streamed.index(STAGES + stage_of(n, STAGES)).reshape([HALF, BLOCK_D])
    return warpgroup_mma(do_tile, v_tile.permute((1, 0)), nothing, use_acc=False, is_async=True)


@gluon.jit
def _probabilities(s, lse2, words, scale, MASKED: gl.constexpr):
    """words: pointers to the words of a MASKED tile's keys in the queries' lines of the bitmap."""
    p = gl.exp2(s * (scale * LOG2E) - lse2[:, None])
    if MASKED:
        s_layout: gl.constexpr = products(HALF)
        keys = gl.arange(0, HALF, layout=gl.SliceLayout(0, s_layout))[None, :]
        p = where_bits(p, 0.0, line_bits(words, 0, keys, HALF), keys)
    return p


@gluon.jit
def _query_gradient(
    dq, s, n, last, q_tile, do_tile, streamed, full, empty, lse2, delta, words, union, scale,
    BLOCK_D: gl.constexpr, STAGES: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """(dq, S of tile n + 2) after tiles n and n + 1, two halves of a block of keys, with S of tile n; dq not yet times
    scale. S of tile `last` serves as the one that would follow it.

    Of a MASKED block, words: pointers to the queries' lines of its bitmap; union: to the last line.
    """
    operand: gl.constexpr = gl.DotOperandLayout(0, products(BLOCK_D), 2)
    WORDS: gl.constexpr = HALF // 32
    one, other = stage_of(n, STAGES), stage_of(n + 1, STAGES)
    if MASKED:
        clean_streamed(streamed, one, STAGES + one, union, 2 * STAGES, HALF, BLOCK_D)
    dp = _value_products(n, do_tile, streamed, BLOCK_D, STAGES)
    s_other = _key_scores(n + 1, q_tile, streamed, full, BLOCK_D, STAGES)
    p = _probabilities(s, lse2, words, scale, MASKED)
    dp = warpgroup_mma_wait(1, deps=[dp])
    ds16 = gl.convert_layout((p * (dp - delta[:, None])).to(streamed.dtype), operand)
    dq = warpgroup_mma(ds16, streamed.index(one).reshape([HALF, BLOCK_D]), dq, is_async=True)

    if MASKED:
        clean_streamed(streamed, other, STAGES + other, union + WORDS, 2 * STAGES, HALF, BLOCK_D)
    dp = _value_products(n + 1, do_tile, streamed, BLOCK_D, STAGES)
    s_other = warpgroup_mma_wait(2, deps=[s_other])
    p = _probabilities(s_other, lse2, words + WORDS, scale, MASKED)
    s = _key_scores(gl.minimum(n + 2, last), q_tile, streamed, full, BLOCK_D, STAGES)
    dp, dq, ds16 = warpgroup_mma_wait(1, deps=[dp, dq, ds16])
    mbarrier.arrive(empty.index(one), count=1)
    ds16 = gl.convert_layout((p * (dp - delta[:, None])).to(streamed.dtype), operand)
    dq = warpgroup_mma(ds16, streamed.index(other).reshape([HALF, BLOCK_D]), dq, is_async=True)
    dq, s, _ds16 = warpgroup_mma_wait(0, deps=[dq, s, ds16])
    mbarrier.arrive(empty.index(other), count=1)
    return dq, s


@gluon.jit
def _consume_keys(
    held, streamed, resident, full, empty, full_tiles, part_tiles, maps, docs, rows,
    lse2, delta, dq, slot_dq, to, scale,
    CONSUMER: gl.constexpr, HEAD_DIM: gl.constexpr, BLOCK_D: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """docs, lse2, delta: of the block, which has `rows` queries; to: as `work` has it."""
    s_layout: gl.constexpr = products(HALF)
    d_layout: gl.constexpr = products(BLOCK_D)
    WORDS: gl.constexpr = map_words(BLOCK)
    TILES: gl.constexpr = BLOCK // HALF
    local = CONSUMER * HALF + gl.arange(0, HALF, layout=gl.SliceLayout(1, s_layout))
    words = maps + local * WORDS
    row_lse2 = gl.load(lse2 + local)
    row_delta = gl.load(delta + local)
    q_tile = held.index(CONSUMER).reshape([HALF, BLOCK_D])
    do_tile = held.index(2 + CONSUMER).reshape([HALF, BLOCK_D])
    acc = gl.full([HALF, BLOCK_D], 0.0, gl.float32, d_layout)
    s = gl.full([HALF, HALF], 0.0, gl.float32, s_layout)
    mbarrier.wait(resident, 0)
    clean_held(held, CONSUMER, 2 + CONSUMER, docs + CONSUMER * HALF, rows - CONSUMER * HALF, BLOCK_D)
    last = full_tiles + part_tiles - 1
    if last >= 0:
        s = warpgroup_mma_wait(0, deps=[_key_scores(0, q_tile, streamed, full, BLOCK_D, STAGES)])
    for n in range(0, full_tiles, TILES):
        acc, s = _query_gradient(
            acc, s, n, last, q_tile, do_tile, streamed, full, empty, row_lse2, row_delta,
            words, maps, scale, BLOCK_D, STAGES, False,
        )  # fmt: skip
    for i in range(0, part_tiles, TILES):
        at = (i // TILES) * ((BLOCK + 1) * WORDS)
        acc, s = _query_gradient(
            acc, s, full_tiles + i, last, q_tile, do_tile, streamed, full, empty, row_lse2, row_delta,
            words + at, maps + (at + BLOCK * WORDS), scale, BLOCK_D, STAGES, True,
        )  # fmt: skip
    write(acc * scale, dq, slot_dq, to, rows, CONSUMER, HEAD_DIM, BLOCK_D)


@gluon.jit(do_not_specialize=["heads", "group", "padded", "q_length", "q_blocks"])
def gluon_query_gradient_kernel(
    q_desc, k_desc, v_desc, do_desc, lse2, delta, dq, slot_dq,
    full_ptr, full_idx, part_ptr, part_idx, part_map,
    work_row, work_start, work_stop, work_slot,
    q_doc, heads, group, padded, q_length, q_blocks, scale,
    HEAD_DIM: gl.constexpr, BLOCK_D: gl.constexpr, STAGES: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr, CONSUMER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """One program per (work item, query head). Descriptors as in `gluon_key_gradient_kernel`, but those of k and v in
    boxes of HALF rows."""
    head = gl.program_id(0) % heads
    item = gl.program_id(0) // heads
    row = gl.load(work_row + item)
    if row < 0:  # the list is padded to its capacity
        return
    batch, first, full_list, full_tiles, part_list, part_tiles, maps, to = work(
        row, item, full_ptr, full_idx, part_ptr, part_idx, part_map, work_start, work_stop, work_slot,
        head, heads, q_length, q_blocks, BLOCK // HALF,
    )  # fmt: skip
    rows_at = (batch * heads + head) * padded + first
    docs = q_doc + batch * q_length + first

    held = gl.allocate_shared_memory(q_desc.dtype, [4] + q_desc.block_type.shape, q_desc.layout)
    streamed = gl.allocate_shared_memory(k_desc.dtype, [2 * STAGES] + k_desc.block_type.shape, k_desc.layout)
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
                held, streamed, resident, full, empty,
                full_tiles, part_tiles, maps,
                docs, q_length - first, lse2 + rows_at, delta + rows_at, dq, slot_dq, to, scale,
                gl.constexpr(0), HEAD_DIM, BLOCK_D, STAGES,
            )),
            (_consume_keys, (
                held, streamed, resident, full, empty,
                full_tiles, part_tiles, maps,
                docs, q_length - first, lse2 + rows_at, delta + rows_at, dq, slot_dq, to, scale,
                gl.constexpr(1), HEAD_DIM, BLOCK_D, STAGES,
            )),
            (_produce_keys, (
                q_desc, k_desc, v_desc, do_desc, held, streamed, resident, full, empty,
                full_list, full_tiles, part_list, part_tiles, batch, head, head // group, first, STAGES,
            )),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip
