"""Translation of HuggingFace mask functions to BitfieldMasks with the same visible pairs.

A HuggingFace mask is a function (batch, head, q, kv) -> bool, composed of closures (`and_masks`, `or_masks`,
`sliding_window_overlay`, `packed_sequence_mask_function`, ... in transformers.masking_utils and a few models). An
attention implementation receives only the function. So `translate` analyses it: each closure is recognised by its
qualified name, and its parameters are read from its cells. The result is a `Pattern`:

    same ids in every `same`  and  key valid  and  `outer` band  and  (`inner` band  or  same span)

where a band is k in (q - below, q + above]. A band with a finite upper end becomes the bitfield's causal rule, with the
queries' positions increased by `above`; the window expresses its lower end. Unknown is raised for unknown closures and
for patterns that a bitfield cannot express (the union of two kinds of blocks, a block cut by a band ahead of the
query).

A match of names alone is weak evidence. So `differs` also evaluates the function itself on all pairs (for a large mask:
on a sample) and compares.
"""

from __future__ import annotations

import dis
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial, reduce
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from interlace.masks import NO_WINDOW, BitfieldMask, visible, word

MaskFunction = Callable[..., Any]
Result = TypeVar("Result")
ALL_PAIRS = 1 << 16  # masks of at most this many pairs are compared in full


class Unknown(Exception):
    """A mask function cannot be expressed as a BitfieldMask; the message names the function and the reason."""


class Sides(NamedTuple):
    """One value per query and one per key: int64 [B or 1, Tq] and [B or 1, Tk]."""

    q: Tensor
    k: Tensor

    def __call__(self, change: Callable[[Tensor], Tensor]) -> Sides:
        return Sides(change(self.q), change(self.k))

    def joined(self, batch: int) -> Tensor:
        """[B, Tq + Tk]: queries, then keys."""
        return torch.cat([side.expand(batch, -1) for side in self], dim=1)

    def parted(self, joined: Tensor) -> Sides:
        return Sides(*joined.split([self.q.shape[1], self.k.shape[1]], dim=1))


class Band(NamedTuple):
    """Keys from q - below (exclusive) to q + above (inclusive), measured in the coordinates `at` (None: no limits)."""

    below: float
    above: float
    at: Sides | None


EVERYTHING = Band(math.inf, math.inf, None)


@dataclass(frozen=True)
class Pattern:
    """See the module docstring. inner None: only the span is seen. keys: bool [B, Tk], None = all valid."""

    inner: Band | None = EVERYTHING
    span: Sides | None = None
    outer: Band = EVERYTHING
    same: tuple[Sides, ...] = field(default=())
    keys: Tensor | None = None

    def band(self) -> Band:
        """The intersection of `inner` and `outer`, for a pattern without span."""
        if self.inner is None:
            raise Unknown("a mask that hides everything")
        return _intersect_bands(self.inner, self.outer)

    @property
    def is_everything(self) -> bool:
        return self.inner is not None and self.inner.at is None and not self.constrained

    @property
    def is_span_alone(self) -> bool:
        return self.span is not None and self.inner is None and not self.constrained

    @property
    def constrained(self) -> bool:
        return bool(self.same) or self.keys is not None or self.outer.at is not None


# ---------------------------------------------------------------------- analysis of the function


def translate(function: MaskFunction, at: Sides) -> Pattern:
    """The pattern of `function` for queries and keys of these indices; raises Unknown."""
    return read(function, _READERS, Pattern(), at)


def read(
    function: MaskFunction, readers: Mapping[str, Callable[..., Result]], everything: Result, *more: object
) -> Result:
    """The result of reader(captured variables, *more) for the function's qualified name; raises Unknown.

    everything: result for a function that is always True.
    """
    name, cells = name_of(function), cells_of(function)
    if name in readers:
        try:
            return readers[name](cells, *more)
        except (KeyError, TypeError, AttributeError, IndexError, RuntimeError) as error:
            raise Unknown(f"mask function {name} has an unexpected form ({type(error).__name__}: {error})") from error
    if is_constant_true(function):
        return everything
    raise Unknown(f"mask function {name} is unknown")


def name_of(function: MaskFunction) -> str:
    return getattr(function, "__qualname__", None) or type(function).__qualname__


def cells_of(function: MaskFunction) -> dict[str, Any]:
    """Captured variables of a closure, by name; raises Unknown for a variable that is not set yet."""
    try:
        cells = getattr(function, "__closure__", None) or ()
        return {key: cell.cell_contents for key, cell in zip(function.__code__.co_freevars, cells)} if cells else {}
    except ValueError as error:
        raise Unknown(f"mask function {name_of(function)} refers to a variable that is not set yet") from error


def describe(function: MaskFunction) -> str:
    """Name of the function with its parts: "or(causal_mask_function, blockwise_overlay)"."""
    name = name_of(function)
    for kind in ("and", "or"):
        if name == f"{kind}_masks.<locals>.{kind}_mask" and function.__closure__:
            parts = cells_of(function)["mask_functions"]
            return f"{kind}({', '.join(describe(part) for part in parts)})"
    return name.removesuffix(".<locals>.inner_mask")


def is_constant_true(function: MaskFunction) -> bool:
    """True if a function ignores arguments and captured variables and returns True: `lambda *a: torch.tensor(True)`."""
    code = getattr(function, "__code__", None)
    if code is None or code.co_freevars:
        return False
    if any(step.opname.startswith("LOAD_FAST") for step in dis.get_instructions(code)):
        return False
    return bool(function(*torch.zeros(4, dtype=torch.int64)))


def _band(ends: Callable[[dict[str, Any]], tuple[float, float]], cells: dict[str, Any], at: Sides) -> Pattern:
    below, above = ends(cells)
    if below < 1 or above < 0:
        raise Unknown(f"a window of {below} back and {above} ahead does not include the query itself")
    return Pattern(Band(below, above, at))


def _look_up(table: Tensor, at: Sides) -> Sides:
    """table[b, index] for every query and key. An index past the end raises, as in the function itself."""
    if table.dim() != 2:
        raise Unknown(f"a table of {table.dim()} dimensions, expected [batch, tokens]")

    def read(index: Tensor) -> Tensor:
        rows = torch.arange(table.shape[0], device=index.device).unsqueeze(1)
        return table.to(index.device)[rows, index.expand(table.shape[0], -1)].long()

    return at(read)


def _two_sided(cells: dict[str, Any]) -> tuple[float, float]:
    window = cells["sliding_window"]
    if "is_causal" in cells:  # T5Gemma 2 derives both ends from one number
        left, right = (window, 0) if cells["is_causal"] else ((window + 1) // 2, window // 2 + 1)
    else:
        left, right = window
    return left, max(right - 1, 0)


def _chunks(cells: dict[str, Any], at: Sides) -> Pattern:
    size, left = cells["chunk_size"], cells.get("left_padding")
    if left is not None:
        left = left.to(at.q.device).reshape(-1, 1)
        at = at(lambda index: index - left)
    return Pattern(same=(at(lambda index: torch.div(index, size, rounding_mode="floor")),))


def _keys(mask: Tensor | None, at: Sides) -> Pattern:
    return Pattern() if mask is None else Pattern(keys=_look_up(mask, at).k.bool())


def _images(cells: dict[str, Any], at: Sides) -> Pattern:
    """Gemma 3 and PaliGemma before transformers had blockwise_overlay, in three variants."""
    groups = cells["group_ids"] if "group_ids" in cells else cells["image_group_ids"]
    kinds = cells.get("token_type_ids")
    width = groups.shape[1]
    inside = at(lambda index: index.clamp(max=width - 1))  # a static cache extends past the end
    group = _look_up(groups, inside)
    seen = at(lambda index: index < width)
    if kinds is not None:
        kind = _look_up(kinds, inside)
        seen = Sides(seen.q & (kind.q == 1), seen.k & (kind.k == 1))
    return Pattern(inner=None, span=Sides(torch.where(seen.q, group.q, -1), torch.where(seen.k, group.k, -1)))


def _remapped(cells: dict[str, Any], at: Sides) -> Pattern:
    return translate(cells["mask_function"], _look_up(cells["position_ids"], at))


def _shifted(cells: dict[str, Any], at: Sides) -> Pattern:
    return translate(cells["mask_function"], Sides(at.q + cells["q_offset"], at.k + cells["kv_offset"]))


def inner(factory: str) -> str:
    """The qualified name of what `factory` returns."""
    return f"{factory}.<locals>.inner_mask"


# Functions that are only a window: keys after q - back and up to q + ahead, as (back, ahead).
BANDS: dict[str, Callable[[dict[str, Any]], tuple[float, float]]] = {
    "causal_mask_function": lambda c: (math.inf, 0),
    inner("sliding_window_overlay"): lambda c: (c["sliding_window"], math.inf),
    inner("sliding_window_bidirectional_overlay"): lambda c: (c["sliding_window"] + 1, c["sliding_window"]),
    inner("_bidirectional_window_overlay"): lambda c: (c["sliding_window"], c["sliding_window"] - 1),
    inner("sliding_window_bidirectional_mask_function"): lambda c: (c["sliding_window"], c["sliding_window"] - 1),
    inner("sliding_window_mask_function"): _two_sided,
}
_READERS: dict[str, Callable[[dict[str, Any], Sides], Pattern]] = {
    **{name: partial(_band, ends) for name, ends in BANDS.items()},
    "and_masks.<locals>.and_mask": lambda c, at: reduce(_intersection, [translate(f, at) for f in c["mask_functions"]]),
    "or_masks.<locals>.or_mask": lambda c, at: reduce(_union, [translate(f, at) for f in c["mask_functions"]]),
    "bidirectional_mask_function": lambda c, at: Pattern(),
    inner("chunked_overlay"): _chunks,
    inner("_legacy_chunked_overlay"): _chunks,
    inner("blockwise_overlay"): lambda c, at: Pattern(inner=None, span=_look_up(c["block_sequence_ids"], at)),
    inner("token_type_ids_mask_function"): _images,
    inner("packed_sequence_mask_function"): lambda c, at: Pattern(same=(_look_up(c["packed_sequence_mask"], at),)),
    inner("remap_positions_for_packed_sequence"): _remapped,
    inner("add_offsets_to_mask_function"): _shifted,
    inner("padding_mask_function"): lambda c, at: _keys(c["padding_mask"], at),
    # T5Gemma, transformers 4.57
    inner("bidirectional_mask_function"): lambda c, at: _keys(c["attention_mask"], at),
}


# ---------------------------------------------------------------------- putting patterns together


def _intersect_bands(a: Band, b: Band) -> Band:
    if a.at is None or b.at is None:
        return b if a.at is None else a
    return Band(min(a.below, b.below), min(a.above, b.above), _same_positions(a.at, b.at))


def _same_positions(a: Sides, b: Sides) -> Sides:
    if a is not b and not all(x.shape == y.shape and torch.equal(x, y) for x, y in zip(a, b)):
        raise Unknown("windows over two different position numberings")
    return a


def _intersection(a: Pattern, b: Pattern) -> Pattern:
    if a.span is not None and b.span is not None:
        raise Unknown("the intersection of two block patterns")
    if b.span is not None:
        a, b = b, a
    keys = a.keys if b.keys is None else b.keys if a.keys is None else a.keys & b.keys
    return replace(a, outer=_intersect_bands(a.outer, b.band()), same=a.same + b.same, keys=keys)


def _union(a: Pattern, b: Pattern) -> Pattern:
    if a.is_everything or b.is_everything:
        return Pattern()
    if a.is_span_alone:
        a, b = b, a
    if a.span is not None:
        raise Unknown("the union of two block patterns")
    if b.is_span_alone:
        assert b.span is not None
        for ids in a.same:
            if _crosses(b.span, ids):
                raise Unknown("blocks that span several packed documents (use separate block ids in each document)")
        if a.keys is not None and bool(((b.span.k >= 0) & ~a.keys).any()):
            raise Unknown("blocks with keys that are masked elsewhere")
        return replace(a, inner=a.band(), outer=EVERYTHING, span=b.span)
    if b.span is not None or a.same or b.same or a.keys is not None or b.keys is not None:
        raise Unknown("the union of two patterns that differ not only in their windows")
    band_a, band_b = a.band(), b.band()
    if band_a.at is None or band_b.at is None:
        return Pattern()
    # Both hold the query itself, so they overlap and their union has no gap.
    return Pattern(
        Band(max(band_a.below, band_b.below), max(band_a.above, band_b.above), _same_positions(band_a.at, band_b.at))
    )


def _crosses(span: Sides, ids: Sides) -> bool:
    """True if one span holds tokens of different `ids`."""
    batch = max(side.shape[0] for side in (*span, *ids))
    spans, joined_ids = span.joined(batch), ids.joined(batch)
    spans, order = spans.sort(dim=1, stable=True)
    joined_ids = joined_ids.gather(1, order)
    return bool(
        ((spans[:, 1:] == spans[:, :-1]) & (spans[:, 1:] >= 0) & (joined_ids[:, 1:] != joined_ids[:, :-1])).any()
    )


# ---------------------------------------------------------------------- the bitfield


def masks(pattern: Pattern, at: Sides, batch: int, padding: Tensor | None) -> tuple[BitfieldMask, BitfieldMask]:
    """The query side and the key side of `pattern`; raises Unknown.

    padding: bool [B, tokens], False where a token is padding; None = no padding.
    """
    inner, outer = (pattern.band(), EVERYTHING) if pattern.span is None else (pattern.inner, pattern.outer)
    if outer.above != math.inf:
        raise Unknown("blocks inside a window that ends after the query")
    frame = (outer if inner is None else _intersect_bands(inner, outer)).at or at
    causal = inner is not None and inner.above != math.inf
    shift = int(inner.above) if inner is not None and causal else 0
    window = _window(inner, outer, pattern.span, frame, at, batch)
    if window is not None:
        window = (window + shift).clamp(max=NO_WINDOW).to(torch.int32) if isinstance(window, Tensor) else window + shift
    minimum = min(0, *(int(side.min()) for side in frame if side.numel()), 0)
    pos = Sides(frame.q + shift - minimum, frame.k - minimum)

    doc = reduce(lambda a, b: _paired(a, b, batch), pattern.same) if pattern.same else None
    span = pattern.span
    if span is not None and doc is not None:  # in a bitfield, documents must not share span ids
        pairs = _paired(doc, span, batch)
        span = Sides(*(torch.where(ids >= 0, pair, -1) for ids, pair in zip(span, pairs)))
    q_valid, k_valid = None, pattern.keys
    if padding is not None:
        seen = _look_up(padding, Sides(at.q.clamp(max=padding.shape[1] - 1), at.k))(Tensor.bool)
        k_valid = seen.k if k_valid is None else seen.k & k_valid
        # Queries are surely the same tokens as keys only in a causal mask. There, padding queries are excluded.
        q_valid = seen.q if causal else None
    docs = (None, None) if doc is None else _numbered(doc, batch)
    sides = zip(at, docs, (None, None) if span is None else span, pos, (q_valid, k_valid))
    built: list[BitfieldMask] = []
    for index, document, block, position, valid in sides:
        if valid is not None:
            document = torch.where(valid, torch.zeros_like(index) if document is None else document, -1)
        is_query = len(built) == 0  # queries come first; only their words and windows are used
        bits = word(0, [] if is_query and inner is None else None, causal=is_query and causal)
        built.append(
            BitfieldMask(
                torch.full((batch, index.shape[1]), bits, dtype=torch.int64, device=index.device),
                doc=None if document is None else _int32(document, batch),
                span=None if block is None else _int32(block.clamp(min=-1), batch),
                pos=_int32(position, batch),
                window=window if is_query else None,
            )
        )
    return built[0], built[1]


def _window(
    inner: Band | None, outer: Band, span: Sides | None, frame: Sides, at: Sides, batch: int
) -> int | Tensor | None:
    """Window of the queries (int or [B, Tq]); None = unlimited.

    A bitfield's window also cuts its spans. If the function's window does not, a query at distance d from the first
    token of its span gets the window max(window, d + 1). This adds exactly the span, if the span has no gap.
    """
    below = outer.below if inner is None else inner.below
    if span is None or below >= outer.below:
        limit = min(below, outer.below)
        return None if limit == math.inf else int(limit)
    ids, positions = _numbered(span, batch, negative=False), frame(lambda index: index.expand(batch, -1))
    count = 1 + max(int(side.max()) if side.numel() else 0 for side in ids)
    span_ids = torch.where(ids.k >= 0, ids.k, count)  # a separate column for keys without span
    sentinel = torch.iinfo(torch.int64).max
    unseen = torch.full((batch, count + 1), sentinel, device=span_ids.device)
    first = unseen.scatter_reduce(1, span_ids, positions.k, "amin")
    last = (-unseen).scatter_reduce(1, span_ids, positions.k, "amax")
    size = torch.zeros_like(unseen).scatter_add(1, span_ids, torch.ones_like(span_ids))
    query_ids = torch.where(ids.q >= 0, ids.q, count)
    begin = first.gather(1, query_ids)
    reach = torch.where((ids.q >= 0) & (begin != sentinel), positions.q - begin + 1, 0)
    longer = reach > below
    if bool(longer.any()):
        gapless = (last - first + 1 == size).gather(1, query_ids)
        if frame is not at or bool((longer & ~gapless).any()):
            raise Unknown(f"blocks longer than the window of {below} that have gaps or lie in packed documents")
    return reach.clamp(min=int(below), max=NO_WINDOW if outer.below == math.inf else int(outer.below))


def _paired(a: Sides, b: Sides, batch: int) -> Sides:
    """New ids, equal exactly where the ids in both `a` and `b` are equal."""
    ids_a, ids_b = _numbered(a, batch), _numbered(b, batch)
    count = 1 + max(int(side.max()) if side.numel() else 0 for side in ids_b)
    return Sides(ids_a.q * count + ids_b.q, ids_a.k * count + ids_b.k)


def _numbered(ids: Sides, batch: int, *, negative: bool = True) -> Sides:
    """The ids renumbered 0, 1, ... as [B, Tq] and [B, Tk]; negative=False maps ids below 0 to -1."""
    joined = ids.joined(batch)
    _, numbers = torch.unique(joined, return_inverse=True)
    return ids.parted(numbers if negative else torch.where(joined >= 0, numbers, -1))


def _int32(values: Tensor, batch: int) -> Tensor:
    return values.expand(batch, -1).to(torch.int32).contiguous()


# ---------------------------------------------------------------------- check against the function itself


def differs(
    function: MaskFunction, at: Sides, q_mask: BitfieldMask, k_mask: BitfieldMask, padding: Tensor | None
) -> tuple[int, int, int] | None:
    """(batch, query, key), as indices into the tensors, of a pair on which function and masks differ; None if none.

    All pairs of a small mask are compared. Of a large mask, the edges, pairs around the diagonal and a fixed random
    sample are compared. Padding queries are left out.
    """
    b, q, k = _pairs(q_mask.batch, q_mask.length, k_mask.length, at.q.device)
    if b.numel() == 0:
        return None
    queries, keys = q_mask.tokens(), k_mask.tokens()
    actual = visible(queries(lambda f: f[b, q]), keys(lambda f: f[b, k]), q_mask.sinks)
    q_index, k_index = at.q.expand(q_mask.batch, -1)[b, q], at.k.expand(q_mask.batch, -1)[b, k]
    expected = torch.as_tensor(function(b, torch.zeros_like(b), q_index, k_index), device=b.device).bool()
    if padding is not None:
        expected = expected & padding[b, k_index].bool()
    wrong = (actual != expected) & (queries.doc[b, q] >= 0)
    if not bool(wrong.any()):
        return None
    first = int(wrong.nonzero()[0])
    return int(b[first]), int(q[first]), int(k[first])


def _pairs(batch: int, queries: int, keys: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """int64 [n] each: batch, query and key indices."""
    total = batch * queries * keys
    if total <= ALL_PAIRS:
        pair = torch.arange(total, device=device)
        return pair // (queries * keys), pair // keys % queries, pair % keys
    g = torch.Generator().manual_seed(0)
    count = 8192
    b = torch.randint(batch, (count,), generator=g)
    q = torch.randint(queries, (count,), generator=g)
    k = torch.randint(keys, (count,), generator=g)
    # A quarter is around the diagonal (aligned at the end, since a cached prefix comes first), some on the edges.
    near = count // 4
    k[:near] = (q[:near] + keys - queries + torch.randint(-3, 4, (near,), generator=g)).clamp(0, keys - 1)
    edge = count // 16
    q[near : near + edge], k[near + edge : near + 2 * edge] = 0, 0
    q[near + 2 * edge : near + 3 * edge], k[near + 3 * edge : near + 4 * edge] = queries - 1, keys - 1
    return b.to(device), q.to(device), k.to(device)
