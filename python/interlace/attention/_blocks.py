"""Exact EMPTY / PARTIAL / FULL classification of the blocks of a mask; AttentionPlan.build is its only caller.

Summaries of a query block and a key block often prove that no pair, or every pair, of the block is visible. What they
leave open is evaluated with the rule itself, so the result is exact however weak the summaries are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from interlace.masks import OWN_SHIFT, Tokens, visible

CELLS = 1 << 20  # pairs of blocks whose summaries are compared at a time
ELEMENTS = 1 << 19  # pairs of tokens that are evaluated at a time
FAR = 2**31 - 1


class BlockList(NamedTuple):
    """Blocks, int64 [n] each: their query and key block and their rows in both directions."""

    query: Tensor
    key: Tensor
    row: Tensor  # b * q_blocks + query
    key_row: Tensor  # b * k_blocks + key


class Summary(NamedTuple):
    """Per block of tokens [..., blocks]: enough to prove many pairs of blocks empty or full. Bounds are inclusive."""

    doc_lo: Tensor  # over tokens that are not padding
    doc_hi: Tensor  # -1 = all are padding
    padded: Tensor  # bool: some token is padding
    pos_lo: Tensor
    pos_hi: Tensor
    reach_lo: Tensor  # pos - window: keys at or before it are out of reach
    reach_hi: Tensor
    span_lo: Tensor  # over tokens that have a span
    span_hi: Tensor  # -1 = none has
    spanless: Tensor  # bool: some token has no span
    any_bits: Tensor  # OR of the words
    all_bits: Tensor  # AND of the words
    own: Tensor  # OR of 1 << own stream

    def __call__(self, change: Callable[[Tensor], Tensor]) -> Summary:
        return Summary(*(change(field) for field in self))


def classify(q: Tokens, k: Tokens, sinks: int, block: int) -> tuple[BlockList, BlockList]:
    """(full, partial) blocks of queries [B, Tq] against keys [B, Tk], sorted by row, then key block."""
    batch, q_blocks, k_blocks = q.doc.shape[0], -(-q.doc.shape[1] // block), -(-k.doc.shape[1] // block)
    q_tiles, k_tiles = _tiles(q, block), _tiles(k, block)
    q_summary, k_summary = _summarise(q_tiles), _summarise(k_tiles)
    full: list[Tensor] = []
    partial: list[Tensor] = []
    rows_at_once = max(1, CELLS // max(k_blocks, 1))
    for start in range(0, batch * q_blocks, rows_at_once):
        rows = torch.arange(start, min(start + rows_at_once, batch * q_blocks), device=q.doc.device)
        b = rows // q_blocks
        empty, sure = _decide(
            q_summary(lambda field, rows=rows: field.flatten(0, 1)[rows, None]),  # type: ignore[misc]
            k_summary(lambda field, b=b: field[b]),  # type: ignore[misc]
            sinks,
        )
        row, key = (~(empty | sure)).nonzero(as_tuple=True)
        some, every = _evaluate(q_tiles, k_tiles, rows[row], b[row], key, sinks)
        sure[row, key] = every
        full.append(sure.nonzero() + torch.tensor([start, 0], device=sure.device))
        partial.append(torch.stack([rows[row][some & ~every], key[some & ~every]], dim=1))
    return _block_list(full, q_blocks, k_blocks, q.doc.device), _block_list(partial, q_blocks, k_blocks, q.doc.device)


def _block_list(places: list[Tensor], q_blocks: int, k_blocks: int, device: torch.device) -> BlockList:
    row, key = torch.cat([torch.empty(0, 2, dtype=torch.int64, device=device), *places]).unbind(1)
    b, query = row // max(q_blocks, 1), row % max(q_blocks, 1)
    return BlockList(query, key, row, b * k_blocks + key)


def _tiles(tokens: Tokens, block: int) -> Tokens:
    """[B, T] -> [B, blocks, block]. A short last block repeats its last token, which changes no "any" and no "all"."""

    def cut(field: Tensor) -> Tensor:
        short = -field.shape[1] % block
        if short:
            field = torch.cat([field, field[:, -1:].expand(-1, short)], dim=1)
        return field.view(field.shape[0], field.shape[1] // block, block)

    return tokens(cut)


def _summarise(tiles: Tokens) -> Summary:
    doc, span, pos, reach = tiles.doc, tiles.span, tiles.pos, tiles.pos - tiles.window
    return Summary(
        doc_lo=torch.where(doc >= 0, doc, FAR).amin(-1),
        doc_hi=doc.amax(-1),
        padded=(doc < 0).any(-1),
        pos_lo=pos.amin(-1),
        pos_hi=pos.amax(-1),
        reach_lo=reach.amin(-1),
        reach_hi=reach.amax(-1),
        span_lo=torch.where(span >= 0, span, FAR).amin(-1),
        span_hi=span.amax(-1),
        spanless=(span < 0).any(-1),
        any_bits=_fold(tiles.bits, torch.bitwise_or),
        all_bits=_fold(tiles.bits, torch.bitwise_and),
        own=_fold(1 << ((tiles.bits >> OWN_SHIFT) & 63), torch.bitwise_or),
    )


def _fold(values: Tensor, combine: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """Reduce the last dimension by an idempotent operation (torch has no bitwise reductions)."""
    while values.shape[-1] > 1:
        half = (values.shape[-1] + 1) // 2
        values = combine(values[..., :half], values[..., -half:])
    return values[..., 0]


def _decide(q: Summary, k: Summary, sinks: int) -> tuple[Tensor, Tensor]:
    """(surely empty, surely full), bool over pairs of blocks; what is neither has to be evaluated."""
    ordered = q.any_bits < 0  # some query is causal (bit 63 is the sign)
    always_ordered = q.all_bits < 0
    apart = (q.doc_hi < k.doc_lo) | (k.doc_hi < q.doc_lo)
    out_of_reach = (k.pos_hi <= q.reach_lo) & (k.pos_lo >= sinks)
    unseen = ((q.any_bits & k.own) == 0) | (always_ordered & (k.pos_lo > q.pos_hi))
    no_span = (q.span_hi < k.span_lo) | (k.span_hi < q.span_lo)
    empty = apart | out_of_reach | (unseen & no_span)

    together = (q.doc_lo == q.doc_hi) & (k.doc_lo == k.doc_hi) & (q.doc_lo == k.doc_lo) & ~q.padded & ~k.padded
    in_reach = (k.pos_lo > q.reach_hi) | (k.pos_hi < sinks)
    seen = ((k.own & ~q.all_bits) == 0) & (~ordered | (k.pos_hi <= q.pos_lo))
    one_span = (q.span_lo == q.span_hi) & (k.span_lo == k.span_hi) & (q.span_lo == k.span_lo)
    return empty, together & in_reach & (seen | (one_span & ~q.spanless & ~k.spanless))


def _evaluate(
    q_tiles: Tokens, k_tiles: Tokens, row: Tensor, b: Tensor, key: Tensor, sinks: int
) -> tuple[Tensor, Tensor]:
    """(some pair is visible, every pair is), bool [n], for the blocks (row, key) of batch rows b."""
    block = q_tiles.doc.shape[-1]
    some = torch.empty(row.numel(), dtype=torch.bool, device=row.device)
    every = torch.empty_like(some)
    at_once = max(1, ELEMENTS // (block * block))
    flat = q_tiles(lambda field: field.flatten(0, 1))
    for start in range(0, row.numel(), at_once):
        part = slice(start, start + at_once)
        queries = flat(lambda field, at=row[part]: field[at])  # type: ignore[misc]
        keys = k_tiles(lambda field, at=(b[part], key[part]): field[at])  # type: ignore[misc]
        seen = visible(queries.rows(), keys.columns(), sinks).flatten(1)
        some[part], every[part] = seen.any(1), seen.all(1)
    return some, every
