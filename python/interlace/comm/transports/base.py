"""What every transport can do: batches of copies between ranks, in order, with a timeout on every wait.

A transport moves bytes and nothing else; reductions, chunking and autograd are built on top of it. Copies are
collective: all ranks call `copy_batch` the same number of times in the same order, and what rank a sends to b in its
n-th batch is what b expects from a in its n-th. Each batch carries a label, arguments and sizes, which the receiver
checks, so a rank that is elsewhere in the program, or asks for something else, is an error and not a hang or garbage.
For the same reason one thread uses a transport at a time: the calls of two have no order that all ranks share.

Most are a `QueueTransport` (`queued`), which runs batches on a thread of its own.
"""

from __future__ import annotations

import contextlib
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from interlace.comm.paths import Paths
from interlace.comm.trace import Trace

DEFAULT_TIMEOUT = 60.0  # seconds
BETWEEN_ARGUMENTS = "; "  # in their text; no value contains it


class CommError(RuntimeError):
    """A transfer cannot be completed: says which rank, in which operation, waited for whom and why it gave up.

    waited: those ranks, by their numbers in the whole job, where it is they who are missing. why: the reason alone.
    """

    def __init__(self, text: str, waited: Sequence[int] = (), why: str = "") -> None:
        super().__init__(text)
        self.waited, self.why = tuple(waited), why or text

    def again(self) -> CommError:
        """The same without what hangs on it (its traceback, its cause)."""
        return CommError(str(self), self.waited, self.why)


class Arguments:
    """What every rank must pass alike to an operation, by name; `interlace.comm.agreement` says what that is.

    A value may be anything whose text says it all. It becomes text when the first header is written, which is on the
    thread of the transport: one that a GPU still computes is waited for there.
    """

    def __init__(self, **values: object) -> None:
        self._values = values

    @cached_property
    def text(self) -> str:
        return BETWEEN_ARGUMENTS.join(f"{name}={value}" for name, value in self._values.items())


NO_ARGUMENTS = Arguments()


class Copy(NamedTuple):
    """One end of a transfer. `tensor` is contiguous and lies on the transport's device; it may be empty."""

    peer: int
    tensor: Tensor


@dataclass(frozen=True)
class Capabilities:
    """What a transport can do on this machine.

    missing: why it cannot run here ("" if it can).
    device: "cpu" or "cuda", where its tensors lie.
    one_host: all ranks have to be processes of one host.
    copy_engine: transfers occupy no SM.
    """

    name: str
    device: str
    one_host: bool = False
    copy_engine: bool = False
    missing: str = ""


class Ticket(Protocol):
    """A batch under way. Tensors of the batch must be left alone until `wait` has returned.

    error: what `wait` raises, once it is `done`. event: what `wait` makes the current stream wait for; None on CPUs.
    """

    error: CommError | None
    event: torch.Event | None

    def wait(self) -> None:
        """CPU: returns when the batch is complete, both ways. CUDA: makes the current stream wait for it.

        Raises CommError if a peer is lost, late or elsewhere.
        """

    def done(self) -> bool:
        """Whether `wait` would return at once (on the host)."""


class Transport(ABC):
    """A group of ranks and the way bytes move between them. Also the `group` argument of every operation."""

    name: str
    rank: int
    world: int
    timeout: float
    device: torch.device
    trace: Trace | None = None

    @property
    def paths(self) -> Paths:
        """Kind of operation (what its labels begin with) -> the paths that its bytes took so far."""
        found: Paths | None = self.__dict__.get("_paths")
        if found is None:
            found = self.__dict__["_paths"] = Paths(self.rank)
        return found

    @paths.setter
    def paths(self, found: Paths) -> None:
        """Lets several transports note their paths in one place."""
        self.__dict__["_paths"] = found

    @classmethod
    @abstractmethod
    def capabilities(cls) -> Capabilities:
        """What this transport could do in this process; tries what it needs, and never raises."""

    def allocate(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A tensor of unspecified content from which peers can read without a copy in between, where there is such
        memory; any tensor can be sent."""
        return torch.empty(tuple(shape), dtype=dtype, device=self.device)

    @abstractmethod
    def copy_batch(
        self,
        outgoing: Sequence[Copy],
        incoming: Sequence[Copy],
        label: str,
        then: Callable[[], None] | None = None,
        arguments: Arguments = NO_ARGUMENTS,
    ) -> Ticket:
        """Starts one batch of copies; collective (see the module). Copies of one pair of ranks match in their order.

        label: names the operation, equal on all ranks.
        arguments: of the operation, equal on all ranks.
        then: called when the batch has arrived, before its ticket is done and before the next batch reads its tensors:
            a reduction, say. On the transport's thread; on CUDA under its stream.
        """

    def used_for(self, what: str, at_once: bool = False) -> AbstractContextManager[None]:
        """A block in which this thread uses the transport. One after the other, any threads may; within it, the thread
        may again. Where another is inside, raises CommError, and the peers are told.

        at_once: the thread waits for each batch before it does anything else, so the batch may run on it.
        """
        inside = self.__dict__.get("_use")
        if self.world == 1 or (inside is not None and inside[0] == threading.get_ident()):
            return _ANYBODY
        return _Use(self, what, at_once)

    def _give_up(self, error: CommError) -> None:
        """Lets the peers know that this rank will not go on."""
        self.close()

    @abstractmethod
    def signal(self, peer: int) -> None:
        """Raises this rank's flag at `peer` by one."""

    @abstractmethod
    def wait(self, peer: int) -> None:
        """The n-th call returns after the n-th `signal` of `peer`. Raises CommError after the timeout."""

    def barrier(self) -> None:
        """Returns when every rank has called it. Raises CommError after the timeout."""
        peers = [peer for peer in range(self.world) if peer != self.rank]
        with self.used_for("barrier"):
            for peer in peers:
                self.signal(peer)
            for peer in peers:
                self.wait(peer)

    @abstractmethod
    def close(self) -> None:
        """Ends the transport and frees its memory; a second call does nothing. Peers that wait for it get an error."""

    @property
    def ends_with_it(self) -> contextlib.ExitStack:
        """What `close` ends too: what operations keep beside a transport, as a thread."""
        return self.__dict__.setdefault("_ends_with_it", contextlib.ExitStack())

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class Forwarding(Transport):
    """A transport over another, which does what a subclass does not do itself; closing it closes the other."""

    def __init__(self, inner: Transport) -> None:
        self.inner, self.name = inner, inner.name
        self.rank, self.world, self.device, self.timeout = inner.rank, inner.world, inner.device, inner.timeout

    @classmethod
    def capabilities(cls) -> Capabilities:
        return Capabilities(cls.__name__, "cpu")

    def allocate(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return self.inner.allocate(shape, dtype)

    def _give_up(self, error: CommError) -> None:
        self.inner._give_up(error)

    def signal(self, peer: int) -> None:
        self.inner.signal(peer)

    def wait(self, peer: int) -> None:
        self.inner.wait(peer)

    def close(self) -> None:
        self.inner.close()
        self.ends_with_it.close()


class _Use:
    """The block of `Transport.used_for`."""

    __slots__ = ("at_once", "state", "transport", "what")

    def __init__(self, transport: Transport, what: str, at_once: bool) -> None:
        self.transport, self.what, self.at_once = transport, what, at_once

    def __enter__(self) -> None:
        self.state = state = self.transport.__dict__
        lock = state.get("_user") or state.setdefault("_user", threading.Lock())
        if not lock.acquire(blocking=False):
            raise self._refused(*(state.get("_use") or (0, "an operation", False))[:2])
        state["_use"] = threading.get_ident(), self.what, self.at_once

    def __exit__(self, *exc: object) -> None:
        self.state["_use"] = None
        self.state["_user"].release()

    def _refused(self, other: int, operation: str) -> CommError:
        names = {thread.ident: thread.name for thread in threading.enumerate()}  # not of threads of autograd
        here, there = (names.get(thread, f"number {thread}") for thread in (threading.get_ident(), other))
        error = CommError(
            f"rank {self.transport.rank}, {self.what}: thread {here} uses the {self.transport.name} transport while "
            f"thread {there} is in {operation}: the calls of several threads have no order that is the same on every "
            "rank; let one wait for the other, or give each a transport of its own (comm.connect)"
        )
        self.transport._give_up(error)
        return error


_ANYBODY = contextlib.nullcontext()  # nobody waits for a rank that is alone, nor a thread for itself


@lru_cache
def peers_of(rank: int, world: int) -> tuple[int, ...]:
    """The other ranks, the next one first: no rank is everybody's first."""
    return tuple((rank + step) % world for step in range(1, world))
