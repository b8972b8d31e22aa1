"""Processes of one host, CPU tensors: every transfer is two memcpys through memory that all ranks map.

Each rank owns SLOTS slots of that memory. A tensor travels in pieces of a slot: its owner copies piece p + 1 in while
the readers copy piece p out, and a piece that goes to several ranks is copied in once. What was published and what was
taken are counters that only grow, one per pair of ranks and direction; whoever raises a counter rings the bell of the
rank that it concerns, and a rank that can do nothing sleeps on its bell (`csrc/comm/flags.cpp`).

The memory is a memfd: it has no name, so that nothing is left when processes are killed, and it is not bounded by the
size of /dev/shm, 64 MB in many containers. A peer that dies is noticed within LOOK seconds by its process id; who gives
up writes down why and rings all bells.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import stat
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from interlace._core import flag_add, flag_load, flag_store, flag_wait_at_least
from interlace.comm.lost import SLOW, named
from interlace.comm.rendezvous import Rendezvous
from interlace.comm.transports.base import Arguments, Capabilities, CommError, Copy, QueueTransport, peers_of
from interlace.comm.transports.header import HEADER_BYTES, check_packed, header_of, pack

SLOTS = 4
SLOT_BYTES = 512 << 10
LOOK = 0.05  # seconds between two looks at whether a peer that does not answer still lives
_LINE = 8  # counters in a cache line, which only one rank writes
_REASON_BYTES = 1024
_OPEN, _CLOSED, _FAILED = 0, 1, 2


class Segment:
    """The shared memory of `world` ranks, and where everything lies in it. Counters are words of `flags`."""

    def __init__(self, world: int, slot_bytes: int, descriptor: int) -> None:
        self.world, self.slot_bytes = world, slot_bytes
        self._memory = mmap.mmap(descriptor, self.size(world, slot_bytes))
        self.flags = np.frombuffer(self._memory, np.uint64, self._words(world))
        self.bytes = np.frombuffer(self._memory, np.uint8)
        self.address = self.bytes.ctypes.data

    @classmethod
    def create(cls, world: int, slot_bytes: int) -> int:
        """A descriptor of new memory, every page of it reserved. Raises CommError if there is not as much."""
        size = cls.size(world, slot_bytes)
        descriptor = os.memfd_create("interlace", os.MFD_CLOEXEC)
        try:
            os.fchmod(descriptor, 0o600)
            os.posix_fallocate(descriptor, 0, size)  # without it, a lack of memory would be SIGBUS later
        except OSError as error:
            os.close(descriptor)
            raise CommError(f"{size >> 20} MiB of shared memory for {world} ranks cannot be had ({error})") from error
        return descriptor

    @staticmethod
    def _words(world: int) -> int:
        return 2 * _LINE * (world + world * world) + SLOTS * world * world

    @classmethod
    def _texts(cls, world: int) -> int:
        return 8 * cls._words(world)

    @classmethod
    def _slots(cls, world: int) -> int:
        end = cls._texts(world) + HEADER_BYTES * world * world + _REASON_BYTES * world
        return -(-end // mmap.PAGESIZE) * mmap.PAGESIZE

    @classmethod
    def size(cls, world: int, slot_bytes: int) -> int:
        return cls._slots(world) + world * SLOTS * slot_bytes

    # Per rank: its bell, which anybody rings, and its state, which it writes itself.
    def bell(self, rank: int) -> int:
        return 2 * _LINE * rank

    def state(self, rank: int) -> int:
        return 2 * _LINE * rank + _LINE

    # Per pair: what the sender raises (headers, pieces, signals), and on another line what the receiver does.
    def _pair(self, sender: int, receiver: int) -> int:
        return 2 * _LINE * (self.world + sender * self.world + receiver)

    def headers(self, sender: int, receiver: int) -> int:
        return self._pair(sender, receiver)

    def pieces(self, sender: int, receiver: int) -> int:
        return self._pair(sender, receiver) + 1

    def signals(self, sender: int, receiver: int) -> int:
        return self._pair(sender, receiver) + 2

    def heard(self, sender: int, receiver: int) -> int:
        return self._pair(sender, receiver) + _LINE

    def taken(self, sender: int, receiver: int) -> int:
        return self._pair(sender, receiver) + _LINE + 1

    def slot_of(self, sender: int, receiver: int, piece: int) -> int:
        """The word that says in which slot the n-th piece of this pair lies."""
        pairs = 2 * _LINE * (self.world + self.world * self.world)
        return pairs + SLOTS * (sender * self.world + receiver) + piece % SLOTS

    def slot(self, rank: int, slot: int) -> int:
        """The address of a slot in this process."""
        return self.address + self._slots(self.world) + (rank * SLOTS + slot) * self.slot_bytes

    def header(self, sender: int, receiver: int) -> np.ndarray:
        start = self._texts(self.world) + HEADER_BYTES * (sender * self.world + receiver)
        return self.bytes[start : start + HEADER_BYTES]

    def reason(self, rank: int) -> np.ndarray:
        start = self._texts(self.world) + HEADER_BYTES * self.world**2 + _REASON_BYTES * rank
        return self.bytes[start : start + _REASON_BYTES]

    def ring(self, rank: int) -> None:
        flag_add(self.flags, self.bell(rank), 1)


class _Batch:
    """What one rank still has to do for one batch."""

    def __init__(self, outgoing: Sequence[Copy], incoming: Sequence[Copy], peers: Sequence[int], piece: int) -> None:
        self.gives = _staged(outgoing, piece)
        self.takes: dict[int, deque[tuple[int, int]]] = {peer: deque() for peer in peers}
        for peer, tensor in incoming:
            self.takes[peer].extend(_cut(tensor, piece))
        self.unheard = set(peers)

    def is_done(self) -> bool:
        return not (self.gives or self.unheard or any(self.takes.values()))


def _cut(tensor: Tensor, piece: int) -> list[tuple[int, int]]:
    """(address, bytes) of each piece of a contiguous tensor."""
    start, size = tensor.data_ptr(), tensor.nbytes
    return [(start + offset, min(piece, size - offset)) for offset in range(0, size, piece)]


def _staged(outgoing: Sequence[Copy], piece: int) -> deque[tuple[int, int, list[int]]]:
    """(address, bytes, readers) of each piece in the order in which they are copied in.

    A receiver gets its tensors in the order of its copies. The first ones of all receivers come first, in turn piece by
    piece; those that are the same memory are one, for several readers.
    """
    count: dict[int, int] = {}
    rounds: list[dict[tuple[int, int], tuple[Tensor, list[int]]]] = []
    for peer, tensor in outgoing:
        turn = count[peer] = count.get(peer, -1) + 1
        if turn == len(rounds):
            rounds.append({})
        rounds[turn].setdefault((tensor.data_ptr(), tensor.nbytes), (tensor, []))[1].append(peer)
    pieces: deque[tuple[int, int, list[int]]] = deque()
    for tensors in rounds:
        cuts = [(_cut(tensor, piece), readers) for tensor, readers in tensors.values()]
        for step in range(max((len(cut) for cut, _ in cuts), default=0)):
            pieces.extend((*cut[step], readers) for cut, readers in cuts if step < len(cut))
    return pieces


class ShmTransport(QueueTransport):
    """One rank of several processes on one host. Made by `interlace.comm.connect`."""

    name = "shm"

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
        super().__init__(rank, segment.world, device=torch.device(device), timeout=timeout)
        self.piece_bytes = segment.slot_bytes
        self.processes = list(processes)
        self._segment: Segment | None = segment
        self._peers = peers_of(rank, self.world)
        self._sent = [0] * self.world
        self._took = [0] * self.world
        self._signals = [0] * self.world
        self._readers: list[list[tuple[int, int]]] = [[] for _ in range(SLOTS)]  # (rank, its count once it has read)

    @classmethod
    def capabilities(cls) -> Capabilities:
        return Capabilities("shm", "cpu", one_host=True, missing=_missing())

    @classmethod
    def connect(cls, rendezvous: Rendezvous, *, slot_bytes: int = SLOT_BYTES) -> ShmTransport:
        """Collective. Raises CommError on every rank, with the reasons of those that cannot."""
        return cls(rendezvous.rank, *cls.share(rendezvous, slot_bytes), timeout=rendezvous.timeout)

    @staticmethod
    def share(rendezvous: Rendezvous, slot_bytes: int) -> tuple[Segment, list[tuple[int, int]]]:
        """The memory that all ranks map, and their (process id, start time); collective, raises as `connect`."""
        what, descriptor = "connecting by shared memory", -1
        try:
            with rendezvous.together(what):
                if rendezvous.rank == 0:
                    descriptor = Segment.create(rendezvous.world, slot_bytes)
            found = rendezvous.exchange([descriptor, os.getpid(), born(os.getpid()) or -1], what)
            processes = [(process, start) for _, process, start in found]
            with rendezvous.together(what):
                if rendezvous.rank > 0:
                    descriptor = _opened(found[0][1], found[0][0], Segment.size(rendezvous.world, slot_bytes))
                segment = Segment(rendezvous.world, slot_bytes, descriptor)
                hidden = [rank for rank, (process, start) in enumerate(processes) if born(process) != start]
                if hidden:
                    raise CommError(f"the processes of {named(hidden)} cannot be seen: in another container, or dead")
        finally:
            if descriptor >= 0:
                os.close(descriptor)
        return segment, processes

    def _run(
        self, outgoing: Sequence[Copy], incoming: Sequence[Copy], what: str, arguments: Arguments, sequence: int
    ) -> None:
        segment, rank = self._memory(what), self.rank
        self.before(rank, "post")
        for peer in self._peers:
            sent = header_of(sequence, what, arguments, [tensor for to, tensor in outgoing if to == peer])
            segment.header(rank, peer)[:] = np.frombuffer(pack(sent), np.uint8)
            flag_store(segment.flags, segment.headers(rank, peer), sequence + 1)
            segment.ring(peer)
        expected = {
            peer: header_of(sequence, what, arguments, [tensor for source, tensor in incoming if source == peer])
            for peer in self._peers
        }
        batch = _Batch(outgoing, incoming, self._peers, self.piece_bytes)

        def advance() -> bool:
            moved = self._give(segment, batch)
            for peer in self._peers:
                if peer in batch.unheard and flag_load(segment.flags, segment.headers(peer, rank)) > sequence:
                    raw = segment.header(peer, rank).tobytes()
                    check_packed(self.called[rank], self.called[peer], expected[peer], raw)
                    batch.unheard.discard(peer)
                    flag_store(segment.flags, segment.heard(peer, rank), sequence + 1)
                    segment.ring(peer)
                    moved = True
                moved |= self._take(segment, batch, peer)
            return moved

        def lacking(peer: int) -> bool:
            return bool(
                peer in batch.unheard or batch.takes[peer] or (batch.gives and not self._has_all(segment, peer))
            )

        self._until(segment, batch.is_done, lacking, what, advance)
        self.before(rank, "taken")
        self._until(
            segment,
            lambda: all(self._has_all(segment, peer) for peer in self._peers),
            lambda peer: not self._has_all(segment, peer),
            what,
        )

    def _give(self, segment: Segment, batch: _Batch) -> bool:
        """Copies the next piece into a slot that everybody has read, if there is one."""
        free = next((slot for slot in range(SLOTS) if self._is_free(segment, slot)), None) if batch.gives else None
        if free is None:
            return False
        rank = self.rank
        self.before(rank, "stage")
        address, size, readers = batch.gives.popleft()
        self._copy_in(segment, free, address, size)
        self._readers[free] = []
        for peer in readers:
            segment.flags[segment.slot_of(rank, peer, self._sent[peer])] = free
            self._sent[peer] += 1
            self._readers[free].append((peer, self._sent[peer]))
            flag_store(segment.flags, segment.pieces(rank, peer), self._sent[peer])
            segment.ring(peer)
        return True

    def _take(self, segment: Segment, batch: _Batch, peer: int) -> bool:
        """Copies the next piece of a peer out, if it is there."""
        if peer in batch.unheard or not batch.takes[peer]:
            return False
        took = self._took[peer]
        if flag_load(segment.flags, segment.pieces(peer, self.rank)) <= took:
            return False
        self.before(self.rank, "take")
        address, size = batch.takes[peer].popleft()
        slot = int(segment.flags[segment.slot_of(peer, self.rank, took)])
        if slot >= SLOTS:
            me, other = self.called[self.rank], self.called[peer]
            raise CommError(f"rank {me}: rank {other} names slot {slot} of {SLOTS}: its memory is damaged")
        self._copy_out(segment, peer, slot, address, size)
        self._took[peer] += 1
        flag_store(segment.flags, segment.taken(peer, self.rank), self._took[peer])
        segment.ring(peer)
        return True

    def _copy_in(self, segment: Segment, slot: int, address: int, size: int) -> None:
        """Fills a slot of this rank, which its readers have counted read."""
        ctypes.memmove(segment.slot(self.rank, slot), address, size)

    def _copy_out(self, segment: Segment, peer: int, slot: int, address: int, size: int) -> None:
        """Reads a slot of a peer, which has counted it published."""
        ctypes.memmove(address, segment.slot(peer, slot), size)

    def _is_free(self, segment: Segment, slot: int) -> bool:
        waiting = self._readers[slot]
        return all(flag_load(segment.flags, segment.taken(self.rank, peer)) >= count for peer, count in waiting)

    def _has_all(self, segment: Segment, peer: int) -> bool:
        """Whether a peer has read every header and piece that was published to it."""
        heard = flag_load(segment.flags, segment.heard(self.rank, peer))
        taken = flag_load(segment.flags, segment.taken(self.rank, peer))
        return heard >= flag_load(segment.flags, segment.headers(self.rank, peer)) and taken >= self._sent[peer]

    def _until(
        self,
        segment: Segment,
        done: Callable[[], bool],
        lacks: Callable[[int], bool],
        what: str,
        advance: Callable[[], bool] = lambda: False,
    ) -> None:
        """Calls `advance` until it does nothing more and `done`; sleeps on the bell in between.

        lacks: whether a peer is one of those waited for. Raises CommError once one of them is lost, or any rank gave
        up, or nothing moved for the timeout.
        """
        lost: CommError | None = None
        moved = looked = time.monotonic()
        while True:
            seen = flag_load(segment.flags, segment.bell(self.rank))
            if advance():
                moved, lost = time.monotonic(), None
                self._progress.note()
                continue
            if done():
                return
            if lost is not None:  # known before the last look at what peers did: nothing more will come
                raise lost
            now = time.monotonic()
            waiting = [peer for peer in self._peers if lacks(peer)]
            lost = self._lost(segment, waiting, what, look=now - looked > LOOK)
            if lost is None and now - moved > self.timeout:
                missing = [self.called[peer] for peer in waiting]
                text = f"no answer from {named(missing)} within {self.timeout:g} s"
                lost = self._error(what, text, missing, SLOW.format(self.timeout))
            if now - looked > LOOK:
                looked = now
            if lost is None:
                flag_wait_at_least(segment.flags, segment.bell(self.rank), seen + 1, LOOK)

    def _lost(self, segment: Segment, waiting: Sequence[int], what: str, look: bool) -> CommError | None:
        """Why there is nothing to wait for, if there is not. `look`: also at whether the processes live."""
        if self._closed:
            return self._error(what, "the transport was closed meanwhile")
        for peer in self._peers:
            if flag_load(segment.flags, segment.state(peer)) == _FAILED:
                reason = segment.reason(peer).tobytes().rstrip(b"\0").decode(errors="replace")
                return self._error(what, f"rank {self.called[peer]} gave up ({reason})", [self.called[peer]], reason)
        for peer in waiting:
            (process, start), why = self.processes[peer], ""
            if flag_load(segment.flags, segment.state(peer)) == _CLOSED:
                why = "it closed its transport"
            elif look and born(process) != start:
                why = f"its process, {process}, ended"
            if why:
                return self._error(what, f"lost rank {self.called[peer]} ({why})", [self.called[peer]], why)
        return None

    def _error(self, what: str, text: str, waited: Sequence[int] = (), why: str = "") -> CommError:
        return CommError(f"rank {self.called[self.rank]}, {what}: {text}", waited, why)

    def signal(self, peer: int) -> None:
        segment = self._memory("signal")
        flag_add(segment.flags, segment.signals(self.rank, peer), 1)
        segment.ring(peer)

    def wait(self, peer: int) -> None:
        segment = self._memory("wait")
        self._signals[peer] += 1
        flag, count = segment.signals(peer, self.rank), self._signals[peer]
        try:
            self._until(segment, lambda: flag_load(segment.flags, flag) >= count, lambda other: other == peer, "wait")
        except CommError as error:
            self._give_up(error)
            raise

    def _memory(self, what: str) -> Segment:
        self._check_open(what)
        segment = self._segment
        if segment is None:
            raise CommError(f"rank {self.called[self.rank]}, {what}: the shm transport is closed")
        return segment

    def _tell(self, reason: str) -> None:
        self._leave(_FAILED, reason)

    def _interrupt(self) -> None:
        self._leave(_CLOSED, "")

    def _leave(self, state: int, reason: str) -> None:
        segment = self._segment
        if segment is None or flag_load(segment.flags, segment.state(self.rank)) == _FAILED:
            return
        text = reason.encode()[:_REASON_BYTES].ljust(_REASON_BYTES, b"\0")
        segment.reason(self.rank)[:] = np.frombuffer(text, np.uint8)
        flag_store(segment.flags, segment.state(self.rank), state)
        for rank in range(self.world):
            segment.ring(rank)

    def _shut(self) -> None:
        self._segment = None  # unmapped when nothing refers to it any more: a thread that hangs, say


def _opened(process: int, number: int, size: int) -> int:
    """A descriptor of the memory that a process of this user holds under a number of its own."""
    path = f"/proc/{process}/fd/{number}"
    there = os.stat(path)  # before it is opened, which may do something where it is a device
    if (there.st_size, there.st_nlink, there.st_uid) != (size, 0, os.geteuid()) or not stat.S_ISREG(there.st_mode):
        raise CommError(f"descriptor {number} of process {process} is not the memory that rank 0 made")
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    if not os.path.samestat(there, os.fstat(descriptor)):
        os.close(descriptor)
        raise CommError(f"descriptor {number} of process {process} became something else while it was opened")
    return descriptor


def born(process: int) -> int | None:
    """When a process started, in ticks since the host did; None if it is dead, be it that nobody has taken note yet.

    With the id, which is used again, that names a process.
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
        descriptor = Segment.create(1, mmap.PAGESIZE)
        with open(f"/proc/{os.getpid()}/fd/{descriptor}", "r+b") as file:  # as a peer would
            flags = Segment(1, mmap.PAGESIZE, file.fileno()).flags
        flag_store(flags, 0, 1)
        if not flag_wait_at_least(flags, 0, 1, 0.0) or born(os.getpid()) is None:
            return "shared counters do not work here"
    except (CommError, OSError, AttributeError, ValueError) as error:
        return f"shared memory does not work here ({error})"
    finally:
        if descriptor >= 0:
            os.close(descriptor)
    return ""
