"""Transports that run batches on their own thread, in order, while the caller computes.

On CUDA the thread only enqueues, on its own stream.
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
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from interlace import _device
from interlace._text import one_line
from interlace.comm.process.agreement import NO_ARGUMENTS, Arguments
from interlace.comm.process.errors import CommError
from interlace.comm.transports.base import Copies, Copy, Then, Ticket, Transport
from interlace.comm.transports.header import Header, check_packed, header_of

_NO_STREAM = contextlib.nullcontext()


class Batch(NamedTuple):
    """One call of `copy_batch`, with flat tensors.

    sequence: its number. ready: event of the caller's stream, after which the tensors may be used.
    """

    outgoing: Copies
    incoming: Copies
    label: str
    then: Then
    arguments: Arguments
    sequence: int
    ready: torch.Event | None

    def header_to(self, peer: int) -> Header:
        """Header of this rank's data for `peer`."""
        return header_of(self.sequence, self.label, self.arguments, [t for to, t in self.outgoing if to == peer])

    def header_from(self, peer: int) -> Header:
        """Header that `peer` has to send."""
        return header_of(self.sequence, self.label, self.arguments, [t for to, t in self.incoming if to == peer])


class _LastProgress:
    """Time of a transport's last progress: a batch begun, a piece arrived. Timeouts count from there."""

    def __init__(self) -> None:
        self.time = time.monotonic()

    def note(self) -> None:
        self.time = time.monotonic()


class _QueuedTicket(Ticket):
    def __init__(self, operation: str, timeout: float, device: torch.device, progress: _LastProgress) -> None:
        super().__init__(device)
        self.what, self.timeout, self.progress = operation, timeout, progress
        self.finished = threading.Event()
        self.keep: Batch | None = None  # kept alive until it is complete

    def done(self) -> bool:
        return self.finished.is_set()

    def wait(self) -> None:
        # The thread bounds its own waits. This longer bound catches a thread that hangs, and lets the thread report its
        # reason first. Earlier batches may take any time, as long as they make progress.
        self.progress.note()
        patience = self.timeout + 5.0
        while not self.finished.wait(max(self.progress.time + patience - time.monotonic(), 0.0)):
            if time.monotonic() >= self.progress.time + patience:
                raise CommError(f"{self.what}: no progress for {patience:g} s")
        self.keep = None
        super().wait()


def no_step(rank: int, operation: str) -> None:
    """Default of `QueueTransport.before`: no-op."""


class QueueTransport(Transport):
    """A transport that runs batches on a thread, one after another, in call order.

    A subclass implements `_run`, and `_shut` to free its resources. After the first error every later batch fails with
    the same reason: the order of batches is lost, so later results could not be trusted.

    A transport without references is closed. Those still open when the interpreter exits are closed too.
    """

    before: Callable[[int, str], None] = staticmethod(no_step)
    """Called as before(rank, step) before each step of a batch ("post", "take", "taken"): tests delay there."""

    path = ""
    """Description of the path that moves the bytes; "": the transport's name."""

    runs_here = False
    """True if a batch may run on the calling thread if that thread waits at once (see `used_for`)."""

    global_ranks: Sequence[int]
    """Global numbers of the ranks (in the whole job), used in errors. `rank` and peers are local numbers."""

    def __init__(self, rank: int, world: int, *, device: torch.device, timeout: float) -> None:
        self.rank, self.world, self.timeout = rank, world, timeout
        self.device = device
        self.global_ranks: Sequence[int] = range(world)
        self.batches = 0
        self._process = os.getpid()
        self.failed: CommError | None = None
        self._closed = False
        self._progress = _LastProgress()
        self._newest: weakref.ref[_QueuedTicket] | None = None  # weak: a ticket keeps its tensors alive
        self._here = threading.Lock()  # held while a batch runs on the calling thread
        self._queue: queue.SimpleQueue[_Queued | None] = queue.SimpleQueue()
        self._stream = torch.Stream(device) if _device.on_gpu(device) else None
        self._thread = threading.Thread(
            target=_work, args=(self._queue,), name=f"interlace-{self.name}-{rank}", daemon=True
        )
        self._thread.start()
        _open.add(self)

    @abstractmethod
    def _run(self, batch: Batch) -> None:
        """Runs one batch. Returns when incoming tensors are complete and outgoing ones are reusable.

        On CUDA it runs under the transport's stream and returns when everything is enqueued.
        """

    def path_taken(self) -> str:
        """The path of the last batch."""
        return self.path or self.name

    def _shut(self) -> None:
        """Frees the subclass's resources. The thread has ended, or hangs in a wait that `_interrupt` ended."""

    def _interrupt(self) -> None:
        """Aborts a `_run` that waits."""

    def _notify(self, reason: str) -> None:
        """Notifies the peers of this rank's abort and its reason, so that they do not wait until the timeout."""

    def _abort(self, error: CommError) -> None:
        """Marks the transport as failed and notifies the peers. Every later use raises. Only the first error counts."""
        forget_locals(error)
        if self.failed is None:
            self.failed = error.copy()
            if not self._closed:
                self._notify(str(error))

    def copy_batch(
        self, outgoing: Copies, incoming: Copies, label: str, then: Then = None, arguments: Arguments = NO_ARGUMENTS
    ) -> Ticket:
        inside = self.__dict__.get("_use")
        at_once = self.runs_here and inside is not None and inside[0] == threading.get_ident() and inside[2]
        with self.used_for(label):
            self._check_open(label)
            outgoing, incoming = _flat(self, outgoing, label), _flat(self, incoming, label)
            ready = None if self._stream is None else torch.accelerator.current_stream(self.device).record_event()
            batch = Batch(outgoing, incoming, label, then, arguments, self.batches, ready)
            self.batches += 1
            if self.trace is not None:
                self.trace.mark("issue", label)
            newest = None if self._newest is None else self._newest()
            if at_once and (newest is None or newest.done()):
                return self._run_here(batch)
            ticket = _QueuedTicket(self._named(batch), self.timeout, self.device, self._progress)
            ticket.keep = batch
            self._newest = weakref.ref(ticket)
            self._queue.put((self, batch, ticket, torch.is_inference_mode_enabled()))
            return ticket

    def _run_here(self, batch: Batch) -> Ticket:
        ticket = Ticket(self.device)
        with self._here:
            try:
                ticket.event = self._run_batch(batch)
            except BaseException as error:
                ticket.error = self._failed_in(batch, error)
                if not isinstance(error, Exception):  # Ctrl-C
                    raise
        return ticket

    def _run_batch(self, batch: Batch) -> torch.Event | None:
        """Runs one batch on the current thread; returns the event of its stream after all work is enqueued."""
        start, stream = time.perf_counter(), self._stream
        with stream or _NO_STREAM:
            if stream is not None and batch.ready is not None:
                stream.wait_event(batch.ready)
            self._run(batch)
            if stream is not None:  # the caller may free the tensors before the copies end
                for copy in (*batch.outgoing, *batch.incoming):
                    copy.tensor.record_stream(stream)
            if batch.outgoing or batch.incoming:
                self.paths.note(batch.label, self.path_taken())
            if self.trace is not None:
                self.trace.add("copy", batch.label, start, time.perf_counter())
            if batch.then is not None:
                batch.then()
            return None if stream is None else stream.record_event()

    def _failed_in(self, batch: Batch, error: BaseException) -> CommError:
        """Aborts because a batch raised `error`; returns it as a CommError."""
        failure = error
        if not isinstance(failure, CommError):
            text = one_line(error, 300)
            failure = CommError(": ".join(filter(None, (self._named(batch), type(error).__name__, text))))
            failure.__cause__ = error
        self._abort(failure)
        return failure

    def _named(self, batch: Batch) -> str:
        return f"rank {self.global_ranks[self.rank]}, {batch.label} (batch {batch.sequence})"

    def _check_header(self, batch: Batch, peer: int, raw: bytes) -> None:
        """Raises CommError unless `raw`, from `peer`, announces its data for the batch."""
        check_packed(self.global_ranks[self.rank], self.global_ranks[peer], batch.header_from(peer), raw)

    def _error(self, operation: str, text: str, peers: Sequence[int] = (), reason: str = "") -> CommError:
        """An error of this rank. peers: the missing ranks."""
        missing = [self.global_ranks[peer] for peer in peers]
        return CommError(f"rank {self.global_ranks[self.rank]}, {operation}: {text}", missing, reason)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        _open.discard(self)
        self._interrupt()
        self._queue.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join(5.0)
        if self._here.acquire(timeout=5.0):
            self._here.release()
        self._shut()
        self.closed_with_it.close()

    def __del__(self) -> None:
        # Not in a forked child: it has no thread to end and must not send messages for its parent.
        if self.__dict__.get("_process") == os.getpid():
            with contextlib.suppress(Exception):
                self.close()

    def _check_open(self, label: str) -> None:
        if self._closed:
            raise self._error(label, f"the {self.name} transport is closed")
        if self.failed is not None:
            error = self._error(label, f"the {self.name} transport failed before: connect again ({self.failed})")
            error.missing, error.reason = self.failed.missing, self.failed.reason
            raise error


# The last one: inference mode of the caller, whose tensors are writable only in it.
_Queued = tuple[QueueTransport, Batch, _QueuedTicket, bool]


def _work(batches: queue.SimpleQueue[_Queued | None]) -> None:
    # Holds no reference to the transport between batches, so that an unused one is garbage collected.
    while (item := batches.get()) is not None:
        transport, batch, ticket, inference = item
        try:
            if transport.failed is not None:
                raise transport.failed.copy()
            transport._progress.note()
            with torch.inference_mode(inference), torch.no_grad():  # thread-local
                ticket.event = transport._run_batch(batch)
        except BaseException as error:
            ticket.error = transport._failed_in(batch, error)
        ticket.finished.set()
        del transport, batch, ticket, item


_open: weakref.WeakSet[QueueTransport] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    # A daemon thread that waits in compiled code during interpreter shutdown can crash the process.
    for transport in list(_open):
        if transport._process == os.getpid():
            transport.close()


def forget_locals(error: BaseException | None) -> None:
    """Clears the frames of the tracebacks. Otherwise their buffers and sockets would live as long as the error."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def _flat(transport: Transport, copies: Copies, label: str) -> list[Copy]:
    world, rank, device, flat = transport.world, transport.rank, transport.device, []
    for copy in copies:
        peer, tensor = copy
        if not 0 <= peer < world or peer == rank:
            raise ValueError(f"{label}: peer {peer} is not another rank of {world}")
        if tensor.device != device:
            raise ValueError(f"{label}: a tensor is on {tensor.device}, but {transport.name} moves tensors on {device}")
        if tensor.dim() != 1 or tensor.stride(0) != 1 or tensor.requires_grad:
            if not tensor.is_contiguous():
                raise ValueError(f"{label}: a tensor of shape {list(tensor.shape)} is not contiguous")
            # Not view(-1), which keeps an arbitrary stride if the tensor has one element.
            copy = Copy(peer, tensor.detach().as_strided((tensor.numel(),), (1,)))
        flat.append(copy)
    return flat
