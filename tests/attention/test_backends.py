"""Every backend against dense fp64 attention by plain autograd: output, LSE and the gradients of both."""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from interlace.attention import AttentionPlan, bitfield_attention, reference
from interlace.attention.backend import Attention
from interlace.masks import BitfieldMask, word
from tests.attention import cases
from tests.attention.backends import (
    TOLERANCE,
    close,
    compare,
    directions,
    run,
    wide_key_gradients,
)
from tests.judge import judge
from tests.mask_strategies import mask_pairs
from tests.sampling import given_by_tier

BACKENDS = ["reference", "cpu"]
DTYPES = [*TOLERANCE, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", cases.masks())
def test_known_masks(backend, name):
    compare(backend, *cases.masks()[name], torch.float32)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["packed", "empty rows", "113 x 203"])
def test_dtypes(backend, dtype, name):
    compare(backend, *cases.masks()[name], dtype)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (3, 3), (6, 2), (4, 1)])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_head_groups_and_softcap(backend, heads, kv_heads, softcap):
    mask, keys = cases.masks()["shuffled part"]
    compare(backend, mask, keys, torch.float32, heads, kv_heads, dim=9, softcap=softcap)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("block", [1, 7, 128])
def test_block_sizes(backend, block):
    compare(backend, *cases.masks()["multimodal"], torch.float32, block=block, cap=2)


@given_by_tier(
    40, 150, mask_pairs(longest=50), st.sampled_from([4, 16]), st.sampled_from([None, 3.0]), st.sampled_from([4, 7, 2])
)
def test_random_masks(pair, block, softcap, value_dim):
    options = dict(heads=2, kv_heads=1, dim=4, value_dim=value_dim, softcap=softcap, block=block)
    for backend in BACKENDS:
        compare(backend, *pair, torch.float64, **options)


@pytest.mark.slow
@settings(max_examples=700)
@given(mask_pairs(longest=70), st.sampled_from([4, 16, 32]), st.sampled_from([None, 3.0]))
def test_many_random_masks(pair, block, softcap):
    compare("cpu", *pair, torch.float32, heads=2, kv_heads=1, dim=4, softcap=softcap, block=block)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("batch", "q_len", "k_len"), [(0, 5, 5), (2, 0, 3), (1, 5, 0)])
def test_nothing_to_attend(backend, batch, q_len, k_len):
    mask, keys = BitfieldMask.full(batch, q_len), BitfieldMask.full(batch, k_len)
    q, k, v = cases.tensors(mask, keys, 2, 1, 4, torch.float32)
    out, lse = bitfield_attention(q, k, v, mask, kv_mask=keys, return_lse=True, backend=backend)
    assert not out.any() and (lse == -torch.inf).all()
    grads = torch.autograd.grad((out.sum() + lse.sum()), (q, k, v))
    assert all(not grad.any() for grad in grads)


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_output_alone_has_gradients(backend):
    mask, keys = cases.masks()["multimodal"]
    for pick in (0, 1):
        q, k, v = cases.tensors(mask, keys, 2, 1, 4, torch.float64)
        result = bitfield_attention(q, k, v, mask, return_lse=True, backend=backend)[pick]
        wanted = cases.oracle(q, k, v, mask.to_dense(), 0.5)[pick]
        seen = wanted > -torch.inf
        grads = torch.autograd.grad(result[seen].sum(), (q, k, v))
        for got, exact in zip(grads, torch.autograd.grad(wanted[seen].sum(), (q, k, v), allow_unused=True)):
            close(got, torch.zeros_like(got) if exact is None else exact, 1e-11, pick)


@pytest.mark.parametrize("backend", BACKENDS)
def test_strided_inputs(backend):
    """Heads as a transposed view, as in models, and an expanded gradient."""
    mask = BitfieldMask.causal(2, 40)
    q, k, v = (torch.randn(2, 40, 4, 8).transpose(1, 2).requires_grad_() for _ in range(3))
    out = bitfield_attention(q, k, v, mask, backend=backend)
    grads = torch.autograd.grad(out.sum(), (q, k, v))
    wanted = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(out, wanted)
    torch.testing.assert_close(grads, torch.autograd.grad(wanted.sum(), (q, k, v)))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nan_passes_through_as_in_sdpa(backend, dtype):
    mask = BitfieldMask.causal(1, 40)
    q, k, v = (torch.randn(1, 1, 40, 8, dtype=dtype) for _ in range(3))
    q[0, 0, 5] = torch.nan
    k[0, 0, 30] = torch.nan
    out, lse = bitfield_attention(q, k, v, AttentionPlan.build(mask, block=16), return_lse=True, backend=backend)
    dirty = torch.zeros(40, dtype=torch.bool)
    dirty[5], dirty[30:] = True, True
    assert torch.equal(out[0, 0].isnan().all(-1), dirty) and torch.equal(lse[0, 0].isnan(), dirty)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_large_scores_do_not_overflow(backend, dtype):
    mask, keys = cases.masks()["lambda"]
    q, k, v = cases.tensors(mask, keys, 2, 2, 8, dtype)
    out = bitfield_attention(q, k, v, AttentionPlan.build(mask, block=16), scale=1000.0, backend=backend)
    wanted, _ = cases.oracle(q, k, v, mask.to_dense(), 1000.0)
    if dtype == torch.float32:
        close(out, wanted, 1e-3, "out")
    else:
        nothing = torch.zeros_like(out), torch.zeros(out.shape[:3])
        judge("out", out, cases.in_its_dtype(q, k, v, mask.to_dense(), 1000.0, None, *nothing)[0], wanted)
    assert all(grad.isfinite().all() for grad in torch.autograd.grad(out.sum(), (q, k, v)))


def scores_of(size):
    """q, k whose products are small integers, exact in any arithmetic, and the scale that makes the largest `size`."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, 64, 8, generator=generator) for _ in range(3))
    q, k = (2 * q).round(), (2 * k).round()
    scale = size / float((q @ k.mT).abs().max())
    return [x.requires_grad_() for x in (q, k, v)], scale


@pytest.mark.parametrize("size", [10, 1e3, 8e4, 8e6, 8e8])
def test_the_oracle_of_kernels_is_right_for_scores_of_any_size(size):
    """Weights are divided by their sum: exp(score - LSE) has an error of 0.26 % at 8e4 and a factor of 63 at 8e8."""
    (q, k, v), scale = scores_of(size)
    mask = BitfieldMask.causal(1, 64)
    out, lse = bitfield_attention(q, k, v, mask, scale=scale, return_lse=True, backend="reference")
    dout, dlse = directions(out, lse)
    exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
    wanted, wanted_lse = cases.oracle(*exact, mask.to_dense(), scale)
    got = [out, lse, *torch.autograd.grad((out, lse), (q, k, v), (dout, dlse))]
    dlse = dlse.double()
    for one, other in zip(
        got, [wanted, wanted_lse, *torch.autograd.grad((wanted, wanted_lse), exact, (dout.double(), dlse))]
    ):
        assert (one.double() - other).norm() <= 2e-6 * other.norm()


@pytest.mark.parametrize("size", [10, 1e3, 8e4])
def test_cpu_gradients_match_sdpa_accuracy_for_large_scores(size):
    """Both compute exp(score - LSE) in the backward, with an LSE rounded to fp32."""
    (q, k, v), scale = scores_of(size)
    mask = BitfieldMask.causal(1, 64)
    exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
    dout = torch.randn(v.shape, generator=torch.Generator().manual_seed(2))
    wanted = torch.autograd.grad(cases.oracle(*exact, mask.to_dense(), scale)[0], exact, dout.double())
    ours = bitfield_attention(q, k, v, mask, scale=scale, backend="cpu")
    sdpa = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
    for one, other, right in zip(*(torch.autograd.grad(out, (q, k, v), dout) for out in (ours, sdpa)), wanted):
        assert (one.double() - right).norm() <= 2 * (other.double() - right).norm()


def test_the_cpu_backend_is_bitwise_repeatable():
    mask, keys = cases.masks()["packed"]
    plan = AttentionPlan.build(mask, block=16)
    results = []
    for _ in range(2):
        q, k, v = cases.tensors(mask, keys, 4, 2, 8, torch.float32)
        out = bitfield_attention(q, k, v, plan, backend="cpu")
        results.append((out, *torch.autograd.grad(out.sum(), (q, k, v))))
    assert all(torch.equal(one, other) for one, other in zip(*results))


@pytest.mark.skipif("INTERLACE_SANITIZE" in os.environ, reason="a sanitizer keeps what was freed")
@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_cpu_backend_needs_no_square_memory(dtype):
    """16,384 tokens, forward and backward: less than 256 MiB at the peak beyond inputs and results (T x T is 1 GiB)."""
    script = f"""
import resource, torch
torch.set_default_dtype(torch.{dtype})
from interlace import AttentionPlan, BitfieldMask, bitfield_attention
def run(length):
    plan = AttentionPlan.build(BitfieldMask.causal(1, length))
    q, k, v, dout = (torch.randn(1, 2, length, 64) for _ in range(4))
    for x in (q, k, v):
        x.requires_grad_()
    return plan, torch.autograd.grad(bitfield_attention(q, k, v, plan), (q, k, v), dout), (q, k, v, dout)
run(256)  # what importing and a first call take
room = [torch.ones(1, 2, 16384, 64) for _ in range(8)]  # four inputs, out and three gradients
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
del room
kept = run(16384)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    assert int(run(script)) < 256 * 1024


@pytest.mark.parametrize(("heads", "threads"), [(1, 2), (3, 2), (2, 3)])
def test_threads_share_the_heads_and_the_rows_of_a_head(heads, threads):
    """Fewer heads than threads, or a number that does not divide: key gradients are summed from pieces, repeatably."""
    mask, keys = cases.masks()["packed"]
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for dtype in (torch.float32, torch.bfloat16):
            compare("cpu", mask, keys, dtype, heads=2 * heads, kv_heads=heads, dim=64, scale=0.125)
        plan = AttentionPlan.build(mask, block=16)
        results = []
        for _ in range(2):
            q, k, v = cases.tensors(mask, keys, 2 * heads, heads, 8, torch.float32)
            out = bitfield_attention(q, k, v, plan, backend="cpu")
            results.append((out, *torch.autograd.grad(out.square().sum(), (q, k, v))))
        assert all(torch.equal(one, other) for one, other in zip(*results))
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dim", [1, 16, 64, 80, 96, 128, 256])
def test_head_dimensions_at_the_size_of_real_blocks(dim):
    mask, keys = cases.masks()["multimodal"]
    compare("cpu", mask, keys, torch.float32, dim=dim, scale=dim**-0.5, block=128)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("dim", "value_dim"), [(192, 128), (96, 64), (24, 80), (5, 1), (1, 7)])
def test_values_of_another_head_dimension(backend, dtype, dim, value_dim):
    """DeepSeek's 192 and 128, MiniCPM3's 96 and 64, values wider than keys, and odd ones."""
    mask, keys = cases.masks()["multimodal"]
    options = dict(dim=dim, value_dim=value_dim, scale=dim**-0.5)
    compare(backend, mask, keys, dtype, heads=2, kv_heads=1, block=128, **options)
    compare(backend, *cases.masks()["113 x 203"], dtype, heads=2, kv_heads=2, block=32, softcap=2.0, **options)


def test_values_of_256_and_512():
    compare("cpu", *cases.masks()["1 x 50"], torch.float32, dim=256, value_dim=512, scale=1 / 16, block=128)


@pytest.mark.parametrize(("dim", "value_dim"), [(24, 16), (16, 24), (9, 16)])
def test_values_of_another_head_dimension_over_threads(dim, value_dim):
    """Fewer key heads than threads: sums of both widths are made of pieces. Equal numbers: sums are in place if they
    fit."""
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        for kv_heads in (1, 3):
            for dtype in (torch.float32, torch.bfloat16):
                options = dict(dim=dim, value_dim=value_dim, heads=2 * kv_heads, kv_heads=kv_heads)
                compare("cpu", *cases.masks()["packed"], dtype, block=64, **options)
    finally:
        torch.set_num_threads(before)


@pytest.mark.slow
@settings(max_examples=300)
@given(mask_pairs(longest=300), st.sampled_from([64, 100, 128, 200]), st.sampled_from([None, 3.0]))
def test_random_masks_of_several_real_blocks(pair, block, softcap):
    compare("cpu", *pair, torch.float32, heads=2, kv_heads=1, dim=20, softcap=softcap, block=block)


@pytest.mark.parametrize("softcap", [None, 1.5])
def test_gradcheck(softcap):
    mask, keys = BitfieldMask.causal(1, 9, window=4).select([0, 3, 8, 5]), BitfieldMask.causal(1, 9)
    q, k, v = cases.tensors(mask, keys, 2, 1, 2, torch.float64)
    for backend in BACKENDS:
        assert torch.autograd.gradcheck(
            lambda q, k, v, backend=backend: bitfield_attention(
                q, k, v, mask, kv_mask=keys, softcap=softcap, return_lse=True, backend=backend
            ),
            (q, k, v),
        )


def test_reference_agrees_with_its_own_probabilities():
    """Weights of a non-empty row sum to one: attention over ones gives one, otherwise zero."""
    mask, keys = cases.masks()["empty rows"]
    q, k, v = cases.tensors(mask, keys, 2, 2, 4, torch.float32)
    out, lse = reference.forward(Attention(q, k, torch.ones_like(v), AttentionPlan.build(mask), 0.5, None))
    torch.testing.assert_close(out[..., 0], (lse > -torch.inf).float())


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_more_partial_blocks_than_are_kept(dtype):
    """Bits beyond 64 MiB are recomputed for each row: every other key is visible, in blocks too large to keep."""
    batch, block = 5, 8192
    keys = torch.randint(2, (batch, 2 * block), generator=torch.Generator().manual_seed(0))
    kv_mask = BitfieldMask(keys << 56 | 1)
    mask = BitfieldMask(torch.full((batch, 1), word(0, [0])))
    compare("cpu", mask, kv_mask, dtype, heads=1, kv_heads=1, block=block)


def test_blocks_longer_than_the_sequence():
    compare("cpu", *cases.masks()["packed"], torch.float32, block=1 << 40)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_empty_row_has_no_gradient_whatever_comes_in(backend, dtype):
    mask, keys = cases.masks()["empty rows"]
    q, k, v = cases.tensors(mask, keys, 2, 1, 8, dtype)
    out, lse = bitfield_attention(q, k, v, AttentionPlan.build(mask, block=16), return_lse=True, backend=backend)
    empty = lse == -torch.inf
    assert empty.any()
    dout = torch.where(empty[..., None], torch.inf, torch.ones_like(out))
    grads = torch.autograd.grad((out, lse), (q, k, v), (dout, torch.where(empty, torch.nan, 1.0)))
    assert all(grad.isfinite().all() for grad in grads) and not grads[0][empty].any()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("dim", "kv_heads"), [(32, 2), (20, 1)])  # summed in place, and gathered from pieces
def test_wide_key_gradients_are_the_others_before_rounding(backend, dtype, dim, kv_heads):
    wide_key_gradients(backend, dtype, dim, kv_heads)
