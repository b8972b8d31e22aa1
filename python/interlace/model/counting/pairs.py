"""(query, key) pairs of attention, counted from the lengths of documents without building a mask.

visible    pairs that the mask shows: required by the mathematics
visited    pairs in blocks of the score matrix with at least one visible pair: computed by kernels that follow a plan
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from interlace.attention.hf.limits import EVERYTHING, Limits

Span = tuple[int, int]

BLOCK = 128  # tokens per side, the default of `AttentionPlan.build`


class Document(NamedTuple):
    """Tokens that attend to each other and to no other tokens.

    causal: True if a token sees no later tokens.
    spans: non-overlapping ranges [start, stop) inside a causal document whose tokens attend in both directions.
    """

    length: int
    causal: bool = False
    spans: tuple[Span, ...] = ()


def visible(document: Document, limits: Limits = EVERYTHING) -> int:
    """Number of visible pairs of a document, in a layer whose visibility is limited by `limits`.

    Raises ValueError for limits of a document that is not causal: the caller must count two-sided windows.
    """
    if limits.chunk:
        return sum(visible(part, limits._replace(chunk=0)) for part in _chunked(document, limits.chunk))
    length = document.length
    if not document.causal:
        if limits.narrow:
            raise ValueError("only causal documents have windows or chunks here")
        return length * length
    window = length if limits.back == math.inf else min(length, int(limits.back))
    # A query sees itself and window - 1 tokens before it. The first queries of a document have fewer before them.
    seen = window * (window + 1) // 2 + (length - window) * window
    return seen + sum((stop - start) * (stop - start - 1) // 2 for start, stop in document.spans)


def visited(documents: Iterable[Document], limits: Limits = EVERYTHING, *, row: int = 0, block: int = BLOCK) -> int:
    """Number of pairs in blocks with a visible pair, for documents concatenated in one row, in this order.

    row: tokens of the row, if it is longer than the documents (padding).
    Blocks end where the row ends.
    """
    parts = list(documents)
    if limits.chunk:
        parts = [part for document in parts for part in _chunked(document, limits.chunk)]
    total = max(row, sum(part.length for part in parts))
    last = (total - 1) // block  # only this block may be shorter
    rest = total - last * block
    pairs, start, counted = 0, 0, -1  # counted: the last counted block on the diagonal
    for part in parts:
        if not part.length:
            continue
        first, stop = start // block, (start + part.length - 1) // block
        fresh = max(first, counted + 1)
        if fresh <= stop:
            pairs += (stop - fresh + 1) * block * block
            if stop == last:
                pairs += rest * rest - block * block
            counted = stop
        if limits.back == math.inf or limits.back >= part.length:
            below = _below(first, stop, last, rest, block)
        else:
            below = _band(start, start + part.length, int(limits.back), last, rest, block)
        if not part.causal:
            pairs += 2 * below
        else:
            # Blocks above the diagonal belong to one span: neighbouring spans share a diagonal block at most.
            pairs += below + sum(
                _below((start + a) // block, (start + b - 1) // block, last, rest, block) for a, b in part.spans
            )
        start += part.length
    return pairs


def _below(first: int, stop: int, last: int, rest: int, block: int) -> int:
    """Pairs of all blocks (i, j), first <= j < i <= stop."""
    deep = stop - first
    if stop == last:
        return block * block * (deep * (deep - 1) // 2) + block * rest * deep
    return block * block * (deep * (deep + 1) // 2)


def _band(start: int, stop: int, window: int, last: int, rest: int, block: int) -> int:
    """Same as `_below`, for a document at [start, stop) whose queries see `window` keys back, including themselves."""
    pairs = 0
    for i in range(start // block + 1, (stop - 1) // block + 1):
        query = max(start, i * block)  # the first query of the block sees furthest back
        furthest = max(start, query - window + 1) // block
        pairs += (i - furthest) * block * (rest if i == last else block)
    return pairs


def _chunked(document: Document, chunk: int) -> list[Document]:
    """Cut a document into chunks of positions that do not see each other."""
    parts = []
    for begin in range(0, document.length, chunk):
        end = min(begin + chunk, document.length)
        spans: Sequence[Span] = [(max(a, begin) - begin, min(b, end) - begin) for a, b in document.spans]
        parts.append(Document(end - begin, document.causal, tuple((a, b) for a, b in spans if b > a)))
    return parts
