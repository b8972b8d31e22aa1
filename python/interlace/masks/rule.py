"""Mask rule: one int64 word per token and a few optional companions define the tokens that it attends to.

    bit 63      CAUSAL   the token sees only keys whose position is not after its own
    bit 62               reserved, must be 0
    bits 56-61  OWN      the stream the token belongs to, 0..55 (0 = text)
    bits 0-55   ATTENDS  the streams the token sees

Companions, all optional: `doc` (packed document, -1 = padding), `span` (an image, frame or clip whose tokens see each
other in both directions, -1 = none), `pos` (position within the document), `window` (how far back a query sees) and
`sinks` (the first positions of a document, exempt from the window). Query i sees key j when

    doc_i == doc_j >= 0
    and (window is None or pos_j > pos_i - window_i or pos_j < sinks)
    and ( (ATTENDS_i has OWN_j  and (not CAUSAL_i or pos_j <= pos_i))
          or (span_i >= 0 and span_i == span_j) )

`visible` below implements this rule. The dense oracle and the FlexAttention mask_mod call it. Compiled code repeats it:
pair by pair in kernels/bitfield_common.py and csrc/attention_cpu/mask_tile.inc, as bounds of blocks in
kernels/bitfield_plan.py and csrc/attention_cpu/block_lists.cpp. tests/masks tests all five with one table.

A mask costs 8 bytes per token (plus 4 per companion). Only `to_dense` creates a T x T array. So masks are small enough
to be sent between pipeline stages with the activations.

The papers' bitfield masks (dissertation 3.4.2; Cornstarch 2025-03 section 4.3.1, 2025-11 appendix C) are a subset:
`from_cornstarch` converts both of their dialects.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor

CAUSAL = -(1 << 63)  # bit 63 of an int64 is its sign: test it with `bits < 0` or `& CAUSAL != 0`, never with `> 0`
OWN_SHIFT = 56
MAX_STREAM = 55
ATTENDS_MASK = (1 << 56) - 1
NO_WINDOW = 1 << 30  # a window that reaches everything; positions stay below it, so pos - window fits in int32


QUERY_FIELDS = ("bits", "doc", "span", "pos", "window")
KEY_FIELDS = ("bits", "doc", "span", "pos")
"""Fields of Tokens that the rule reads of a query and of a key."""

NEUTRAL = {"doc": 0, "span": -1, "window": NO_WINDOW}
"""Values of the companions of a mask without them; `pos` counts instead."""


class Tokens(NamedTuple):
    """All inputs of the rule for some tokens, without None: bits int64, the others int32, all of one shape."""

    bits: Tensor
    doc: Tensor
    span: Tensor
    pos: Tensor
    window: Tensor

    def __call__(self, change: Callable[[Tensor], Tensor]) -> Tokens:
        """Apply the same change (an index, a reshape, a move) to every field."""
        return Tokens(*(change(field) for field in self))

    def of_queries(self) -> list[Tensor]:
        """The fields that the rule reads of queries, in the order of QUERY_FIELDS."""
        return [getattr(self, name) for name in QUERY_FIELDS]

    def of_keys(self) -> list[Tensor]:
        """The fields that the rule reads of keys, in the order of KEY_FIELDS."""
        return [getattr(self, name) for name in KEY_FIELDS]

    def rows(self) -> Tokens:
        """[..., T] -> [..., T, 1]: shape for queries of `visible`."""
        return self(lambda field: field.unsqueeze(-1))

    def columns(self) -> Tokens:
        """[..., T] -> [..., 1, T]: shape for keys of `visible`."""
        return self(lambda field: field.unsqueeze(-2))


def filled(bits: Tensor, pos: Tensor, **companions: Tensor) -> Tokens:
    """Tokens of these fields; companions that are not given are NEUTRAL."""
    missing = {name: torch.full_like(pos, value) for name, value in NEUTRAL.items() if name not in companions}
    return Tokens(bits=bits, pos=pos, **companions, **missing)


def visible(q: Tokens, k: Tokens, sinks: int) -> Tensor:
    """The rule of this module, elementwise with broadcasting: bool, True where the query sees the key."""
    attends = ((q.bits >> ((k.bits >> OWN_SHIFT) & 63)) & 1) != 0
    in_order = (q.bits >= 0) | (k.pos <= q.pos)
    same_span = (q.span == k.span) & (q.span >= 0)
    near = (k.pos > q.pos - q.window) | (k.pos < sinks)
    return (q.doc == k.doc) & (q.doc >= 0) & near & ((attends & in_order) | same_span)


def word(own: int, attends: Iterable[int] | None = None, *, causal: bool = False) -> int:
    """The int64 word of a token of stream `own` that sees the streams `attends` (None = all)."""
    listed = None if attends is None else set(attends)
    for stream in {own} | (listed or set()):
        if not 0 <= stream <= MAX_STREAM:
            raise ValueError(f"stream {stream} is out of range: a bitfield mask has streams 0..{MAX_STREAM}")
    seen = ATTENDS_MASK if listed is None else sum(1 << stream for stream in listed)
    return (own << OWN_SHIFT) | seen | (CAUSAL if causal else 0)
