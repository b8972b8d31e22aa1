"""Collectives and their overlap on a GPU: several processes on one device, and several ranks in one process.

One device is enough for correctness; `bench.copy_engines` measures speed. INTERLACE_GPU_TESTS_ON=cpu runs the same
checks on a CPU, over shared memory.
"""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist

from bench.copy_engines import sm_copies
from interlace import balance, comm
from interlace.attention import AttentionPlan
from interlace.comm.transports.choose import capabilities
from interlace.comm.transports.copiers import engine_copies, engine_missing, plain_copies
from interlace.masks import BitfieldMask
from tests.attention import cases
from tests.distributed.workers import run_ranks
from tests.gpu import dense
from tests.gpu.dense import DEVICE, ON_GPU
from tests.judge import judge

pytestmark = pytest.mark.skipif(DEVICE is None, reason=dense.WHY_SKIPPED)
TRANSPORTS = ("cuda_ipc", "symm_mem") if ON_GPU else ("shm",)
DTYPE = torch.bfloat16 if ON_GPU else torch.float32
LENGTH = 700


def tensors(world: int, device: str) -> dict[str, torch.Tensor]:
    """Inputs of all ranks, equal on every rank. They are integers, so that sums are exact in any order."""
    generator = torch.Generator().manual_seed(world)

    def numbers(*shape: int) -> torch.Tensor:
        return torch.randint(-3, 4, shape, generator=generator).to(device, DTYPE)

    return {
        "x": numbers(world, 2, 129, 64), "weight": numbers(96, 64), "grad": numbers(world, 2, world * 129, 96),
        "uneven": numbers(world, world * (world - 1) // 2 + world, 3), "large": numbers(world, 3_000_001),
    }  # fmt: skip


def operations(group: comm.Transport, device: str) -> None:
    """Every collective and both products against one process with the inputs of all ranks."""
    rank, world = group.rank, group.world
    given = tensors(world, device)
    x, large = given["x"], given["large"]

    out = torch.empty(world, *x.shape[1:], device=device, dtype=DTYPE)
    comm.all_gather_into_tensor(out, x[rank], group=group)
    assert torch.equal(out, x)
    total = large[rank].clone()
    work = comm.all_reduce(total, group=group, async_op=True)
    assert work is not None
    work.wait()
    assert torch.equal(total, large.float().sum(0).to(DTYPE))
    piece = torch.empty(2, 129, 64, device=device, dtype=DTYPE)
    comm.reduce_scatter_tensor(
        piece, (x[rank] + torch.arange(world, device=device).view(-1, 1, 1, 1)).to(DTYPE), group=group
    )
    assert torch.equal(piece, (x.float().sum(0) + world * rank).to(DTYPE))
    gives = [1 + (rank + peer) % world for peer in range(world)]
    rows = torch.cat([torch.full((n, 3), 10.0 * rank + peer) for peer, n in enumerate(gives)]).to(device, DTYPE)
    takes = [1 + (peer + rank) % world for peer in range(world)]
    came = torch.empty(sum(takes), 3, device=device, dtype=DTYPE)
    comm.all_to_all_single(came, rows, takes, gives, group=group)
    wanted = torch.cat([torch.full((n, 3), 10.0 * peer + rank) for peer, n in enumerate(takes)]).to(device, DTYPE)
    assert torch.equal(came, wanted)

    for chunks in (1, 4):
        mine, weight = x[rank].clone().requires_grad_(), given["weight"].clone().requires_grad_()
        gathered, (product,) = comm.all_gather_matmul(mine, [weight], group=group, num_chunks=chunks)
        assert torch.equal(gathered, x.transpose(0, 1).flatten(1, 2))
        product.backward(given["grad"][rank])
        weight = weight.detach()
        agree("product", product, gathered @ weight.T, gathered.double() @ weight.double().T)
        parts = [grads @ weight for grads in given["grad"]]
        torchs, exact = sum(parts[1:], parts[0]), (given["grad"].double() @ weight.double()).sum(0)
        torchs, exact = (whole[:, rank * 129 : (rank + 1) * 129] for whole in (torchs, exact))
        assert mine.grad is not None
        agree("gradient of x", mine.grad, torchs, exact)
        y = comm.matmul_reduce_scatter(given["grad"][rank], weight.T.contiguous(), group=group, num_chunks=chunks)
        agree("sum of products", y, torchs, exact)
    attention(group, device)


def agree(what: str, got: torch.Tensor, torchs: torch.Tensor, exact: torch.Tensor) -> None:
    """got is exact within the error of torch's own result in its dtype."""
    if DTYPE == torch.bfloat16:
        judge(what, got, torchs, exact)
    else:
        torch.testing.assert_close(got.double(), exact, rtol=1e-4, atol=1e-4)


def attention(group: comm.Transport, device: str) -> None:
    """Context-parallel attention and its gradients against dense attention in one process."""
    mask = BitfieldMask.causal(1, LENGTH).to(device)
    shards = balance.distribute_tokens(AttentionPlan.build(mask).row_blocks().cpu(), group.world, lengths=LENGTH)
    generator = torch.Generator().manual_seed(0)
    whole = [torch.randn(1, heads, LENGTH, 64, generator=generator).to(device, DTYPE) for heads in (4, 2, 2)]
    grad = torch.randn(1, 4, LENGTH, 64, generator=generator).to(device, DTYPE)
    exact = [tensor.double().requires_grad_() for tensor in whole]
    out, _ = cases.oracle(*exact, mask.to_dense(), 1 / 8)
    wanted = [out, *torch.autograd.grad(out, exact, grad.double())]
    nothing = torch.zeros(1, 4, LENGTH, device=device)
    torchs = cases.in_its_dtype(*whole, mask.to_dense(), 1 / 8, None, grad, nothing)
    del torchs[1]  # the LSE
    local = [comm.shard(t, shards, group.rank, dim=2).detach().requires_grad_() for t in whole]
    mine = comm.context_parallel_attention(*local, mask, shards, group=group, heads_per_chunk=1)
    assert isinstance(mine, torch.Tensor)
    grads = torch.autograd.grad(mine, local, comm.shard(grad, shards, group.rank, dim=2))
    for what, got, *others in zip(("out", "dq", "dk", "dv"), (mine, *grads), torchs, wanted):
        agree(what, got, *(comm.shard(other, shards, group.rank, dim=2) for other in others))


def run_rank(rank: int, transport: str, device: str) -> str:
    os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"  # several ranks on one device
    if device == "cuda":
        torch.cuda.set_device(0)
    with comm.connect(dist.group.WORLD, device=device, transport=transport, timeout=60.0) as group:
        assert group.name == transport
        operations(group, device)
        path = f"{transport} copy engines" if device == "cuda" else transport
        for kind in ("all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce", "all_to_all_single"):
            assert group.paths[kind] == {path}, (kind, group.paths)
        group.barrier()
    return "ok"


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_processes_on_one_device(transport, world):
    if why := capabilities()[transport].missing:
        pytest.skip(why)
    results = run_ranks(world, run_rank, transport, "cuda" if ON_GPU else "cpu", timeout=150)
    assert [result for result, _ in results] == ["returned"] * world, results


@pytest.mark.parametrize("copier", ["plain", "engine", "sm"])
@pytest.mark.parametrize("world", [1, 2, 4])
def test_ranks_in_one_process(world, copier):
    if copier != "plain" and not ON_GPU:
        pytest.skip("needs CUDA")
    if copier == "engine" and (why := engine_missing()):
        pytest.skip(why)
    device = "cuda" if ON_GPU else "cpu"
    copy = {"plain": plain_copies, "engine": engine_copies, "sm": sm_copies(8)}[copier]
    comm.run_local(world, operations, device, device=device, copier=copy)
