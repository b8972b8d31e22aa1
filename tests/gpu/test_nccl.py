"""The NCCL transport between real GPUs. It needs at least two, since NCCL refuses two ranks on one."""

from __future__ import annotations

import pytest
import torch

from interlace.comm import CommError, Transport, all_gather_into_tensor, all_reduce, all_to_all_single, connect
from tests.distributed.workers import run_ranks

GPUS = torch.cuda.device_count()
pytestmark = pytest.mark.skipif(GPUS < 2, reason="needs two GPUs")


def connected(rank: int) -> Transport:
    torch.cuda.set_device(rank)
    return connect(device="cuda", transport="nccl", timeout=30.0)


def moves(rank: int) -> int:
    """Each collective against values that every rank computes alone; and copies that overlap with a matrix product."""
    with connected(rank) as group:
        x = [torch.arange(1000.0, device="cuda") * (r + 1) for r in range(group.world)]
        gathered = torch.empty(group.world * 1000, device="cuda")
        for _ in range(3):
            gathered.zero_()
            all_gather_into_tensor(gathered, x[rank], group)
            assert torch.equal(gathered, torch.cat(x))
        total = x[rank].clone()
        all_reduce(total, group=group)
        assert torch.equal(total, torch.stack(x).sum(0))
        empty = torch.empty(0, device="cuda")
        all_gather_into_tensor(empty, empty.clone(), group)

        rows = [[(a + 2 * b) % 3 for b in range(group.world)] for a in range(group.world)]
        takes = [row[rank] for row in rows]
        output = torch.empty(sum(takes), 7, device="cuda", dtype=torch.bfloat16)
        all_to_all_single(
            output, torch.full((sum(rows[rank]), 7), float(rank), device="cuda").bfloat16(), takes, rows[rank], group
        )
        assert output[:, 0].tolist() == [float(a) for a in range(group.world) for _ in range(takes[a])]

        a = torch.randn(2048, 2048, device="cuda")
        work = all_gather_into_tensor(gathered.zero_(), x[rank], group, async_op=True)
        b = a @ a
        assert work is not None
        work.wait()
        assert torch.equal(gathered, torch.cat(x)) and torch.equal(b, a @ a)
        group.barrier()
    return group.world


def test_collectives_over_nccl() -> None:
    world = min(GPUS, 4)
    assert run_ranks(world, moves) == [("returned", world)] * world


def differ(rank: int) -> str:
    with connected(rank) as group:
        with pytest.raises(CommError) as error:
            x = torch.ones(4 + rank, device="cuda")
            all_gather_into_tensor(torch.empty(group.world * len(x), device="cuda"), x, group)
            torch.cuda.synchronize()
        return str(error.value)


def test_ranks_that_differ_are_told_before_anything_hangs() -> None:
    for rank, (kind, text) in enumerate(run_ranks(2, differ)):
        assert kind == "returned" and text.startswith(f"rank {rank}") and f"rank {1 - rank}" in text, text
