"""Emulated link of given speed between two processes, in the time of the computing thread: for a shared machine.

Time advances while that thread has a core. If the thread waits for a transfer, time advances to the transfer's end on
the link. The link carries one transfer after the other. A transfer starts when all ranks have requested it, takes
bytes / bandwidth, and arrives `LATENCY` later. Adding received data counts as computation of the waiting rank. The core
time of copies is left out.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from bench.overlap import LATENCY, Absent
from interlace.comm.process.agreement import NO_ARGUMENTS, Arguments
from interlace.comm.transports import Transport
from interlace.comm.transports.base import Copy, Forwarding, Ticket


class Counted(Absent):
    """Delivers zeros, so that a step computes finite values; counts [batches, bytes] by operation."""

    def __init__(self, inner: Transport) -> None:
        super().__init__(inner)
        self.found: dict[str, list[int]] = {}

    def copy_batch(
        self, outgoing: Sequence[Copy], incoming: Sequence[Copy], label: str,
        then: Callable[[], None] | None = None, arguments: Arguments = NO_ARGUMENTS,
    ) -> Ticket:  # fmt: skip
        noted = self.found.setdefault(operation_of(label), [0, 0])
        noted[0] += 1
        for _, tensor in incoming:
            tensor.zero_()
            noted[1] += tensor.nbytes
        return super().copy_batch(outgoing, incoming, label, then, arguments)


class Link(Forwarding):
    """Bytes move over `inner`. bandwidth: bytes per second.

    waited: seconds since `begin` for which the computing thread waited for the link, by operation. late: seconds it
    waited for ranks that had not issued their request yet.
    """

    def __init__(self, inner: Transport, bandwidth: float) -> None:
        super().__init__(inner)
        self.bandwidth = bandwidth
        self._issued: list[_Issued] = []
        self.begin()

    def begin(self) -> None:
        """Start of time, on every rank."""
        self._thread, self._began = threading.get_ident(), time.thread_time()
        self._free = self._ready = self._added = self.late = 0.0
        self._issued.clear()
        self._settled = 0
        self.waited: dict[str, float] = {}

    def now(self) -> float:
        assert threading.get_ident() == self._thread, "one thread computes"
        return time.thread_time() - self._began + self._added + self.late + sum(self.waited.values())

    def copy_batch(
        self, outgoing: Sequence[Copy], incoming: Sequence[Copy], label: str,
        then: Callable[[], None] | None = None, arguments: Arguments = NO_ARGUMENTS,
    ) -> Ticket:  # fmt: skip
        mine = torch.tensor([self.now()], dtype=torch.float64)
        theirs = [torch.empty_like(mine) for _ in range(self.world - 1)]
        peers = [peer for peer in range(self.world) if peer != self.rank]
        issued = _Issued(
            self, len(self._issued), operation_of(label), sum(c.tensor.nbytes for c in incoming), mine, theirs
        )

        def arrived() -> None:
            if then is not None:
                start = time.thread_time()
                then()
                issued.adding = time.thread_time() - start

        issued.ticket = self.inner.copy_batch(
            [*outgoing, *(Copy(peer, mine) for peer in peers)],
            [*incoming, *(Copy(peer, when) for peer, when in zip(peers, theirs, strict=True))],
            label, arrived, arguments,
        )  # fmt: skip
        self._issued.append(issued)
        return issued

    def settle(self, issued: _Issued) -> None:
        """Advance time to the arrival of a batch that has arrived; all batches issued before it have arrived too."""
        while self._settled <= issued.number:
            batch = self._issued[self._settled]
            began = max(self._free, self._ready, *(float(when) for when in (batch.mine, *batch.theirs)))
            self._free = began + batch.size / self.bandwidth
            batch.due = self._free + LATENCY
            if batch.adding:  # the next one may send the sum
                self._ready = batch.due + batch.adding
            self._settled += 1
        now = self.now()
        late = max(max(float(when) for when in issued.theirs) - now, 0.0)
        self.late += late
        self.waited[issued.operation] = self.waited.get(issued.operation, 0.0) + max(issued.due - now - late, 0.0)
        self._added += issued.adding


@dataclass
class _Issued:
    """A batch in flight, and its ticket. mine, theirs: request times of each rank."""

    link: Link
    number: int
    operation: str
    size: int
    mine: Tensor
    theirs: list[Tensor]
    adding: float = 0.0
    due: float = 0.0
    ticket: Ticket | None = None

    def wait(self) -> None:
        if self.ticket is not None:
            self.ticket.wait()
            self.ticket = None
            self.link.settle(self)

    def done(self) -> bool:
        return self.ticket is None or self.ticket.done()


class Clocked(NamedTuple):
    """Seconds of the slower rank, and the mean over ranks of the seconds waited for the link, by operation."""

    seconds: float
    waited: dict[str, float]

    @classmethod
    def of(cls, link: Link, call: Callable[[], object]) -> Clocked:
        """Time of `call`, which all ranks start together."""
        link.inner.barrier()
        link.begin()
        call()
        slower = torch.tensor([link.now()], dtype=torch.float64)
        dist.all_reduce(slower, op=dist.ReduceOp.MAX)
        mean = torch.tensor([*link.waited.values(), 0.0], dtype=torch.float64) / link.world
        dist.all_reduce(mean)
        return cls(float(slower), dict(zip(link.waited, mean.tolist(), strict=False)))


def operation_of(label: str) -> str:
    return label.partition(", ")[0]
