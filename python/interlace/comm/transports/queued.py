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
from typing import Any

import torch

from interlace import _device
from interlace.comm.process.agreement import NO_ARGUMENTS, Arguments
from interlace.comm.process.errors import CommError
from interlace.comm.transports.base import Copy, Ticket, Transport

_NO_STREAM = contextlib.nullcontext()


class _LastProgress:
    """Time of a transport's last progress: a batch begun, a piece arrived. Timeouts count from there."""

    def __init__(self) -> None:
        self.time = time.monotonic()

    def note(self) -> None:
        self.time = time.monotonic()


class _QueuedTicket:
    def __init__(self, operation: str, timeout: float, device: torch.device, progress: _LastProgress) -> None:
        self.what, self.timeout, self.device, self.progress = operation, timeout, device, progress
        self.finished = threading.Event()
        self.error: CommError | None = None
        self.event: torch.Event | None = None
        self.keep: Any = None  # references to keep alive until the batch is complete

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
        if self.error is not None:
            raise self.error.copy() from self.error
        if self.event is not None:
            torch.accelerator.current_stream(self.device).wait_event(self.event)


class _EndedTicket:
    """Ticket of a batch that ran on the caller's thread."""

    def __init__(self, error: CommError | None, event: torch.Event | None, device: torch.device) -> None:
        self.error, self.event, self.device = error, event, device

    def done(self) -> bool:
        return True

    def wait(self) -> None:
        if self.error is not None:
            raise self.error.copy() from self.error
        if self.event is not None:
            torch.accelerator.current_stream(self.device).wait_event(self.event)


def no_step(rank: int, operation: str) -> None:
    """Default of `QueueTransport.before`: no-op."""


class QueueTransport(Transport):
    """A transport that runs batches on a thread, one after another, in call order.

    A subclass implements `_run`, `signal` and `wait`, and `_shut` to free its resources. After the first error every
    later batch fails with the same reason: the order of batches is lost, so later results could not be trusted.

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
        self._queue: queue.SimpleQueue[tuple[Callable[[], None], _QueuedTicket] | None] = queue.SimpleQueue()
        self._stream = torch.Stream(device) if _device.on_gpu(device) else None
        self._thread = threading.Thread(
            target=_work, args=(weakref.ref(self), self._queue), name=f"interlace-{self.name}-{rank}", daemon=True
        )
        self._thread.start()
        _open.add(self)

    @abstractmethod
    def _run(
        self, outgoing: Sequence[Copy], incoming: Sequence[Copy], operation: str, arguments: Arguments, sequence: int
    ) -> None:
        """Runs one batch of flat tensors. Returns when incoming tensors are complete and outgoing ones are reusable.

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
        self,
        outgoing: Sequence[Copy],
        incoming: Sequence[Copy],
        label: str,
        then: Callable[[], None] | None = None,
        arguments: Arguments = NO_ARGUMENTS,
    ) -> Ticket:
        inside = self.__dict__.get("_use")
        if inside is not None and inside[0] == threading.get_ident():
            return self._enqueue(outgoing, incoming, label, then, arguments, inside[2])
        with self.used_for(label):
            return self._enqueue(outgoing, incoming, label, then, arguments, False)

    def _enqueue(
        self, outgoing: Sequence[Copy], incoming: Sequence[Copy], label: str, then: Callable[[], None] | None,
        arguments: Arguments, at_once: bool,
    ) -> Ticket:  # fmt: skip
        self._check_open(label)
        outgoing, incoming = _flat(self, outgoing, label), _flat(self, incoming, label)
        sequence = self.batches
        self.batches += 1
        if self.trace is not None:
            self.trace.mark("issue", label)
        ready = torch.accelerator.current_stream(self.device).record_event() if self._stream is not None else None
        newest = None if self._newest is None else self._newest()
        if at_once and self.runs_here and (newest is None or newest.done()):
            return self._run_here(outgoing, incoming, label, then, arguments, sequence, ready)
        ticket = _QueuedTicket(self._named(label, sequence), self.timeout, self.device, self._progress)
        ticket.keep = (outgoing, incoming, then)
        inference = torch.is_inference_mode_enabled()  # thread-local; its tensors are writable only in it

        def run() -> None:
            self._progress.note()
            with torch.inference_mode(inference), torch.no_grad():
                ticket.event = self._run_batch(outgoing, incoming, label, then, arguments, sequence, ready)

        self._newest = weakref.ref(ticket)
        self._queue.put((run, ticket))
        return ticket

    def _run_here(
        self, outgoing: Sequence[Copy], incoming: Sequence[Copy], label: str, then: Callable[[], None] | None,
        arguments: Arguments, sequence: int, ready: torch.Event | None,
    ) -> Ticket:  # fmt: skip
        event = error = None
        with self._here:
            try:
                event = self._run_batch(outgoing, incoming, label, then, arguments, sequence, ready)
            except BaseException as failure:
                error = _failure(self._named(label, sequence), failure)
                self._abort(error)
                if not isinstance(failure, Exception):  # Ctrl-C
                    raise
        return _EndedTicket(error, event, self.device)

    def _run_batch(
        self, outgoing: Sequence[Copy], incoming: Sequence[Copy], label: str, then: Callable[[], None] | None,
        arguments: Arguments, sequence: int, ready: torch.Event | None,
    ) -> torch.Event | None:  # fmt: skip
        """Runs one batch on the current thread; returns the event of its stream after all work is enqueued."""
        start = time.perf_counter()
        with _NO_STREAM if self._stream is None else self._stream:
            if self._stream is not None and ready is not None:
                self._stream.wait_event(ready)
            self._run(outgoing, incoming, label, arguments, sequence)
            if self._stream is not None:  # the caller may free the tensors before the copies end
                for copy in (*outgoing, *incoming):
                    copy.tensor.record_stream(self._stream)
            if outgoing or incoming:
                self.paths.note(label, self.path_taken())
            if self.trace is not None:
                self.trace.add("copy", label, start, time.perf_counter())
            if then is not None:
                then()
            return None if self._stream is None else self._stream.record_event()

    def _named(self, label: str, sequence: int) -> str:
        return f"rank {self.global_ranks[self.rank]}, {label} (batch {sequence})"

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
            raise CommError(f"rank {self.global_ranks[self.rank]}, {label}: the {self.name} transport is closed")
        if self.failed is not None:
            raise CommError(
                f"rank {self.global_ranks[self.rank]}, {label}: the {self.name} transport failed before: connect again "
                f"({self.failed})",
                self.failed.missing,
                self.failed.reason,
            )


def _work(owner: weakref.ref[QueueTransport], batches: queue.SimpleQueue[Any]) -> None:
    # Holds no reference to the transport between batches, so that an unused one is garbage collected.
    while (item := batches.get()) is not None:
        run, ticket = item
        transport = owner()
        try:
            if transport is not None and transport.failed is not None:
                raise transport.failed.copy()
            run()
        except BaseException as error:
            ticket.error = _failure(ticket.what, error)
            if transport is not None:
                transport._abort(ticket.error)
        ticket.finished.set()
        del run, ticket, item, transport


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


def _flat(transport: Transport, copies: Sequence[Copy], label: str) -> list[Copy]:
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


def _failure(operation: str, error: BaseException) -> CommError:
    if isinstance(error, CommError):
        return error
    failure = CommError(f"{operation}: {_line(error)}")
    failure.__cause__ = error
    return failure


def _line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}" if text else type(error).__name__
