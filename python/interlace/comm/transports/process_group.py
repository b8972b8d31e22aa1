"""Transports over torch.distributed: gloo for CPU tensors, NCCL for CUDA tensors, both across hosts.

Both use private process groups, so their messages never mix with the user's. Headers go over gloo in both: they
concern the host, and a closed connection shows at once that a peer died. Gloo messages carry a tag with their
type. A message of another size than expected ends the process in gloo. So bytes are requested only after the header has
announced them.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import defaultdict
from datetime import timedelta
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from interlace._text import one_line
from interlace.comm.process.abort_reports import SLOW
from interlace.comm.process.errors import CommError
from interlace.comm.process.rendezvous import Rendezvous
from interlace.comm.transports.base import Capabilities, Copies, Copy, peers_of
from interlace.comm.transports.header import HEADER_BYTES, pack, pack_abort
from interlace.comm.transports.queued import Batch, QueueTransport

_HEADER, _BYTES, _NEVER = 1, 2, 3  # tags
_FAREWELL = 0.5  # seconds in which peers may receive the reason of an abort
Work = Any  # torch.distributed.Work: its stub lacks methods used here


class GlooTransport(QueueTransport):
    """One rank over gloo. Made by `interlace.comm.connect`."""

    name = "gloo"

    def __init__(self, rendezvous: Rendezvous, *, device: torch.device | str = "cpu") -> None:
        """Collective. Raises CommError if a rank is missing within the timeout."""
        self._control = _gloo(rendezvous)
        super().__init__(rendezvous.rank, rendezvous.world, device=torch.device(device), timeout=rendezvous.timeout)
        self._peers = peers_of(self.rank, self.world)

    @classmethod
    def capabilities(cls) -> Capabilities:
        there = dist.is_available() and dist.is_gloo_available()
        return Capabilities("gloo", "cpu", missing="" if there else "this torch was built without gloo")

    @classmethod
    def connect(cls, rendezvous: Rendezvous) -> GlooTransport:
        """Collective. Raises CommError on every rank, with the reasons of the failed ranks."""
        operation, transport = f"connecting by {cls.name}", None
        try:
            with rendezvous.collective_step(operation):
                transport = cls(rendezvous)
            assert transport is not None
            with rendezvous.collective_step(operation):
                transport._try()
        except CommError as error:
            if transport is not None:
                transport.failed = CommError(str(error))
                transport.close()
            raise
        return transport

    def _try(self) -> None:
        """Probe: raises RuntimeError if the connected group cannot move bytes."""

    def _run(self, batch: Batch) -> None:
        self.before(self.rank, "post")
        self._announce(batch)
        self.before(self.rank, "take")
        self._move(batch.outgoing, batch.incoming, batch.label)

    def _announce(self, batch: Batch) -> None:
        """Exchanges headers with every peer; raises CommError if one differs from the expected header."""
        sent: list[tuple[int, Work, Tensor]] = []
        received: list[tuple[int, Work, Tensor]] = []
        lost: CommError | None = None
        for peer in self._peers:
            own_header = _bytes(pack(batch.header_to(peer)))
            peer_header = torch.empty(HEADER_BYTES, dtype=torch.uint8)
            try:
                sent.append((peer, self._start(peer, batch.label, "send", own_header, _HEADER), own_header))
                received.append((peer, self._start(peer, batch.label, "recv", peer_header, _HEADER), peer_header))
            except CommError as error:
                lost = lost or error
        for peer, work, peer_header in received:
            try:
                self._finish(peer, batch.label, work, self.timeout if lost is None else _FAREWELL)
            except CommError as error:  # another peer may have sent the reason
                lost = lost or error
                continue
            self._check_header(batch, peer, peer_header.numpy().tobytes())
        if lost is not None:
            raise lost
        for peer, work, _ in sent:
            self._finish(peer, batch.label, work)

    def _move(self, outgoing: Copies, incoming: Copies, operation: str) -> None:
        sent, received = (
            [(peer, self._start(peer, operation, direction, t, _BYTES)) for peer, t in copies if t.numel()]
            for direction, copies in (("send", outgoing), ("recv", incoming))
        )
        for peer, work in received:
            self._finish(peer, operation, work)
        self.before(self.rank, "taken")
        for peer, work in sent:
            self._finish(peer, operation, work)

    def _start(self, peer: int, operation: str, direction: str, tensor: Tensor, tag: int) -> Work:
        control = self._control
        if control is None:
            raise self._error(operation, "the transport was closed meanwhile")
        try:
            return getattr(control, direction)([tensor.view(torch.uint8)], peer, tag)
        except RuntimeError as error:
            raise self._lost(peer, operation, error) from error

    def _finish(self, peer: int, operation: str, work: Work, timeout: float | None = None) -> None:
        try:
            work.wait(timedelta(seconds=self.timeout if timeout is None else timeout))
        except RuntimeError as error:
            raise self._lost(peer, operation, error) from error
        self._progress.note()

    def _lost(self, peer: int, operation: str, error: RuntimeError) -> CommError:
        reason, peer_rank = one_line(error), self.global_ranks[peer]
        if "imed out" in reason or "imeout" in reason:
            text = f"no answer from rank {peer_rank} within {self.timeout:g} s ({reason})"
            return self._error(operation, text, [peer], SLOW.format(self.timeout))
        return self._error(operation, f"lost rank {peer_rank} ({reason})", [peer], f"its connection closed: {reason}")

    def _notify(self, reason: str) -> None:
        # Send a refusal to peers that wait for a header. The others see the connection close.
        head, sent = _bytes(pack_abort(reason)), []
        for peer in self._peers:
            with contextlib.suppress(CommError):
                sent.append(self._start(peer, "farewell", "send", head, _HEADER))
        deadline = time.monotonic() + _FAREWELL
        for work in sent:  # a timeout closes all connections; a failed message closes only its own
            with contextlib.suppress(RuntimeError):
                work.wait(timedelta(seconds=max(deadline - time.monotonic(), 1e-3)))
        sent.clear()
        self._disconnect()

    def _shut(self) -> None:
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._break_off()
        self._disconnect()

    def _break_off(self) -> None:
        # The thread waits for a missing peer. A gloo wait that times out closes all connections, which ends all waits
        # on them, here and at the peers.
        for peer in self._peers:
            with contextlib.suppress(CommError):
                nothing = torch.empty(1, dtype=torch.uint8)
                self._finish(peer, "close", self._start(peer, "close", "recv", nothing, _NEVER), 1e-3)
        self._thread.join(5.0)

    def _disconnect(self) -> None:
        # Gloo's sockets close with the last reference to it and to messages in flight (its abort does nothing).
        self._control = None


class NcclTransport(GlooTransport):
    """One rank over NCCL: bytes use NCCL, the rest goes over gloo. Made by `interlace.comm.connect`.

    The host notices a hung copy when it is about to enqueue the next but one.
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
        with torch.cuda.device(self.device):  # NCCL connects with the first bytes: do it now, for clear errors
            probe = torch.zeros(self.world, dtype=torch.uint8, device=self.device)
            copies = [Copy(peer, probe[peer : peer + 1]) for peer in self._peers]
            self._move(copies, [Copy(peer, torch.empty_like(byte)) for peer, byte in copies], "connecting")
            self._wait_for_last_batch()

    def _move(self, outgoing: Copies, incoming: Copies, operation: str) -> None:
        self._wait_for_last_batch()
        nothing = torch.empty(0, dtype=torch.uint8, device=self.device)
        # The n-th copies of all pairs form one group of sends and receives, which NCCL may run in any order.
        for give, take in zip_longest(_rounds(outgoing), _rounds(incoming), fillvalue=dict[int, Tensor]()):
            work = self._payload.alltoall(
                [take.get(peer, nothing) for peer in range(self.world)],
                [give.get(peer, nothing) for peer in range(self.world)],
            )
            work.wait()  # blocks the current stream, not the host
        self.before(self.rank, "taken")
        if self.device.type == "cuda":
            self._last = torch.cuda.current_stream(self.device).record_event(), operation

    def _wait_for_last_batch(self) -> None:
        """Waits until the previous batch has ended on the device: a hang is noticed one batch late."""
        if self._last is None:
            return
        event, operation = self._last
        deadline = time.monotonic() + self.timeout
        while not event.query():
            if self._closed:
                raise self._error(operation, "the transport was closed meanwhile")
            if time.monotonic() > deadline:
                raise self._error(operation, f"the copies did not end within {self.timeout:g} s", self._peers)
            time.sleep(50e-6)
        self._last = None

    def _disconnect(self) -> None:
        super()._disconnect()
        payload, self._payload = self._payload, None
        if payload is not None:
            payload.abort() if self.failed is not None else payload.shutdown()


def _rounds(copies: Copies) -> list[dict[int, Tensor]]:
    """Peer -> bytes, for the first copies of all peers, then for the second ones, ..."""
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
        raise CommError(
            f"rank {rendezvous.rank}, connecting by gloo: not all ranks joined within {rendezvous.timeout:g} s "
            f"({one_line(error)})"
        ) from error


def _nccl(rendezvous: Rendezvous) -> Any:
    options: Any = dist.ProcessGroupNCCL.Options()
    # Longer than the transport's own timeout: when this one expires, torch ends the process.
    options._timeout = timedelta(seconds=2 * rendezvous.timeout + 30)
    options.group_name = rendezvous.name
    return dist.ProcessGroupNCCL(dist.PrefixStore("nccl", rendezvous.store), rendezvous.rank, rendezvous.world, options)


def _bytes(packed: bytes) -> Tensor:
    return torch.frombuffer(bytearray(packed), dtype=torch.uint8)
