"""The Gluon backward against dense attention; `gluon_interpreter` runs it from its own source."""

from __future__ import annotations

import pytest
import torch
from hypothesis import strategies as st

pytest.importorskip("triton.experimental.gluon")

from interlace.attention import AttentionPlan, cpu, gluon, triton
from interlace.masks import BitfieldMask, word
from tests.attention import backends, cases
from tests.attention import no_part as no_part_cases
from tests.kernels.gluon_interpreter import edited, launching
from tests.mask_strategies import mask_pairs
from tests.sampling import given_by_tier

KERNELS = ["delta_kernel", "gluon_query_gradient_kernel", "gluon_key_gradient_kernel"]


@pytest.fixture(autouse=True)
def backend(monkeypatch):
    """Gluon runs on the CPU; the forward is the CPU's."""
    monkeypatch.setattr(gluon, "unsupported", lambda q, v: None)
    monkeypatch.setattr(gluon, "forward", cpu.forward)


def check(mask, kv_mask=None, dtype=torch.bfloat16, *, seed=0, mistakes=None, **options):
    options = {"block": 128, "dim": 64, "heads": 2, "kv_heads": 1, "scale": 0.1, **options}
    with launching(seed, **mistakes or {}) as ran:
        backends.compare("gluon", mask, kv_mask, dtype, **options)
    split = ["sum_kernel"] * (len(ran) - len(KERNELS))
    assert ran == KERNELS + split


@pytest.mark.parametrize("name", cases.masks())
def test_known_masks(name):
    check(*cases.masks()[name], seed=1)


@pytest.mark.parametrize(
    "options",
    [
        dict(heads=4, kv_heads=2, dim=128),
        dict(heads=3, kv_heads=3, dtype=torch.float16, cap=1),
        dict(dim=96, cap=2),
        dict(dim=40, scale=-0.3),
    ],
    ids=str,
)
def test_full_blocks_heads_and_splits(options):
    """Three blocks of queries and keys, the last one short; FULL, PARTIAL and empty ones."""
    check(BitfieldMask.causal(1, 300), seed=2, **options)


@pytest.mark.slow
@given_by_tier(
    10, 60, st.integers(1, 400), st.sampled_from([None, 1]), st.sampled_from([64, 72]), st.integers(0, 1 << 20)
)
def test_lengths(length, cap, dim, seed):
    check(BitfieldMask.causal(1, length), cap=cap, dim=dim, seed=seed)


@given_by_tier(3, 40, mask_pairs(longest=200), st.sampled_from([None, 1]), st.integers(0, 1 << 20))
def test_random_masks(masks, cap, seed):
    masks = tuple(m if m is None else m.mapped(lambda tensor: tensor[:2]) for m in masks)
    check(*masks, cap=cap, seed=seed)


@pytest.mark.parametrize(("poison", "cap"), [(torch.nan, None), (torch.inf, 1)])
def test_rows_that_take_no_part_may_hold_anything(poison, cap):
    no_part(poison, cap)


def no_part(poison, cap, mistakes=None):
    """Two rows of the batch: queries without keys, keys without queries; padding within a block and at the end."""
    bits = BitfieldMask.causal(2, 200).bits.clone()
    bits[0, 5:40] = word(3, [5])
    doc = torch.zeros(2, 200, dtype=torch.int32)
    doc[0, 190:] = doc[1, 60:170] = -1
    mask, shape = BitfieldMask(bits, doc=doc), dict(dims=(64, 64), heads=(2, 1))
    with launching(0, **mistakes or {}):
        no_part_cases.compare("gluon", mask, None, torch.bfloat16, poison, block=128, cap=cap, **shape)


def test_wide_key_gradients():
    mask = BitfieldMask.causal(1, 200)
    q, k, v = (x.detach() for x in cases.tensors(mask, None, 2, 1, 64, torch.bfloat16))
    dout = torch.randn(q.shape, generator=torch.Generator().manual_seed(2)).bfloat16()
    for cap in (None, 1):
        with launching():
            job = gluon.Attention(q, k, v, AttentionPlan.build(mask, cap=cap), 0.1, None)
            given = (*cpu.forward(job), dout, None)
            for rounded, wide in zip(gluon.backward(job, *given, False)[1:], gluon.backward(job, *given, True)[1:]):
                assert wide.dtype == torch.float32 and torch.equal(rounded, wide.bfloat16())


@pytest.mark.parametrize("reason", ["softcap", "bitmaps"])
def test_the_rest_is_tritons(reason, monkeypatch):
    mask = BitfieldMask.causal(1, 200)
    q, k, v = (x.detach() for x in cases.tensors(mask, None, 2, 1, 64, torch.bfloat16))
    with launching():
        plan = AttentionPlan.build(mask)
    if reason == "bitmaps":
        plan = AttentionPlan.build(mask)  # on the CPU
    job = gluon.Attention(q, k, v, plan, 0.1, 2.0 if reason == "softcap" else None)
    assert reason in gluon.unsupported_backward(job)
    monkeypatch.setattr(triton, "backward", cpu.backward)
    given = (*cpu.forward(job), torch.ones_like(q), None, False)
    for got, wanted in zip(gluon.backward(job, *given), cpu.backward(job, *given)):
        assert torch.equal(got, wanted)


# ---------------------------------------------------------------------- mistakes


WAIT_FULL = "    mbarrier.wait(full.index(stage), full_phase(n, STAGES))\n"
WAIT_EMPTY = "        mbarrier.wait(empty.index(stage), empty_phase(n + i, STAGES))\n"
ARRIVE = "    mbarrier.arrive(empty.index(stage), count=1)\n"
ARRIVE_ONE = "    mbarrier.arrive(empty.index(one), count=1)\n"
LAST_WAIT = "    dv, dk, _p16, _ds16 = warpgroup_mma_wait(0, deps=[dv, dk, p16, ds16])\n"
MIDDLE_WAIT = "    dp, dq, ds16 = warpgroup_mma_wait(1, deps=[dp, dq, ds16])\n"
MISTAKES = {
    "bytes not waited for": edited("_key_gradients", (WAIT_FULL, "")),
    "keys not waited for": edited("_key_scores", (WAIT_FULL, "")),
    "wrong phase of full barriers": edited(
        "_key_gradients", (WAIT_FULL, WAIT_FULL.replace("full_phase", "empty_phase"))
    ),
    "handed back early": edited("_key_gradients", (LAST_WAIT + ARRIVE, ARRIVE + LAST_WAIT)),
    "keys handed back early": edited("_query_gradient", (MIDDLE_WAIT + ARRIVE_ONE, ARRIVE_ONE + MIDDLE_WAIT)),
    "never handed back": edited("_key_gradients", (ARRIVE, "")),
    "handed back by one": edited("_key_gradients", (ARRIVE, ARRIVE.replace("count=1", "count=2"))),
    "buffers not waited for": edited("_fetch_queries", (WAIT_EMPTY, "")),
    "wrong phase of empty barriers": edited("_fetch_queries", ("empty_phase(n + i", "full_phase(n + i")),
    "bytes not expected": edited("_fetch_queries", ("+ 2 * lse2_desc.block_type", "+ lse2_desc.block_type")),
    "dP not waited for": edited("_key_gradients", ("wait(1, deps=[dp])", "wait(2, deps=[dp])")),
    "S not waited for": edited("_query_gradient", ("wait(2, deps=[s_other])", "wait(3, deps=[s_other])")),
    "S beyond the last tile": edited("_query_gradient", ("gl.minimum(n + 2, last)", "n + 2")),
    "K and V not waited for": edited("_consume_queries", ("    mbarrier.wait(resident, 0)\n", "")),
    "Q and dO not waited for": edited("_consume_keys", ("    mbarrier.wait(resident, 0)\n", "")),
    "heads in another order": edited("_produce_queries", ("member * part_tiles, batch", "part_tiles, batch")),
    "bitmaps of the wrong tile": edited("_consume_queries", ("words + at,", "words,")),
}
UNCLEAN = {
    "of queries": edited("_key_gradients", ("clean_streamed(", "0 and clean_streamed(")),
    "of keys": edited("_query_gradient", ("clean_streamed(streamed, one", "0 and clean_streamed(streamed, one")),
    "of padding": edited("clean_held", (" < 0,", " < -9,")),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_found(mistake):
    """At least one of some seeds finds the mistake."""
    mask = BitfieldMask.causal(1, 640, window=300)

    def fails(seed: int) -> bool:
        try:
            check(mask, seed=seed, mistakes=MISTAKES[mistake])
        except (AssertionError, TypeError):  # Broken, wrong values, or an operator on a product
            return True
        return False

    assert any(fails(seed) for seed in range(20))


@pytest.mark.parametrize("mistake", UNCLEAN)
def test_rows_that_are_not_cleaned_are_found(mistake):
    with pytest.raises(AssertionError, match="nan"):
        no_part(torch.nan, None, UNCLEAN[mistake])
