"""Context-parallel attention on virtual ranks against one process with the whole sequence."""

from __future__ import annotations

import pytest
import torch
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint

from bench.attention_masks import MASKS
from interlace.attention import AttentionPlan, bitfield_attention
from interlace.attention.backend import accumulate_dtype
from interlace.attention.op import run_backward, run_forward
from interlace.comm import ContextParallelPlan, context_parallel_attention, run_local, shard, shard_mask, unshard
from interlace.comm.overlap.context_parallel import LEAST_BYTES, _chunks
from interlace.masks import BitfieldMask
from tests.attention import cases
from tests.attention.backends import agree, close
from tests.comm.context_parallel import METHODS, dealt
from tests.judge import judge
from tests.mask_strategies import masks
from tests.sampling import given_by_tier

SCALE = 0.4


def on_ranks(mask, shards, q, k, v, ddout, ddlse, *, before=None, prepared=False, **options):
    """[out, lse, dq, dk, dv] of the whole, assembled from those of all ranks; and as each rank assembles them."""

    def rank(group):
        mine = [shard(x.detach(), shards, group.rank, dim=2).requires_grad_() for x in (q, k, v)]
        given = ContextParallelPlan.build(mask, shards, group.rank) if prepared else mask
        out, lse = context_parallel_attention(*mine, given, shards, scale=SCALE, return_lse=True, **options)
        assert out.is_contiguous() and out.dtype == q.dtype
        weights = [shard(x, shards, group.rank, dim=2) for x in (ddout, ddlse)]
        grads = torch.autograd.grad((out, lse), mine, weights)
        return [unshard(x.detach(), shards, dim=2, length=mask.length) for x in (out, lse, *grads)]

    everywhere = run_local(shards.ranks, rank, before=before, timeout=20)
    for other in everywhere[1:]:
        assert all(torch.equal(a, b) for a, b in zip(everywhere[0], other))
    return everywhere[0]


def compare(
    mask, shards, dtype=torch.float64, heads=4, kv_heads=2, dim=8, softcap=None, value_dim=None, **options
):  # fmt: skip
    """Forward and backward of a loss of out and LSE, against dense fp64 attention by plain autograd."""
    q, k, v = cases.tensors(mask, None, heads, kv_heads, dim, dtype, value_dim)
    generator = torch.Generator().manual_seed(2)
    dout = torch.randn((*q.shape[:3], v.shape[3]), generator=generator).to(dtype)
    dlse = torch.randn(q.shape[:3], generator=generator).to(accumulate_dtype(dtype))
    results = on_ranks(mask, shards, q, k, v, dout, dlse, softcap=softcap, **options)
    agree(results, (q, k, v), mask.to_dense(), dout, dlse, SCALE, softcap)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", MASKS)
def test_every_mask_and_balancer_equals_one_process(name, method):
    mask = MASKS[name](203)
    compare(mask, dealt(mask, 3, METHODS[method]), heads_per_chunk=1)


@given_by_tier(
    25,
    100,
    masks(longest=40),
    st.integers(1, 4),
    st.sampled_from([1, 4, 7, 16]),
    st.sampled_from(sorted(METHODS)),
    st.sampled_from([(2, 1), (3, 3), (6, 3)]),
    st.sampled_from([1, 2, 5, "auto"]),
    st.sampled_from([None, 3.0]),
    st.booleans(),
)
def test_any_mask_equals_one_process(mask, ranks, block, method, heads, chunk, softcap, prepared):
    """Batches with different documents per row, windows, rows with empty masks, fewer blocks than ranks, odd
    lengths."""
    compare(
        mask, dealt(mask, ranks, METHODS[method], block), heads=heads[0], kv_heads=heads[1], dim=5, softcap=softcap,
        heads_per_chunk=chunk, prepared=prepared,
    )  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dtypes(dtype):
    for name in ("empty rows", "multimodal"):
        mask = cases.masks()[name][0]
        compare(mask, dealt(mask, 2), dtype, heads_per_chunk=1)


@pytest.mark.parametrize("dims", [(24, 16), (6, 9)])
def test_values_of_another_head_dimension(dims):
    for name, dtype in (("multimodal", torch.float64), ("packed", torch.bfloat16)):
        mask = cases.masks()[name][0]
        compare(mask, dealt(mask, 3), dtype, dim=dims[0], value_dim=dims[1], heads_per_chunk=1)


@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
def test_what_padding_holds_is_not_looked_at(poison):
    """A document that ends early, and the tokens that shards add: bits equal those with zeros in their place."""
    doc = torch.zeros(1, 100, dtype=torch.int32)
    doc[:, 77:] = -1
    mask = BitfieldMask(BitfieldMask.causal(1, 100).bits, doc=doc)
    shards = dealt(mask, 3)
    q, k, v = (x.detach() for x in cases.tensors(mask, None, 4, 2, 8, torch.float32))

    def results(value):
        def rank(group):
            inside = shard(doc >= 0, shards, group.rank)
            mine = [shard(x, shards, group.rank, dim=2) for x in (q, k, v)]
            mine = [x.masked_fill(~inside[:, None, :, None], value).requires_grad_() for x in mine]
            out = context_parallel_attention(*mine, mask, shards, heads_per_chunk=1)
            dout = torch.ones_like(out).masked_fill(~inside[:, None, :, None], value)
            return [out.detach(), *torch.autograd.grad(out, mine, dout)], inside

        return run_local(3, rank, timeout=20)

    for (clean, inside), (result, _) in zip(results(0.0), results(poison)):
        for one, other in zip(clean, result):
            assert torch.equal(one, other) and not other.transpose(1, 2)[~inside].any()


def test_the_reference_backend():
    mask = cases.masks()["packed"][0]
    compare(mask, dealt(mask, 2), backend="reference")


@pytest.mark.slow
@pytest.mark.parametrize("name", MASKS)
def test_long_sequences(name):
    mask = MASKS[name](4099)
    for method in ("lpt", "zigzag"):
        compare(mask, dealt(mask, 4, method, 128), torch.float32, heads=2, kv_heads=2, dim=16, heads_per_chunk=1)


def test_one_rank_is_plain_attention():
    mask = BitfieldMask.causal(2, 48)
    q, k, v = cases.tensors(mask, None, 4, 2, 8, torch.float32)
    shards = dealt(mask, 1)
    out = context_parallel_attention(q, k, v, mask, shards)
    wanted = bitfield_attention(q, k, v, AttentionPlan.build(mask, block=16))
    assert torch.equal(out, wanted)
    for got, exact in zip(*(torch.autograd.grad(x.square().sum(), (q, k, v)) for x in (out, wanted))):
        assert torch.equal(got, exact)


class Whole(torch.autograd.Function):
    """Attention of the whole sequence by virtual ranks, forward and backward, as one function of q, k and v."""

    @staticmethod
    def forward(ctx, q, k, v, mask, shards):
        ctx.save_for_backward(q, k, v)
        ctx.of = mask, shards
        zeros = torch.zeros(q.shape), torch.zeros(q.shape[:3])
        return tuple(on_ranks(mask, shards, q, k, v, *(x.double() for x in zeros), heads_per_chunk=1)[:2])

    @staticmethod
    def backward(ctx, dout, dlse):
        q, k, v = ctx.saved_tensors
        return *on_ranks(*ctx.of, q, k, v, dout, dlse, heads_per_chunk=1)[2:], None, None


@pytest.mark.parametrize("by_projections", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_gradcheck(by_projections):
    """By random projections, and element by element."""
    mask = BitfieldMask.pack([BitfieldMask.causal(1, 2), MASKS["prefix_lm"](3)])
    shards = dealt(mask, 2, block=2)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(1, heads, 5, 2, generator=generator, dtype=torch.float64).requires_grad_() for heads in (4, 2, 2)
    )
    assert torch.autograd.gradcheck(lambda *x: Whole.apply(*x, mask, shards), (q, k, v), fast_mode=by_projections)


def test_partial_gradients_are_summed_in_fp32_in_rank_order():
    """bf16: the contributions of ranks are rounded once, after the sum."""
    mask, world = MASKS["packed_images"](160), 3
    shards = dealt(mask, world)
    q, k, v = (x.detach() for x in cases.tensors(mask, None, 4, 2, 8, torch.bfloat16))
    dout = torch.randn(q.shape, generator=torch.Generator().manual_seed(3)).bfloat16()
    *_, dk, dv = on_ranks(mask, shards, q, k, v, dout, torch.zeros(q.shape[:3]), heads_per_chunk=1)

    everyone = torch.cat([shard(x, shards, rank, dim=2) for x in (k, v) for rank in range(world)], 2).chunk(2, 2)
    parts = []
    for rank in range(world):
        plan = ContextParallelPlan.build(mask, shards, rank).plan
        mine, mine_dout = (shard(x, shards, rank, dim=2) for x in (q, dout))
        out, lse = run_forward(mine, *everyone, plan, SCALE, None, "")
        parts.append(
            run_backward(mine_dout, None, mine, *everyone, out, lse, plan, SCALE, None, True, "", wide=True)[1:]
        )
    place = torch.from_numpy(shards.inverse)[0, : mask.length]
    for got, which in ((dk, 0), (dv, 1)):
        wanted = parts[0][which] + parts[1][which] + parts[2][which]
        assert wanted.dtype == torch.float32
        assert torch.equal(got, wanted.bfloat16()[:, :, place])
        rounded = sum((part[which].bfloat16().float() for part in parts), torch.zeros(())).bfloat16()
        assert not torch.equal(got, rounded[:, :, place])  # rounding each part would differ


def test_transposed_inputs_checkpointing_autocast_and_compile():
    mask = BitfieldMask.causal(2, 64)
    shards = dealt(mask, 2)
    q, k, v = (x.detach() for x in cases.tensors(mask, None, 4, 2, 8, torch.float32))

    def rank(group):
        mine = [
            shard(x.transpose(1, 2), shards, group.rank).contiguous().transpose(1, 2).requires_grad_()
            for x in (q, k, v)
        ]
        assert not mine[1].is_contiguous()
        attend = lambda *x: context_parallel_attention(*x, mask, shards, heads_per_chunk=1)  # noqa: E731
        plain = attend(*mine)
        again = checkpoint(attend, *mine, use_reentrant=False)
        assert torch.equal(plain, again)
        for one, other in zip(*(torch.autograd.grad(x.square().sum(), mine) for x in (plain, again))):
            assert torch.equal(one, other)
        with torch.autocast("cpu", torch.bfloat16):
            cast = attend(*mine)
        assert cast.dtype == torch.bfloat16
        grads = torch.autograd.grad(cast.sum(), mine)
        assert [grad.dtype for grad in grads] == [torch.float32] * 3
        whole = [x.bfloat16() for x in (q, k, v)]
        dout, dlse = torch.zeros(q.shape).bfloat16(), torch.zeros(q.shape[:3])
        torchs = cases.in_its_dtype(*whole, mask.to_dense(), 8**-0.5, None, dout, dlse)[0]
        exact, _ = cases.oracle(q, k, v, mask.to_dense(), 8**-0.5)
        judge("out", cast, *(shard(x, shards, group.rank, dim=2) for x in (torchs, exact)))
        compiled = torch.compile(lambda *x: attend(*(y * 1.0 for y in x)) + 0.0, backend="eager")
        assert torch.equal(compiled(*mine), plain)  # the graph breaks there

    run_local(2, rank)


def test_rank_that_uses_only_the_lse_joins_the_backward():
    mask = BitfieldMask.causal(1, 64)
    shards = dealt(mask, 2)
    q, k, v = (x.detach() for x in cases.tensors(mask, None, 2, 2, 8, torch.float64))
    whole = [x.clone().requires_grad_() for x in (q, k, v)]
    out, lse = bitfield_attention(*whole, mask, return_lse=True)
    first = torch.zeros(64, dtype=torch.bool)
    first[shards.tokens(0)[0]] = True
    wanted = torch.autograd.grad(out[:, :, ~first].sum() + lse[:, :, first].sum(), whole)

    def rank(group):
        mine = [shard(x, shards, group.rank, dim=2).requires_grad_() for x in (q, k, v)]
        out, lse = context_parallel_attention(*mine, mask, shards, return_lse=True)
        grads = torch.autograd.grad((lse if group.rank == 0 else out).sum(), mine)
        return [unshard(x, shards, dim=2) for x in grads]

    for got, exact in zip(run_local(2, rank)[0], wanted):
        close(got, exact, 1e-11, "gradient")


def test_second_derivatives_are_refused():
    mask = BitfieldMask.causal(1, 32)
    q, k, v = cases.tensors(mask, None, 1, 1, 4, torch.float64)
    out = context_parallel_attention(q, k, v, mask, dealt(mask, 1))
    (grad,) = torch.autograd.grad(out.sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="does not support second derivatives"):
        grad.sum().backward()


def test_chunks():
    def chunks(tokens, kv_heads, heads, *, world=4, dims=128):
        q, k = (torch.empty(1, n, tokens, 128, dtype=torch.bfloat16, device="meta") for n in (32, kv_heads))
        return [(chunk.start, chunk.stop) for chunk in _chunks(q, k, k[..., :dims], world, heads)]

    assert chunks(64, 5, 2) == [(0, 2), (2, 4), (4, 5)] and chunks(64, 5, 9) == [(0, 5)]
    assert chunks(4096, 3, "auto") == [(0, 1), (1, 2), (2, 3)]  # 2 MiB per head
    assert chunks(1024, 8, "auto") == [(0, 2), (2, 4), (4, 6), (6, 8)] and 2 * 1024 * 128 * 2 * 2 == LEAST_BYTES
    assert chunks(1024, 8, "auto", dims=64) == [(0, 3), (3, 6), (6, 8)]  # values of half the width
    assert chunks(512, 6, "auto") == [(0, 3), (3, 6)]  # 4 of 256 KiB would suffice: 4 + 2 are evened out
    assert chunks(16, 8, "auto") == [(0, 8)] and chunks(4096, 3, "auto", world=1) == [(0, 3)]


def test_what_does_not_fit_is_named():
    mask = BitfieldMask.causal(1, 100)
    shards = dealt(mask, 1)
    q = torch.zeros(1, 2, 112, 8)
    call = lambda *args, **options: context_parallel_attention(*args, **options)  # noqa: E731
    for arguments, options, error, message in [
        ((q[:, :, :100], q, q, mask, shards), {}, ValueError, r"q has shape .*100 tokens, but every rank .* 1 .* 112"),
        ((q, q[:, :, 1:], q[:, :, 1:], mask, shards), {}, ValueError, "k has shape .*111 tokens"),
        ((q, q, q[:, :1], mask, shards), {}, ValueError, "k has shape .* and v"),
        ((q, q, q, BitfieldMask.causal(1, 96), shards), {}, ValueError, "the mask has 96 tokens, but shards holds 112"),
        ((q, q, q, BitfieldMask.causal(2, 100), shards), {}, ValueError, "the mask has 2 rows, but shards has 1"),
        ((q, q, q, AttentionPlan.build(mask), shards), {}, TypeError, "a BitfieldMask or a ContextParallelPlan"),
        ((q, q, q, mask, shards.order), {}, TypeError, "shards must be a TokenShards"),
        ((q, q, q, mask, dealt(mask, 2)), {}, ValueError, "made for 2 ranks, but the group has 1"),
        ((q, q, q, ContextParallelPlan.build(mask, dealt(mask, 1), 0), shards), {}, ValueError, "for other shards"),
        ((q, q, q, mask, shards), {"heads_per_chunk": 0}, ValueError, "heads_per_chunk must be a number"),
        ((q, q, q, mask, shards), {"heads_per_chunk": "all"}, ValueError, "heads_per_chunk must be a number"),
        ((q, q, q, mask, shards), {"scale": float("nan")}, ValueError, "scale is nan"),
        ((q, q, q, mask, shards), {"backend": "fast"}, ValueError, "backend is 'fast'"),
        ((q.int(), q.int(), q.int(), mask, shards), {}, TypeError, "floating dtype"),
        ((q, q.double(), q, mask, shards), {}, TypeError, "q, k and v must have one dtype"),
        ((q, q, q, mask, shards), {"group": "world"}, TypeError, "group must be a Transport"),
    ]:
        with pytest.raises(error, match=message):
            call(*arguments, **options)
    two = dealt(mask, 2)
    with pytest.raises(ValueError, match="built for rank 1, but this is rank 0"):
        half = q[:, :, :64]
        run_local(2, lambda group: call(half, half, half, ContextParallelPlan.build(mask, two, 1), two))
    with pytest.raises(ValueError, match="rank must lie between 0 and 1, got 2"):
        ContextParallelPlan.build(mask, two, 2)
    with pytest.raises(TypeError, match="mask must be a BitfieldMask"):
        ContextParallelPlan.build(shard_mask, two, 0)


def test_the_plan_has_blocks_that_suit_the_shards():
    mask = BitfieldMask.causal(1, 600)
    for block, wanted in ((16, 16), (64, 64), (128, 128), (256, 128), (100, 128)):
        assert ContextParallelPlan.build(mask, dealt(mask, 2, block=block), 0).plan.block == wanted
    assert ContextParallelPlan.build(mask, dealt(mask, 2), 0, block=48).plan.block == 48
