"""Typical training masks at small sizes, and dense attention by plain autograd: in fp64, and with torch's own operators
in 16 bits."""

from __future__ import annotations

import torch

from interlace.masks import BitfieldMask, Segment, word


def _prefix_lm(length: int, prefix: int) -> BitfieldMask:
    span = torch.full((1, length), -1, dtype=torch.int32)
    span[:, :prefix] = 0
    return BitfieldMask(torch.full((1, length), word(0, causal=True)), span=span)


def _shared_question(length: int) -> BitfieldMask:
    """A question (stream 0) and two answers (streams 1, 2): each answer sees the question and itself, not the other."""
    third = length // 3
    bits = torch.full((1, length), word(0, [0], causal=True))
    bits[:, third : 2 * third] = word(1, [0, 1], causal=True)
    bits[:, 2 * third :] = word(2, [0, 2], causal=True)
    return BitfieldMask(bits)


def _blockwise(length: int, size: int) -> BitfieldMask:
    """Causal blockwise: back to the start of the previous block, and one sink; the last row sees all."""
    index = torch.arange(length, dtype=torch.int32)
    window = (index % size + size + 1)[None].contiguous()
    window[:, -1] = 1 << 30
    return BitfieldMask(torch.full((1, length), word(0, causal=True)), window=window, sinks=1)


def _interleaved(length: int) -> list[Segment]:
    return [Segment("text", length // 6), Segment("image", length // 5), Segment("text", 3), Segment("audio", 9)]


def _with_empty_rows(length: int) -> BitfieldMask:
    """Queries of stream 3 attend stream 5, which has no tokens: these rows are empty. The rest is causal, the tail
    padding."""
    bits = torch.full((2, length), word(0, [0], causal=True))
    bits[0, length // 4 : length // 2] = word(3, [5])
    doc = torch.zeros(2, length, dtype=torch.int32)
    doc[1, length // 3 :] = -1
    return BitfieldMask(bits, doc=doc)


def masks() -> dict[str, tuple[BitfieldMask, BitfieldMask | None]]:
    """name -> (mask, kv_mask). Sizes are odd on purpose: 113 x 203, 1 x 50, and more than one chunk of keys."""
    long = BitfieldMask.causal(1, 203)
    packed = BitfieldMask.pack([BitfieldMask.from_segments([_interleaved(n)]) for n in (90, 60, 150)])
    shuffled = torch.randperm(packed.length, generator=torch.Generator().manual_seed(0))
    return {
        "full": (BitfieldMask.full(2, 70), None),
        "causal": (BitfieldMask.causal(2, 130), None),
        "window": (BitfieldMask.causal(1, 150, window=33), None),
        "lambda": (BitfieldMask.causal(1, 150, window=20, sinks=4), None),
        "prefix": (_prefix_lm(120, 50), None),
        "shared question": (_shared_question(150), None),
        "blockwise": (_blockwise(150, 32), None),
        "multimodal": (BitfieldMask.from_segments([_interleaved(150), _interleaved(90)]), None),
        "packed": (packed, None),
        "shuffled part": (packed.select(shuffled[:100]), packed),
        "empty rows": (_with_empty_rows(100), None),
        "113 x 203": (long.select(slice(90, 203)), long),
        "1 x 50": (BitfieldMask.causal(2, 50).select([49]), BitfieldMask.causal(2, 50)),
        "50 x 1": (BitfieldMask.causal(1, 50), BitfieldMask.causal(1, 1)),
        "cross": (BitfieldMask.full(1, 40), BitfieldMask.full(1, 77)),
    }


def tensors(
    mask: BitfieldMask, keys: BitfieldMask | None, heads: int, kv_heads: int, dim: int, dtype: torch.dtype,
    value_dim: int | None = None,
) -> list[torch.Tensor]:  # fmt: skip
    """q, k, v that require gradients, from a fixed seed; value_dim: head dimension of v, if it differs from q and k."""
    generator = torch.Generator().manual_seed(1)
    length = mask.length if keys is None else keys.length
    shapes = [(mask.batch, heads, mask.length, dim)]
    shapes += [(mask.batch, kv_heads, length, columns) for columns in (dim, value_dim or dim)]
    return [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]


def oracle(q, k, v, dense, scale, softcap=None):
    """(out, lse) in fp64 by autograd through a softmax over the visible keys alone; -inf never occurs in it."""
    q, k, v = q.double(), k.double(), v.double()
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    scores = q @ k.mT * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    seen = dense[:, None].to(scores.dtype)
    top = (scores.detach() - 1e9 * (1 - seen)).amax(-1, keepdim=True) if scores.shape[-1] else 0.0
    weights = torch.exp((scores - top) * seen) * seen
    total = weights.sum(-1, keepdim=True)
    empty = total == 0
    out = weights @ v / torch.where(empty, 1.0, total)
    lse = torch.where(empty, -torch.inf, torch.log(torch.where(empty, 1.0, total)) + top)
    return out, lse.squeeze(-1)


def in_its_dtype(q, k, v, dense, scale, softcap, dout, dlse, factor=1.0):
    """[out, lse, dq, dk, dv] by torch's operators in the inputs' dtype, with the rounding of fused kernels.

    Scores and softmax are in fp32, other products in 16 bits. The gradient of the scores uses the rounded output.

    factor: values are multiplied by it before rounding and divided by it after, which gives other, equally valid
    roundings.
    """
    heads, kv_heads, dtype = q.shape[1], k.shape[1], q.dtype

    def rounded(x):
        return (x * factor).to(dtype).float() / factor

    k, v = (x.repeat_interleave(heads // kv_heads, dim=1) for x in (k, v))
    scores, slope = q.float() @ k.float().mT * scale, scale
    if softcap is not None:
        squashed = torch.tanh(scores / softcap)
        scores, slope = softcap * squashed, scale * (1 - squashed.square())
    scores = scores.masked_fill(~dense[:, None], -torch.inf)
    empty = ~dense.any(-1)[:, None]
    lse = scores.logsumexp(-1) if scores.shape[-1] else scores.new_full(scores.shape[:-1], -torch.inf)
    weights = scores.softmax(-1).masked_fill(empty[..., None], 0)
    out = (rounded(weights) @ v.float()).to(dtype)
    dlse = dlse.masked_fill(empty, 0)
    correction = (dout.float() * out.float()).sum(-1) - dlse
    ds = rounded(weights * ((dout @ v.mT).float() - correction[..., None]) * slope)
    pairs = ((ds, q), (rounded(weights), dout))
    dk, dv = ((x.mT @ y.float()).to(dtype).unflatten(1, (kv_heads, -1)).sum(2) for x, y in pairs)
    return [out, lse, (ds @ k.float()).to(dtype), dk, dv]


def renderings(q, k, v, *others):
    """For each of out, lse, dq, dk, dv: results of `in_its_dtype`, with enough factors for 500 values of the smallest.

    A few values are too few to estimate the rounding error.
    """
    few = min(x.numel() for x in (q, k, v))
    count = min(32, -(-500 // max(few, 1)))
    return list(zip(*(in_its_dtype(q, k, v, *others, factor=2 ** (i / count)) for i in range(count))))
