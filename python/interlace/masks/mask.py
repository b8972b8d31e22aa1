"""BitfieldMask: an attention mask with one int64 word per token and a few optional companions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from interlace.masks.cornstarch import convert
from interlace.masks.rule import MAX_STREAM, NEUTRAL, NO_WINDOW, OWN_SHIFT, Tokens, visible, word
from interlace.masks.values import keepable, readable

if TYPE_CHECKING:
    from interlace.masks.flex import FlexDifference

FlexMaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


class Segment(NamedTuple):
    """A run of `length` tokens of one kind: "text", or the name of a modality. `stream` overrides its OWN stream."""

    kind: str
    length: int
    stream: int | None = None


class BitfieldMask:
    """An attention mask for `batch` rows of `length` tokens; see `interlace.masks.rule` for the rule.

    bits:   int64 [B, T], one word per token (`word` makes one)
    doc:    int32 [B, T], the packed document of each token, -1 = padding; None = one document per row
    span:   int32 [B, T], -1 = none; an id must not occur in two documents of a row
    pos:    int32 [B, T] >= 0; None = 0, 1, ... within each document in row order
    window: int >= 1, or int32 [B, T] with one per query (NO_WINDOW = unlimited); None = unlimited
    sinks:  keys at positions below this are exempt from the window

    All tensors are on one device. A mask is immutable by convention: plans and kernels keep references to its tensors.
    Raises TypeError or ValueError that names the wrong companion. Values are checked on the CPU only: a check on a GPU
    would make every construction wait for it.
    """

    def __init__(
        self,
        bits: Tensor,
        *,
        doc: Tensor | None = None,
        span: Tensor | None = None,
        pos: Tensor | None = None,
        window: int | Tensor | None = None,
        sinks: int = 0,
    ) -> None:
        if not isinstance(bits, Tensor) or bits.dtype != torch.int64 or bits.dim() != 2:
            raise TypeError(f"bits must be an int64 tensor of shape [batch, length], got {_describe(bits)}")
        companions = {"doc": doc, "span": span, "pos": pos}
        if isinstance(window, Tensor):
            companions["window"] = window
        elif window is not None:
            window = min(_integer("window", window, minimum=1), NO_WINDOW)
        for name, tensor in companions.items():
            if tensor is None:
                continue
            if not isinstance(tensor, Tensor) or tensor.dtype != torch.int32:
                raise TypeError(f"{name} must be an int32 tensor, got {_describe(tensor)}; use .to(torch.int32)")
            if tensor.shape != bits.shape:
                raise ValueError(f"{name} has shape {list(tensor.shape)} but bits has {list(bits.shape)}")
            if tensor.device != bits.device:
                raise ValueError(f"{name} is on {tensor.device} but bits is on {bits.device}; move one of them")
        self.bits = bits
        self.doc = doc
        self.span = span
        self.window = window
        self.sinks = min(_integer("sinks", sinks, minimum=0), NO_WINDOW)  # positions stay below it
        self._pos = pos
        if bits.device.type == "cpu" and readable(bits, *companions.values()):
            self._check_values()

    def _check_values(self) -> None:
        if bool((self.bits & (1 << 62)).any()):
            raise ValueError("bit 62 of a mask word is reserved and must be 0; Cornstarch words go to from_cornstarch")
        if bool((self.own > MAX_STREAM).any()):
            raise ValueError(f"a token's OWN stream is above {MAX_STREAM}: bits 56-61 hold 0..{MAX_STREAM}")
        for name, tensor, least in (("doc", self.doc, -1), ("span", self.span, -1), ("pos", self._pos, 0)):
            if tensor is not None and bool((tensor < least).any()):
                raise ValueError(f"{name} holds {int(tensor.min())}; it must be at least {least}")
        if self._pos is not None and bool((self._pos >= NO_WINDOW).any()):
            raise ValueError(f"pos holds {int(self._pos.max())}; positions stay below {NO_WINDOW}")
        if isinstance(self.window, Tensor) and bool(((self.window < 1) | (self.window > NO_WINDOW)).any()):
            raise ValueError(f"window values must lie in 1..{NO_WINDOW} (= unlimited)")
        if self.span is not None and self.doc is not None and self.length > 1:
            span = torch.where(self.doc >= 0, self.span, -1)  # padding is never seen, so its span has no effect
            order = span.argsort(dim=1, stable=True)
            span, doc = span.gather(1, order), self.doc.gather(1, order)
            shared = (span[:, 1:] == span[:, :-1]) & (span[:, 1:] >= 0) & (doc[:, 1:] != doc[:, :-1])
            if bool(shared.any()):
                raise ValueError(
                    f"span {int(span[:, 1:][shared][0])} occurs in two documents of a row: span ids must be unique "
                    "across the row (BitfieldMask.pack renumbers them)"
                )

    # ------------------------------------------------------------------ contents

    @property
    def batch(self) -> int:
        return self.bits.shape[0]

    @property
    def length(self) -> int:
        return self.bits.shape[1]

    @property
    def device(self) -> torch.device:
        return self.bits.device

    @property
    def own(self) -> Tensor:
        """int64 [B, T]: the stream each token belongs to."""
        return (self.bits >> OWN_SHIFT) & 63

    @property
    def pos(self) -> Tensor:
        """int32 [B, T]: as given, else 0, 1, ... within each document (made on first use and cached)."""
        if self._pos is not None:
            return self._pos
        made = _default_positions(self.bits, self.doc)
        if keepable(made):
            self._pos = made
        return made

    def tokens(self) -> Tokens:
        """Every field of the rule as a [B, T] tensor; NEUTRAL where the mask has none."""

        def filled(name: str) -> Tensor:
            given = getattr(self, name)
            if isinstance(given, Tensor):
                return given
            return torch.full_like(self.bits, NEUTRAL[name] if given is None else given, dtype=torch.int32)

        return Tokens(bits=self.bits, pos=self.pos, **{name: filled(name) for name in NEUTRAL})

    def __repr__(self) -> str:
        extras = [name for name in ("doc", "span") if getattr(self, name) is not None]
        window = "per query" if isinstance(self.window, Tensor) else self.window
        return (
            f"BitfieldMask(batch={self.batch}, length={self.length}, with={extras}, "
            f"window={window}, sinks={self.sinks}, device={self.device})"
        )

    # ------------------------------------------------------------------ constructors

    @classmethod
    def from_tokens(cls, tokens: Tokens, sinks: int = 0) -> BitfieldMask:
        """The mask of these tokens, [B, T] per field; the inverse of `tokens`."""
        return cls(**tokens._asdict(), sinks=sinks)

    @classmethod
    def causal(
        cls,
        batch: int,
        length: int,
        *,
        window: int | None = None,
        sinks: int = 0,
        device: torch.device | str | None = None,
    ) -> BitfieldMask:
        """Every token sees itself and all tokens before it (within `window`, if given)."""
        bits = torch.full((batch, length), word(0, causal=True), dtype=torch.int64, device=device)
        return cls(bits, window=window, sinks=sinks)

    @classmethod
    def full(cls, batch: int, length: int, *, device: torch.device | str | None = None) -> BitfieldMask:
        """Every token sees every token."""
        return cls(torch.full((batch, length), word(0), dtype=torch.int64, device=device))

    @classmethod
    def from_segments(
        cls,
        sequences: Sequence[Sequence[Segment]],
        *,
        streams: Mapping[str, int] | None = None,
        window: int | None = None,
        sinks: int = 0,
        device: torch.device | str | None = None,
    ) -> BitfieldMask:
        """One row per sequence of segments, shorter rows padded at the end with doc = -1.

        Every token is causal and attends every stream. A segment that is not "text" is also a separate span, so its
        tokens see each other in both directions. This is the rule of Gemma-3: causal over earlier tokens, bidirectional
        within the image. Streams: text is 0. Other kinds are numbered 1, 2, ... in the order of first appearance in
        `sequences`, unless `streams` gives their number; `Segment.stream` overrides both for its segment. Kinds beyond
        the last free number share stream 55. This changes names and colours only: every token attends every stream.
        Span ids count 0, 1, ... along each row. Raises TypeError for anything but rows of segments, ValueError for a
        length below 0 or a given stream outside 0..55.
        """
        rows = _segments(sequences)
        numbers = {"text": 0, **(streams or {})}
        free = (n for n in range(1, MAX_STREAM + 1) if n not in set((streams or {}).values()))
        for segment in (segment for row in rows for segment in row):
            _integer(f"length of segment {segment.kind!r}", segment.length, minimum=0)
            if segment.stream is not None:
                _integer(f"stream of segment {segment.kind!r}", segment.stream, minimum=0)
            if segment.kind not in numbers and segment.stream is None:
                numbers[segment.kind] = next(free, MAX_STREAM)
        length = max((sum(segment.length for segment in row) for row in rows), default=0)
        bits = torch.zeros(len(rows), length, dtype=torch.int64)
        doc = torch.full((len(rows), length), -1, dtype=torch.int32)
        span = torch.full((len(rows), length), -1, dtype=torch.int32)
        for b, row in enumerate(rows):
            start, spans = 0, 0
            for segment in row:
                stop = start + segment.length
                stream = numbers[segment.kind] if segment.stream is None else segment.stream
                bits[b, start:stop] = word(stream, causal=True)
                doc[b, start:stop] = 0
                if segment.kind != "text":
                    span[b, start:stop] = spans
                    spans += 1
                start = stop
        padded = bool((doc < 0).any())
        mask = cls(
            bits,
            doc=doc if padded else None,
            span=span if bool((span >= 0).any()) else None,
            window=window,
            sinks=sinks,
        )
        return mask if device is None else mask.to(device)

    @classmethod
    def pack(cls, masks: Sequence[BitfieldMask]) -> BitfieldMask:
        """Documents side by side in one row: [1, sum of batch x length], the rows of each mask in order.

        Documents and spans are renumbered so that their ids are unique. Positions are kept. Padding stays padding, at
        the same place, so token tensors packed the same way stay aligned. Windows may differ. Sinks must be equal among
        masks that have a window. Raises ValueError for an empty list or differing devices or sinks.
        """
        if not masks:
            raise ValueError("BitfieldMask.pack needs at least one mask")
        if len({mask.device for mask in masks}) > 1:
            raise ValueError(f"masks to pack are on several devices:  {sorted({str(m.device) for m in masks})}")
        sinks = {mask.sinks for mask in masks if mask.window is not None}
        if len(sinks) > 1:
            raise ValueError(f"masks to pack have different sinks {sorted(sinks)}: use one number of sinks for all")
        pieces = [(mask, mask.tokens()) for mask in masks]
        windows = {None if isinstance(mask.window, Tensor) else (mask.window,) for mask in masks}
        window: int | Tensor | None
        if len(windows) == 1 and (only := windows.pop()) is not None:
            window = only[0]
        else:
            window = torch.cat([tokens.window.reshape(1, -1) for _, tokens in pieces], dim=1)
        return cls(
            torch.cat([mask.bits.reshape(1, -1) for mask in masks], dim=1),
            doc=_renumber([tokens.doc for _, tokens in pieces]),
            span=_renumber([tokens.span for _, tokens in pieces]) if any(m.span is not None for m in masks) else None,
            pos=torch.cat([tokens.pos.reshape(1, -1) for _, tokens in pieces], dim=1),
            window=window,
            sinks=sinks.pop() if sinks else 0,
        )

    @classmethod
    def from_cornstarch(cls, field: Tensor, dialect: str = "causal_bit") -> BitfieldMask:
        """Convert Cornstarch's words, int64 [B, T], to a mask that allows exactly the same pairs.

        "causal_bit" (dissertation 3.4.2): bit 63 marks a causal token; the other bits are the modalities that it sees.
        Bit 0 is the LLM's text. A token with bit 0 is text. Any other token belongs to the one modality in its word
        (several modalities are ambiguous and raise ValueError).
        "text_bit" (2025 papers and their code): a token with bit 0 is text and sees, causally, every token with which
        it shares a bit. Any other token sees, in both directions, exactly the tokens whose word equals its own. Bits 62
        and 63 are ignored, as in that code.

        In both, a word without modality bits is padding. Bits 56-61 and words of several modalities get free streams,
        so stream numbers equal Cornstarch's bit numbers only for single bits up to 55.
        """
        bits, doc = convert(field, dialect)
        return cls(bits, doc=doc)

    # ------------------------------------------------------------------ changes

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> BitfieldMask:
        """The same mask on another device (itself if already there)."""
        if torch.device(device) == self.device:
            return self
        return self.mapped(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def select(self, index: Tensor | slice | Sequence[int]) -> BitfieldMask:
        """Keep these tokens, in this order, with their positions in the whole mask.

        index: int64 [n] for every row, or [B, n] row by row, or a slice. Used for the part of a sequence on a
        context-parallel rank, or for the query side of a decoding step. Pass the whole mask as `kv_mask`.
        """
        if isinstance(index, slice):
            index = torch.arange(self.length, device=self.device)[index]
        index = torch.as_tensor(index, device=self.device)
        if index.dtype not in (torch.int32, torch.int64) or index.dim() not in (1, 2):
            raise TypeError(f"index must be int64 [n] or [batch, n], got {_describe(index)}")
        if index.dim() == 2 and index.shape[0] != self.batch:
            raise ValueError(f"index has {index.shape[0]} rows but the mask has {self.batch}")
        if self.device.type == "cpu" and bool(((index < 0) | (index >= self.length)).any()):
            raise IndexError(f"index has values outside 0..{self.length - 1}")
        rows = index.long().expand(self.batch, -1)
        return self.mapped(lambda tensor: tensor.gather(1, rows))

    def padded(self, length: int) -> BitfieldMask:
        """The same mask with padding tokens at the end, up to `length` (itself if that is its length)."""
        extra = length - self.length
        if extra == 0:
            return self

        def extended(field: Tensor, value: int) -> Tensor:
            return torch.nn.functional.pad(field, (0, extra), value=value)

        doc = torch.zeros_like(self.pos) if self.doc is None else self.doc
        return BitfieldMask(
            extended(self.bits, 0),
            doc=extended(doc, -1),
            span=None if self.span is None else extended(self.span, -1),
            pos=extended(self.pos, 0),
            window=extended(self.window, NO_WINDOW) if isinstance(self.window, Tensor) else self.window,
            sinks=self.sinks,
        )

    def mapped(self, change: Callable[[Tensor], Tensor]) -> BitfieldMask:
        """The mask with `change` (an index, a move) applied to every tensor; positions are kept."""
        return BitfieldMask(
            change(self.bits),
            doc=None if self.doc is None else change(self.doc),
            span=None if self.span is None else change(self.span),
            pos=change(self.pos),
            window=change(self.window) if isinstance(self.window, Tensor) else self.window,
            sinks=self.sinks,
        )

    # ------------------------------------------------------------------ views

    def to_dense(self, kv_mask: BitfieldMask | None = None) -> Tensor:
        """bool [B, Tq, Tk], True where a query of this mask sees a key of `kv_mask` (default: of itself).

        Window and sinks are those of this mask. Those of `kv_mask` are not used.
        """
        keys = _check_keys(self, kv_mask)
        return visible(self.tokens().rows(), keys.tokens().columns(), self.sinks)

    def to_flex(self, kv_mask: BitfieldMask | None = None) -> FlexMaskMod:
        """A FlexAttention mask_mod(b, h, q_idx, kv_idx) of the same mask, for `create_block_mask`."""
        q, k, sinks = self.tokens(), _check_keys(self, kv_mask).tokens(), self.sinks

        def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            return visible(q(lambda field: field[b, q_idx]), k(lambda field: field[b, kv_idx]), sinks)

        return mask_mod

    def differs_from_flex(
        self,
        mask_mod: FlexMaskMod,
        kv_mask: BitfieldMask | None = None,
        *,
        heads: int = 1,
        samples: int | None = None,
        seed: int = 0,
    ) -> FlexDifference | None:
        """The first pair on which a FlexAttention mask_mod(b, h, q_idx, kv_idx) and this mask differ; None if none.

        Use it to migrate a mask from FlexAttention: write the equivalent BitfieldMask and compare.
        Pairs are ordered by row, query, key. `samples`: number of pairs drawn at random with `seed`; None compares all.
        heads: number of heads for which mask_mod is evaluated; a bitfield is the same for all heads. The result prints
        as a sentence and has the fields batch, head, query, key, bitfield and flex. No T x T array is created. Raises
        ValueError for heads or samples below 1.
        """
        from interlace.masks.flex import first_difference

        return first_difference(self, _check_keys(self, kv_mask), mask_mod, heads, samples, seed)

    def plot(
        self,
        path: str | Path,
        *,
        row: int = 0,
        kv_mask: BitfieldMask | None = None,
        title: str = "",
        names: Mapping[int, str] | None = None,
    ) -> Path:
        """Draw row `row` as a PNG (or the format of the suffix): visible pairs coloured by the key's stream.

        Documents are framed. Strips along both sides show streams and spans. Long masks are drawn from evenly spaced
        tokens, so no T x T array is created. names: stream -> its name in the legend (default: stream 0 is "text",
        others are numbered). Needs matplotlib; returns the path.
        """
        from interlace.masks.plot import plot

        return plot(self, _check_keys(self, kv_mask), Path(path), row, title, names or {})


def _check_keys(mask: BitfieldMask, kv_mask: BitfieldMask | None) -> BitfieldMask:
    if kv_mask is None:
        return mask
    if kv_mask.batch != mask.batch:
        raise ValueError(f"kv_mask has {kv_mask.batch} rows but the query mask has {mask.batch}")
    if kv_mask.device != mask.device:
        raise ValueError(f"kv_mask is on {kv_mask.device} but the query mask is on {mask.device}; move one of them")
    return kv_mask


def _default_positions(bits: Tensor, doc: Tensor | None) -> Tensor:
    """0, 1, ... within each document in row order; padding gets 0."""
    index = torch.arange(bits.shape[1], dtype=torch.int32, device=bits.device).expand(bits.shape)
    if doc is None or bits.shape[1] == 0:
        return index.contiguous()
    order = doc.argsort(dim=1, stable=True)
    grouped = doc.gather(1, order)
    begins = torch.ones_like(grouped, dtype=torch.bool)
    begins[:, 1:] = grouped[:, 1:] != grouped[:, :-1]
    rank = index - torch.where(begins, index, 0).cummax(dim=1).values
    return torch.empty_like(doc).scatter_(1, order, rank).masked_fill_(doc < 0, 0)


def _renumber(pieces: Sequence[Tensor]) -> Tensor:
    """Concatenate rows of ids, [1, total] int32, renumbered so that no two rows share an id; -1 stays."""
    out, used = [], 0
    for row in (row for piece in pieces for row in piece):
        ids, inverse = torch.unique(row, return_inverse=True)
        holes = int((ids < 0).sum())  # 0 or 1: -1 sorts first
        out.append(torch.where(row < 0, -1, inverse - holes + used))
        used += ids.numel() - holes
    return torch.cat(out).to(torch.int32).unsqueeze(0)


def _segments(sequences: Sequence[Sequence[Segment]]) -> list[list[Segment]]:
    """The rows of from_segments. Raises TypeError for anything but a list of rows of segments."""
    try:
        rows = [list(sequence) for sequence in sequences]
        if all(isinstance(kind, str) and len(more) in (1, 2) for row in rows for kind, *more in row):
            return [[Segment(*segment) for segment in row] for row in rows]
    except (TypeError, ValueError):  # not lists, not tuples
        pass
    raise TypeError(
        f"from_segments takes a list of rows, each a list of segments, [[Segment('text', 12), Segment('image', 64)]]; "
        f"got {sequences!r:.200}"
    )


def _integer(name: str, value: object, *, minimum: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int, got {_describe(value)}")
    if value < minimum:
        raise ValueError(f"{name} is {value}; it must be at least {minimum}")
    return value


def _describe(value: object) -> str:
    if isinstance(value, Tensor):
        return f"a {str(value.dtype).removeprefix('torch.')} tensor of shape {list(value.shape)}"
    return f"{type(value).__name__} {value!r}"
