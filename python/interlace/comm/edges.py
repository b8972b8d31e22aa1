"""Pipeline edges: tensors from one rank to another, one direction each, in the order in which they were sent.

An edge is a group of torch.distributed (gloo; NCCL on GPUs), or a transport of collectives (`shm`, `cuda_ipc`,
`symm_mem`): the one that INTERLACE_TRANSPORT names, or, for two ranks on one GPU, the first that can run. NCCL refuses
such ranks.

Over a transport each message is a batch of one copy, through slots that its sender owns. The thread of the transport
waits for free slots and for the receiver, so `send` returns at once, however large the message: no order of sends and
receives leads to a deadlock.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Protocol

import torch.distributed as dist
from torch import Tensor

from interlace.comm.paths import Paths
from interlace.comm.transports.base import CommError, Copy, Ticket, Transport

KIND = "pipeline edge"  # of operation, in logs of paths and in errors


class Work(Protocol):
    """A message under way, as torch.distributed has it."""

    def is_completed(self) -> bool: ...

    def wait(self, timeout: timedelta = ...) -> Any: ...


class Edge(Protocol):
    """One direction between two ranks, at one of its ends. peer: the other rank. Errors are RuntimeErrors."""

    def send(self, tensor: Tensor, peer: int) -> Work:
        """Returns at once. `tensor` is contiguous, and left alone until the work is complete."""

    def receive(self, tensor: Tensor, peer: int) -> Work:
        """On a GPU `wait` makes the current stream wait."""

    def _give_up(self, error: CommError) -> None:
        """Tells the peer that nothing more will come from here."""

    def close(self) -> None: ...


class GroupEdge:
    """An edge over a group of torch.distributed; None: the default one. path: what moves the bytes, in words; "": of
    headers, which are no path of their own."""

    def __init__(self, group: dist.ProcessGroup | None, paths: Paths, path: str = "") -> None:
        self._group, self._paths, self._path = group, paths, path

    def send(self, tensor: Tensor, peer: int) -> Work:
        work = dist.isend(tensor, peer, group=self._group)
        assert work is not None
        if self._path:
            self._paths.note(KIND, self._path)
        return work

    def receive(self, tensor: Tensor, peer: int) -> Work:
        work = dist.irecv(tensor, peer, group=self._group)
        assert work is not None
        return work

    def _give_up(self, error: CommError) -> None: ...

    def close(self) -> None: ...


class TransportEdge:
    """An edge over a transport between its two ranks, which carries nothing else. Its waits last for the transport's
    timeout: of the sender, for the receiver to ask for the next message; of both, for the next piece of one."""

    def __init__(self, transport: Transport, paths: Paths) -> None:
        self.transport = transport
        transport.paths = paths

    def send(self, tensor: Tensor, peer: int) -> Work:
        return _Delivery(self.transport.copy_batch([Copy(1 - self.transport.rank, tensor)], [], KIND))

    def receive(self, tensor: Tensor, peer: int) -> Work:
        return _Delivery(self.transport.copy_batch([], [Copy(1 - self.transport.rank, tensor)], KIND))

    def _give_up(self, error: CommError) -> None:
        self.transport._give_up(error)

    def close(self) -> None:
        self.transport.close()


class _Delivery:
    def __init__(self, ticket: Ticket) -> None:
        self._ticket = ticket

    def is_completed(self) -> bool:
        ticket = self._ticket
        return ticket.done() and ticket.error is None and (ticket.event is None or ticket.event.query())

    def wait(self, timeout: timedelta | None = None) -> None:
        self._ticket.wait()  # which the transport bounds
