"""The Gluon kernels against dense attention, on the CPU: their own source runs in `gluon_emulation`.

Waits and arrivals of producer and consumers take place in random order, so a wait that is missing or comes too early is
a wrong value or a deadlock here. `test_the_emulation_finds_mistakes` makes such mistakes.
"""

from __future__ import annotations

import importlib.util
import sys

import pytest
import torch
from hypothesis import strategies as st

pytest.importorskip("triton.experimental.gluon")

from interlace.attention import AttentionPlan, cpu, gluon, triton
from interlace.kernels import bitfield_gluon_backward, bitfield_gluon_backward_launch
from interlace.masks import BitfieldMask
from tests.attention import cases, test_backends, test_no_part
from tests.kernels.gluon_emulation import emulated
from tests.mask_strategies import mask_pairs
from tests.sampling import given_by_tier

KERNELS = ["delta_kernel", "gluon_query_gradient_kernel", "gluon_key_gradient_kernel"]


@pytest.fixture(autouse=True)
def backend(monkeypatch):
    """Gluon runs on the CPU; the forward is the CPU's."""
    monkeypatch.setattr(gluon, "why_not", lambda q, v: None)
    monkeypatch.setattr(gluon, "forward", cpu.forward)


def check(mask, keys=None, dtype=torch.bfloat16, *, seed=0, **options):
    options = {"block": 128, "dim": 64, "heads": 2, "kv_heads": 1, "scale": 0.1, **options}
    with emulated(seed) as ran:
        test_backends.compare("gluon", mask, keys, dtype, **options)
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
    masks = tuple(m if m is None else m._map(lambda tensor: tensor[:2]) for m in masks)
    check(*masks, cap=cap, seed=seed)


@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
@pytest.mark.parametrize("cap", [None, 1])
def test_rows_that_take_no_part_may_hold_anything(poison, cap):
    bits = BitfieldMask.causal(2, 300).bits.clone()
    bits[0, 5:40] = test_no_part.word(3, [5])  # see nothing and are seen by nobody
    doc = torch.zeros(2, 300, dtype=torch.int32)
    doc[0, 290:] = doc[1, 100:210] = -1
    mask = BitfieldMask(bits, doc=doc)
    with emulated():
        test_no_part.compare("gluon", mask, None, torch.bfloat16, poison, block=128, dims=(64, 64), cap=cap)


def test_wide_key_gradients():
    mask = BitfieldMask.causal(1, 200)
    q, k, v = (x.detach() for x in cases.tensors(mask, None, 2, 1, 64, torch.bfloat16))
    dout = torch.randn(q.shape, generator=torch.Generator().manual_seed(2)).bfloat16()
    for cap in (None, 1):
        with emulated():
            job = gluon.Attention(q, k, v, AttentionPlan.build(mask, cap=cap), 0.1, None)
            given = (*cpu.forward(job), dout, None)
            for rounded, wide in zip(gluon.backward(job, *given, False)[1:], gluon.backward(job, *given, True)[1:]):
                assert wide.dtype == torch.float32 and torch.equal(rounded, wide.bfloat16())


@pytest.mark.parametrize("reason", ["softcap", "bitmaps"])
def test_the_rest_is_tritons(reason, monkeypatch):
    mask = BitfieldMask.causal(1, 200)
    q, k, v = (x.detach() for x in cases.tensors(mask, None, 2, 1, 64, torch.bfloat16))
    with emulated():
        plan = AttentionPlan.build(mask)
    if reason == "bitmaps":
        plan = AttentionPlan.build(mask)  # on the CPU
    job = gluon.Attention(q, k, v, plan, 0.1, 2.0 if reason == "softcap" else None)
    assert reason in gluon.why_not_backward(job)
    monkeypatch.setattr(triton, "backward", cpu.backward)
    given = (*cpu.forward(job), torch.ones_like(q), None, False)
    for got, wanted in zip(gluon.backward(job, *given), cpu.backward(job, *given)):
        assert torch.equal(got, wanted)


# ---------------------------------------------------------------------- mistakes

WAIT_FULL = "    mbarrier.wait(full.index(stage), full_phase(n, STAGES))\n"
ARRIVE = "    mbarrier.arrive(empty.index(stage), count=1)\n"
LAST_WAIT = "    dv, dk, _p16, _ds16 = warpgroup_mma_wait(0, deps=[dv, dk, p16, ds16])\n"
WAIT_EMPTY = "        mbarrier.wait(empty.index(stage), empty_phase(n + i, STAGES))\n"
TWO, WAIT_PRODUCT = "init(empty.index(stage), count=2)", "warpgroup_mma_wait(1, deps=[dp])"
MISTAKES = {
    "a consumer reads before the bytes have come": (WAIT_FULL, ""),
    "a consumer waits for the wrong phase": (WAIT_FULL, WAIT_FULL.replace("full_phase", "empty_phase")),
    "a buffer goes back while products read it": (LAST_WAIT + ARRIVE, ARRIVE + LAST_WAIT),
    "a buffer goes back when one consumer has read it": (TWO, TWO.replace("2", "1")),
    "a buffer never goes back": (ARRIVE, ""),
    "the producer does not wait": (WAIT_EMPTY, ""),
    "the producer waits for the wrong phase": ("empty_phase(n + i", "full_phase(n + i"),
    "some bytes are not expected": ("+ 2 * lse2_desc.block_type.nbytes", "+ lse2_desc.block_type.nbytes"),
    "a product is read while in flight": (WAIT_PRODUCT, WAIT_PRODUCT.replace("1", "2")),
    "resident tiles are not waited for": ("    mbarrier.wait(resident, 0)\n", ""),
    "rows that nobody sees are not cleaned": ("        _clean_streamed(q_smem", "        0 and _clean_streamed(q_smem"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_emulation_finds_mistakes(mistake, tmp_path, monkeypatch):
    old, new = MISTAKES[mistake]
    with open(bitfield_gluon_backward.__file__) as file:
        source = file.read()
    assert old in source
    path = tmp_path / "mutant.py"
    path.write_text(source.replace(old, new))
    spec = importlib.util.spec_from_file_location("interlace.kernels.mutant", path)
    mutant = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, mutant)
    spec.loader.exec_module(mutant)
    monkeypatch.setattr(bitfield_gluon_backward_launch, "gluon_key_gradient_kernel", mutant.gluon_key_gradient_kernel)

    def fails(seed: int) -> bool:
        try:
            if "cleaned" in mistake:
                test_rows_that_take_no_part_may_hold_anything(torch.nan, None)
            else:
                check(BitfieldMask.causal(1, 640, window=300), seed=seed, heads=2)
        except (AssertionError, TypeError):  # Broken, wrong values, or an operator on a product
            return True
        return False

    assert any(fails(seed) for seed in range(10))
