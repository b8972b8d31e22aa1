"""Comparison of attention with and without poison (NaN, infinity) in unused tokens."""

from __future__ import annotations

import torch

from interlace.attention import AttentionPlan
from interlace.attention.op import run_backward, run_forward
from interlace.masks import BitfieldMask, word
from tests.attention import cases

POISONS = [torch.nan, torch.inf, -torch.inf]


OF_QUERIES, OF_KEYS = ("q", "dout", "dlse", "out", "lse"), ("k", "v")


def hidden(mask: BitfieldMask, keys: BitfieldMask | None) -> tuple[torch.Tensor, torch.Tensor]:
    """bool [B, Tq] and [B, Tk]: queries without visible keys and keys without queries, by the dense mask."""
    dense = mask.to_dense(keys)
    return ~dense.any(2), ~dense.any(1)


def small() -> BitfieldMask:
    """One row of two full, two partial and some empty blocks of 16.

    It has padding at the end. One query has no visible keys: it attends a stream without tokens. One key has no
    queries: no query attends its stream.
    """
    bits = torch.full((1, 60), word(0, [0], causal=True))
    bits[0, 5], bits[0, 9] = word(0, [7]), word(3, [0], causal=True)
    doc = torch.zeros(1, 60, dtype=torch.int32)
    doc[:, 50:] = -1
    return BitfieldMask(bits, doc=doc)


def results(
    backend, mask, keys, dtype, poison, *, block=16, softcap=None, cap=None, dims=(8, 8), heads=(4, 2),
    deterministic=True,
):  # fmt: skip
    """[out, lse, dq, dk, dv] with `poison` in every unused row, also in the gradients of out and lse."""
    q, k, v = (x.detach().clone() for x in cases.tensors(mask, keys, *heads, dims[0], dtype, dims[1]))
    blind, unseen = hidden(mask, keys)
    generator = torch.Generator().manual_seed(2)
    dout = torch.randn((*q.shape[:3], dims[1]), generator=generator).to(dtype)
    dlse = torch.randn(q.shape[:3], generator=generator).to(torch.promote_types(dtype, torch.float32))

    def poisoned(name, x):
        rows = blind if name in OF_QUERIES else unseen
        value = poison[name] if isinstance(poison, dict) else poison
        return x.masked_fill(rows.view(*rows.shape[:1], 1, rows.shape[1], *(1,) * (x.dim() - 3)), value)

    q, k, v = (poisoned(name, x) for name, x in (("q", q), ("k", k), ("v", v)))
    plan = AttentionPlan.build(mask, keys, block=block, cap=cap)
    options = (plan, 0.3, softcap)
    out, lse = run_forward(q, k, v, *options, backend)
    again = [poisoned(name, x) for name, x in (("dout", dout), ("dlse", dlse), ("out", out), ("lse", lse))]
    grads = run_backward(again[0], again[1], q, k, v, *again[2:], *options, deterministic, backend)
    return [out, lse, *grads]


def compare(backend, mask, keys, dtype, poison, **options):
    clean = results(backend, mask, keys, dtype, 0.0, **options)
    result = results(backend, mask, keys, dtype, poison, **options)
    for name, one, other in zip(("out", "lse", "dq", "dk", "dv"), result, clean):
        assert torch.equal(one, other), (name, poison)
    blind, unseen = hidden(mask, keys)
    out, lse, dq, dk, dv = (x.transpose(1, 2) for x in result)  # tokens before heads
    assert not out[blind].any() and (lse[blind] == -torch.inf).all() and not dq[blind].any()
    assert not dk[unseen].any() and not dv[unseen].any()
