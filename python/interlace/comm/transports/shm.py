"""Shared-memory transport: processes of one host, CPU tensors. All ranks map the same memory.

The sender copies a tensor into slots of that memory, and its readers copy it out. A tensor in registered memory
(`allocate`) is copied once, by its reader. The driver is C++ (`csrc/comm/exchange.h` describes the protocol): one call
per batch, without the GIL. It returns early for decisions that are made here: timeouts, dead peers, errors.

The memory is a memfd. It has no name, so nothing remains when processes are killed. It is not limited by the size of
/dev/shm (64 MB in many containers). A dead peer is detected within LOOK seconds by its process id. A rank that aborts
writes down the reason and rings all bells.
"""

from __future__ import annotations

import mmap
import os
import stat
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from interlace._core import Exchange
from interlace.comm.process.abort_reports import SLOW, named
from interlace.comm.process.errors import CommError
from interlace.comm.process.rendezvous import Rendezvous
from interlace.comm.transports.base import Capabilities, peers_of
from interlace.comm.transports.header import headers_of
from interlace.comm.transports.queued import Batch, QueueTransport, no_step
from interlace.comm.transports.registered import Memory, Regions

SLOT_BYTES = 512 << 10
LOOK = 0.05  # seconds between checks whether a silent peer is still alive


class Segment:
    """The shared memory of `world` ranks."""

    def __init__(self, world: int, slot_bytes: int, descriptor: int) -> None:
        self.world, self.slot_bytes = world, slot_bytes
        self.bytes = np.frombuffer(mmap.mmap(descriptor, Exchange.size(world, slot_bytes)), np.uint8)

    @staticmethod
    def create(world: int, slot_bytes: int) -> int:
        """A descriptor of new memory. Raises CommError if there is not enough."""
        size = Exchange.size(world, slot_bytes)
        try:
            return reserved(size)
        except OSError as error:
            raise CommError(
                f"{size >> 20} MiB of shared memory for {world} ranks are not available ({error})"
            ) from error

    def exchange(self, rank: int) -> Exchange:
        """One rank's end of the exchange; keeps the memory mapped."""
        return Exchange(self.bytes, rank, self.world, self.slot_bytes)


def reserved(size: int) -> int:
    """A descriptor of new memory without a name, with all pages reserved. Raises OSError."""
    descriptor = os.memfd_create("interlace", os.MFD_CLOEXEC)
    try:
        os.fchmod(descriptor, 0o600)
        os.posix_fallocate(descriptor, 0, size)  # otherwise a lack of memory would cause SIGBUS later
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


class SharedMemory:
    """Regions of memfds: creates own regions and maps those of peers, for `Regions`."""

    def __init__(self, processes: Sequence[tuple[int, int]]) -> None:
        self._processes = processes

    def create(self, size: int) -> tuple[np.ndarray, bytes, Callable[[], None]]:
        """(memory, handle for peers to map it, function that releases the handle). Raises OSError if out of memory."""
        descriptor = reserved(size)
        memory = np.frombuffer(mmap.mmap(descriptor, size), np.uint8)
        return memory, descriptor.to_bytes(8, "little"), partial(os.close, descriptor)

    def lease(self, memory: np.ndarray) -> tuple[np.ndarray, Tensor]:
        lease = memory[:]
        return lease, torch.from_numpy(lease)

    def address(self, memory: np.ndarray) -> int:
        return memory.ctypes.data

    def map(self, rank: int, handle: bytes, size: int) -> tuple[int, object]:
        """(address of a peer's region in this process, object that keeps it mapped). Raises CommError or OSError."""
        descriptor = _opened(self._processes[rank][0], int.from_bytes(handle[:8], "little"), size)
        try:
            memory = np.frombuffer(mmap.mmap(descriptor, size), np.uint8)
        finally:
            os.close(descriptor)
        return memory.ctypes.data, memory


class ShmTransport(QueueTransport):
    """One rank of several processes on one host. Made by `interlace.comm.connect`."""

    name = "shm"
    path = "shm"  # some tensor of the batch is copied into slots
    direct_path = "shm, registered memory"  # all tensors are read in place
    runs_here = True

    def __init__(
        self,
        rank: int,
        segment: Segment,
        processes: Sequence[tuple[int, int]],
        *,
        timeout: float,
        device: torch.device | str = "cpu",
    ) -> None:
        """processes: (process id, start time) of every rank."""
        self.processes = list(processes)
        self._exchange: Exchange | None = segment.exchange(rank)
        self._regions = Regions(self._exchange, self._memory_for_peers())
        super().__init__(rank, segment.world, device=torch.device(device), timeout=timeout)
        self._peers = peers_of(rank, self.world)

    def _memory_for_peers(self) -> Memory:
        return SharedMemory(self.processes)

    def allocate(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        tensor = self._regions.allocate(tuple(shape), dtype)
        return super().allocate(shape, dtype) if tensor is None else tensor

    @classmethod
    def capabilities(cls) -> Capabilities:
        return Capabilities("shm", "cpu", one_host=True, missing=_missing())

    @classmethod
    def connect(cls, rendezvous: Rendezvous, *, slot_bytes: int = SLOT_BYTES) -> ShmTransport:
        """Collective. Raises CommError on every rank, with the reasons of the failed ranks."""
        return cls(rendezvous.rank, *cls.share(rendezvous, slot_bytes), timeout=rendezvous.timeout)

    @staticmethod
    def share(rendezvous: Rendezvous, slot_bytes: int) -> tuple[Segment, list[tuple[int, int]]]:
        """The memory that all ranks map, and their (process id, start time). Collective; errors as for `connect`."""
        operation, descriptor = "connecting by shared memory", -1
        try:
            with rendezvous.collective_step(operation):
                if rendezvous.rank == 0:
                    descriptor = Segment.create(rendezvous.world, slot_bytes)
            answers = rendezvous.exchange([descriptor, os.getpid(), start_time_of(os.getpid()) or -1], operation)
            processes = [(process, start) for _, process, start in answers]
            with rendezvous.collective_step(operation):
                if rendezvous.rank > 0:
                    descriptor = _opened(answers[0][1], answers[0][0], Exchange.size(rendezvous.world, slot_bytes))
                segment = Segment(rendezvous.world, slot_bytes, descriptor)
                hidden = [rank for rank, (process, start) in enumerate(processes) if start_time_of(process) != start]
                if hidden:
                    raise CommError(
                        f"the processes of {named(hidden)} are not visible: they are in another container, or dead"
                    )
        finally:
            if descriptor >= 0:
                os.close(descriptor)
        return segment, processes

    def _run(self, batch: Batch) -> None:
        exchange = self._exchange
        if exchange is None:
            raise self._error(batch.label, f"the {self.name} transport is closed")
        before = None if self.before is no_step else partial(self.before, self.rank)
        if before is not None:
            before("post")
        sides, text = (batch.outgoing, batch.incoming), batch.arguments.text
        own_headers, peer_headers = (
            headers_of(self.world, batch.label, text, tuple([(peer, t.numel(), t.dtype) for peer, t in side]))
            for side in sides
        )
        sends, receives = ([(peer, tensor.data_ptr(), tensor.nbytes) for peer, tensor in side] for side in sides)
        status = exchange.run(batch.sequence, own_headers, peer_headers, sends, receives, before, LOOK)
        if status != Exchange.DONE:
            self._finish(exchange, status, batch)

    def path_taken(self) -> str:
        return self.direct_path if self._exchange is not None and self._exchange.direct else self.path

    def _finish(self, exchange: Exchange, status: int, batch: Batch) -> None:
        """Runs the driver until it is done, and handles its early returns.

        status: of its first run, of at most LOOK seconds.

        Raises CommError if an awaited peer is lost, any rank has aborted, or nothing moved within the timeout.
        """
        lost: CommError | None = None
        moves, last_move, last_look = exchange.moves, time.monotonic(), 0.0
        while status != Exchange.DONE:
            if status == Exchange.HEADER:
                self._check_header(batch, exchange.peer, exchange.header_from(exchange.peer))
            elif status == Exchange.MAP:
                self._regions.map(exchange.peer, exchange.number)
            elif status == Exchange.DAMAGED:
                raise CommError(
                    f"rank {self.global_ranks[self.rank]}: rank {self.global_ranks[exchange.peer]} refers to region "
                    f"{exchange.number}: its memory is damaged"
                )
            now = time.monotonic()
            if moves != exchange.moves:
                moves, last_move, lost = exchange.moves, now, None
                self._progress.note()
            elif lost is not None:  # lost before the last check for progress: no more data will come
                raise lost
            waiting = exchange.lacking()
            lost = self._lost(exchange, waiting, batch.label, look=now - last_look > LOOK)
            if lost is None and now - last_move > self.timeout:
                ranks = named([self.global_ranks[peer] for peer in waiting])
                text = f"no answer from {ranks} within {self.timeout:g} s"
                lost = self._error(batch.label, text, waiting, SLOW.format(self.timeout))
            if now - last_look > LOOK:
                last_look = now
            status = exchange.advance(LOOK if lost is None else 0.0)

    def _lost(self, exchange: Exchange, waiting: Sequence[int], operation: str, look: bool) -> CommError | None:
        """The reason why waiting is futile, if any. `look`: also check whether the processes are alive."""
        if self._closed:
            return self._error(operation, "the transport was closed meanwhile")
        for peer in self._peers:
            if exchange.state(peer) == Exchange.FAILED:
                reason = exchange.reason(peer).decode(errors="replace")
                return self._error(operation, f"rank {self.global_ranks[peer]} aborted ({reason})", [peer], reason)
        for peer in waiting:
            (process, start), loss = self.processes[peer], ""
            if exchange.state(peer) == Exchange.CLOSED:
                loss = "it closed its transport"
            elif look and start_time_of(process) != start:
                loss = f"its process, {process}, ended"
            if loss:
                return self._error(operation, f"lost rank {self.global_ranks[peer]} ({loss})", [peer], loss)
        return None

    def _notify(self, reason: str) -> None:
        self._leave(Exchange.FAILED, reason)

    def _interrupt(self) -> None:
        self._leave(Exchange.CLOSED, "")

    def _leave(self, state: int, reason: str) -> None:
        if self._exchange is not None:
            self._exchange.leave(state, reason.encode())

    def _shut(self) -> None:
        self._exchange = None  # unmapped with its last reference, for example of a hung thread
        self._regions.close()


def _opened(process: int, number: int, size: int) -> int:
    """A descriptor of the memory that a process of this user holds under its own descriptor number."""
    path = f"/proc/{process}/fd/{number}"
    status = os.stat(path)  # check before opening: opening a device could have side effects
    if (status.st_size, status.st_nlink, status.st_uid) != (size, 0, os.geteuid()) or not stat.S_ISREG(status.st_mode):
        raise CommError(f"descriptor {number} of process {process} is not the memory that rank 0 made")
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    if not os.path.samestat(status, os.fstat(descriptor)):
        os.close(descriptor)
        raise CommError(f"descriptor {number} of process {process} changed while it was opened")
    return descriptor


def start_time_of(process: int) -> int | None:
    """Start time of a process, in ticks since the host started; None if it is dead, including zombies.

    Together with the process id, which may be reused, it identifies a process.
    """
    try:
        with open(f"/proc/{process}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def _missing() -> str:
    if sys.platform != "linux":
        return "needs Linux (memfd_create)"
    descriptor = -1
    try:
        descriptor = Segment.create(2, mmap.PAGESIZE)
        own_end = Segment(2, mmap.PAGESIZE, descriptor).exchange(0)
        with open(f"/proc/{os.getpid()}/fd/{descriptor}", "r+b") as file:  # as a peer does
            peer_end = Segment(2, mmap.PAGESIZE, file.fileno()).exchange(1)
        own_end.signal(1)
        if peer_end.wait(0, 1, 0.0) != Exchange.DONE or start_time_of(os.getpid()) is None:
            return "shared counters do not work here"
    except (CommError, OSError, AttributeError, ValueError) as error:
        return f"shared memory does not work here ({error})"
    finally:
        if descriptor >= 0:
            os.close(descriptor)
    return ""
