"""Work of the ranks of a test, in threads of this process or in processes of the pool."""

from __future__ import annotations

import gc
import hashlib
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from interlace._core import Exchange
from interlace.comm import Transport, connect, run_local
from interlace.comm.transports import Copy
from interlace.comm.transports.base import peers_of
from interlace.comm.transports.shm import SLOT_BYTES, Segment, ShmTransport, start_time_of
from tests.comm.pool import Pool

TIMEOUT = 30.0


def on_ranks(pool: Pool, kind: str, world: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """[function(group, *args) of each rank], on the transport that `kind` names."""
    if kind == "local":
        return run_local(world, function, *args, timeout=TIMEOUT)
    return pool.returned(world, _connected, kind, function, args)


def _connected(rank: int, kind: str, function: Callable[..., Any], args: Sequence[Any]) -> Any:
    with connect(transport=kind, timeout=TIMEOUT) as group:
        return function(group, *args)


def on_shm_threads(world: int, function: Callable[..., Any], *, slot_bytes: int = 4096) -> list[Any]:
    """[function(group) of each rank], over shared memory with small slots; each rank is a thread of this process."""
    descriptor = Segment.create(world, slot_bytes)
    me = (os.getpid(), start_time_of(os.getpid()))
    segments = [Segment(world, slot_bytes, descriptor) for _ in range(world)]
    os.close(descriptor)

    def rank(number: int) -> Any:
        with ShmTransport(number, segments[number], [me] * world, timeout=TIMEOUT) as group:
            return function(group)

    with ThreadPoolExecutor(world) as threads:
        return list(threads.map(rank, range(world)))


# ---------------------------------------------------------------------- data that every rank can make


def data(rank: int, shape: Sequence[int], dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Input of `rank`: floats of many magnitudes, so that the order of a sum changes its bits."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    if dtype == torch.bool:
        return torch.randint(0, 2, tuple(shape), generator=generator).bool()
    if not dtype.is_floating_point:
        return torch.randint(0, 100, tuple(shape), generator=generator).to(dtype)
    wide = torch.randn(tuple(shape), generator=generator, dtype=torch.float64)
    return (wide * 10 ** (2 * torch.rand(tuple(shape), generator=generator, dtype=torch.float64))).to(dtype)


def strided(tensor: Tensor) -> Tensor:
    """The same values, not contiguous: every other one of a last dimension twice as long."""
    wide = torch.zeros(*tensor.shape[:-1], 2 * tensor.shape[-1], dtype=tensor.dtype)
    wide[..., ::2] = tensor
    return wide[..., ::2]


def reduced(parts: Sequence[Tensor], op: str = "sum") -> Tensor:
    """The reduction by hand: rank by rank, in float32 if that is wider."""
    dtype = parts[0].dtype
    wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
    total = parts[0].to(wide)
    for part in parts[1:]:
        if op in ("sum", "mean"):
            total = total + part.to(wide)
        else:
            total = (torch.maximum if op == "max" else torch.minimum)(total, part.to(wide))
    if op == "mean":
        total = total / len(parts)
    return total.to(dtype)


def same_bits(found: Tensor, wanted: Tensor) -> bool:
    same = found.shape == wanted.shape and found.dtype == wanted.dtype
    return same and torch.equal(_bytes(found), _bytes(wanted))


def digest(tensor: Tensor) -> str:
    return hashlib.sha256(_bytes(tensor).numpy().tobytes()).hexdigest()


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)


# ---------------------------------------------------------------------- resources of a process


def sizes(sender: int, receiver: int, batch: int) -> list[int]:
    """Elements of each copy of one pair in a batch: zero, one or several copies, some of them empty."""
    generator = torch.Generator().manual_seed(100 * sender + 10 * receiver + batch)
    count = int(torch.randint(0, 4, (), generator=generator))
    longest = 3 * Exchange.SLOTS * SLOT_BYTES // 4 if (sender, batch) == (0, 1) else 9
    return torch.randint(0, longest, (count,), generator=generator).tolist()


def parcels(sender: int, receiver: int, batch: int) -> list[Tensor]:
    dtype = (torch.float32, torch.int64, torch.bool)[batch % 3]
    return [data(sender, (size,), dtype, 7 * batch + n) for n, size in enumerate(sizes(sender, receiver, batch))]


def batches(group: Transport, count: int) -> None:
    """Posts all batches before the first wait. `then` reads the received data in the order of the batches."""
    arrived: list[int] = []
    tickets, received = [], []
    peers = peers_of(group.rank, group.world)
    for batch in range(count):
        outgoing = [Copy(peer, tensor) for peer in peers for tensor in parcels(group.rank, peer, batch)]
        incoming = [Copy(p, torch.zeros_like(tensor)) for p in peers for tensor in parcels(p, group.rank, batch)]

        def then(batch: int = batch, incoming: list[Copy] = incoming) -> None:
            for peer in peers:
                result = [tensor for source, tensor in incoming if source == peer]
                assert all(same_bits(a, b) for a, b in zip(result, parcels(peer, group.rank, batch))), (batch, peer)
            arrived.append(batch)

        received.append(incoming)
        tickets.append(group.copy_batch(outgoing, incoming, f"batch {batch}", then))
    for batch, ticket in enumerate(tickets):
        ticket.wait()
        ticket.wait()
        assert ticket.done() and arrived[: batch + 1] == list(range(batch + 1))


# ---------------------------------------------------------------------- what a process holds


def used() -> dict[str, int]:
    """Resources of this process that a transport could leak."""
    gc.collect()
    maps = Path("/proc/self/maps").read_text()
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "segments": maps.count("memfd:interlace"),
        "named segments": sum("interlace" in name for name in os.listdir("/dev/shm")),
    }


def grown(before: dict[str, int], patience: float = 30.0) -> dict[str, tuple[int, int]]:
    """Resources that have grown since `before`. A decrease is allowed: the test's own process group drops connections
    to dead peers.

    A joined thread leaves /proc a little later, on a busy machine much later: wait up to `patience` seconds.
    """
    deadline = time.monotonic() + patience
    while True:
        more = {what: (before[what], count) for what, count in used().items() if count > before[what]}
        if not more or time.monotonic() > deadline:
            return more
        time.sleep(0.02)
