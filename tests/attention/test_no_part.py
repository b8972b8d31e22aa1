"""Tokens that take no part: what rows of padding hold, of queries that see nothing and of keys that nobody sees, enters
no result, be it NaN or infinite. Bits are compared with those for zeros in their place."""

from __future__ import annotations

import pytest
import torch
from hypothesis import strategies as st

from interlace.attention import AttentionPlan
from interlace.attention.op import run_backward, run_forward
from interlace.masks import BitfieldMask, word
from tests.attention import cases
from tests.mask_strategies import mask_pairs
from tests.sampling import given_by_tier

POISONS = [torch.nan, torch.inf, -torch.inf]
OF_QUERIES, OF_KEYS = ("q", "dout", "dlse", "out", "lse"), ("k", "v")


def hidden(mask: BitfieldMask, keys: BitfieldMask | None) -> tuple[torch.Tensor, torch.Tensor]:
    """bool [B, Tq] and [B, Tk]: the queries that see nothing and the keys that nobody sees, by the dense mask."""
    dense = mask.to_dense(keys)
    return ~dense.any(2), ~dense.any(1)


def small() -> BitfieldMask:
    """One row of two full, two partial and some empty blocks of 16: padding at the end, a query that sees nothing (of a
    stream that attends one that nobody is), and a key that nobody sees (of a stream that nobody attends)."""
    bits = torch.full((1, 60), word(0, [0], causal=True))
    bits[0, 5], bits[0, 9] = word(0, [7]), word(3, [0], causal=True)
    doc = torch.zeros(1, 60, dtype=torch.int32)
    doc[:, 50:] = -1
    return BitfieldMask(bits, doc=doc)


def results(
    backend, mask, keys, dtype, poison, *, block=16, softcap=None, cap=None, dims=(8, 8), heads=(4, 2),
    deterministic=True,
):  # fmt: skip
    """[out, lse, dq, dk, dv] with `poison` in every row that takes no part, also in out and lse on their way back."""
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
    found = results(backend, mask, keys, dtype, poison, **options)
    for name, one, other in zip(("out", "lse", "dq", "dk", "dv"), found, clean):
        assert torch.equal(one, other), (name, poison)
    blind, unseen = hidden(mask, keys)
    out, lse, dq, dk, dv = (x.transpose(1, 2) for x in found)  # tokens before heads
    assert not out[blind].any() and (lse[blind] == -torch.inf).all() and not dq[blind].any()
    assert not dk[unseen].any() and not dv[unseen].any()


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("name", ["empty rows", "shuffled part", "50 x 1", "window"])
def test_known_masks(backend, dtype, name):
    for poison in POISONS:
        compare(backend, *cases.masks()[name], dtype, poison)
    compare(backend, *cases.masks()[name], dtype, torch.nan, block=128, softcap=2.0, dims=(9, 20))


@given_by_tier(30, 100,
    mask_pairs(longest=150), st.sampled_from([1, 16, 64, 100]), st.sampled_from([None, 3.0]),
    st.fixed_dictionaries({name: st.sampled_from([0.0, *POISONS]) for name in OF_QUERIES + OF_KEYS}),
    st.sampled_from([torch.float32, torch.bfloat16]), st.sampled_from([(8, 8), (5, 20), (16, 7)]),
)  # fmt: skip
def test_any_mask_and_any_poison(pair, block, softcap, poison, dtype, dims):
    for backend in ("reference", "cpu"):
        compare(backend, *pair, dtype, poison, block=block, softcap=softcap, dims=dims)


def test_several_threads_and_pieces_of_a_head():
    mask, keys = cases.masks()["empty rows"]
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        compare("cpu", mask, keys, torch.float32, torch.nan, dims=(64, 32))
        compare("cpu", mask, keys, torch.bfloat16, torch.nan, dims=(64, 64))
    finally:
        torch.set_num_threads(before)


def test_who_is_hidden_in_the_small_mask():
    blind, unseen = (side[0].nonzero().flatten().tolist() for side in hidden(small(), None))
    assert blind == [5, *range(50, 60)] and unseen == [9, *range(50, 60)]
    for dims in ((16, 16), (5, 20)):
        compare("cpu", small(), None, torch.float32, torch.nan, dims=dims)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_finite_values_there_change_no_bits_either(backend):
    for name in ("empty rows", "shuffled part"):
        compare(backend, *cases.masks()[name], torch.float32, 1e30)
