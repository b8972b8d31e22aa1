"""Pairs counted from lengths, against dense masks and the plans that kernels run."""

from __future__ import annotations

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from interlace.attention import AttentionPlan
from interlace.attention.hf.limits import Limits
from interlace.attention.hf.plans import narrowed
from interlace.masks import BitfieldMask, word
from interlace.model.counting.pairs import Document, visible, visited

LIMITS = [Limits(), Limits(back=5), Limits(back=40), Limits(chunk=7), Limits(back=3, chunk=16)]


@st.composite
def documents(draw: st.DrawFn) -> Document:
    length = draw(st.integers(1, 60))
    causal = draw(st.booleans())
    spans, at = [], 0
    for gap, size in draw(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 20)), max_size=3 if causal else 0)):
        if at + gap + size <= length:
            spans.append((at + gap, at + gap + size))
            at += gap + size
    return Document(length, causal, tuple(spans))


def mask_of(parts: list[Document], padding: int) -> BitfieldMask:
    bits, doc, span, pos, spans = [], [], [], [], 0
    for number, part in enumerate(parts):
        bits += [word(0, causal=part.causal)] * part.length
        doc += [number] * part.length
        mine = [-1] * part.length
        for start, stop in part.spans:
            mine[start:stop] = [spans] * (stop - start)
            spans += 1
        span += mine
        pos += range(part.length)
    bits, doc, span, pos = (x + [fill] * padding for x, fill in ((bits, 0), (doc, -1), (span, -1), (pos, 0)))
    tables = (torch.tensor([x], dtype=torch.int32) for x in (doc, span, pos))
    return BitfieldMask(torch.tensor([bits]), **dict(zip(("doc", "span", "pos"), tables, strict=True)))


@settings(max_examples=120, deadline=None)
@given(
    st.lists(documents(), min_size=1, max_size=6), st.sampled_from(LIMITS), st.integers(0, 30), st.sampled_from([8, 32])
)
def test_pairs_are_those_of_the_dense_mask_and_of_its_plan(
    parts: list[Document], limits: Limits, padding: int, block: int
) -> None:
    if limits.narrow and any(not part.causal for part in parts):
        parts = [part._replace(causal=True) for part in parts]
    plan = narrowed(AttentionPlan.build(mask_of(parts, padding), block=block), limits)
    queries, keys = plan.queries(), plan.keys()
    dense = BitfieldMask(queries.bits, doc=queries.doc, span=queries.span, pos=queries.pos, window=queries.window)
    assert sum(visible(part, limits) for part in parts) == int(
        dense.to_dense(BitfieldMask(keys.bits, doc=keys.doc, span=keys.span, pos=keys.pos)).sum()
    )
    assert visited(parts, limits, row=plan.q_len, block=block) == visited_by(plan)


def visited_by(plan: AttentionPlan) -> int:
    total, size = 0, [min(plan.block, plan.q_len - i * plan.block) for i in range(plan.q_blocks)]
    for ptr, idx in ((plan.full_q_ptr, plan.full_q_idx), (plan.part_q_ptr, plan.part_q_idx)):
        for row, (a, b) in enumerate(zip(ptr.tolist(), ptr.tolist()[1:], strict=False)):
            total += sum(size[row] * size[key] for key in idx[a:b].tolist())
    return total


def test_without_limits_a_document_is_a_triangle_and_its_images() -> None:
    assert visible(Document(10, True)) == 55
    assert visible(Document(10, True, ((2, 6),))) == 55 + 6
    assert visible(Document(10, True), Limits(back=math.inf, ahead=0)) == 55
    assert visible(Document(10)) == 100
    assert visited([]) == 0
