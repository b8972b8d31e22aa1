"""Torch's context parallelism with Interlace's order of tokens."""

from __future__ import annotations

import re
import sys

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from interlace.attention import AttentionPlan, bitfield_attention
from interlace.balance import distribute_tokens
from interlace.comm import shard, torch_load_balancer
from interlace.comm.collectives import torch_balancer
from interlace.masks import BitfieldMask
from tests.attention import cases
from tests.distributed.workers import run_ranks

torch_cp = pytest.importorskip("torch.distributed.tensor.experimental._context_parallel")


def mask_of_two_rows() -> BitfieldMask:
    """512 tokens: a row of packed documents, and the same row reversed."""
    row = BitfieldMask.pack([BitfieldMask.causal(1, 200), BitfieldMask.full(1, 120), BitfieldMask.causal(1, 192)])
    return BitfieldMask(torch.cat([row.bits, row.bits.flip(1)]), doc=torch.cat([row.doc, row.doc.flip(1)]))


def dealt(mask: BitfieldMask, method: str = "lpt", ranks: int = 2):
    return distribute_tokens(AttentionPlan.build(mask).row_blocks(), ranks, method=method)


def test_indices():
    mask = mask_of_two_rows()
    shards = dealt(mask)
    balancer = torch_load_balancer(shards)
    order, restore = balancer._generate_indices(), balancer._generate_indices(restore=True)
    assert order.shape == restore.shape == (2, 512)
    assert torch.equal(order.gather(1, restore), torch.arange(512).expand(2, -1))
    assert order[:, :256].tolist() == shards.tokens(0).tolist()
    zigzag = torch_load_balancer(dealt(mask, "zigzag"))._generate_indices()
    assert zigzag.shape == (1, 512)  # identical for both rows, so it deals tensors of any batch
    assert torch.equal(zigzag, torch_cp._HeadTailLoadBalancer(512, 2, "cpu")._generate_indices().long())


def torch_ranks(rank: int, methods: list[str]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    mesh = init_device_mesh("cpu", (2,))
    x = torch.randn(2, 3, 512, 4, generator=torch.Generator().manual_seed(0))
    results = []
    for method in methods:
        balancer = torch_load_balancer(dealt(mask_of_two_rows(), method))
        (mine,) = torch_cp._context_parallel_shard(mesh, [x], [2], load_balancer=balancer)
        (whole,) = torch_cp.context_parallel_unshard(mesh, [mine.clone()], [2], load_balancer=balancer)
        results.append((mine, whole))
    return results


def test_torch_deals_and_gathers_as_we_do():
    x = torch.randn(2, 3, 512, 4, generator=torch.Generator().manual_seed(0))
    methods = ["lpt", "zigzag"]
    for rank, (kind, value) in enumerate(run_ranks(2, torch_ranks, methods)):
        assert kind == "returned", value
        for method, (mine, whole) in zip(methods, value, strict=True):
            assert torch.equal(mine, shard(x, dealt(mask_of_two_rows(), method), rank, dim=2))
            assert torch.equal(whole, x)


def flex_ranks(rank: int) -> torch.Tensor:
    from torch.nn.attention.flex_attention import flex_attention

    mesh = init_device_mesh("cpu", (2,))
    mask = mask_of_two_rows()
    balancer = torch_load_balancer(dealt(mask))
    q, k, v = (x.detach() for x in cases.tensors(mask, None, 2, 2, 16, torch.float32))
    block_mask = torch_cp._attention._create_cp_block_mask(mask.to_flex(), 2, 1, 512, 512, mesh, balancer)
    mine = torch_cp._context_parallel_shard(mesh, [q, k, v], [2, 2, 2], load_balancer=balancer)
    keys = [torch.cat(torch.distributed.nn.functional.all_gather(x.contiguous()), 2) for x in mine[1:]]
    out = torch.compile(flex_attention)(mine[0], *keys, block_mask=block_mask)
    (whole,) = torch_cp.context_parallel_unshard(mesh, [out], [2], load_balancer=balancer)
    return whole


@pytest.mark.slow
def test_flex_attention_under_torchs_context_parallelism():
    """Torch's block mask for Interlace's order equals Interlace's mask."""
    mask = mask_of_two_rows()
    q, k, v = (x.detach() for x in cases.tensors(mask, None, 2, 2, 16, torch.float32))
    wanted = bitfield_attention(q, k, v, mask)
    for kind, value in run_ranks(2, flex_ranks, timeout=280):
        assert kind == "returned", value
        torch.testing.assert_close(value, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("missing", ["module", "shape"])
def test_a_torch_without_the_hook_is_named(monkeypatch, missing):
    home = "torch.distributed.tensor.experimental._context_parallel._load_balancer"
    if missing == "module":
        monkeypatch.setitem(sys.modules, home, None)
    else:  # older versions: one order for the whole batch
        one = lambda *_, **options: torch.arange(2)  # noqa: E731
        monkeypatch.setattr(torch_cp._HeadTailLoadBalancer, "_generate_indices", one)
    torch_balancer._balancer_class.cache_clear()
    with pytest.raises(RuntimeError, match=re.escape(f"torch {torch.__version__} has no _LoadBalancer")):
        torch_load_balancer(dealt(BitfieldMask.causal(1, 512)))
    torch_balancer._balancer_class.cache_clear()
