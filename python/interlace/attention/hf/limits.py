"""Limits of a model's own mask function: its sliding window and its chunks.

A plan defines visibility in a row of packed documents. The model defines how far each of its layers looks. Under a plan
only these limits are read from the function by which HuggingFace describes a layer's mask, as numbers:

    keys after q - back, up to q + ahead, in the same chunk of positions; counted inside a document

The function's causality, packing and image blocks are ignored: the plan defines those. Anything else that hides keys
raises Unknown: padding that is not in the plan, or unknown closures. As in `masks`, closures are recognised by their
qualified names. Then the function itself is evaluated on pairs around every limit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial, reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor

from interlace.attention.hf.masks import BANDS, MaskFunction, Unknown, cells_of, describe, inner, name_of, read


class Limits(NamedTuple):
    """back, ahead: see the module docstring, inf = unlimited; chunk: positions per chunk, 0 = no chunks."""

    back: float = math.inf
    ahead: float = math.inf
    chunk: int = 0

    @property
    def narrow(self) -> bool:
        """True if these limits can remove pairs from a plan. ahead = 0 is causality, which the plan itself defines."""
        return self.back != math.inf or self.ahead not in (0, math.inf) or self.chunk > 0


EVERYTHING = Limits()


def limits_of(function: MaskFunction) -> Limits:
    """The limits that `function` sets inside one document; raises Unknown."""
    limits = _read(function)
    if limits is None:
        raise Unknown(f"mask function {name_of(function)} shows only blocks, which the plan defines")
    case = (describe(function), limits)
    if case not in _proved:
        q, k = _pairs(limits)
        wrong = (_evaluate(function, q, k) != _within(limits, q, k)).nonzero()
        if len(wrong):
            pair = int(q[wrong[0]]), int(k[wrong[0]])
            raise Unknown(f"{limits} differs from {case[0]} at (query, key) = {pair}")
        _proved.add(case)
    return limits


_proved: set[tuple[str, Limits]] = set()  # cached, since a model requests the same masks in every forward


def _read(function: MaskFunction) -> Limits | None:
    """Limits of a function; None if it shows only blocks, which the plan has as spans."""
    return read(function, _READERS, _UNLIMITED)


def _intersection(parts: list[Limits | None]) -> Limits | None:
    if any(part is None for part in parts):
        raise Unknown("blocks intersected with other limits")
    return reduce(
        lambda a, b: Limits(
            min(a.back, b.back), min(a.ahead, b.ahead), _one_chunk(a.chunk or b.chunk, b.chunk or a.chunk)
        ),
        [part for part in parts if part is not None],
    )


def _union(parts: list[Limits | None]) -> Limits | None:
    shown = [part for part in parts if part is not None]
    if not shown:
        return None
    joined = reduce(
        lambda a, b: Limits(max(a.back, b.back), max(a.ahead, b.ahead), _one_chunk(a.chunk, b.chunk)), shown
    )
    if len(shown) < len(parts) and joined.narrow:
        raise Unknown("blocks that extend beyond a window or a chunk")
    return joined


def _one_chunk(a: int, b: int) -> int:
    if a != b:
        raise Unknown(f"chunks of {a} and of {b} positions (0: none) in one mask")
    return a


def _band(ends: Callable[[dict[str, Any]], tuple[float, float]], cells: dict[str, Any]) -> Limits:
    return Limits(*ends(cells))


def _chunks(cells: dict[str, Any]) -> Limits:
    left = cells.get("left_padding")
    if left is not None and bool(left.any()):
        raise Unknown("chunks that start after left padding")
    return Limits(chunk=int(cells["chunk_size"]))


def _all_keys(mask: Tensor | None) -> Limits:
    if mask is not None and not bool(mask.all()):
        raise Unknown("padding that is not in the plan")
    return EVERYTHING


_UNLIMITED: Limits | None = EVERYTHING  # of the type that readers return
_WRAPPERS = {inner("remap_positions_for_packed_sequence"), inner("add_offsets_to_mask_function")}
_BLOCKS = {inner("blockwise_overlay"), inner("token_type_ids_mask_function")}
_AND, _OR = "and_masks.<locals>.and_mask", "or_masks.<locals>.or_mask"
_READERS: dict[str, Callable[[dict[str, Any]], Limits | None]] = {
    **{name: partial(_band, ends) for name, ends in BANDS.items()},
    **dict.fromkeys(_WRAPPERS, lambda c: _read(c["mask_function"])),
    **dict.fromkeys(_BLOCKS, lambda c: None),
    _AND: lambda c: _intersection([_read(f) for f in c["mask_functions"]]),
    _OR: lambda c: _union([_read(f) for f in c["mask_functions"]]),
    "bidirectional_mask_function": lambda c: EVERYTHING,
    inner("chunked_overlay"): _chunks,
    inner("_legacy_chunked_overlay"): _chunks,
    inner("packed_sequence_mask_function"): lambda c: EVERYTHING,
    inner("padding_mask_function"): lambda c: _all_keys(c["padding_mask"]),
    inner("bidirectional_mask_function"): lambda c: _all_keys(c["attention_mask"]),
}


# ---------------------------------------------------------------------- check against the function itself


def _pairs(limits: Limits) -> tuple[Tensor, Tensor]:
    """Positions of queries and keys, int64 [n] each: all pairs of small positions, and pairs around every limit."""
    near = torch.arange(12)
    q, k = [near.repeat_interleave(12)], [near.repeat(12)]
    step = torch.arange(-2, 3)
    for query in _boundary_queries(limits):
        for reach in (-limits.back, 0, limits.ahead, -limits.chunk):
            if abs(reach) != math.inf:
                keys = (query + int(reach) + step).clamp(min=0)
                q.append(torch.full_like(keys, query))
                k.append(keys)
    return torch.cat(q), torch.cat(k)


def _boundary_queries(limits: Limits) -> Iterator[int]:
    for limit in (limits.back, limits.ahead, limits.chunk, 100):
        if limit != math.inf:
            yield from (int(limit) + offset for offset in (0, 1, 7))
            yield 2 * int(limit) + 3


def _within(limits: Limits, q: Tensor, k: Tensor) -> Tensor:
    seen = (k > q - limits.back) & (k <= q + limits.ahead)
    return seen & (q // limits.chunk == k // limits.chunk) if limits.chunk else seen


def _evaluate(function: MaskFunction, q: Tensor, k: Tensor) -> Tensor:
    """`function` on pairs of positions of one document, without the parts that the plan defines."""
    name, cells = name_of(function), cells_of(function)
    if name in (_AND, _OR):
        parts = [_evaluate(f, q, k) for f in cells["mask_functions"]]
        return torch.stack(parts).all(0) if name == _AND else torch.stack(parts).any(0)
    if name in _WRAPPERS:
        return _evaluate(cells["mask_function"], q, k)
    if name in _BLOCKS:
        return torch.zeros_like(q, dtype=torch.bool)
    if name == inner("packed_sequence_mask_function") or "padding_mask" in cells or "attention_mask" in cells:
        return torch.ones_like(q, dtype=torch.bool)
    left = cells.get("left_padding")
    device = q.device if left is None else left.device
    zero = torch.zeros_like(q, device=device)
    seen = torch.as_tensor(function(zero, zero, q.to(device), k.to(device)))
    return seen.to(device=q.device, dtype=torch.bool).expand(q.shape)
