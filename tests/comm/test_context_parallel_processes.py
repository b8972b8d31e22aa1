"""Context parallelism over processes: bitwise equal to virtual ranks, on every transport for CPU tensors."""

from __future__ import annotations

import torch

from bench.attention_masks import MASKS
from interlace.comm import connect, context_parallel_attention, resolve, run_local, shard, unshard
from tests.attention import cases
from tests.comm.context_parallel import dealt
from tests.distributed.workers import run_ranks

TRANSPORTS = ("shm", "gloo")


def attend(group) -> list[torch.Tensor]:
    """out, dq, dk, dv of the whole, in three chunks of heads."""
    mask = MASKS["cornstarch_mp"](300)
    shards = dealt(mask, 2)
    q, k, v = (x.detach() for x in cases.tensors(mask, None, 6, 3, 8, torch.bfloat16))
    transport = resolve(group)
    mine = [shard(x, shards, transport.rank, dim=2).requires_grad_() for x in (q, k, v)]
    out = context_parallel_attention(*mine, mask, shards, group=group, heads_per_chunk=1)
    grads = torch.autograd.grad(out.float().square().sum(), mine)
    return [unshard(x.detach(), shards, group, dim=2) for x in (out, *grads)]


def on_processes(rank: int) -> dict[str, list[torch.Tensor]]:
    result = {"chosen": attend(None)}
    for name in TRANSPORTS:
        with connect(transport=name, timeout=30) as transport:
            assert transport.name == name
            result[name] = attend(transport)
    return result


def test_processes_give_the_bits_of_virtual_ranks():
    wanted = run_local(2, attend)[0]
    for kind, value in run_ranks(2, on_processes):
        assert kind == "returned", value
        assert set(value) == {"chosen", *TRANSPORTS}
        for name, tensors in value.items():
            for got, exact in zip(tensors, wanted, strict=True):
                assert torch.equal(got, exact), name
