"""Bitfield attention, forward, for Hopper in Gluon: TMA loads, a producer warp and two consumer warpgroups.

Same plan, same arithmetic and same slots as `bitfield_forward`; one program per (work item, query head), blocks of
128. The scheme is FlashAttention-3's (arXiv 2407.08608, sections 3.1 and 3.2): warp specialisation, overlap inside a
warpgroup, and the two consumers by turns. It compiles for sm_90, without spills where plans have bitmaps
(bench.kernel_report), and the tests run this source on a model of Hopper's memory, barriers and asynchronous operations
(tests/kernels/gluon_interpreter.py).

Head dimensions. A tile has 64 or 128 columns (BLOCK_D); 80 and 96 are 64 and, in a tile of their own, 16 or 32 (REST),
as boxes of TMA have 2^n. Then S is two products into one accumulator, and O two accumulators.

Overlap inside a warpgroup. S = Q K^T of tile n and then O += P V of tile n - 1 are started together; the softmax of
tile n begins when S is complete, and runs beside O. P and the factor by which O decays are carried to the next tile,
from FULL tiles to PARTIAL ones too.

Waits. Tile n is the n-th block of the item's list, FULL blocks first; its stage is n % STAGES and its round
n // STAGES (`stage_of`, `full_phase`, `empty_phase`, `turn_phase`). The producer loads in the order of need: K of tile
n, then V of tile n - 1.

    barrier    count          producer, 1 warp                     consumer c = 0, 1 (rows c * 64 of the block)
    q_full     2 + bytes      expect and load each half            wait(0), once, even if there is no tile
    turn[c]    1                                                   wait before S of tile n; consumer 1 - c arrives
                                                                   when its S is complete: of n - 1 if c = 0, of n if 1
    k_full[s]  1 + bytes      expect(K), load                      wait(round & 1), then start S of tile n
    k_empty[s] 2              wait(round & 1 ^ 1) before the load  arrive(1) when S of tile n is complete
    v_full[s]  1 + bytes      expect(V), load                      wait(round & 1) after the softmax of tile n
    v_empty[s] 2              wait(round & 1 ^ 1) before the load  arrive(1) when O of tile n is complete
    v_landed   1 + bytes      expect(V), load, wait, then clean V and arrive(1) at v_full[s]: tiles with absent keys

- A barrier starts in phase 0. wait(p) returns once the phase of parity p has completed: wait(1) on a fresh barrier
  returns at once, so the producer's first round waits for nothing. Round r of a full barrier completes phase r (its one
  arrival is `expect`, and the bytes have come); round r of an empty barrier completes phase r once both consumers have
  arrived, and the producer of round r + 1 waits for it with parity r & 1 = (r + 1) & 1 ^ 1.
- No actor can be two phases ahead, which a parity could not tell apart: the producer needs both consumers' arrivals of
  round r before it fills round r + 1, a consumer needs that fill before it can arrive for round r + 1, and neither
  consumer can start S twice between two of the other's.
- A wgmma is complete before the arrival that hands its operand back (groups complete in order: O may be outstanding
  after the wait for S, nothing after that for O). All four warps of the consumer have to be past that wait: Triton puts
  a barrier of the partition before an arrival, which one thread makes.
- V of tile n is waited for before O of tile n - 1 is, so there are at least two stages. That wait also ends the basic
  block of the softmax: ptxas would otherwise wait for O first and compute exp2 after it (the gate counts these).
- K, V and Q are written by TMA and read by wgmma only, both of the asynchronous proxy, so no proxy fence stands between
  them. `_clean` writes through the generic proxy, and a fence makes that visible to wgmma; another one makes the
  initialisation of the barriers visible to TMA.
- TMA fills what lies beyond a tensor with zeros and counts its bytes, so a ragged box completes its barrier.
- All loads are waited for by both consumers, so none is under way when the program ends.

Not persistent: the hardware starts items longest first as SMs become free (`bitfield_launch`), which a static stride
cannot do and a counter would repeat at the cost of resetting it in every launch. Gained would be the loads of an item's
first tiles beside the end of the one before, about one tile's time per item.

Bitmaps are loaded by the consumers, not by the producer. A thread needs the 4 words of each of its 2 rows, and loads
them before it starts S, which hides the wait. Through shared memory they would cost as many loads and one more barrier.
"""

from __future__ import annotations

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .bitfield_common import LN2, LOG2E, allowed, cap, key_terms, line_bits, map_words, query_terms, where_bits
from .bitfield_gluon_producer import BLOCK, HALF, full_phase, produce, products, stage_of

WORD = gl.constexpr(32)  # bits of one
PRODUCER_REGISTERS = 40
CONSUMER_REGISTERS = 232


@gluon.jit
def turn_phase(n, CONSUMER: gl.constexpr):
    """The parity that a consumer waits for before S of tile n."""
    return (n & 1) ^ (1 - CONSUMER)


@triton.constexpr_function
def packs(columns, mapped):
    """True if loops carry P `packed`. In fp32 it is rounded beside the next S, but takes 32 registers more, which
    wider O or the predicate do not leave."""
    return columns > 80 or not mapped


@gluon.jit
def packed(x, DTYPE: gl.constexpr, PACKED: gl.constexpr):
    """fp32 [rows, columns] or, if PACKED, rounded to DTYPE, as int32 [rows, columns / 2]: 16-bit values that a loop
    carries are packed anew in every iteration, an instruction for each pair."""
    if not PACKED:
        return x
    else:
        even, odd = gl.split(x.reshape([x.shape[0], x.shape[1] // 2, 2]))
        if DTYPE == gl.bfloat16:
            return gl.inline_asm_elementwise(
                "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [even, odd], dtype=gl.int32, is_pure=True, pack=1
            )
        else:
            return gl.inline_asm_elementwise(
                "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,f,f", [even, odd], dtype=gl.int32, is_pure=True, pack=1
            )


@gluon.jit
def unpacked(x, DTYPE: gl.constexpr, PACKED: gl.constexpr, LAYOUT: gl.constexpr):
    """The inverse of `packed`, in DTYPE and LAYOUT."""
    if not PACKED:
        return gl.convert_layout(x.to(DTYPE), LAYOUT)
    else:
        if DTYPE == gl.bfloat16:
            even, odd = gl.inline_asm_elementwise(
                "mov.b32 {$0, $1}, $2;", "=h,=h,r", [x], dtype=(gl.bfloat16, gl.bfloat16), is_pure=True, pack=1
            )
        else:
            even, odd = gl.inline_asm_elementwise(
                "mov.b32 {$0, $1}, $2;", "=h,=h,r", [x], dtype=(gl.float16, gl.float16), is_pure=True, pack=1
            )
        return gl.convert_layout(gl.join(even, odd).reshape([x.shape[0], 2 * x.shape[1]]), LAYOUT)


@gluon.jit
def _or(a, b):
    return a | b


@gluon.jit
def _seen(words, queries, keys, first_key, MAPPED: gl.constexpr):
    """`line_bits` [64, 128] of a PARTIAL tile: from its bitmap (MAPPED), or from the predicate, 32 keys at a time."""
    s_layout: gl.constexpr = products(BLOCK)
    column = gl.arange(0, BLOCK, layout=gl.SliceLayout(0, s_layout))[None, :]
    if MAPPED:
        return line_bits(words, 0, column, BLOCK)
    else:
        attends, q_doc, q_span, last, before = queries
        k_bits, k_doc, k_span, k_pos, k_length, sinks = keys
        bit = gl.arange(0, WORD, layout=gl.SliceLayout(0, products(WORD)))
        bits = gl.full([HALF, BLOCK], 0, gl.int32, s_layout)
        for i in gl.static_range(BLOCK // WORD):
            stream, doc, span, pos, window_pos = key_terms(
                k_bits, k_doc, k_span, k_pos, first_key + WORD * i + bit, k_length, sinks
            )
            see = allowed(
                attends[:, None], q_doc[:, None], q_span[:, None], last[:, None], before[:, None],
                stream[None, :], doc[None, :], span[None, :], pos[None, :], window_pos[None, :],
            )  # fmt: skip
            word = gl.reduce(gl.where(see, 1 << bit[None, :], 0), 1, _or)
            word = gl.convert_layout(word, gl.SliceLayout(1, s_layout))
            bits = gl.where(column < WORD * i, bits, word[:, None])
        return bits >> (column & 7)


@gluon.jit
def _scores(
    n, memory, barriers, CONSUMER: gl.constexpr, BLOCK_D: gl.constexpr, REST: gl.constexpr, STAGES: gl.constexpr
):  # fmt: skip
    """Begins S of tile n."""
    q_smem, k_smem, _, q_more, k_more, _ = memory
    k_full, _, _, _, turn = barriers
    stage = stage_of(n, STAGES)
    mbarrier.wait(turn.index(CONSUMER), turn_phase(n, CONSUMER))
    mbarrier.wait(k_full.index(stage), full_phase(n, STAGES))
    s = gl.full([HALF, BLOCK], 0.0, gl.float32, products(BLOCK))
    q_tile = q_smem.index(CONSUMER).reshape([HALF, BLOCK_D])
    k_tile = k_smem.index(stage).reshape([BLOCK, BLOCK_D])
    s = warpgroup_mma(q_tile, k_tile.permute((1, 0)), s, use_acc=False, is_async=True)
    if REST:
        q_tile = q_more.index(CONSUMER).reshape([HALF, REST])
        k_tile = k_more.index(stage).reshape([BLOCK, REST])
        s = warpgroup_mma(q_tile, k_tile.permute((1, 0)), s, is_async=True)
    return s


@gluon.jit
def _values(acc, decay, p, n, v_smem, COLUMNS: gl.constexpr, PACKED: gl.constexpr, STAGES: gl.constexpr):
    """Begins O = O * decay + P V of tile n, whose V is there: (O, the operand P, which stays until O is complete)."""
    layout: gl.constexpr = products(COLUMNS)
    p16 = unpacked(p, v_smem.dtype, PACKED, gl.DotOperandLayout(0, layout, 2))
    v_tile = v_smem.index(stage_of(n, STAGES)).reshape([BLOCK, COLUMNS])
    acc = acc * gl.convert_layout(decay, gl.SliceLayout(1, layout))[:, None]
    return warpgroup_mma(p16, v_tile, acc, is_async=True), p16


@gluon.jit
def _softmax(
    s, m, total, bits, scale, softcap, BLOCK_D: gl.constexpr, MASKED: gl.constexpr, SOFTCAP: gl.constexpr
):  # fmt: skip
    """(P of a tile, new m, new total, decay of O). Rows of S and of O lie in the same threads."""
    s_layout: gl.constexpr = products(BLOCK)
    row: gl.constexpr = gl.SliceLayout(1, products(BLOCK_D))
    if SOFTCAP:
        s, _slope = cap(s * scale, softcap)
        to_base_2 = LOG2E
    else:
        to_base_2 = scale * LOG2E
    if MASKED:
        column = gl.arange(0, BLOCK, layout=gl.SliceLayout(0, s_layout))
        s = where_bits(s, float("-inf"), bits, column[None, :])
    m_new = gl.maximum(m, gl.convert_layout(gl.max(s, 1) * to_base_2, row))
    if MASKED:
        shift = gl.where(m_new == float("-inf"), 0.0, m_new)  # a row that has seen nothing: exp2(-inf - 0) = 0
    else:
        shift = m_new
    p = gl.exp2(s * to_base_2 - gl.convert_layout(shift, gl.SliceLayout(1, s_layout))[:, None])
    decay = gl.exp2(m - shift)
    return p, m_new, total * decay + gl.convert_layout(gl.sum(p, 1), row), decay


@gluon.jit
def _complete(acc, more, operand, other, REST: gl.constexpr):
    """Waits for all products. operand, other: those in registers of acc and of more."""
    if REST:
        acc, more, operand, other = warpgroup_mma_wait(0, deps=[acc, more, operand, other])
    else:
        acc, operand = warpgroup_mma_wait(0, deps=[acc, operand])
    return acc, more


@gluon.jit
def _write(
    acc, safe, out, slot_out, slot, first, out_at, q_length, local, COLUMN: gl.constexpr, HEAD_DIM: gl.constexpr
):
    """Columns of O from COLUMN on: [64, columns]."""
    o_layout: gl.constexpr = products(acc.shape[1])
    row: gl.constexpr = gl.SliceLayout(1, o_layout)
    acc = acc / gl.convert_layout(safe, row)[:, None]
    local = gl.convert_layout(local, row)
    columns = COLUMN + gl.arange(0, acc.shape[1], layout=gl.SliceLayout(0, o_layout))
    written = (columns[None, :] < HEAD_DIM) & (local[:, None] >= 0)
    tile = local[:, None] * HEAD_DIM + columns[None, :]
    if slot < 0:
        written = written & (first + local[:, None] < q_length)
        gl.store(out + (out_at + first) * HEAD_DIM + tile, acc.to(out.dtype.element_ty), mask=written)
    else:
        gl.store(slot_out + out_at * HEAD_DIM + tile, acc, mask=written)


@gluon.jit
def _step(
    acc, more, m, total, p, decay, n, memory, barriers, words, queries, keys, first_key, scale, softcap,
    CONSUMER: gl.constexpr, BLOCK_D: gl.constexpr, REST: gl.constexpr, STAGES: gl.constexpr,
    MASKED: gl.constexpr, MAPPED: gl.constexpr, SOFTCAP: gl.constexpr,
):  # fmt: skip
    """S and softmax of tile n, O of tile n - 1: p and decay are that tile's, and what is returned are those of n."""
    PACKED: gl.constexpr = packs(BLOCK_D + REST, MAPPED)
    _, _, v_smem, _, _, v_more = memory
    _, k_empty, v_full, v_empty, turn = barriers
    bits = 0
    if MASKED:
        bits = _seen(words, queries, keys, first_key, MAPPED)
    s = _scores(n, memory, barriers, CONSUMER, BLOCK_D, REST, STAGES)
    acc, operand = _values(acc, decay, p, n - 1, v_smem, BLOCK_D, PACKED, STAGES)
    if REST:
        more, other = _values(more, decay, p, n - 1, v_more, REST, PACKED, STAGES)
        s = warpgroup_mma_wait(2, deps=[s])
    else:
        other = operand
        s = warpgroup_mma_wait(1, deps=[s])
    mbarrier.arrive(turn.index(1 - CONSUMER), count=1)
    mbarrier.arrive(k_empty.index(stage_of(n, STAGES)), count=1)
    p_new, m, total, decay = _softmax(s, m, total, bits, scale, softcap, BLOCK_D, MASKED, SOFTCAP)
    mbarrier.wait(v_full.index(stage_of(n, STAGES)), full_phase(n, STAGES))
    acc, more = _complete(acc, more, operand, other, REST)
    mbarrier.arrive(v_empty.index(stage_of(n - 1, STAGES)), count=1)
    return acc, more, m, total, packed(p_new, v_smem.dtype, PACKED), decay


@gluon.jit
def _consume(
    q_smem, k_smem, v_smem, q_more, k_more, v_more, q_full, k_full, k_empty, v_full, v_empty, turn,
    full_list, full_count, part_list, part_count, maps,
    out, lse, slot_out, slot_lse, slot, first, qm, km, out_at,
    q_bits, q_doc, q_span, q_pos, q_window, k_bits, k_doc, k_span, k_pos,
    q_length, k_length, sinks, scale, softcap,
    CONSUMER: gl.constexpr, HEAD_DIM: gl.constexpr, BLOCK_D: gl.constexpr, REST: gl.constexpr, STAGES: gl.constexpr,
    MAPPED: gl.constexpr, SOFTCAP: gl.constexpr,
):  # fmt: skip
    """out_at: (b * heads + head) * q_length for a row's result, (slot * heads + head) * 128 for a partial one."""
    o_layout: gl.constexpr = products(BLOCK_D)
    row: gl.constexpr = gl.SliceLayout(1, o_layout)
    masked_row: gl.constexpr = gl.SliceLayout(1, products(BLOCK if MAPPED else WORD))
    WORDS: gl.constexpr = map_words(BLOCK)
    PACKED: gl.constexpr = packs(BLOCK_D + REST, MAPPED)
    mine = CONSUMER * HALF + gl.arange(0, HALF, layout=masked_row)
    words = maps + mine * WORDS
    queries = query_terms(q_bits + qm, q_doc + qm, q_span + qm, q_pos + qm, q_window + qm, first + mine, q_length)
    keys = (k_bits + km, k_doc + km, k_span + km, k_pos + km, k_length, sinks)
    m = gl.full([HALF], float("-inf"), gl.float32, row)
    total = gl.full([HALF], 0.0, gl.float32, row)
    acc = gl.full([HALF, BLOCK_D], 0.0, gl.float32, o_layout)
    if REST:
        more = gl.full([HALF, REST], 0.0, gl.float32, products(REST))
    else:
        more = 0.0
    memory = (q_smem, k_smem, v_smem, q_more, k_more, v_more)
    barriers = (k_full, k_empty, v_full, v_empty, turn)
    mbarrier.wait(q_full, 0)
    tiles = full_count + part_count
    if tiles > 0:
        s = _scores(0, memory, barriers, CONSUMER, BLOCK_D, REST, STAGES)
        s = warpgroup_mma_wait(0, deps=[s])
        mbarrier.arrive(turn.index(1 - CONSUMER), count=1)
        mbarrier.arrive(k_empty.index(0), count=1)
        bits = gl.full([HALF, BLOCK], -1, gl.int32, products(BLOCK))
        if full_count == 0:
            bits = _seen(words, queries, keys, gl.load(part_list) * BLOCK, MAPPED)
        p, m, total, decay = _softmax(s, m, total, bits, scale, softcap, BLOCK_D, True, SOFTCAP)
        p = packed(p, v_smem.dtype, PACKED)
        mbarrier.wait(v_full.index(0), 0)
        for n in range(1, full_count):
            acc, more, m, total, p, decay = _step(
                acc, more, m, total, p, decay, n, memory, barriers, words, queries, keys, 0, scale, softcap,
                CONSUMER, BLOCK_D, REST, STAGES, False, MAPPED, SOFTCAP,
            )  # fmt: skip
        for n in range(gl.maximum(full_count, 1), tiles):
            i = n - full_count
            if MAPPED:
                first_key = 0
            else:
                first_key = gl.load(part_list + i) * BLOCK
            acc, more, m, total, p, decay = _step(
                acc, more, m, total, p, decay, n, memory, barriers,
                words + i * ((BLOCK + 1) * WORDS), queries, keys, first_key, scale, softcap,
                CONSUMER, BLOCK_D, REST, STAGES, True, MAPPED, SOFTCAP,
            )  # fmt: skip
        acc, operand = _values(acc, decay, p, tiles - 1, v_smem, BLOCK_D, PACKED, STAGES)
        if REST:
            more, other = _values(more, decay, p, tiles - 1, v_more, REST, PACKED, STAGES)
        else:
            other = operand
        acc, more = _complete(acc, more, operand, other, REST)

    safe = gl.where(total == 0.0, 1.0, total)
    lse2 = gl.where(total == 0.0, float("-inf"), m + gl.log2(safe))
    local = CONSUMER * HALF + gl.arange(0, HALF, layout=row)
    if slot < 0:
        gl.store(lse + out_at + first + local, lse2 * LN2, mask=first + local < q_length)
    else:
        gl.store(slot_lse + out_at + local, lse2)
    _write(acc, safe, out, slot_out, slot, first, out_at, q_length, local, 0, HEAD_DIM)
    if REST:
        _write(more, safe, out, slot_out, slot, first, out_at, q_length, local, BLOCK_D, HEAD_DIM)


@gluon.jit(do_not_specialize=["heads", "group", "q_length", "k_length", "q_blocks", "sinks"])
def gluon_forward_kernel(
    q_desc, k_desc, v_desc, q_rest, k_rest, v_rest, out, lse, slot_out, slot_lse,
    full_ptr, full_idx, part_ptr, part_idx, part_map,
    work_row, work_start, work_stop, work_slot,
    q_bits, q_doc, q_span, q_pos, q_window, k_bits, k_doc, k_span, k_pos,
    heads, group, q_length, k_length, q_blocks, sinks, scale, softcap,
    HEAD_DIM: gl.constexpr, BLOCK_D: gl.constexpr, REST: gl.constexpr, STAGES: gl.constexpr,
    MAPPED: gl.constexpr, SOFTCAP: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr, CONSUMER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Descriptors: q [B, Hq, Tq, D] in boxes of 64 rows, k and v [B, Hkv, Tk, D] in boxes of 128, of BLOCK_D columns
    and (rest, None if REST is 0) of REST columns, which begin at BLOCK_D.

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
    if REST:
        q_more = gl.allocate_shared_memory(q_rest.dtype, [2] + q_rest.block_type.shape, q_rest.layout)
        k_more = gl.allocate_shared_memory(k_rest.dtype, [STAGES] + k_rest.block_type.shape, k_rest.layout)
        v_more = gl.allocate_shared_memory(v_rest.dtype, [STAGES] + v_rest.block_type.shape, v_rest.layout)
    else:
        q_rest, k_rest, v_rest = q_desc, k_desc, v_desc
        q_more, k_more, v_more = q_smem, k_smem, v_smem
    q_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_landed = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    turn = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    mbarrier.init(q_full, count=2)
    mbarrier.init(turn.index(0), count=1)
    mbarrier.init(turn.index(1), count=1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_full.index(stage), count=1)
        mbarrier.init(v_full.index(stage), count=1)
        mbarrier.init(k_empty.index(stage), count=2)
        mbarrier.init(v_empty.index(stage), count=2)
    mbarrier.init(v_landed, count=1)
    fence_async_shared()

    # The tuples are written in place: assigned to a name, their constexprs would become tensors.
    gl.warp_specialize(
        [
            (_consume, (
                q_smem, k_smem, v_smem, q_more, k_more, v_more, q_full, k_full, k_empty, v_full, v_empty, turn,
                full_list, full_count, part_list, part_count, maps,
                out, lse, slot_out, slot_lse, slot, first, qm, km, out_at,
                q_bits, q_doc, q_span, q_pos, q_window, k_bits, k_doc, k_span, k_pos,
                q_length, k_length, sinks, scale, softcap,
                gl.constexpr(0), HEAD_DIM, BLOCK_D, REST, STAGES, MAPPED, SOFTCAP,
            )),
            (_consume, (
                q_smem, k_smem, v_smem, q_more, k_more, v_more, q_full, k_full, k_empty, v_full, v_empty, turn,
                full_list, full_count, part_list, part_count, maps,
                out, lse, slot_out, slot_lse, slot, first, qm, km, out_at,
                q_bits, q_doc, q_span, q_pos, q_window, k_bits, k_doc, k_span, k_pos,
                q_length, k_length, sinks, scale, softcap,
                gl.constexpr(1), HEAD_DIM, BLOCK_D, REST, STAGES, MAPPED, SOFTCAP,
            )),
            (produce, (
                q_desc, k_desc, v_desc, q_rest, k_rest, v_rest, q_smem, k_smem, v_smem, q_more, k_more, v_more,
                q_full, k_full, k_empty, v_full, v_empty, v_landed,
                full_list, full_count, part_list, part_count, batch, head, head // group, first,
                k_doc + km, k_length, BLOCK_D, REST, STAGES,
            )),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip
