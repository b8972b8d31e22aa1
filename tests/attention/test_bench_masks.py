"""The benchmark's masks: each equals its index formula and is deterministic, and every backend is correct on it."""

from __future__ import annotations

import pytest
import torch

from bench.attention_masks import FORMULAS, MASKS, MULTIMODAL, cut
from interlace.attention import AttentionPlan, bitfield_attention
from tests.attention import cases
from tests.attention.backends import compare


def dense(name: str, length: int) -> torch.Tensor:
    """bool [T, T] by the formula."""
    i, j, none = torch.arange(length)[:, None], torch.arange(length)[None, :], torch.zeros((), dtype=torch.int64)
    return FORMULAS[name](length, "cpu")(none, none, i, j).expand(length, length)


@pytest.mark.parametrize("length", [1, 7, 65, 203, 1000, 2048])
@pytest.mark.parametrize("name", MASKS)
def test_masks_equal_their_formulas(name, length):
    mask = MASKS[name](length)
    assert (mask.batch, mask.length) == (1, length)
    seen = mask.to_dense()[0]
    assert torch.equal(seen, dense(name, length))
    assert seen.diagonal().all(), "a row that sees nothing would be NaN in the peers"


def test_every_mask_has_a_formula():
    assert MASKS.keys() == FORMULAS.keys() and set(MULTIMODAL) < set(MASKS)


def test_masks_differ_from_each_other():
    whole = {name: dense(name, 1000) for name in MASKS}
    names = list(whole)
    assert not [
        (one, other) for n, one in enumerate(names) for other in names[:n] if torch.equal(whole[one], whole[other])
    ]


def test_sizes_are_those_of_the_sources():
    """At lengths where they fit: 64 sinks and 4,096 keys, images of 256 tokens, 64 frames, four documents."""
    assert (MASKS["lambda"](16384).window, MASKS["lambda"](16384).sinks) == (4096, 64)
    assert MASKS["sliding_window"](4096).window == 1024
    for name, spans in (("gemma3_images", None), ("packed_images", 4)):
        sizes = torch.unique(MASKS[name](4096).span, return_counts=True)[1][1:]
        assert set(sizes.tolist()) == {256} and (spans is None or len(sizes) == spans)
    assert int(MASKS["video"](8192).span.max()) == 63
    assert int(MASKS["packed_images"](4096).doc.max()) == 3
    assert int(MASKS["cornstarch_mp"](65536).doc.max()) == 65536 // 3696 - 1


@pytest.mark.parametrize("name", MASKS)
def test_attention_equals_the_dense_oracle(name):
    """Forward and gradients on this machine's default backend, at a length that is no multiple of a block."""
    mask = MASKS[name](203)
    q, k, v = cases.tensors(mask, None, 4, 2, 8, torch.float32)
    out, lse = bitfield_attention(q, k, v, AttentionPlan.build(mask, block=32), return_lse=True)
    exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
    wanted, wanted_lse = cases.oracle(*exact, dense(name, 203)[None], 8**-0.5)
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(3))
    torch.testing.assert_close(out.double(), wanted, atol=2e-5, rtol=2e-5)
    torch.testing.assert_close(lse.double(), wanted_lse, atol=2e-5, rtol=2e-5)
    grads = torch.autograd.grad(out, (q, k, v), dout)
    for got, exact_grad in zip(grads, torch.autograd.grad(wanted, exact, dout.double())):
        torch.testing.assert_close(got.double(), exact_grad, atol=5e-5, rtol=5e-5)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", MASKS)
def test_the_cpu_backend_on_every_mask_type_and_odd_shape(name, dtype):
    """113 x 203, 1 x 500, two rows that differ; groups of heads; head dimensions that are no multiple of a vector."""
    mask = MASKS[name](203)
    compare("cpu", mask.select(slice(90, 203)), mask, dtype, dim=20, scale=0.2, block=64)
    mask = MASKS[name](500)
    compare("cpu", mask.select([499]), mask, dtype, dim=72, scale=0.1, block=128)
    rows = torch.stack([torch.arange(0, 200, 2), torch.arange(499, 399, -1)])
    both = MASKS[name](500).mapped(lambda field: field.expand(2, -1).contiguous())
    compare("cpu", both.select(rows), both, dtype, dim=20, scale=0.2, block=64)


def test_pieces_sum_to_the_whole():
    assert cut(10, (1, 1, 1)) == [3, 3, 4] and cut(0, (2, 1)) == [0, 0] and sum(cut(1001, (30, 5, 20))) == 1001
