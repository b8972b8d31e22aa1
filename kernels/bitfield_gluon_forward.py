"""Bitfield attention, forward, for Hopper in Gluon: TMA loads, a producer warp and two consumer warpgroups.

It compiles for sm_90 without spills (tests/kernels), the model test of its pipeline passes, and on an H200 it equals
the Triton forward on every mask of `bench.attention_masks`. Same plan, same arithmetic and same slots as
`bitfield_forward`; one program per (work item, query head), blocks of 128. Scheme of warp specialisation after
FlashAttention-3 (arXiv 2407.08608, section 3.1), without its overlap inside a warpgroup: the two consumers overlap each
other's softmax and products.

Who waits on what. Tile n is the n-th block of the item's list, FULL blocks first; its stage is n % STAGES and its round
n // STAGES (`stage_of`, `full_phase`, `empty_phase`; tests/kernels/test_pipeline.py drives the same functions).

    barrier    count          producer, 1 warp                     consumer c = 0, 1 (rows c * 64 of the block)
    q_full     1 + bytes      expect(both halves), 2 loads         wait(0), once, even if there is no tile
    k_full[s]  1 + bytes      expect(K), load                      wait(round & 1), then S = Q K^T
    k_empty[s] 2              wait(round & 1 ^ 1) before the load  arrive(1) when S is complete
    v_full[s]  1 + bytes      expect(V), load                      wait(round & 1), then O += P V
    v_empty[s] 2              wait(round & 1 ^ 1) before the load  arrive(1) when O is complete

- A barrier starts in phase 0. wait(p) returns once the phase of parity p has completed: wait(1) on a fresh barrier
  returns at once, so the producer's first round waits for nothing. Round r of a full barrier completes phase r (its one
  arrival is `expect`, and the bytes have come); round r of an empty barrier completes phase r once both consumers have
  arrived, and the producer of round r + 1 waits for it with parity r & 1 = (r + 1) & 1 ^ 1.
- Nobody can be two phases ahead, which a parity could not tell apart: the producer needs both consumers' arrivals of
  round r before it fills round r + 1, and a consumer needs that fill before it can arrive for round r + 1.
- Every wgmma is waited for (0 outstanding) before the arrival that hands its operand back. All four warps of the
  consumer have to be past that wait: Triton puts a barrier of the partition before an arrival, which one thread makes.
- K, V and Q are written by TMA and read by wgmma only, both of the asynchronous proxy, so no proxy fence stands between
  them; the one after the initialisation of the barriers makes that visible to TMA.
- TMA fills what lies beyond a tensor with zeros and counts its bytes, so a ragged box completes its barrier.
- All loads are waited for by both consumers, so none is under way when the program ends.
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

from .bitfield_common import LN2, LOG2E, allowed, cap, key_terms, map_words, query_terms, where_seen
from .gluon_compat import tma_load

BLOCK = gl.constexpr(128)
HALF = gl.constexpr(64)  # rows of one consumer: one wgmma
PRODUCER_REGISTERS = 24
CONSUMER_REGISTERS = 240


@gluon.jit
def stage_of(n, STAGES: gl.constexpr):
    return n % STAGES


@gluon.jit
def full_phase(n, STAGES: gl.constexpr):
    """The parity that a consumer of tile n waits for."""
    return (n // STAGES) & 1


@gluon.jit
def empty_phase(n, STAGES: gl.constexpr):
    """The parity that the producer of tile n waits for."""
    return ((n // STAGES) & 1) ^ 1


@gluon.jit
def _fetch(descriptor, buffers, full, empty, n, batch, head, token, STAGES: gl.constexpr):
    stage = stage_of(n, STAGES)
    mbarrier.wait(empty.index(stage), empty_phase(n, STAGES))
    mbarrier.expect(full.index(stage), descriptor.block_type.nbytes)
    tma_load(descriptor, [batch, head, token, 0], full.index(stage), buffers.index(stage))


@gluon.jit
def _produce(
    q_desc, k_desc, v_desc, q_smem, k_smem, v_smem, q_full, k_full, k_empty, v_full, v_empty,
    full_list, full_count, part_list, part_count, batch, head, kv_head, first, STAGES: gl.constexpr,
):  # fmt: skip
    mbarrier.expect(q_full, 2 * q_desc.block_type.nbytes)
    tma_load(q_desc, [batch, head, first, 0], q_full, q_smem.index(0))
    tma_load(q_desc, [batch, head, first + HALF, 0], q_full, q_smem.index(1))
    for n in range(full_count):
        token = gl.load(full_list + n) * BLOCK
        _fetch(k_desc, k_smem, k_full, k_empty, n, batch, kv_head, token, STAGES)
        _fetch(v_desc, v_smem, v_full, v_empty, n, batch, kv_head, token, STAGES)
    for m in range(part_count):
        token = gl.load(part_list + m) * BLOCK
        _fetch(k_desc, k_smem, k_full, k_empty, full_count + m, batch, kv_head, token, STAGES)
        _fetch(v_desc, v_smem, v_full, v_empty, full_count + m, batch, kv_head, token, STAGES)


@gluon.jit
def _attend(
    acc, m, total, n, q_tile, k_smem, v_smem, k_full, k_empty, v_full, v_empty,
    words, first_key, attends, q_doc, q_span, last, before,
    k_bits, k_doc, k_span, k_pos, k_length, sinks, scale, softcap,
    BLOCK_D: gl.constexpr, STAGES: gl.constexpr,
    MASKED: gl.constexpr, MAPPED: gl.constexpr, SOFTCAP: gl.constexpr,
):  # fmt: skip
    """One tile of keys: the new (acc, m, total). Rows of S and of O lie in the same threads.

    words: pointers to the rows' lines in the bitmap of a MASKED tile. Without bitmaps such tiles are taken in halves:
    the terms of the predicate cost 6 registers per key that a thread holds.
    """
    KEYS: gl.constexpr = HALF if MASKED and not MAPPED else BLOCK
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    row: gl.constexpr = gl.SliceLayout(1, s_layout)
    stage = stage_of(n, STAGES)
    phase = full_phase(n, STAGES)
    k_tile = k_smem.index(stage).reshape([BLOCK, BLOCK_D])
    v_tile = v_smem.index(stage).reshape([BLOCK, BLOCK_D])
    mbarrier.wait(k_full.index(stage), phase)
    for part in gl.static_range(BLOCK // KEYS):
        k_part = k_tile.slice(part * KEYS, KEYS).permute((1, 0))
        nothing = gl.full([HALF, KEYS], 0.0, gl.float32, s_layout)
        s = warpgroup_mma(q_tile, k_part, nothing, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(0, deps=[s])
        if part == BLOCK // KEYS - 1:
            mbarrier.arrive(k_empty.index(stage), count=1)

        if SOFTCAP:
            s, _slope = cap(s * scale, softcap)
            to_base_2 = LOG2E
        else:
            to_base_2 = scale * LOG2E
        if MASKED:
            keys = gl.arange(0, KEYS, layout=gl.SliceLayout(0, s_layout))
            if MAPPED:
                s = where_seen(s, float("-inf"), words, 0, keys[None, :], KEYS)
            else:
                keys += first_key + part * KEYS
                stream, doc, span, pos, window_pos = key_terms(k_bits, k_doc, k_span, k_pos, keys, k_length, sinks)
                see = allowed(
                    attends[:, None], q_doc[:, None], q_span[:, None], last[:, None], before[:, None],
                    stream[None, :], doc[None, :], span[None, :], pos[None, :], window_pos[None, :],
                )  # fmt: skip
                s = gl.where(see, s, float("-inf"))
        m_new = gl.maximum(m, gl.convert_layout(gl.max(s, 1) * to_base_2, gl.SliceLayout(1, o_layout)))
        if MASKED:
            shift = gl.where(m_new == float("-inf"), 0.0, m_new)  # a row that has seen nothing: exp2(-inf - 0) = 0
        else:
            shift = m_new
        p = gl.exp2(s * to_base_2 - gl.convert_layout(shift, row)[:, None])
        decay = gl.exp2(m - shift)
        total = total * decay + gl.convert_layout(gl.sum(p, 1), gl.SliceLayout(1, o_layout))
        acc = acc * decay[:, None]
        m = m_new
        p16 = gl.convert_layout(p.to(v_smem.dtype), gl.DotOperandLayout(0, o_layout, 2))

        mbarrier.wait(v_full.index(stage), phase)
        acc = warpgroup_mma(p16, v_tile.slice(part * KEYS, KEYS), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(v_empty.index(stage), count=1)
    return acc, m, total


@gluon.jit
def _consume(
    q_smem, k_smem, v_smem, q_full, k_full, k_empty, v_full, v_empty,
    full_list, full_count, part_list, part_count, maps,
    out, lse, slot_out, slot_lse, slot, first, qm, km, out_at,
    q_bits, q_doc, q_span, q_pos, q_window, k_bits, k_doc, k_span, k_pos,
    q_length, k_length, sinks, scale, softcap,
    CONSUMER: gl.constexpr, HEAD_DIM: gl.constexpr, BLOCK_D: gl.constexpr, STAGES: gl.constexpr,
    MAPPED: gl.constexpr, SOFTCAP: gl.constexpr,
):  # fmt: skip
    """out_at: (b * heads + head) * q_length for a row's result, (slot * heads + head) * 128 for a partial one."""
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    # Of PARTIAL tiles, as in _attend.
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK if MAPPED else HALF, 16])
    masked_row: gl.constexpr = gl.SliceLayout(1, s_layout)
    row: gl.constexpr = gl.SliceLayout(1, o_layout)
    WORDS: gl.constexpr = map_words(BLOCK)
    words = maps + (CONSUMER * HALF + gl.arange(0, HALF, layout=masked_row)) * WORDS
    attends, doc, span, last, before = query_terms(
        q_bits + qm, q_doc + qm, q_span + qm, q_pos + qm, q_window + qm,
        first + CONSUMER * HALF + gl.arange(0, HALF, layout=masked_row), q_length,
    )  # fmt: skip
    m = gl.full([HALF], float("-inf"), gl.float32, row)
    total = gl.full([HALF], 0.0, gl.float32, row)
    acc = gl.full([HALF, BLOCK_D], 0.0, gl.float32, o_layout)
    q_tile = q_smem.index(CONSUMER).reshape([HALF, BLOCK_D])
    mbarrier.wait(q_full, 0)
    for n in range(full_count):
        acc, m, total = _attend(
            acc, m, total, n, q_tile, k_smem, v_smem, k_full, k_empty, v_full, v_empty,
            words, 0, attends, doc, span, last, before,
            k_bits + km, k_doc + km, k_span + km, k_pos + km, k_length, sinks, scale, softcap,
            BLOCK_D, STAGES, False, MAPPED, SOFTCAP,
        )  # fmt: skip
    for i in range(part_count):
        acc, m, total = _attend(
            acc, m, total, full_count + i, q_tile, k_smem, v_smem, k_full, k_empty, v_full, v_empty,
            words + i * ((BLOCK + 1) * WORDS), gl.load(part_list + i) * BLOCK, attends, doc, span, last, before,
            k_bits + km, k_doc + km, k_span + km, k_pos + km, k_length, sinks, scale, softcap,
            BLOCK_D, STAGES, True, MAPPED, SOFTCAP,
        )  # fmt: skip

    safe = gl.where(total == 0.0, 1.0, total)
    lse2 = gl.where(total == 0.0, float("-inf"), m + gl.log2(safe))
    acc = acc / safe[:, None]
    local = CONSUMER * HALF + gl.arange(0, HALF, layout=row)
    columns = gl.arange(0, BLOCK_D, layout=gl.SliceLayout(0, o_layout))
    written = (columns[None, :] < HEAD_DIM) & (local[:, None] >= 0)
    tile = local[:, None] * HEAD_DIM + columns[None, :]
    if slot < 0:
        gl.store(lse + out_at + first + local, lse2 * LN2, mask=first + local < q_length)
        written = written & (first + local[:, None] < q_length)
        gl.store(out + (out_at + first) * HEAD_DIM + tile, acc.to(out.dtype.element_ty), mask=written)
    else:
        gl.store(slot_lse + out_at + local, lse2)
        gl.store(slot_out + out_at * HEAD_DIM + tile, acc, mask=written)


@gluon.jit(do_not_specialize=["heads", "group", "q_length", "k_length", "q_blocks", "sinks"])
def gluon_forward_kernel(
    q_desc, k_desc, v_desc, out, lse, slot_out, slot_lse,
    full_ptr, full_idx, part_ptr, part_idx, part_map,
    work_row, work_start, work_stop, work_slot,
    q_bits, q_doc, q_span, q_pos, q_window, k_bits, k_doc, k_span, k_pos,
    heads, group, q_length, k_length, q_blocks, sinks, scale, softcap,
    HEAD_DIM: gl.constexpr, BLOCK_D: gl.constexpr, STAGES: gl.constexpr,
    MAPPED: gl.constexpr, SOFTCAP: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr, CONSUMER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Descriptors: q [B, Hq, Tq, D] in boxes of 64 rows, k and v [B, Hkv, Tk, D] in boxes of 128, padded to BLOCK_D.

    Launched with 4 warps, which are consumer 0; consumer 1 and the producer are the workers.
    """
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
    full = gl.load(full_ptr + row + 1) - full_from
    full_list = full_idx + full_from + gl.minimum(start, full)
    full_count = gl.minimum(stop, full) - gl.minimum(start, full)
    part_list = part_idx + part_from + gl.maximum(start - full, 0)
    part_count = gl.maximum(stop - full, 0) - gl.maximum(start - full, 0)
    maps = part_map + (part_from + gl.maximum(start - full, 0)) * ((BLOCK + 1) * map_words(BLOCK))
    qm = batch.to(gl.int64) * q_length
    km = batch.to(gl.int64) * k_length
    if slot < 0:
        out_at = (batch.to(gl.int64) * heads + head) * q_length
    else:
        out_at = (slot.to(gl.int64) * heads + head) * BLOCK

    q_smem = gl.allocate_shared_memory(q_desc.dtype, [2] + q_desc.block_type.shape, q_desc.layout)
    k_smem = gl.allocate_shared_memory(k_desc.dtype, [STAGES] + k_desc.block_type.shape, k_desc.layout)
    v_smem = gl.allocate_shared_memory(v_desc.dtype, [STAGES] + v_desc.block_type.shape, v_desc.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(q_full, count=1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_full.index(stage), count=1)
        mbarrier.init(v_full.index(stage), count=1)
        mbarrier.init(k_empty.index(stage), count=2)
        mbarrier.init(v_empty.index(stage), count=2)
    fence_async_shared()

    # The tuples are written in place: assigned to a name, their constexprs would become tensors.
    gl.warp_specialize(
        [
            (_consume, (
                q_smem, k_smem, v_smem, q_full, k_full, k_empty, v_full, v_empty,
                full_list, full_count, part_list, part_count, maps,
                out, lse, slot_out, slot_lse, slot, first, qm, km, out_at,
                q_bits, q_doc, q_span, q_pos, q_window, k_bits, k_doc, k_span, k_pos,
                q_length, k_length, sinks, scale, softcap,
                gl.constexpr(0), HEAD_DIM, BLOCK_D, STAGES, MAPPED, SOFTCAP,
            )),
            (_consume, (
                q_smem, k_smem, v_smem, q_full, k_full, k_empty, v_full, v_empty,
                full_list, full_count, part_list, part_count, maps,
                out, lse, slot_out, slot_lse, slot, first, qm, km, out_at,
                q_bits, q_doc, q_span, q_pos, q_window, k_bits, k_doc, k_span, k_pos,
                q_length, k_length, sinks, scale, softcap,
                gl.constexpr(1), HEAD_DIM, BLOCK_D, STAGES, MAPPED, SOFTCAP,
            )),
            (_produce, (
                q_desc, k_desc, v_desc, q_smem, k_smem, v_smem, q_full, k_full, k_empty, v_full, v_empty,
                full_list, full_count, part_list, part_count, batch, head, head // group, first, STAGES,
            )),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip
