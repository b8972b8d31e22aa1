"""Block lists of a mask, built on the GPU with one host synchronisation: `block_lists`; and bitmaps: `map_calls`.

    summary_kernel    tokens of a block -> ranges of document, position, reach and span, OR and AND of the words
    classify_kernel   two summaries -> EMPTY, FULL or UNDECIDED, an int8 per pair of blocks
    decide_kernel     UNDECIDED pairs, element by element until both a visible and an invisible pair have been met
    (torch)           counts per row and column, their running sums, and the one read of the two totals
    list_kernel       rows of the class matrix -> q-major lists, columns -> k-major lists, ascending
    documents_kernel  tokens of blocks without a FULL one -> documents, but -1 for who sees, or is seen by, nobody
    map_kernel        PARTIAL pairs -> a bit per pair of tokens, along queries or along keys

Exact, by the rules for summaries of csrc/attention_cpu/block_lists.cpp (the paper's implementation evaluates every
element instead: Cornstarch 2025-11, section 6.1). Nothing of size T x T exists: the class matrix has
(T / block)^2 bytes, 67 MB at a million tokens, and the lists 4 bytes per listed block and direction.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .bitfield_common import INT_MAX, OWN_SHIFT, allowed, key_terms, map_words, query_terms
from .bitfield_launch import Call, on_device

EMPTY = tl.constexpr(0)
PARTIAL = tl.constexpr(1)
FULL = tl.constexpr(2)
UNDECIDED = tl.constexpr(3)

CHUNK = 64  # key blocks per program that classifies or decides
KEYS = 16  # keys (or queries) per step of an element test: 128 x 16 pairs fit in the registers of 8 warps
LINES, STEPS = 16, 128  # rows (or columns) of the class matrix per program that lists, and entries per step
RANGES = 10  # int32 fields of a summary
WORDS = 3  # int64 fields of a summary


@triton.jit
def _or(a, b):
    return a | b


@triton.jit
def _and(a, b):
    return a & b


@triton.jit(do_not_specialize=["length", "blocks", "count"])
def summary_kernel(
    bits, doc, span, pos, window, ranges, words, length, blocks, count,
    BLOCK: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """One program per block: its column of ranges int32 [RANGES, count] and words int64 [WORDS, count]."""
    item = tl.program_id(0)
    local = tl.arange(0, PADDED)
    token = (item % blocks) * BLOCK + local
    inside = (local < BLOCK) & (token < length)  # what lies beyond the end must change no range
    at = (item // blocks).to(tl.int64) * length + token
    d = tl.load(doc + at, mask=inside, other=-1)
    s = tl.load(span + at, mask=inside, other=-1)
    p = tl.load(pos + at, mask=inside, other=0)
    reach = p - tl.load(window + at, mask=inside, other=0)
    word = tl.load(bits + at, mask=inside, other=0)
    own = tl.full([PADDED], 1, tl.int64) << ((word >> OWN_SHIFT) & 63)

    tl.store(ranges + item, tl.min(tl.where(d >= 0, d, INT_MAX), 0))
    tl.store(ranges + count + item, tl.max(d, 0))
    tl.store(ranges + 2 * count + item, tl.max((inside & (d < 0)).to(tl.int32), 0))
    tl.store(ranges + 3 * count + item, tl.min(tl.where(inside, p, INT_MAX), 0))
    tl.store(ranges + 4 * count + item, tl.max(tl.where(inside, p, -INT_MAX), 0))
    tl.store(ranges + 5 * count + item, tl.min(tl.where(inside, reach, INT_MAX), 0))
    tl.store(ranges + 6 * count + item, tl.max(tl.where(inside, reach, -INT_MAX), 0))
    tl.store(ranges + 7 * count + item, tl.min(tl.where(s >= 0, s, INT_MAX), 0))
    tl.store(ranges + 8 * count + item, tl.max(s, 0))
    tl.store(ranges + 9 * count + item, tl.max((inside & (s < 0)).to(tl.int32), 0))
    tl.store(words + item, tl.reduce(word, 0, _or))
    tl.store(words + count + item, tl.reduce(tl.where(inside, word, -1), 0, _and))
    tl.store(words + 2 * count + item, tl.reduce(tl.where(inside, own, 0), 0, _or))


@triton.jit
def _summary(ranges, words, count, item, inside):
    """The fields of summary_kernel for the blocks `item`, a scalar or a vector."""
    doc_lo = tl.load(ranges + item, mask=inside, other=0)
    doc_hi = tl.load(ranges + count + item, mask=inside, other=0)
    padded = tl.load(ranges + 2 * count + item, mask=inside, other=0) != 0
    pos_lo = tl.load(ranges + 3 * count + item, mask=inside, other=0)
    pos_hi = tl.load(ranges + 4 * count + item, mask=inside, other=0)
    reach_lo = tl.load(ranges + 5 * count + item, mask=inside, other=0)
    reach_hi = tl.load(ranges + 6 * count + item, mask=inside, other=0)
    span_lo = tl.load(ranges + 7 * count + item, mask=inside, other=0)
    span_hi = tl.load(ranges + 8 * count + item, mask=inside, other=0)
    spanless = tl.load(ranges + 9 * count + item, mask=inside, other=0) != 0
    any_bits = tl.load(words + item, mask=inside, other=0)
    all_bits = tl.load(words + count + item, mask=inside, other=0)
    own = tl.load(words + 2 * count + item, mask=inside, other=0)
    return (
        doc_lo, doc_hi, padded, pos_lo, pos_hi, reach_lo, reach_hi, span_lo, span_hi, spanless, any_bits, all_bits, own
    )  # fmt: skip


@triton.jit(do_not_specialize=["q_length", "k_length", "q_blocks", "k_blocks", "q_count", "k_count", "sinks"])
def classify_kernel(
    q_ranges, q_words, k_ranges, k_words, classes, q_length, k_length, q_blocks, k_blocks, q_count, k_count, sinks,
    BLOCK: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """One program per (row r = b * q_blocks + i, CHUNK key blocks): classes int8 [rows, k_blocks]."""
    chunks = tl.cdiv(k_blocks, CHUNK)
    row = tl.program_id(0) // chunks
    key = (tl.program_id(0) % chunks) * CHUNK + tl.arange(0, CHUNK)
    inside = key < k_blocks
    (
        q_doc_lo, q_doc_hi, q_padded, q_pos_lo, q_pos_hi, q_reach_lo, q_reach_hi, q_span_lo, q_span_hi, q_spanless,
        any_bits, all_bits, _q_own,
    ) = _summary(q_ranges, q_words, q_count, row, row >= 0)  # fmt: skip
    (
        k_doc_lo, k_doc_hi, k_padded, k_pos_lo, k_pos_hi, _k_reach_lo, _k_reach_hi, k_span_lo, k_span_hi, k_spanless,
        _k_any, _k_all, own,
    ) = _summary(k_ranges, k_words, k_count, (row // q_blocks) * k_blocks + key, inside)  # fmt: skip

    apart = (q_doc_hi < k_doc_lo) | (k_doc_hi < q_doc_lo)
    out_of_reach = (k_pos_hi <= q_reach_lo) & (k_pos_lo >= sinks)
    # Bit 63, CAUSAL, is the sign of a word: some query is causal, or all are.
    unseen = ((any_bits & own) == 0) | ((all_bits < 0) & (k_pos_lo > q_pos_hi))
    no_span = (q_span_hi < k_span_lo) | (k_span_hi < q_span_lo)
    empty = apart | out_of_reach | (unseen & no_span)

    one_doc = (q_doc_lo == q_doc_hi) & (k_doc_lo == k_doc_hi) & (q_doc_lo == k_doc_lo)
    together = one_doc & (q_padded == 0) & (k_padded == 0)
    in_reach = (k_pos_lo > q_reach_hi) | (k_pos_hi < sinks)
    seen = ((own & (all_bits ^ -1)) == 0) & ((any_bits >= 0) | (k_pos_hi <= q_pos_lo))
    one_span = (q_span_lo == q_span_hi) & (k_span_lo == k_span_hi) & (q_span_lo == k_span_lo)
    full = together & in_reach & (seen | (one_span & (q_spanless == 0) & (k_spanless == 0)))

    # Kernels test no bounds in FULL blocks, so a block that ends with the sequence is PARTIAL.
    short = ((row % q_blocks + 1) * BLOCK > q_length) | ((key + 1) * BLOCK > k_length)
    result = tl.where(empty, EMPTY, tl.where(full, tl.where(short, PARTIAL, FULL), UNDECIDED))
    tl.store(classes + row.to(tl.int64) * k_blocks + key, result.to(tl.int8), mask=inside)


@triton.jit(do_not_specialize=["q_length", "k_length", "q_blocks", "k_blocks", "sinks"])
def decide_kernel(
    classes, q_bits, q_doc, q_span, q_pos, q_window, k_bits, k_doc, k_span, k_pos,
    q_length, k_length, q_blocks, k_blocks, sinks,
    BLOCK: tl.constexpr, PADDED: tl.constexpr, KEYS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """One program per (row, CHUNK key blocks) again; every UNDECIDED class becomes exact."""
    chunks = tl.cdiv(k_blocks, CHUNK)
    row = tl.program_id(0) // chunks
    first = (tl.program_id(0) % chunks) * CHUNK
    line = classes + row.to(tl.int64) * k_blocks
    lanes = first + tl.arange(0, CHUNK)
    here = tl.load(line + lanes, mask=lanes < k_blocks, other=0)
    if tl.max((here == UNDECIDED).to(tl.int32), 0) == 0:
        return
    batch = (row // q_blocks).to(tl.int64)
    qm = batch * q_length
    km = batch * k_length
    local = tl.arange(0, PADDED)
    # Rows of this block only: those beyond it (PADDED > BLOCK) count as non-existent, like those beyond the end.
    end = tl.minimum((row % q_blocks) * BLOCK + BLOCK, q_length)
    rows = (row % q_blocks) * BLOCK + local
    attends, doc, span, last, before = query_terms(
        q_bits + qm, q_doc + qm, q_span + qm, q_pos + qm, q_window + qm, rows, end
    )
    for key_block in range(first, tl.minimum(first + CHUNK, k_blocks)):
        if tl.load(line + key_block) == UNDECIDED:
            key = key_block * BLOCK
            key_end = tl.minimum(key + BLOCK, k_length)
            some = 0
            every = 1
            while (key < key_end) & ((some == 0) | (every == 1)):
                keys = key + tl.arange(0, KEYS)
                stream, k_docs, k_spans, k_poss, window_pos = key_terms(
                    k_bits + km, k_doc + km, k_span + km, k_pos + km, keys, key_end, sinks
                )
                see = allowed(
                    attends[:, None], doc[:, None], span[:, None], last[:, None], before[:, None],
                    stream[None, :], k_docs[None, :], k_spans[None, :], k_poss[None, :], window_pos[None, :],
                )  # fmt: skip
                exists = (rows[:, None] < end) & (keys[None, :] < key_end)
                some = some | tl.max(tl.max((see & exists).to(tl.int32), 1), 0)
                every = every & (1 - tl.max(tl.max(((see == 0) & exists).to(tl.int32), 1), 0))
                key += KEYS
            whole = (end == (row % q_blocks) * BLOCK + BLOCK) & (key_end == key_block * BLOCK + BLOCK)
            result = tl.where(some == 0, EMPTY, tl.where((every == 1) & whole, FULL, PARTIAL))
            tl.store(line + key_block, result.to(tl.int8))


@triton.jit(do_not_specialize=["lines", "per_batch", "length", "batch_stride", "line_stride"])
def list_kernel(
    classes, full_ptr, full_idx, part_ptr, part_idx, lines, per_batch, length, batch_stride, line_stride, step_stride,
    LINES: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """One program per LINES lines of the class matrix: where FULL and PARTIAL stand in each, ascending, from ptr on.

    Line r starts at (r // per_batch) * batch_stride + (r % per_batch) * line_stride and takes steps of step_stride.
    """
    line = tl.program_id(0) * LINES + tl.arange(0, LINES)
    exists = line < lines
    start = (line // per_batch).to(tl.int64) * batch_stride + (line % per_batch).to(tl.int64) * line_stride
    full_at = tl.load(full_ptr + line, mask=exists, other=0)
    part_at = tl.load(part_ptr + line, mask=exists, other=0)
    for first in range(0, length, STEPS):
        step = first + tl.arange(0, STEPS)
        inside = exists[:, None] & (step[None, :] < length)
        here = tl.load(classes + start[:, None] + step.to(tl.int64)[None, :] * step_stride, mask=inside, other=0)
        value = tl.broadcast_to(step[None, :], [LINES, STEPS])
        full = (here == FULL).to(tl.int32)
        part = (here == PARTIAL).to(tl.int32)
        tl.store(full_idx + full_at[:, None] + tl.cumsum(full, 1) - 1, value, mask=full == 1)
        tl.store(part_idx + part_at[:, None] + tl.cumsum(part, 1) - 1, value, mask=part == 1)
        full_at += tl.sum(full, 1)
        part_at += tl.sum(part, 1)


@triton.jit
def sees(
    q_bits, q_doc, q_span, q_pos, q_window, k_bits, k_doc, k_span, k_pos, mine, length, others, other_length, sinks,
    OF_QUERIES: tl.constexpr,
):  # fmt: skip
    """[mine, others]: whether queries `mine` see keys `others`, or (not OF_QUERIES) keys `mine` are seen by `others`.

    Tokens from `length` and `other_length` on neither see nor are seen.
    """
    if OF_QUERIES:
        attends, docs, spans, last, before = query_terms(q_bits, q_doc, q_span, q_pos, q_window, mine, length)
        stream, k_docs, k_spans, pos, window_pos = key_terms(k_bits, k_doc, k_span, k_pos, others, other_length, sinks)
        return allowed(
            attends[:, None], docs[:, None], spans[:, None], last[:, None], before[:, None],
            stream[None, :], k_docs[None, :], k_spans[None, :], pos[None, :], window_pos[None, :],
        )  # fmt: skip
    else:
        attends, docs, spans, last, before = query_terms(q_bits, q_doc, q_span, q_pos, q_window, others, other_length)
        stream, k_docs, k_spans, pos, window_pos = key_terms(k_bits, k_doc, k_span, k_pos, mine, length, sinks)
        return allowed(
            attends[None, :], docs[None, :], spans[None, :], last[None, :], before[None, :],
            stream[:, None], k_docs[:, None], k_spans[:, None], pos[:, None], window_pos[:, None],
        )  # fmt: skip


@triton.jit(do_not_specialize=["q_length", "k_length", "blocks", "sinks"])
def documents_kernel(
    result, full_ptr, part_ptr, part_idx, q_bits, q_doc, q_span, q_pos, q_window, k_bits, k_doc, k_span, k_pos,
    q_length, k_length, blocks, sinks,
    BLOCK: tl.constexpr, PADDED: tl.constexpr, STEP: tl.constexpr, OF_QUERIES: tl.constexpr,
):  # fmt: skip
    """One program per block of queries (else keys): result = their doc, but -1 where the token takes no part.

    Blocks that meet a FULL one are done. In most others every token sees itself, so the block at the same place of the
    other side is looked at before the PARTIAL ones of the list, until nobody is left.
    """
    row = tl.program_id(0)
    batch = (row // blocks).to(tl.int64)
    qm = batch * q_length
    km = batch * k_length
    local = tl.arange(0, PADDED)
    token = (row % blocks) * BLOCK + local
    if OF_QUERIES:
        length = q_length
        other_length = k_length
        mine = qm
        given = q_doc
    else:
        length = k_length
        other_length = q_length
        mine = km
        given = k_doc
    exists = (local < BLOCK) & (token < length)
    doc = tl.load(given + mine + token, mask=exists, other=-1)
    from_part = tl.load(part_ptr + row)
    parts = tl.load(part_ptr + row + 1) - from_part
    left = doc >= 0  # who has not been found to take part
    if tl.load(full_ptr + row + 1) > tl.load(full_ptr + row):
        left = left & (token < 0)
    waiting = tl.max(left.to(tl.int32), 0)
    n = -1
    while (n < parts) & (waiting == 1):
        block = tl.where(n < 0, row % blocks, tl.load(part_idx + from_part + n, mask=n >= 0, other=0))
        at = block * BLOCK
        end = tl.minimum(at + BLOCK, other_length)
        while (at < end) & (waiting == 1):
            others = at + tl.arange(0, STEP)
            see = sees(
                q_bits + qm, q_doc + qm, q_span + qm, q_pos + qm, q_window + qm,
                k_bits + km, k_doc + km, k_span + km, k_pos + km, token, length, others, end, sinks, OF_QUERIES,
            )  # fmt: skip
            left = left & (tl.max(see.to(tl.int32), 1) == 0)
            waiting = tl.max(left.to(tl.int32), 0)
            at += STEP
        n += 1
    tl.store(result + mine + token, tl.where(left, -1, doc), mask=exists)


@triton.jit(do_not_specialize=["q_length", "k_length", "blocks", "rows", "sinks"])
def map_kernel(
    maps, entry_row, part_idx, q_bits, q_doc, q_span, q_pos, q_window, k_bits, k_doc, k_span, k_pos,
    q_length, k_length, blocks, rows, sinks,
    BLOCK: tl.constexpr, OF_QUERIES: tl.constexpr,
):  # fmt: skip
    """One program per PARTIAL block: its bitmap, a line per query (else key) of it and a last one, their union."""
    entry = tl.program_id(0)
    row = tl.load(entry_row + entry)
    if row >= rows:  # the list has room for more
        return
    WORDS: tl.constexpr = map_words(BLOCK)
    BITS: tl.constexpr = BLOCK if BLOCK < 32 else 32
    batch = (row // blocks).to(tl.int64)
    local = tl.arange(0, BLOCK)
    bit = tl.arange(0, BITS)
    mine = (row % blocks) * BLOCK + local
    other = tl.load(part_idx + entry) * BLOCK
    qm = batch * q_length
    km = batch * k_length
    to = maps + entry.to(tl.int64) * ((BLOCK + 1) * WORDS)
    if OF_QUERIES:
        length = q_length
        other_length = k_length
    else:
        length = k_length
        other_length = q_length
    for word in range(WORDS):
        others = other + word * BITS + bit
        see = sees(
            q_bits + qm, q_doc + qm, q_span + qm, q_pos + qm, q_window + qm,
            k_bits + km, k_doc + km, k_span + km, k_pos + km, mine, length, others, other_length, sinks, OF_QUERIES,
        )  # fmt: skip
        line = tl.reduce(tl.where(see, 1 << bit[None, :], 0), 1, _or)
        tl.store(to + local * WORDS + word, line)
        tl.store(to + BLOCK * WORDS + word, tl.reduce(line, 0, _or))


def block_lists(
    q: Any, k: Any, sinks: int, block: int, also: Callable[..., Tensor] | None = None
) -> tuple[tuple[Tensor, ...], list[int]]:
    """The FULL and PARTIAL blocks of queries q against keys k, as AttentionPlan holds them (not yet padded).

    q, k: the fields bits int64, doc, span, pos, window int32, each [B, T] contiguous, on one device (as
    `interlace.masks.Tokens`; the keys' window plays no part). sinks: key positions below it pass every window.
    block: tokens per side of a block, any number.

    also: numbers, int64 [n], that the caller wants to know of full_q_ptr, part_q_ptr, full_k_ptr, part_k_ptr.

    Returns full_q_ptr [B * q_blocks + 1], full_q_idx, part_q_ptr, part_q_idx, then the same four k-major, then q_doc
    and k_doc with -1 for tokens that take no part, all int32; and the numbers of `also`. Waits for the device once, for
    the lengths of the lists and those numbers.
    """
    batch, q_length = q.bits.shape
    k_length = k.bits.shape[1]
    q_blocks, k_blocks = -(-q_length // block), -(-k_length // block)
    classes = torch.empty((batch, q_blocks, k_blocks), dtype=torch.int8, device=q.bits.device)
    with on_device(classes.device):
        for call in class_calls(q, k, sinks, block, classes):
            call.run()
        pointers = [_pointers(classes == kind.value, axis) for axis in (2, 1) for kind in (FULL, PARTIAL)]
        sizes = torch.stack([pointers[0][-1], pointers[1][-1]])
        asked = sizes if also is None else torch.cat([sizes, also(*pointers)])
        full, partial, *numbers = asked.tolist()  # the one synchronisation
        indices = [classes.new_empty(count, dtype=torch.int32) for count in (full, partial) * 2]
        lists = [tensor for pair in zip(pointers, indices) for tensor in pair]
        documents = [torch.empty_like(tokens.doc) for tokens in (q, k)]
        for call in [*list_calls(classes, pointers, indices), *document_calls(q, k, sinks, block, lists, documents)]:
            call.run()
    return (*lists, *documents), numbers


def class_calls(q: Any, k: Any, sinks: int, block: int, classes: Tensor) -> list[Call]:
    """The launches that fill `classes`, int8 [B, q_blocks, k_blocks]."""
    batch, q_blocks, k_blocks = classes.shape
    padded = triton.next_power_of_2(block)
    calls, summaries = [], []
    for tokens, blocks in ((q, q_blocks), (k, k_blocks)):
        count = batch * blocks
        ranges = tokens.doc.new_empty((RANGES, count))
        words = tokens.bits.new_empty((WORDS, count))
        summaries.append((ranges, words, count))
        arguments = dict(
            bits=tokens.bits, doc=tokens.doc, span=tokens.span, pos=tokens.pos, window=tokens.window,
            ranges=ranges, words=words, length=tokens.bits.shape[1], blocks=blocks, count=count,
            BLOCK=block, PADDED=padded,
        )  # fmt: skip
        calls.append(Call(summary_kernel, count, arguments, 4, 1))
    (q_ranges, q_words, q_count), (k_ranges, k_words, k_count) = summaries
    programs = q_count * -(-k_blocks // CHUNK)
    sizes = dict(
        q_length=q.bits.shape[1], k_length=k.bits.shape[1], q_blocks=q_blocks, k_blocks=k_blocks, sinks=sinks,
        BLOCK=block, CHUNK=CHUNK,
    )  # fmt: skip
    calls.append(
        Call(
            classify_kernel,
            programs,
            dict(
                q_ranges=q_ranges, q_words=q_words, k_ranges=k_ranges, k_words=k_words, classes=classes,
                q_count=q_count, k_count=k_count, **sizes,
            ),
            2,
            1,
        )
    )  # fmt: skip
    calls.append(
        Call(
            decide_kernel,
            programs,
            dict(
                classes=classes, q_bits=q.bits, q_doc=q.doc, q_span=q.span, q_pos=q.pos, q_window=q.window,
                k_bits=k.bits, k_doc=k.doc, k_span=k.span, k_pos=k.pos,
                PADDED=padded, KEYS=min(KEYS, padded), **sizes,
            ),
            8,
            1,
        )
    )  # fmt: skip
    return calls


def list_calls(classes: Tensor, pointers: list[Tensor], indices: list[Tensor]) -> list[Call]:
    """The launches that fill `indices` (full, partial; q-major, then k-major) from `classes`."""
    batch, q_blocks, k_blocks = classes.shape
    directions = ((q_blocks, k_blocks, k_blocks, 1), (k_blocks, q_blocks, 1, k_blocks))
    return [
        Call(
            list_kernel,
            -(-batch * per_batch // LINES),
            dict(
                classes=classes, full_ptr=pointers[at], full_idx=indices[at], part_ptr=pointers[at + 1],
                part_idx=indices[at + 1], lines=batch * per_batch, per_batch=per_batch, length=length,
                batch_stride=q_blocks * k_blocks, line_stride=line, step_stride=step, LINES=LINES, STEPS=STEPS,
            ),
            4,
            1,
        )
        for at, (per_batch, length, line, step) in zip((0, 2), directions)
    ]  # fmt: skip


def document_calls(
    q: Any, k: Any, sinks: int, block: int, lists: Sequence[Tensor], documents: Sequence[Tensor]
) -> list[Call]:
    """The launches that fill `documents` (q_doc, k_doc) from the lists, pointers and indices by turns."""
    padded = triton.next_power_of_2(block)
    calls = []
    for side, (doc, of_queries) in enumerate(zip(documents, (True, False))):
        full_ptr, _, part_ptr, part_idx = lists[4 * side : 4 * side + 4]
        batch, length = doc.shape
        blocks = -(-length // block)
        arguments = dict(
            result=doc, full_ptr=full_ptr, part_ptr=part_ptr, part_idx=part_idx,
            q_bits=q.bits, q_doc=q.doc, q_span=q.span, q_pos=q.pos, q_window=q.window,
            k_bits=k.bits, k_doc=k.doc, k_span=k.span, k_pos=k.pos,
            q_length=q.bits.shape[1], k_length=k.bits.shape[1], blocks=blocks, sinks=sinks,
            BLOCK=block, PADDED=padded, STEP=min(KEYS, padded), OF_QUERIES=of_queries,
        )  # fmt: skip
        calls.append(Call(documents_kernel, batch * blocks, arguments, 4, 1))
    return calls


def map_calls(
    q: Any, k: Any, sinks: int, block: int, ptr: Tensor, idx: Tensor, maps: Tensor, of_queries: bool
) -> list[Call]:
    """The launch that fills `maps` int32 [len(idx), block + 1, words] for one list of PARTIAL blocks (ptr, idx).

    Entries beyond ptr[-1] are left as they are. block: a power of two from 16 on.
    """
    entries = torch.arange(idx.shape[0], dtype=torch.int32, device=idx.device)
    entry_row = torch.searchsorted(ptr[1:], entries, right=True, out_int32=True)
    length = (q if of_queries else k).bits.shape[1]
    arguments = dict(
        maps=maps, entry_row=entry_row, part_idx=idx,
        q_bits=q.bits, q_doc=q.doc, q_span=q.span, q_pos=q.pos, q_window=q.window,
        k_bits=k.bits, k_doc=k.doc, k_span=k.span, k_pos=k.pos,
        q_length=q.bits.shape[1], k_length=k.bits.shape[1], blocks=-(-length // block), rows=ptr.shape[0] - 1,
        sinks=sinks, BLOCK=block, OF_QUERIES=of_queries,
    )  # fmt: skip
    return [Call(map_kernel, idx.shape[0], arguments, 4, 1)]


def _pointers(chosen: Tensor, axis: int) -> Tensor:
    """int32 [lines + 1] from bool [B, q_blocks, k_blocks]: running counts over `axis`, line after line."""
    counts = chosen.sum(axis, dtype=torch.int32).flatten()
    pointers = counts.new_zeros(counts.numel() + 1)
    torch.cumsum(counts, 0, dtype=torch.int32, out=pointers[1:])
    return pointers
