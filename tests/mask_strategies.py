"""Random masks for property tests, and a second implementation of the mask rule, pair by pair in plain Python."""

from __future__ import annotations

import torch
from hypothesis import strategies as st

from interlace.masks import BitfieldMask, word


def rule(q: BitfieldMask, k: BitfieldMask) -> torch.Tensor:
    """bool [B, Tq, Tk] by a triple loop over the definition in the design document."""

    def plain(mask: BitfieldMask) -> list[list[dict]]:
        rows = []
        for b in range(mask.batch):
            row, seen = [], {}
            for t in range(mask.length):
                value = int(mask.bits[b, t]) % 2**64
                doc = 0 if mask.doc is None else int(mask.doc[b, t])
                window = mask.window[b, t].item() if isinstance(mask.window, torch.Tensor) else mask.window
                row.append(
                    {
                        "causal": value >> 63 == 1,
                        "own": value >> 56 & 0b111111,
                        "attends": {s for s in range(56) if value >> s & 1},
                        "doc": doc,
                        "span": -1 if mask.span is None else int(mask.span[b, t]),
                        "pos": int(mask._pos[b, t]) if mask._pos is not None else seen.get(doc, 0),
                        "window": window,
                    }
                )
                seen[doc] = seen.get(doc, 0) + 1
            rows.append(row)
        return rows

    queries, keys = plain(q), plain(k)
    dense = torch.zeros(q.batch, q.length, k.length, dtype=torch.bool)
    for b in range(q.batch):
        for i, x in enumerate(queries[b]):
            for j, y in enumerate(keys[b]):
                same_document = x["doc"] == y["doc"] >= 0
                near = x["window"] is None or y["pos"] > x["pos"] - x["window"] or y["pos"] < q.sinks
                attends = y["own"] in x["attends"] and (not x["causal"] or y["pos"] <= x["pos"])
                same_span = x["span"] >= 0 and x["span"] == y["span"]
                dense[b, i, j] = same_document and near and (attends or same_span)
    return dense


@st.composite
def masks(draw: st.DrawFn, batch: int | None = None, longest: int = 40, shortest: int = 1) -> BitfieldMask:
    """Masks with runs of equal tokens (as real ones have), some documents, spans, shuffled positions, windows."""
    batch = draw(st.integers(1, 3)) if batch is None else batch
    length = draw(st.integers(shortest, longest))
    change_rate = draw(st.sampled_from([0.05, 0.2, 0.7]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**20)))

    def runs(low: int, high: int) -> torch.Tensor:
        """int64 [B, T] of values in low..high in runs of random length."""
        change = torch.rand(batch, length, generator=generator) < change_rate
        values = torch.randint(low, high + 1, (batch, length), generator=generator)
        index = torch.where(change, torch.arange(length), 0).cummax(1).values
        return values.gather(1, index)

    streams = draw(st.sampled_from([[0], [0, 1], [0, 3, 55]]))
    attends = st.one_of(st.none(), st.sets(st.sampled_from(streams)))
    words = [word(stream, draw(attends), causal=draw(st.booleans())) for stream in streams for _ in range(2)]
    bits = torch.tensor(words)[runs(0, len(words) - 1)]
    doc = runs(-1, 2).int() if draw(st.booleans()) else None
    span = None
    if draw(st.booleans()):
        span = runs(-1, 1).int()
        if doc is not None:
            span = torch.where(span >= 0, span + 2 * doc.clamp(min=0), -1).int()  # no span in two documents
    pos = None
    if draw(st.booleans()):
        pos = torch.stack([torch.randperm(length, generator=generator) for _ in range(batch)]).int()
    window: int | torch.Tensor | None = draw(st.sampled_from([None, 1, 3, 10]))
    if window is not None and draw(st.booleans()):
        window = torch.randint(1, 12, (batch, length), generator=generator, dtype=torch.int32)
    return BitfieldMask(bits, doc=doc, span=span, pos=pos, window=window, sinks=draw(st.sampled_from([0, 2])))


@st.composite
def mask_pairs(draw: st.DrawFn, longest: int = 40, shortest: int = 1) -> tuple[BitfieldMask, BitfieldMask | None]:
    """A mask, and None or a mask of other keys: of another length, or the full mask whose first part is this mask."""
    mask = draw(masks(longest=longest, shortest=shortest))
    kind = draw(st.sampled_from(["self", "other", "part"]))
    if kind == "self":
        return mask, None
    if kind == "other":
        return mask, draw(masks(batch=mask.batch, longest=longest, shortest=shortest))
    index = draw(st.lists(st.integers(0, mask.length - 1), min_size=1, max_size=longest))
    return mask.select(index), mask
