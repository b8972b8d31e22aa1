"""The Gluon forward against dense attention; `gluon_interpreter` runs it from its own source."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton.experimental.gluon")

from interlace.attention import AttentionPlan, reference
from interlace.attention.backend import Attention
from interlace.kernels.bitfield_gluon_launch import gluon_forward_calls
from interlace.masks import BitfieldMask, word
from tests.attention import cases
from tests.kernels import gluon_interpreter
from tests.kernels.gluon_interpreter import edited, with_bitmaps
from tests.mask_strategies import mask_pairs


def forward(job: Attention, seed: int = 0, **mistakes: str) -> tuple[torch.Tensor, torch.Tensor]:
    q, k, v, plan, scale, softcap = job
    out, lse = torch.full_like(q, torch.nan), torch.full(q.shape[:3], torch.nan)
    for call in gluon_forward_calls(q, k, v, plan, out, lse, scale, softcap):
        gluon_interpreter.run(call, seed, **mistakes)
    return out, lse


def check(mask, keys=None, dim=64, dtype=torch.bfloat16, softcap=None, cap=None, mapped=True, heads=(2, 1), seed=0):
    with with_bitmaps() if mapped else nullcontext():
        plan = AttentionPlan.build(mask, keys, cap=cap)
    q, k, v = (x.detach() for x in cases.tensors(mask, keys, *heads, dim, dtype))
    wanted = reference.forward(Attention(q.float(), k.float(), v.float(), plan, 0.2, softcap))
    for x, docs in ((q, plan.q_doc), (k, plan.k_doc), (v, plan.k_doc)):
        x.masked_fill_((docs < 0)[:, None, :, None], torch.nan)  # unused rows may hold anything
    got = forward(Attention(q, k, v, plan, 0.2, softcap), seed)
    torch.testing.assert_close(got[0].float(), wanted[0], rtol=0.02, atol=0.02)
    torch.testing.assert_close(got[1], wanted[1], rtol=1e-3, atol=1e-3)


def documents(batch: int, *lengths: tuple[int, int], causal: bool = False) -> BitfieldMask:
    """lengths: (document, tokens)."""
    docs = torch.repeat_interleave(*torch.tensor(lengths).T).int()
    bits = torch.full((batch, docs.numel()), word(0, [0], causal=causal))
    return BitfieldMask(bits, doc=docs.expand(batch, -1).contiguous())


@pytest.mark.parametrize("mapped", [True, False])
@pytest.mark.parametrize("name", cases.masks())
def test_masks(name, mapped):
    check(*cases.masks()[name], mapped=mapped)


@pytest.mark.parametrize(
    "options",
    [
        dict(dim=128),
        dict(dim=72),
        dict(dim=80, mapped=False),
        dict(dim=96, dtype=torch.float16, cap=1, heads=(2, 2)),
        dict(dim=104),
        dict(dim=8, dtype=torch.float16),
        dict(dim=128, dtype=torch.float16, softcap=3.0),
        dict(dim=128, mapped=False, softcap=3.0),
        dict(cap=1),
        dict(cap=2, dim=128, heads=(4, 2)),
        dict(cap=1, mapped=False),
    ],
    ids=str,
)
def test_variants(options):
    """Three documents, the last tokens padding: FULL and PARTIAL blocks in a row, and rows that are split."""
    check(documents(2, (0, 300), (1, 70), (2, 40), (-1, 23), causal=True), **options)


@pytest.mark.parametrize("length", [1, 63, 64, 127, 128, 129, 256, 300, 385])
@pytest.mark.parametrize("dim", [64, 80, 128])
def test_lengths(length, dim):
    """Lengths of keys; every query sees the first keys, so that rows begin with FULL blocks."""
    mask = BitfieldMask.causal(1, 400)
    check(mask.select(slice(400 - length, 400)), mask, dim=dim, seed=length)


@settings(max_examples=10)
@given(mask_pairs(longest=300), st.sampled_from([None, 1]), st.booleans(), st.integers(0, 1000))
def test_random_masks(masks, cap, mapped, seed):
    check(*masks, cap=cap, mapped=mapped, heads=(1, 1), seed=seed)


GIVE_K = "mbarrier.arrive(k_empty.index(stage_of(n, STAGES)), count=1)"
GIVE_V = "mbarrier.arrive(v_empty.index(stage_of(n - 1, STAGES)), count=1)"
WAIT_FOR_S = "s = warpgroup_mma_wait(2, deps=[s])"
WAIT_FOR_O = "acc, more = _complete(acc, more, operand, other, REST)"
WAIT_FOR_V = "mbarrier.wait(v_full.index(stage_of(n, STAGES)), full_phase(n, STAGES))"
CLEAN = "_clean(v_smem, stage, k_doc + token, k_length - token, BLOCK_D, STAGES)"
CLEAN_REST = "_clean(rest_smem, stage, k_doc + token, k_length - token, REST, STAGES)"
LANDED = "mbarrier.wait(v_landed, cleaned & 1)"
MISTAKES = {
    "K handed back early": edited("_step", (GIVE_K, "0"), (WAIT_FOR_S, f"{GIVE_K}; {WAIT_FOR_S}")),
    "V handed back early": edited("_step", (GIVE_V, "0"), (WAIT_FOR_O, f"{GIVE_V}; {WAIT_FOR_O}")),
    "K never handed back": edited("_step", (GIVE_K, "0")),
    "S not waited for": edited("_step", (WAIT_FOR_S, WAIT_FOR_S.replace("2", "3"))),
    "O not waited for": edited("_complete", ("(0, deps=[acc, more,", "(1, deps=[acc, more,")),
    "V not waited for": edited("_step", (WAIT_FOR_V, "0")),
    "V cleaned before it is there": edited("_fetch_clean", (LANDED, "0")),
    "V not cleaned": edited("_fetch_clean", (CLEAN, "0")),
    "the rest of V not cleaned": edited("_fetch_clean", (CLEAN_REST, "0")),
    "the rest of S left out": edited("_scores", ("if REST:", "if 0:")),
    "the rest of O of the wrong columns": edited(
        "_consume", ("q_length, local, BLOCK_D, HEAD_DIM", "q_length, local, 0, HEAD_DIM")
    ),
    "no key is absent": edited("_absent", (" < 0", " < -1")),
    "phases of full barriers": edited("full_phase", ("& 1", "& 0")),
    "phases of empty barriers": edited("empty_phase", ("^ 1", "^ 0")),
    "empty barriers not waited for": edited("empty_phase", ("((n // STAGES) & 1) ^ 1", "1")),
    "one stage for all": edited("stage_of", ("n % STAGES", "0")),
    "both consumers wait for a turn": edited("turn_phase", ("(1 - CONSUMER)", "0")),
    "decay of the wrong tile": edited("_values", ("acc = acc *", "0 *")),
    "bitmaps of the wrong tile": edited("_consume", ("words + i *", "words + (i - 1) *")),
}


def crowded() -> Attention:
    """A block of queries with 2 FULL and 3 PARTIAL blocks of keys, two of which have absent keys."""
    tokens = documents(1, (1, 100), (0, 284), (-1, 20), (0, 108), (-1, 28), (0, 100))
    with with_bitmaps():
        plan = AttentionPlan.build(tokens.select(slice(256, 384)), tokens)
    assert (plan.full_q_ptr.tolist(), plan.part_q_ptr.tolist()) == ([0, 2], [0, 3])
    q, k, v = (x.detach() for x in cases.tensors(tokens, None, 1, 1, 96, torch.bfloat16))
    v.masked_fill_((plan.k_doc < 0)[:, None, :, None], torch.nan)
    return Attention(q[:, :, 256:384].contiguous(), k, v, plan, 0.2, None)


def test_results_do_not_depend_on_the_order_of_events():
    results = [forward(crowded(), seed)[0] for seed in range(20)]
    assert all(torch.equal(result, results[0]) for result in results) and results[0].isfinite().all()


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_found(mistake):
    """At least one of many seeds finds the mistake."""
    right, _ = forward(crowded())

    def fails(seed: int) -> bool:
        try:
            return not torch.equal(forward(crowded(), seed, **MISTAKES[mistake])[0], right)
        except gluon_interpreter.Broken:
            return True

    assert any(fails(seed) for seed in range(100))
