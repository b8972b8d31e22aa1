"""Pipeline edges: tensors from one rank to another, one direction each, in sending order.

An edge is a group of torch.distributed (gloo; NCCL on GPUs), or a transport of collectives (`shm`, `cuda_ipc`,
`symm_mem`). The transport is the one named by INTERLACE_TRANSPORT. For two ranks on one GPU, which NCCL refuses, it is
the first that can run.

Over a transport each message is a batch of one copy, through slots that its sender owns. The transport's thread waits
for free slots and for the receiver, so `send` returns at once for any message size. So no order of sends and receives
leads to a deadlock.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Protocol

import torch.distributed as dist
from torch import Tensor

from interlace.comm.process.errors import CommError
from interlace.comm.process.paths import Paths
from interlace.comm.transports.base import Copy, Ticket, Transport

KIND = "pipeline edge"  # name of the operation, in logs of paths and in errors


class Work(Protocol):
    """A message in flight, with the interface of torch.distributed."""

    def is_completed(self) -> bool: ...

    def wait(self, timeout: timedelta = ...) -> Any: ...


class GroupEdge:
    """An edge over a group of torch.distributed; None: the default one.

    path: description of what moves the bytes; "": for headers, which are not logged as a path.
    """

    def __init__(self, group: dist.ProcessGroup | None, paths: Paths, path: str = "") -> None:
        self._group, self._paths, self._path = group, paths, path

    def send(self, tensor: Tensor, peer: int) -> Work:
        """Returns at once. `tensor` is contiguous, and must not be modified until the work is complete."""
        work = dist.isend(tensor, peer, group=self._group)
        assert work is not None
        if self._path:
            self._paths.note(KIND, self._path)
        return work

    def receive(self, tensor: Tensor, peer: int) -> Work:
        """On a GPU `wait` makes the current stream wait."""
        work = dist.irecv(tensor, peer, group=self._group)
        assert work is not None
        return work

    def _abort(self, error: CommError) -> None:
        """No-op: the abort report notifies the peer."""

    def close(self) -> None: ...


class TransportEdge:
    """An edge over a transport between its two ranks, used for this edge only.

    Its waits use the transport's timeout. The sender waits for the receiver to request the next message. Both wait for
    the next piece of a message.
    """

    def __init__(self, transport: Transport, paths: Paths) -> None:
        self.transport = transport
        transport.paths = paths

    def send(self, tensor: Tensor, peer: int) -> Work:
        return _Delivery(self.transport.copy_batch([Copy(1 - self.transport.rank, tensor)], [], KIND))

    def receive(self, tensor: Tensor, peer: int) -> Work:
        return _Delivery(self.transport.copy_batch([], [Copy(1 - self.transport.rank, tensor)], KIND))

    def _abort(self, error: CommError) -> None:
        """Notifies the peer that this rank sends no more messages."""
        self.transport._abort(error)

    def close(self) -> None:
        self.transport.close()


Edge = GroupEdge | TransportEdge
"""One end of a one-directional connection between two ranks. peer: the other rank. Errors are RuntimeErrors."""


class _Delivery:
    def __init__(self, ticket: Ticket) -> None:
        self._ticket = ticket

    def is_completed(self) -> bool:
        ticket = self._ticket
        return ticket.done() and ticket.error is None and (ticket.event is None or ticket.event.query())

    def wait(self, timeout: timedelta | None = None) -> None:
        self._ticket.wait()  # the transport bounds this wait
