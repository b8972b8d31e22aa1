"""Speed of links: every pair of ranks, and all-reduces over the ranks of a host and over all ranks.

In a round each rank is in at most one pair (circle method: world - 1 rounds for an even world). Ranks of one host still
share its network card in a round, as in training.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist

from interlace import _device

ECHOES = 10  # per latency measurement
SMALL = 8  # bytes; transfer time is only latency
LARGEST = 16 << 20  # bytes
PAIR_SECONDS = 0.5  # no larger message is begun after this time
SUM_BYTES = 16 << 20
SUMS = 3  # per bandwidth measurement; the first one is a warm-up


class Link(NamedTuple):
    """Measured link.

    latency: seconds of a small message, one way. bandwidth: bytes per second of the largest message.
    """

    first: int
    second: int
    latency: float
    bandwidth: float


def rounds(world: int) -> list[list[tuple[int, int]]]:
    """Every pair of `world` ranks once, in rounds in which each rank occurs at most once. An odd world leaves one rank
    idle."""
    places = list(range(world + world % 2))
    result = []
    for _ in range(len(places) - 1):
        half = len(places) // 2
        pairs = zip(places[:half], reversed(places[half:]), strict=True)
        result.append([(min(pair), max(pair)) for pair in pairs if max(pair) < world])
        places = [places[0], places[-1], *places[1:-1]]
    return result


def measure_pair(rank: int, peer: int, device: torch.device, timeout: float) -> tuple[float, float]:
    """(latency, bandwidth) between this rank and `peer`, which calls this too.

    The rank with the lower number measures time and announces the size of the next message; 0 ends the measurement.
    Raises RuntimeError (torch's own) if the peer is lost.
    """
    leads, wait = rank < peer, timedelta(seconds=timeout)
    plan = torch.zeros(1, dtype=torch.int64)

    def move(tensor: torch.Tensor, gives: bool) -> None:
        work = dist.isend(tensor, peer) if gives else dist.irecv(tensor, peer)
        assert work is not None
        work.wait() if _device.on_gpu(tensor.device) else work.wait(wait)
        if _device.on_gpu(tensor.device):
            torch.accelerator.synchronize(device)

    def echo(size: int) -> float:
        there, back = (torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(2))
        begin = time.perf_counter()
        move(there, leads)
        move(back, not leads)
        return (time.perf_counter() - begin) / 2

    echo(SMALL)  # establishes the connection
    latency = min(echo(SMALL) for _ in range(ECHOES))
    size, begin, bandwidth = 1 << 16, time.perf_counter(), 0.0
    while True:
        goes_on = size <= LARGEST and time.perf_counter() - begin < PAIR_SECONDS
        plan[0] = size if goes_on else 0
        move(plan, leads)
        if not (size := int(plan[0])):
            return latency, bandwidth
        bandwidth = size / max(echo(size), 1e-9)
        size *= 4


def measure_sum(group: dist.ProcessGroup | None, size: int, device: torch.device, timeout: float) -> float:
    """Bus bandwidth of an all-reduce of 16 MiB over a group of `size` ranks, in bytes per second: each byte travels 2
    (n - 1) / n times. Raises RuntimeError (torch's own) if a rank is lost."""
    tensor = torch.zeros(SUM_BYTES // 4, device=device)
    seconds = []
    for _ in range(SUMS):
        begin = time.perf_counter()
        work = dist.all_reduce(tensor, group=group, async_op=True)
        assert work is not None
        work.wait() if _device.on_gpu(tensor.device) else work.wait(timedelta(seconds=timeout))
        if _device.on_gpu(tensor.device):
            torch.accelerator.synchronize(device)
        seconds.append(time.perf_counter() - begin)
    return 2 * (size - 1) / size * SUM_BYTES / max(min(seconds[1:]), 1e-9)


def slow(links: Sequence[Link], hosts: Mapping[int, str], part: float) -> list[tuple[Link, float]]:
    """Links with a bandwidth below `part` of the median of their kind (within a host, or between two), with that
    median. Kinds with fewer than three links are skipped."""
    slow_links = []
    for inside in (True, False):
        kind = [link for link in links if (hosts[link.first] == hosts[link.second]) is inside]
        if len(kind) >= 3:
            median = statistics.median(link.bandwidth for link in kind)
            slow_links += [(link, median) for link in kind if link.bandwidth < part * median]
    return slow_links
