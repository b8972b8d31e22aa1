"""Links between the ranks of a run, measured at startup with small messages, in well under a second.

For each kind of link (between processes of a host, between hosts), one pair of ranks sends messages of a few sizes back
and forth, and one group of ranks sums a few tensors. Both use the methods of the executor. A line is fitted through the
shortest times of each. Other ranks wait meanwhile.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import astuple

import torch
from torch import nn

from interlace import _device
from interlace.comm.channels.base import Channel, Tag
from interlace.costs.fitted import FREE
from interlace.costs.links import NO_LINK, Link, Links
from interlace.plan import LinkModel, fit_link
from interlace.run.execute.gradients import Sum

SIZES = (1 << 8, 1 << 14, 1 << 18, 1 << 21)  # bytes
ECHOES = {1 << 8: 24, 1 << 14: 12}  # repeats of small sizes, which a busy core disturbs most; the first is not counted
FEW = 5  # repeats of other sizes


def measure_links(channel: Channel | None, modules: Sequence[str], *, hosts: Sequence[str] | None = None) -> Links:
    """The links between the ranks of a channel, the same on every rank. Collective.

    channel: None if one process runs all ranks: messages are references then, and links take no time. modules: those
    of the channel. hosts: of each rank (default: the system's hostnames).

    Raises CommError if a rank is lost.
    """
    if channel is None:
        return Links()
    world = channel.world
    names = list(hosts) if hosts is not None else channel.exchange(socket.gethostname(), "the names of the hosts")
    numbers = [names.index(name) for name in names]
    by_host = [[rank for rank in range(world) if numbers[rank] == host] for host in sorted(set(numbers))]
    heads = [ranks[0] for ranks in by_host]
    # Inside hosts: the host with the most ranks. Between hosts: the first rank of each.
    groups = [ranks for ranks in (max(by_host, key=len), heads) if len(ranks) > 1]
    channel.add_groups(groups)
    channel.add_edges([way for ranks in groups for way in ((ranks[0], ranks[1]), (ranks[1], ranks[0]))])
    channel.begin(0)
    link_of, posting = {}, 0.0
    for number, ranks in enumerate(groups):
        link, took = _measure(channel, modules[0], ranks, number)
        mine = [*astuple(link.message), *astuple(link.ring), took]
        *lines, took = map(float, channel.exchange(mine, "the speed of a link")[ranks[0]])
        link_of[tuple(ranks)] = Link(LinkModel(*lines[:2]), LinkModel(*lines[2:]))
        posting = max(posting, took)
    host, network = (link_of.get(tuple(ranks), NO_LINK) for ranks in (max(by_host, key=len), heads))
    if len(by_host) == 1:
        network = NO_LINK
    return Links(host=host, network=network, hosts=tuple(numbers), overhead=posting)


def _measure(channel: Channel, module: str, ranks: Sequence[int], number: int) -> tuple[Link, float]:
    """A link over `ranks`, measured on this rank, and the seconds of posting a message; NO_LINK on other ranks."""
    if channel.rank not in ranks:
        return NO_LINK, 0.0
    first, second, posting = ranks[0], ranks[1], list[float]()
    message = FREE
    if channel.rank in (first, second):
        peer, leads = (second, True) if channel.rank == first else (first, False)

        def echo(size: int, turn: int) -> None:
            there = torch.zeros(1, size // 4, device=channel.device)
            for gives in (leads, not leads):
                tag = Tag(module, number, turn, turn, False)
                if gives:
                    begin = time.perf_counter()
                    channel.send(there, peer, tag)
                    posting.append(time.perf_counter() - begin)
                else:
                    channel.receive(peer, tag)

        message = _line(echo, lambda seconds: seconds / 2, channel)
    channel.finish()

    def add_up(size: int, turn: int) -> None:
        weight = nn.Parameter(torch.zeros(size // 4, device=channel.device))
        weight.grad = torch.zeros_like(weight)
        Sum([weight], ranks, channel, f"the speed of a link {number} {turn}").wait()

    count = len(ranks)
    ring = _line(add_up, lambda seconds: seconds / (2 * (count - 1)), channel, share=count)
    took = min(posting, default=0.0)  # by the sender, and assumed equal for the receiver: not part of the transfer
    return Link(LinkModel(max(message.latency - 2 * took, 0.0), message.per_byte), ring), took


def _line(
    work: Callable[[int, int], None], one: Callable[[float], float], channel: Channel, share: int = 1
) -> LinkModel:
    """Latency and seconds per byte of `work`, from the shortest of several repeats at each size. one: converts its
    seconds to those of one step, which moves 1 / share of the bytes."""
    seconds, turn = [], 0
    for size in SIZES:
        best: list[float] = []
        for _ in range(ECHOES.get(size, FEW)):
            begin = time.perf_counter()
            work(size, turn)
            if _device.on_gpu(channel.device):
                torch.accelerator.synchronize(channel.device)
            best.append(time.perf_counter() - begin)
            turn += 1
        seconds.append(max(one(min(best[1:])), 1e-9))
    return fit_link([size / share for size in SIZES], seconds)
