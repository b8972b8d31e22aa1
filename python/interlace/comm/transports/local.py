"""Several virtual ranks in one process, a thread each: for tests, examples, and overlap on a single GPU.

    def rank(group):                      # runs once per rank
        gathered, (y,) = all_gather_matmul(x[group.rank], [w], group=group)

    results = run_local(4, rank)

A batch is posted as references. The receiver copies directly from the sender's tensor, without staging. On CUDA all
ranks share one device, and `copier` selects the engine that moves the bytes (`interlace.comm.transports.copiers`).
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from interlace import _device
from interlace.comm.process.errors import CommError
from interlace.comm.process.groups import use
from interlace.comm.process.thread_ranks import ThreadRanks
from interlace.comm.transports.base import DEFAULT_TIMEOUT, peers_of
from interlace.comm.transports.copiers import Copier, plain_copies
from interlace.comm.transports.header import pack
from interlace.comm.transports.queued import Batch, QueueTransport, no_step

T = TypeVar("T")


class _Parcel(NamedTuple):
    header: bytes
    tensors: list[Tensor]
    ready: torch.Event | None


class LocalHub(ThreadRanks):
    """Shared state of the virtual ranks of one process.

    global_ranks: see `ThreadRanks`.
    """

    def __init__(self, world: int, global_ranks: Sequence[int] | None = None) -> None:
        super().__init__(world, global_ranks)
        self.posted: dict[tuple[int, int], deque[_Parcel]] = defaultdict(deque)  # (from, to)
        self.taken: dict[tuple[int, int], deque[torch.Event | None]] = defaultdict(deque)  # (from, to)


class LocalTransport(QueueTransport):
    """One virtual rank. Made by `run_local`, or from a `LocalHub` that all ranks of the process share."""

    name = "local"

    def __init__(
        self,
        rank: int,
        hub: LocalHub,
        *,
        device: torch.device | str = "cpu",
        timeout: float = DEFAULT_TIMEOUT,
        copier: Copier = plain_copies,
    ) -> None:
        super().__init__(rank, hub.world, device=_device.indexed(torch.device(device)), timeout=timeout)
        self.hub, self.global_ranks = hub, hub.global_ranks
        self.copier = copier

    def _run(self, batch: Batch) -> None:
        hub, rank = self.hub, self.rank
        self.before(rank, "post")
        ready = torch.accelerator.current_stream().record_event() if _device.on_gpu(self.device) else None
        peers = peers_of(rank, self.world)
        with hub.changed:
            for peer in peers:  # also empty parcels: a peer that expects data gets an error instead of waiting
                tensors = [tensor for to, tensor in batch.outgoing if to == peer]
                hub.posted[rank, peer].append(_Parcel(pack(batch.header_to(peer)), tensors, ready))
            hub.changed.notify_all()

        for peer in peers:
            parcel = self._take(peer, batch.label, hub.posted[peer, rank])
            self._check_header(batch, peer, parcel.header)
            expected = [tensor for source, tensor in batch.incoming if source == peer]
            self.before(rank, "take")
            if parcel.ready is not None:
                torch.accelerator.current_stream().wait_event(parcel.ready)
            self.copier([(to, source) for to, source in zip(expected, parcel.tensors) if to.numel()])
            taken = torch.accelerator.current_stream().record_event() if _device.on_gpu(self.device) else None
            with hub.changed:
                self._progress.note()
                hub.taken[peer, rank].append(taken)
                hub.changed.notify_all()

        for peer in peers:
            taken = self._take(peer, batch.label, hub.taken[rank, peer])
            self.before(rank, "taken")
            if taken is not None:
                torch.accelerator.current_stream().wait_event(taken)

    def _take(self, peer: int, operation: str, waiting: deque[T]) -> T:
        """The first entry of a queue that `peer` fills. Raises CommError if the peer is gone or too slow."""
        with self.hub.changed:
            if self.hub.wait_for(self.rank, operation, lambda: () if waiting else (peer,), self.timeout):
                text = f"no answer from rank {self.global_ranks[peer]} within {self.timeout:g} s"
                raise self._error(operation, text, [peer])
            return waiting.popleft()

    def _notify(self, reason: str) -> None:
        self.hub.leave(self.rank, reason)

    def _interrupt(self) -> None:
        self.hub.leave(self.rank, "it closed its transport")


def run_local(
    world: int,
    function: Callable[..., T],
    *args: Any,
    device: torch.device | str = "cpu",
    timeout: float = DEFAULT_TIMEOUT,
    before: Callable[[int, str], None] | None = None,
    copier: Copier = plain_copies,
) -> list[T]:
    """[function(group, *args) of each of `world` virtual ranks], a thread each; `group` is the rank's transport.

    Inside, `group=None` means that transport. Backward passes run in the calling thread, on CUDA too: autograd has one
    thread per device, which ranks that wait for each other must not share.

    Raises the exception of the first rank that failed on its own, after all have ended.
    """
    hub = LocalHub(world)
    results: list[Any] = [None] * world
    errors: list[tuple[int, BaseException]] = []

    def main(rank: int) -> None:
        transport = LocalTransport(rank, hub, device=device, timeout=timeout, copier=copier)
        transport.before = before or no_step
        try:
            with use(transport), torch.autograd.set_multithreading_enabled(False):
                if _device.on_gpu(transport.device):
                    torch.accelerator.set_device_index(transport.device)
                results[rank] = function(transport, *args)
        except BaseException as error:
            errors.append((rank, error))
            hub.leave(rank, f"it raised {type(error).__name__}: {str(error)[:300]}")
        finally:
            transport.close()

    threads = [threading.Thread(target=main, args=(rank,), name=f"rank-{rank}", daemon=True) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        # The first failure causes CommErrors on the other ranks: report the first.
        raise next((error for _, error in errors if not isinstance(error, CommError)), errors[0][1])
    return results
