"""Transports over torch.distributed: gloo for CPU tensors on any hosts, NCCL for CUDA tensors on any hosts.

Both have process groups of their own, so that their messages never mix with the user's. Headers and signals travel
over gloo in both: they concern the host, and a closed connection tells at once that a peer died. Messages of gloo carry
a tag that says what they are. One of another size than its receiver expects ends the process there, so bytes are asked
for only once the header has said what will come.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import defaultdict, deque
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from interlace.comm.lost import SLOW
from interlace.comm.rendezvous import Rendezvous
from interlace.comm.transports.base import Arguments, Capabilities, CommError, Copy, peers_of
from interlace.comm.transports.header import HEADER_BYTES, check_packed, header_of, pack, pack_refusal
from interlace.comm.transports.queued import QueueTransport

_HEADER, _BYTES, _SIGNAL, _NEVER = 1, 2, 3, 4  # tags
_AHEAD = 64  # signals that a rank may be ahead of the waits of its peer before it waits too
_FAREWELL = 0.5  # seconds in which peers may hear why this rank gave up
_LINGER = 5.0  # seconds in which they may read what was sent before it closed
Work = Any  # torch.distributed.Work: its stub lacks what is used here


class GlooTransport(QueueTransport):
    """One rank over gloo. Made by `interlace.comm.connect`."""

    name = "gloo"

    def __init__(self, rendezvous: Rendezvous, *, device: torch.device | str = "cpu") -> None:
        """Collective. Raises CommError if a rank does not come within the timeout."""
        self._control = _gloo(rendezvous)
        super().__init__(rendezvous.rank, rendezvous.world, device=torch.device(device), timeout=rendezvous.timeout)
        self._peers = peers_of(self.rank, self.world)
        self._signals: dict[int, deque[tuple[Work, Tensor]]] = defaultdict(deque)

    @classmethod
    def capabilities(cls) -> Capabilities:
        there = dist.is_available() and dist.is_gloo_available()
        return Capabilities("gloo", "cpu", missing="" if there else "this torch was built without gloo")

    @classmethod
    def connect(cls, rendezvous: Rendezvous) -> GlooTransport:
        """Collective. Raises CommError on every rank, with the reasons of those that cannot."""
        what, transport = f"connecting by {cls.name}", None
        try:
            with rendezvous.together(what):
                transport = cls(rendezvous)
            assert transport is not None
            with rendezvous.together(what):
                transport._try()
        except CommError as error:
            if transport is not None:
                transport.failed = CommError(str(error))
                transport.close()
            raise
        return transport

    def _try(self) -> None:
        """Raises RuntimeError if what worked so far does not move anything."""

    def _run(
        self, outgoing: Sequence[Copy], incoming: Sequence[Copy], what: str, arguments: Arguments, sequence: int
    ) -> None:
        self.before(self.rank, "post")
        self._announce(outgoing, incoming, what, arguments, sequence)
        self.before(self.rank, "take")
        self._move(outgoing, incoming, what)

    def _announce(
        self, outgoing: Sequence[Copy], incoming: Sequence[Copy], what: str, arguments: Arguments, sequence: int
    ) -> None:
        """Exchanges headers with every peer; raises CommError unless they say what is expected."""
        sent: list[tuple[int, Work, Tensor]] = []
        asked: list[tuple[int, Work, Tensor]] = []
        lost: CommError | None = None
        for peer in self._peers:
            mine = _bytes(pack(header_of(sequence, what, arguments, [tensor for to, tensor in outgoing if to == peer])))
            theirs = torch.empty(HEADER_BYTES, dtype=torch.uint8)
            try:
                sent.append((peer, self._start(peer, what, "send", mine, _HEADER), mine))
                asked.append((peer, self._start(peer, what, "recv", theirs, _HEADER), theirs))
            except CommError as error:
                lost = lost or error
        for peer, work, theirs in asked:
            try:
                self._finish(peer, what, work, self.timeout if lost is None else _FAREWELL)
            except CommError as error:  # another peer may have said why
                lost = lost or error
                continue
            expected = header_of(sequence, what, arguments, [tensor for source, tensor in incoming if source == peer])
            check_packed(self.called[self.rank], self.called[peer], expected, theirs.numpy().tobytes())
        if lost is not None:
            raise lost
        for peer, work, _ in sent:
            self._finish(peer, what, work)

    def _move(self, outgoing: Sequence[Copy], incoming: Sequence[Copy], what: str) -> None:
        sent = [(peer, self._start(peer, what, "send", tensor, _BYTES)) for peer, tensor in outgoing if tensor.numel()]
        asked = [(peer, self._start(peer, what, "recv", tensor, _BYTES)) for peer, tensor in incoming if tensor.numel()]
        for peer, work in asked:
            self._finish(peer, what, work)
        self.before(self.rank, "taken")
        for peer, work in sent:
            self._finish(peer, what, work)

    def _start(self, peer: int, what: str, direction: str, tensor: Tensor, tag: int) -> Work:
        control = self._control
        if control is None:
            raise CommError(f"rank {self.called[self.rank]}, {what}: the transport was closed meanwhile")
        try:
            return getattr(control, direction)([tensor.view(torch.uint8)], peer, tag)
        except RuntimeError as error:
            raise self._lost(peer, what, error) from error

    def _finish(self, peer: int, what: str, work: Work, timeout: float | None = None) -> None:
        try:
            work.wait(timedelta(seconds=self.timeout if timeout is None else timeout))
        except RuntimeError as error:
            raise self._lost(peer, what, error) from error
        self._progress.note()

    def _lost(self, peer: int, what: str, error: RuntimeError) -> CommError:
        reason = " ".join(str(error).split())[:200]
        me, other = self.called[self.rank], self.called[peer]
        if "imed out" in reason or "imeout" in reason:
            text = f"rank {me}, {what}: no answer from rank {other} within {self.timeout:g} s ({reason})"
            return CommError(text, [other], SLOW.format(self.timeout))
        return CommError(
            f"rank {me}, {what}: lost rank {other} ({reason})", [other], f"its connection closed: {reason}"
        )

    def signal(self, peer: int) -> None:
        self._check_open("signal")
        flag, sent = torch.ones(1, dtype=torch.uint8), self._signals[peer]
        try:
            # A send lasts until its receiver waits, and whether it has is known only by waiting too.
            if len(sent) == _AHEAD:
                self._finish(peer, "signal", sent.popleft()[0])
            sent.append((self._start(peer, "signal", "send", flag, _SIGNAL), flag))
        except CommError as error:
            self._give_up(error)
            raise

    def wait(self, peer: int) -> None:
        self._check_open("wait")
        flag = torch.empty(1, dtype=torch.uint8)
        try:
            self._finish(peer, "wait", self._start(peer, "wait", "recv", flag, _SIGNAL))
        except CommError as error:
            self._give_up(error)
            raise

    def barrier(self) -> None:
        super().barrier()
        # What is still on its way is lost when this rank closes: a peer may not have read its signal yet.
        try:
            for peer, sent in self._signals.items():
                while sent:
                    self._finish(peer, "barrier", sent.popleft()[0])
        except CommError as error:
            self._give_up(error)
            raise

    def _tell(self, reason: str) -> None:
        # A header for those who wait for one; the others see the connection close.
        head, sent = _bytes(pack_refusal(reason)), []
        for peer in self._peers:
            with contextlib.suppress(CommError):
                sent.append(self._start(peer, "farewell", "send", head, _HEADER))
        _linger(sent, _FAREWELL)
        sent.clear()
        self._disconnect()

    def _shut(self) -> None:
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._break_off()
        elif self.failed is None:
            _linger([work for sent in self._signals.values() for work, _ in sent], _LINGER)
        self._disconnect()

    def _break_off(self) -> None:
        # The thread waits for a peer that does not come. A wait that runs out ends all connections, with what waits
        # for them, here and at the peers.
        for peer in self._peers:
            with contextlib.suppress(CommError):
                nothing = torch.empty(1, dtype=torch.uint8)
                self._finish(peer, "close", self._start(peer, "close", "recv", nothing, _NEVER), 1e-3)
        self._thread.join(5.0)

    def _disconnect(self) -> None:
        # The sockets of gloo close with the last reference to it and to what is under way (its abort does nothing).
        self._signals.clear()
        self._control = None


class NcclTransport(GlooTransport):
    """One rank over NCCL: what the bytes take; the rest goes over gloo. Made by `interlace.comm.connect`.

    The host learns of a copy that hangs when it is about to enqueue the next but one.
    """

    name = "nccl"
    path = "NCCL on SMs"

    def __init__(self, rendezvous: Rendezvous) -> None:
        self._last: tuple[torch.cuda.Event, str] | None = None
        self._payload = _nccl(rendezvous)
        super().__init__(rendezvous, device=rendezvous.device)

    @classmethod
    def capabilities(cls) -> Capabilities:
        missing = ""
        if not (dist.is_available() and dist.is_nccl_available()):
            missing = "not in this build of torch"
        elif not torch.cuda.is_available():
            missing = "no GPU or no driver"
        return Capabilities("nccl", "cuda", missing=missing)

    def _try(self) -> None:
        with torch.cuda.device(self.device):  # NCCL connects with the first bytes: now, where a failure is clear
            mine = torch.zeros(self.world, dtype=torch.uint8, device=self.device)
            copies = [Copy(peer, mine[peer : peer + 1]) for peer in self._peers]
            self._move(copies, [Copy(peer, torch.empty_like(byte)) for peer, byte in copies], "connecting")
            self._settle()

    def _move(self, outgoing: Sequence[Copy], incoming: Sequence[Copy], what: str) -> None:
        self._settle()
        # The n-th copies of all pairs are one group of sends and receives, which NCCL makes in any order.
        gives, takes = _rounds(outgoing), _rounds(incoming)
        nothing = torch.empty(0, dtype=torch.uint8, device=self.device)
        for turn in range(max(len(gives), len(takes))):
            give, take = (rounds[turn] if turn < len(rounds) else {} for rounds in (gives, takes))
            work = self._payload.alltoall(
                [take.get(peer, nothing) for peer in range(self.world)],
                [give.get(peer, nothing) for peer in range(self.world)],
            )
            work.wait()  # of the current stream, not of the host
        self.before(self.rank, "taken")
        if self.device.type == "cuda":
            self._last = torch.cuda.current_stream(self.device).record_event(), what

    def _settle(self) -> None:
        """Waits for the batch before this one to end on the device: what hangs there is noticed, one batch late."""
        if self._last is None:
            return
        event, what = self._last
        deadline = time.monotonic() + self.timeout
        while not event.query():
            if self._closed:
                raise CommError(f"rank {self.called[self.rank]}, {what}: the transport was closed meanwhile")
            if time.monotonic() > deadline:
                me, others = self.called[self.rank], [self.called[peer] for peer in self._peers]
                raise CommError(f"rank {me}, {what}: the copies did not end within {self.timeout:g} s", others)
            time.sleep(50e-6)
        self._last = None

    def _disconnect(self) -> None:
        super()._disconnect()
        payload, self._payload = self._payload, None
        if payload is not None:
            payload.abort() if self.failed is not None else payload.shutdown()


def _linger(works: Sequence[Work], seconds: float) -> None:
    """Waits for messages to be read. One that is not in time ends all connections, one that cannot be only its own."""
    deadline = time.monotonic() + seconds
    for work in works:
        with contextlib.suppress(RuntimeError):
            work.wait(timedelta(seconds=max(deadline - time.monotonic(), 1e-3)))


def _rounds(copies: Sequence[Copy]) -> list[dict[int, Tensor]]:
    """Peer -> bytes, for the first copies of all peers, the second ones, ..."""
    rounds: list[dict[int, Tensor]] = []
    count: dict[int, int] = defaultdict(int)
    for peer, tensor in copies:
        if not tensor.numel():
            continue
        if count[peer] == len(rounds):
            rounds.append({})
        rounds[count[peer]][peer] = tensor.view(torch.uint8)
        count[peer] += 1
    return rounds


def _gloo(rendezvous: Rendezvous) -> Any:
    store = dist.PrefixStore("gloo", rendezvous.store)
    try:
        return dist.ProcessGroupGloo(store, rendezvous.rank, rendezvous.world, timedelta(seconds=rendezvous.timeout))
    except RuntimeError as error:
        reason = " ".join(str(error).split())[:200]
        raise CommError(
            f"rank {rendezvous.rank}, connecting by gloo: not every rank came within {rendezvous.timeout:g} s "
            f"({reason})"
        ) from error


def _nccl(rendezvous: Rendezvous) -> Any:
    options: Any = dist.ProcessGroupNCCL.Options()
    # Later than the waits of the transport: when this one runs out, torch ends the process.
    options._timeout = timedelta(seconds=2 * rendezvous.timeout + 30)
    options.group_name = rendezvous.name
    return dist.ProcessGroupNCCL(dist.PrefixStore("nccl", rendezvous.store), rendezvous.rank, rendezvous.world, options)


def _bytes(packed: bytes) -> Tensor:
    return torch.frombuffer(bytearray(packed), dtype=torch.uint8)
