"""What every transport can do: batches of copies between ranks, in order, with a timeout on every wait.

A transport moves bytes and nothing else; reductions, chunking and autograd are built on top of it. Copies are
collective: all ranks call `copy_batch` the same number of times in the same order, and what rank a sends to b in its
n-th batch is what b expects from a in its n-th. Each batch carries a label, arguments and sizes, which the receiver
checks, so a rank that is elsewhere in the program, or asks for something else, is an error and not a hang or garbage.
For the same reason one thread uses a transport at a time: the calls of two have no order that all ranks share.

`QueueTransport` runs batches on a thread of its own, in order, so that the caller computes meanwhile. On CUDA the
thread only enqueues, on a stream of its own.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import queue
import threading
import time
import traceback
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from interlace import _device
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
    """A batch under way. Tensors of the batch must be left alone until `wait` has returned."""

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

    def used_for(self, what: str) -> AbstractContextManager[None]:
        """A block in which this thread uses the transport. One after the other, any threads may; within it, the thread
        may again. Where another is inside, raises CommError, and the peers are told."""
        inside = self.__dict__.get("_use")
        if self.world == 1 or (inside is not None and inside[0] == threading.get_ident()):
            return _ANYBODY
        return _Use(self, what)

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

    __slots__ = ("state", "transport", "what")

    def __init__(self, transport: Transport, what: str) -> None:
        self.transport, self.what = transport, what

    def __enter__(self) -> None:
        self.state = state = self.transport.__dict__
        lock = state.get("_user") or state.setdefault("_user", threading.Lock())
        if not lock.acquire(blocking=False):
            raise self._refused(*(state.get("_use") or (0, "an operation")))
        state["_use"] = threading.get_ident(), self.what

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


def peers_of(rank: int, world: int) -> list[int]:
    """The other ranks, the next one first: no rank is everybody's first."""
    return [(rank + step) % world for step in range(1, world)]


class _LastProgress:
    """When a transport last got somewhere: a batch begun, a piece arrived. Waits are bounded from there."""

    def __init__(self) -> None:
        self.time = time.monotonic()

    def note(self) -> None:
        self.time = time.monotonic()


class _QueuedTicket:
    def __init__(self, what: str, timeout: float, device: torch.device, progress: _LastProgress) -> None:
        self.what, self.timeout, self.device, self.progress = what, timeout, device, progress
        self.finished = threading.Event()
        self.error: CommError | None = None
        self.event: torch.Event | None = None
        self.keep: Any = None  # what must live until the batch is complete

    def done(self) -> bool:
        return self.finished.is_set()

    def wait(self) -> None:
        # The thread bounds its own waits; this one, a little longer so that the thread's reason arrives, is for a
        # thread that hangs. Batches that were issued before may take their time, as long as they move.
        self.progress.note()
        patience = self.timeout + 5.0
        while not self.finished.wait(max(self.progress.time + patience - time.monotonic(), 0.0)):
            if time.monotonic() >= self.progress.time + patience:
                raise CommError(f"{self.what}: nothing moved for {patience:g} s")
        self.keep = None
        if self.error is not None:
            raise self.error.again() from self.error
        if self.event is not None:
            torch.accelerator.current_stream(self.device).wait_event(self.event)


class QueueTransport(Transport):
    """A transport whose batches run on a thread, one after the other, in the order of the calls.

    A subclass implements `_run`, `signal` and `wait`, and `_shut` to free what it holds. After the first error every
    later batch fails with the same reason: the order of batches is lost, and nothing that follows could be trusted.

    A transport that nobody refers to any more is closed, and so are those still open when the interpreter exits.
    """

    before: Callable[[int, str], None] = staticmethod(lambda rank, what: None)
    """Called as before(rank, step) ahead of each step of a batch ("post", "take", "taken"): tests delay there."""

    called: Sequence[int]
    """The numbers of its ranks in the whole job, by which errors call them; `rank` and peers count within it."""

    def __init__(self, rank: int, world: int, *, device: torch.device, timeout: float) -> None:
        self.rank, self.world, self.timeout = rank, world, timeout
        self.device = device
        self.called: Sequence[int] = range(world)
        self.batches = 0
        self._process = os.getpid()
        self.failed: CommError | None = None
        self._closed = False
        self._progress = _LastProgress()
        self._queue: queue.SimpleQueue[tuple[Callable[[], None], _QueuedTicket] | None] = queue.SimpleQueue()
        self._stream = torch.Stream(device) if _device.on_gpu(device) else None
        self._thread = threading.Thread(
            target=_work, args=(weakref.ref(self), self._queue), name=f"interlace-{self.name}-{rank}", daemon=True
        )
        self._thread.start()
        _open.add(self)

    @abstractmethod
    def _run(
        self, outgoing: Sequence[Copy], incoming: Sequence[Copy], what: str, arguments: Arguments, sequence: int
    ) -> None:
        """One batch of flat tensors, whole: returns when the incoming ones are written, the outgoing ones may be.

        On a GPU it runs under the transport's stream and returns when all that is enqueued.
        """

    def _shut(self) -> None:
        """Frees what the subclass holds; the thread has ended, or hangs in a wait that `_interrupt` ended."""

    def _interrupt(self) -> None:
        """Makes a `_run` that waits give up."""

    def _tell(self, reason: str) -> None:
        """Lets the peers know that this rank gave up, and why, so that none waits for it until the timeout."""

    def _give_up(self, error: CommError) -> None:
        """From now on every use raises; peers are told. Only the first error counts."""
        forget_locals(error)
        if self.failed is None:
            self.failed = error.again()
            if not self._closed:
                self._tell(str(error))

    def copy_batch(
        self,
        outgoing: Sequence[Copy],
        incoming: Sequence[Copy],
        label: str,
        then: Callable[[], None] | None = None,
        arguments: Arguments = NO_ARGUMENTS,
    ) -> Ticket:
        with self.used_for(label):
            return self._enqueue(outgoing, incoming, label, then, arguments)

    def _enqueue(
        self, outgoing: Sequence[Copy], incoming: Sequence[Copy], label: str, then: Callable[[], None] | None,
        arguments: Arguments,
    ) -> Ticket:  # fmt: skip
        self._check_open(label)
        outgoing, incoming = (_flat(self, copies, label) for copies in (outgoing, incoming))
        sequence = self.batches
        self.batches += 1
        what = f"rank {self.called[self.rank]}, {label} (batch {sequence})"
        ticket = _QueuedTicket(what, self.timeout, self.device, self._progress)
        ticket.keep = (outgoing, incoming, then)
        ready = torch.accelerator.current_stream(self.device).record_event() if self._stream is not None else None
        inference = torch.is_inference_mode_enabled()  # belongs to a thread, and its tensors are written only in it
        if self.trace is not None:
            self.trace.mark("issue", label)

        def run() -> None:
            began = time.perf_counter()
            self._progress.note()
            with torch.inference_mode(inference), torch.no_grad(), self._stream or nullcontext():
                if self._stream is not None and ready is not None:
                    self._stream.wait_event(ready)
                self._run(outgoing, incoming, label, arguments, sequence)
                if self.trace is not None:
                    self.trace.add("copy", label, began, time.perf_counter())
                if then is not None:
                    then()
                if self._stream is not None:
                    ticket.event = self._stream.record_event()

        self._queue.put((run, ticket))
        return ticket

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        _open.discard(self)
        self._interrupt()
        self._queue.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join(5.0)
        self._shut()
        self.ends_with_it.close()

    def __del__(self) -> None:
        # Not in a forked child, which has no thread to end and must not speak for its parent.
        if self.__dict__.get("_process") == os.getpid():
            with contextlib.suppress(Exception):
                self.close()

    def _check_open(self, label: str) -> None:
        if self._closed:
            raise CommError(f"rank {self.called[self.rank]}, {label}: the {self.name} transport is closed")
        if self.failed is not None:
            raise CommError(
                f"rank {self.called[self.rank]}, {label}: the {self.name} transport failed before and cannot be used "
                f"again; connect anew ({self.failed})",
                self.failed.waited,
                self.failed.why,
            )


def _work(owner: weakref.ref[QueueTransport], batches: queue.SimpleQueue[Any]) -> None:
    # Holds no reference to the transport between batches, so that one that is forgotten is collected.
    while (item := batches.get()) is not None:
        run, ticket = item
        transport = owner()
        try:
            if transport is not None and transport.failed is not None:
                raise transport.failed.again()
            run()
        except BaseException as error:
            ticket.error = _failure(ticket.what, error)
            if transport is not None:
                transport._give_up(ticket.error)
        ticket.finished.set()
        del run, ticket, item, transport


_open: weakref.WeakSet[QueueTransport] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    # A daemon thread that still waits in compiled code while the interpreter goes away can take the process down.
    for transport in list(_open):
        if transport._process == os.getpid():
            transport.close()


def forget_locals(error: BaseException | None) -> None:
    """Drops what the frames of the tracebacks refer to: buffers and sockets would live as long as the error."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def _flat(transport: Transport, copies: Sequence[Copy], label: str) -> list[Copy]:
    for peer, tensor in copies:
        if not 0 <= peer < transport.world or peer == transport.rank:
            raise ValueError(f"{label}: peer {peer} is not another rank of {transport.world}")
        if tensor.device != transport.device:
            raise ValueError(f"{label}: a tensor is on {tensor.device}, {transport.name} moves {transport.device}")
        if not tensor.is_contiguous():
            raise ValueError(f"{label}: a tensor of shape {list(tensor.shape)} is not contiguous")
    # Not view(-1), which leaves the only element of a tensor with what stride it had.
    return [Copy(peer, tensor.detach().as_strided((tensor.numel(),), (1,))) for peer, tensor in copies]


def _failure(what: str, error: BaseException) -> CommError:
    if isinstance(error, CommError):
        return error
    failure = CommError(f"{what}: {_line(error)}")
    failure.__cause__ = error
    return failure


def _line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}" if text else type(error).__name__
