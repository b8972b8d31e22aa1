"""Transport: batches of copies between ranks, in order, with a timeout on every wait.

A transport only moves bytes; reductions, chunking and autograd are built on top of it. Copies are collective: all ranks
call `copy_batch` the same number of times in the same order. The tensors that rank a sends to b in its n-th batch are
those that b expects from a in its n-th. Each batch carries a label, arguments and sizes, which the receiver checks. So
a rank in another part of its program, or with other arguments, causes an error instead of a hang or garbage. For the
same reason one thread uses a transport at a time: calls of two threads have no order that all ranks share.

Most transports are a `QueueTransport` (`queued`), which runs batches on its own thread.
"""

from __future__ import annotations

import contextlib
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from interlace.comm.process.agreement import NO_ARGUMENTS, Arguments
from interlace.comm.process.errors import CommError
from interlace.comm.process.paths import Paths
from interlace.comm.process.trace import Trace

DEFAULT_TIMEOUT = 60.0  # seconds


class Copy(NamedTuple):
    """One end of a transfer. `tensor` is contiguous and on the transport's device; it may be empty."""

    peer: int
    tensor: Tensor


Copies = Sequence[Copy]
Then = Callable[[], None] | None
"""Called when a batch has arrived, see `Transport.copy_batch`."""
T = TypeVar("T", bound="Transport")


@dataclass(frozen=True)
class Capabilities:
    """Capabilities of a transport on this machine.

    missing: the reason why it cannot run here ("" if it can).
    device: "cpu" or "cuda", the device of its tensors; "any": no restriction.
    one_host: all ranks must be processes of one host.
    copy_engine: transfers occupy no SM.
    """

    name: str
    device: str
    one_host: bool = False
    copy_engine: bool = False
    missing: str = ""


class Ticket:
    """A batch. Do not modify its tensors until `wait` has returned. This class: of a batch that has ended.

    error: raised by `wait`, once the batch is `done`.
    event: `wait` makes the current stream wait for it; None on CPUs.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.error: CommError | None = None
        self.event: torch.Event | None = None

    def done(self) -> bool:
        """True if `wait` would return at once (on the host)."""
        return True

    def wait(self) -> None:
        """CPU: returns when all copies of the batch are complete, in and out. CUDA: the current stream waits for them.

        Raises CommError if a peer is lost, late or in another part of its program.
        """
        if self.error is not None:
            raise self.error.copy() from self.error
        if self.event is not None:
            torch.accelerator.current_stream(self.device).wait_event(self.event)


class Transport(ABC):
    """A group of ranks that exchange bytes. Also the `group` argument of every operation."""

    name: str
    rank: int
    world: int
    timeout: float
    device: torch.device
    trace: Trace | None = None

    @cached_property
    def paths(self) -> Paths:
        """Kind of operation (prefix of its labels) -> the paths that its bytes took so far.

        May be set: several transports may share one `Paths`.
        """
        return Paths(self.rank)

    @classmethod
    def capabilities(cls) -> Capabilities:
        """Capabilities in this process. Probes all requirements and never raises. Default: of one process only."""
        return Capabilities(cls.name, "any", one_host=True)

    def allocate(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """An uninitialized tensor that peers can read without an intermediate copy, if the transport supports that.

        Any other tensor can be sent too.
        """
        return torch.empty(tuple(shape), dtype=dtype, device=self.device)

    @abstractmethod
    def copy_batch(
        self, outgoing: Copies, incoming: Copies, label: str, then: Then = None, arguments: Arguments = NO_ARGUMENTS
    ) -> Ticket:
        """Starts one batch of copies; collective (see the module). Copies of one pair of ranks match in their order.

        label: names the operation, equal on all ranks.
        arguments: of the operation, equal on all ranks.
        then: called when the batch has arrived, before its ticket is done and before the next batch reads its tensors:
            for example a reduction. Runs on the transport's thread; on CUDA under its stream.
        """

    def used_for(self, label: str, at_once: bool = False) -> AbstractContextManager[None]:
        """A block with exclusive use of the transport. Reentrant; threads may use it one after another.

        Raises CommError, and notifies the peers, if another thread is inside.

        at_once: the thread waits for each batch before it does anything else, so the batch may run on this thread.
        """
        inside = self.__dict__.get("_use")
        if self.world == 1 or (inside is not None and inside[0] == threading.get_ident()):
            return _NO_LOCK
        return _Use(self, label, at_once)

    def _abort(self, error: CommError) -> None:
        """Notifies the peers that this rank aborts."""
        self.close()

    def barrier(self) -> None:
        """Returns when every rank has called it. Raises CommError after the timeout."""
        with self.used_for("barrier", at_once=True):
            self.copy_batch([], [], "barrier").wait()

    @abstractmethod
    def close(self) -> None:
        """Ends the transport and frees its memory; a second call is a no-op. Waiting peers get an error."""

    @cached_property
    def closed_with_it(self) -> contextlib.ExitStack:
        """Resources of operations that `close` also closes, such as threads."""
        return contextlib.ExitStack()

    def __enter__(self: T) -> T:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class Forwarding(Transport):
    """A transport that delegates to another one, except for overridden methods. Closing it closes the other."""

    def __init__(self, inner: Transport) -> None:
        self.inner, self.name = inner, inner.name
        self.rank, self.world, self.device, self.timeout = inner.rank, inner.world, inner.device, inner.timeout

    def allocate(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return self.inner.allocate(shape, dtype)

    def _abort(self, error: CommError) -> None:
        self.inner._abort(error)

    def barrier(self) -> None:
        self.inner.barrier()

    def close(self) -> None:
        self.inner.close()
        self.closed_with_it.close()


class _Use:
    """The block of `Transport.used_for`."""

    __slots__ = ("at_once", "state", "transport", "what")

    def __init__(self, transport: Transport, label: str, at_once: bool) -> None:
        self.transport, self.what, self.at_once = transport, label, at_once

    def __enter__(self) -> None:
        self.state = state = self.transport.__dict__
        lock = state.get("_user") or state.setdefault("_user", threading.Lock())
        if not lock.acquire(blocking=False):
            raise self._refused(*(state.get("_use") or (0, "an operation", False))[:2])
        state["_use"] = threading.get_ident(), self.what, self.at_once

    def __exit__(self, *exc: object) -> None:
        self.state["_use"] = None
        self.state["_user"].release()

    def _refused(self, other_thread: int, operation: str) -> CommError:
        names = {thread.ident: thread.name for thread in threading.enumerate()}  # without autograd threads
        own_name, other_name = (
            names.get(thread, f"number {thread}") for thread in (threading.get_ident(), other_thread)
        )
        error = CommError(
            f"rank {self.transport.rank}, {self.what}: thread {own_name} uses the {self.transport.name} transport "
            f"while thread {other_name} is in {operation}: calls of several threads have no common order on all ranks. "
            "Let one thread wait for the other, or use a separate transport for each (comm.connect)"
        )
        self.transport._abort(error)
        return error


_NO_LOCK = contextlib.nullcontext()  # a single rank has no peers, and a thread may reenter its own block


def swap(
    transport: Transport, gives: Callable[[int], Iterable[Tensor]], takes: Callable[[int], Iterable[Tensor]],
    label: str, arguments: Arguments = NO_ARGUMENTS, then: Then = None,
) -> Ticket:  # fmt: skip
    """Starts one batch with every other rank r: gives(r) to it, takes(r) from it. Otherwise as `copy_batch`."""
    peers = peers_of(transport.rank, transport.world)
    outgoing = [Copy(peer, tensor) for peer in peers for tensor in gives(peer)]
    incoming = [Copy(peer, tensor) for peer in peers for tensor in takes(peer)]
    return transport.copy_batch(outgoing, incoming, label, then, arguments)


@lru_cache
def peers_of(rank: int, world: int) -> tuple[int, ...]:
    """The other ranks, starting with the next one: each rank starts with a different peer."""
    return tuple((rank + step) % world for step in range(1, world))
