"""Common parts of the bitfield attention kernels: mask predicate, masked tile loads, dot, softcap.

The predicate is the one of ``interlace.masks`` (query i sees key j), rearranged so that a pair costs five compares:

    doc_i == doc_j >= 0
    and (pos_j > pos_i - window_i or pos_j < sinks)
    and ((ATTENDS_i has OWN_j and (not CAUSAL_i or pos_j <= pos_i)) or span_i == span_j >= 0)

PARTIAL blocks come with bitmaps of the predicate (``plan.part_q_map``, ``plan.part_k_map``), which kernels read in its
place (``where_seen``): one bit test per pair. Plans with too many PARTIAL blocks have no bitmaps.

A token that takes no part (padding, a query that sees nothing, a key that nobody sees: doc < 0 in a plan) may hold NaN
or infinity, and 0 times that is NaN: its rows are read as zeros wherever a product contracts them.

Everything that depends on one side alone is folded into vectors first (``query_terms``, ``key_terms``); only
``allowed`` touches pairs. Rows and keys outside the tensors get document numbers that equal nothing, so the length
bounds need no arithmetic of their own.
"""

from __future__ import annotations

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
"""Whether the kernels of this process run in Triton's interpreter (decided when they are decorated, once)."""

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
ATTENDS_MASK = tl.constexpr((1 << 56) - 1)  # the same constants as interlace.masks, which kernels may not import
OWN_SHIFT = tl.constexpr(56)
INT_MAX = tl.constexpr(2**31 - 1)


@triton.jit
def query_terms(bits_ptr, doc_ptr, span_ptr, pos_ptr, window_ptr, rows, length):
    """Vectors of the predicate that depend on the query: (attends, doc, span, last key position, before-window)."""
    inside = rows < length
    bits = tl.load(bits_ptr + rows, mask=inside, other=0)
    doc = tl.load(doc_ptr + rows, mask=inside, other=-1)
    span = tl.load(span_ptr + rows, mask=inside, other=-1)
    pos = tl.load(pos_ptr + rows, mask=inside, other=0)
    window = tl.load(window_ptr + rows, mask=inside, other=0)
    # CAUSAL is the sign bit: a causal query sees positions up to its own, any other query sees all of them.
    last = tl.where(bits < 0, pos, INT_MAX)
    return bits & ATTENDS_MASK, doc, span, last, pos - window


@triton.jit
def takes_part(doc_ptr, rows, length):
    """Whether rows exist and their tokens take part: others may hold NaN or infinity, and 0 times these is NaN."""
    return tl.load(doc_ptr + rows, mask=rows < length, other=-1) >= 0


@triton.jit
def key_terms(bits_ptr, doc_ptr, span_ptr, pos_ptr, rows, length, sinks):
    """Vectors of the predicate that depend on the key: (stream bit, doc, span, position, position for the window)."""
    inside = rows < length
    bits = tl.load(bits_ptr + rows, mask=inside, other=0)
    doc = tl.load(doc_ptr + rows, mask=inside, other=-2)
    span = tl.load(span_ptr + rows, mask=inside, other=-2)
    pos = tl.load(pos_ptr + rows, mask=inside, other=0)
    own = (bits >> OWN_SHIFT) & 63
    stream = (own * 0 + 1) << own  # not tl.full, which in Gluon wants a layout
    # Padding (-1) must not meet the padding of the query side: on the key side it becomes -2.
    doc = tl.where(doc < 0, -2, doc)
    span = tl.where(span < 0, -2, span)
    # A sink passes every window.
    return stream, doc, span, pos, tl.where(pos < sinks, INT_MAX, pos)


@triton.jit
def allowed(attends, q_doc, q_span, last, before, stream, k_doc, k_span, k_pos, k_window_pos):
    """The predicate on pairs; the caller has given one side a trailing and the other a leading axis of length 1.

    The word test is ``!= 0`` and never ``> 0``: the word is signed and its top bits are in use.
    """
    streams = ((attends & stream) != 0) & (k_pos <= last)
    return (q_doc == k_doc) & (k_window_pos > before) & (streams | (q_span == k_span))


@triton.constexpr_function
def map_words(BLOCK):
    """int32 words of one line of a bitmap, which has BLOCK + 1 lines; bit j % 32 of word j // 32 is column j."""
    return BLOCK // 32 if BLOCK > 32 else 1


@triton.jit
def where_seen(values, other, words, first, column, COLUMNS: tl.constexpr):
    """values [rows, COLUMNS], fp32, where a row sees a column of [first, first + COLUMNS) of its block, else `other`.

    words: pointers [rows] to the first word of each row's line. column: arange(COLUMNS)[None, :].

    Threads hold columns 2t, 2t + 1, 2t + 8, 2t + 9, ... of a product, t their lane. Shifting by column % 8 first makes
    what is left to test a constant bit of a word that all these columns share: two instructions per pair.
    """
    return where_bits(values, other, line_bits(words, first, column, COLUMNS), column)


@triton.jit
def line_bits(words, first, column, COLUMNS: tl.constexpr):
    """int32 [rows, COLUMNS]: bit column & 24 says whether the row sees the column; see where_seen."""
    word = tl.load(words + first // 32)
    if COLUMNS < 32:
        word = word >> (first % 32)
    word = word[:, None]
    for i in tl.static_range(1, COLUMNS // 32):
        word = tl.where(column < 32 * i, word, tl.load(words + first // 32 + i)[:, None])
    return word >> (column & 7)


@triton.jit
def where_bits(values, other, bits, column):
    """As where_seen, of what line_bits read."""
    bit = 1 << (column & 24)
    if INTERPRETED:
        return tl.where((bits & bit) != 0, values, other)
    else:  # in PTX, since LLVM packs the conditions of a tile into words that it takes apart again
        return tl.inline_asm_elementwise(
            "{ .reg .pred p; .reg .b32 t; and.b32 t, $2, $3; setp.ne.b32 p, t, 0; selp.f32 $0, $1, $4, p; }",
            "=f,f,r,r,f", [values, bits, bit, other], dtype=tl.float32, is_pure=True, pack=1,
        )  # fmt: skip


@triton.jit
def union_word(entry, first, exists, COLUMNS: tl.constexpr, BLOCK: tl.constexpr):
    """int64 whose bit j says whether any row of the bitmap at `entry`, if that exists, sees column first + j."""
    tl.static_assert(COLUMNS <= 64, "tiles are looped over in steps of at most 64")
    word = entry + BLOCK * map_words(BLOCK) + first // 32
    if COLUMNS > 32:
        return tl.load(word.to(tl.pointer_type(tl.int64)), mask=exists, other=0)
    else:
        return (tl.load(word, mask=exists, other=0) >> (first % 32)).to(tl.int64)


@triton.jit
def tile_offsets(stride, ROWS: tl.constexpr, BLOCK_D: tl.constexpr):
    """Offsets of a [rows, columns] tile from its first element: int32, so that a loop keeps half the registers."""
    return tl.arange(0, ROWS)[:, None] * stride + tl.arange(0, BLOCK_D)[None, :]


@triton.jit
def load_tile(pointers, inside, columns, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BOUNDED: tl.constexpr):
    """A [rows, columns] tile, zero in rows that are not ``inside`` and beyond ``HEAD_DIM`` columns.

    Rows are only tested where that is BOUNDED: a tile may cross the end, or hold tokens that take no part.
    """
    if BOUNDED:
        if HEAD_DIM == BLOCK_D:
            return tl.load(pointers, mask=inside[:, None], other=0.0)
        else:
            return tl.load(pointers, mask=inside[:, None] & (columns[None, :] < HEAD_DIM), other=0.0)
    else:
        if HEAD_DIM == BLOCK_D:
            return tl.load(pointers)
        else:
            return tl.load(pointers, mask=columns[None, :] < HEAD_DIM, other=0.0)


@triton.jit
def store_tile(pointers, value, rows, columns, length, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Store a [rows, columns] tile, cut at ``length`` rows and ``HEAD_DIM`` columns."""
    inside = rows[:, None] < length
    if HEAD_DIM != BLOCK_D:
        inside = inside & (columns[None, :] < HEAD_DIM)
    tl.store(pointers, value.to(pointers.dtype.element_ty), mask=inside)


@triton.jit
def first_block(block_index, begin, end):
    """block_index[begin], or 0 where [begin, end) is empty and nothing may be read.

    Loops read the index of the next tile's block one tile ahead: loads whose address comes from a load of the same
    iteration cannot be started early, and every tile would wait for memory.
    """
    return tl.load(block_index + begin, mask=begin < end, other=0)


@triton.jit
def dot(a, b, PRECISION: tl.constexpr, UPCAST: tl.constexpr):
    """a @ b in float32. UPCAST: the interpreter's bfloat16 dot returns garbage (Triton 3.6 and 3.9)."""
    if UPCAST:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    else:
        return tl.dot(a, b, input_precision=PRECISION)


@triton.jit
def cap(scores, softcap):
    """softcap * tanh(scores / softcap) and its slope, 1 - tanh^2; by exp2, which saturates to +-1 without NaN."""
    tanh = 1.0 - 2.0 / (1.0 + tl.exp2(scores * (2.0 * LOG2E / softcap)))
    return softcap * tanh, 1.0 - tanh * tanh


# Triton (3.6) hashes a helper where a kernel first needs it, and what it finds then depends on which helpers had their
# hash already. In a fixed order, kernels have the same key in the disk cache whichever is launched first.
for _helper in list(globals().values()):
    getattr(_helper, "cache_key", None)
