"""Channel between virtual ranks that are threads of one process: for tests, examples and a single device.

    network = LocalNetwork(world, timeout=60.0)
    channels = [LocalChannel(rank, network) for rank in range(world)]      # each is used by its rank's thread alone

Nothing is passed by reference: sent tensors are copied, as between processes. The last rank to join computes a sum, in
rank order; the others copy its result.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from interlace.comm.channels.base import Channel, Part, Pending, Tag, check_digest, check_numbers
from interlace.comm.process.abort_reports import SLOW, named
from interlace.comm.process.errors import CommError
from interlace.comm.process.groups import Device
from interlace.comm.process.messages import decode, encode
from interlace.comm.process.thread_ranks import ThreadRanks
from interlace.comm.transports.base import Transport
from interlace.comm.transports.local import LocalHub, LocalTransport

T = TypeVar("T")


class _Parcel(NamedTuple):
    digest: int
    tag: Tag
    tensor: Tensor
    rows: int


class _Round:
    """One collective: each rank's value, and the result."""

    def __init__(self) -> None:
        self.values: dict[int, tuple[str, Any]] = {}  # rank -> (subject, value)
        self.result: Any = None
        self.last_rank = -1  # the rank that joined last
        self.complete = False
        self.readers = 0


class LocalNetwork(ThreadRanks):
    """Shared state of the channels of one process. `timeout`: seconds that any of them waits."""

    def __init__(self, world: int, timeout: float) -> None:
        super().__init__(world)
        self.timeout = timeout
        self.edges: dict[tuple[int, int], deque[_Parcel]] = defaultdict(deque)  # (from, to)
        self.rounds: dict[tuple[str, tuple[int, ...], int], _Round] = defaultdict(_Round)
        self.joined: dict[tuple[int, str, tuple[int, ...]], int] = defaultdict(int)  # rounds joined by a rank
        self.hubs: dict[tuple[int, ...], LocalHub] = {}  # lane -> hub
        self.hub_of_all = LocalHub(self.world)

    def hub(self, lane: tuple[int, ...]) -> LocalHub:
        """The hub of a lane's ranks."""
        with self.changed:
            return self.hubs.setdefault(lane, LocalHub(len(lane), global_ranks=lane))


class LocalChannel(Channel):
    """Channel of one virtual rank; see `interlace.comm.channels.base.Channel`."""

    def __init__(self, rank: int, network: LocalNetwork, *, device: Device = "cpu") -> None:
        if not 0 <= rank < network.world:
            raise ValueError(f"rank must be 0 to {network.world - 1}, got {rank}")
        super().__init__(rank, network.world, network.timeout, device)
        self.network = network
        self._sends: list[int] = []  # recorder tokens

    def send(self, tensor: Tensor, peer: int, tag: Tag, rows: int = 0) -> None:
        self._sends.append(self.recorder.begin("send", tag, (peer,)))
        copy = tensor.detach().clone()
        self._sent.note(peer, tag, copy)
        with self.network.changed:
            self.network.edges[self.rank, peer].append(_Parcel(self._digest, tag, copy, rows))
            self.network.changed.notify_all()

    def _next(self, peer: int, tag: Tag, others: Collection[Tag]) -> tuple[Tag, Part]:
        """The next message from ``peer``: ``tag``, or one of the others."""
        with self.network.changed:
            queue = self.network.edges[peer, self.rank]
            self._wait_for(f"RECV {tag}", lambda: () if queue else (peer,))
            digest, received, tensor, rows = queue.popleft()
            self.network.changed.notify_all()
        self._check_message(peer, tag, others, digest, received)
        self._sent.check(self.rank, peer, received, tensor.shape, tensor.dtype)
        return received, Part(tensor, rows)

    def start_all_reduce(self, tensor: Tensor, ranks: Sequence[int], key: str) -> Pending:
        if len(ranks) == 1:
            return Pending()
        wait = self._join_with("all_reduce", f"REDUCE {key}", ranks, key, tensor.detach(), _sum)

        def finish() -> None:
            tensor.detach().copy_(wait())

        return Pending(finish)

    def start_reduce_scatter(self, tensor: Tensor, ranks: Sequence[int], key: str) -> Pending:
        wait = self._join_with("reduce_scatter", f"REDUCE {key}", ranks, key, tensor.detach(), _sum)
        return Pending(lambda: wait()[ranks.index(self.rank)].clone())

    def start_gather(self, tensor: Tensor, ranks: Sequence[int], key: str) -> Pending:
        return Pending(self._join_with("gather", f"GATHER {key}", ranks, key, tensor.detach().clone(), torch.stack))

    def start_all_gather(self, numbers: Tensor, operation: str, *, compare_sums: bool = False) -> Pending:
        # Mismatched sums cannot occur here: their keys are compared when ranks join.
        check_numbers(numbers)
        self.collectives += 1
        own = self._digest, numbers.detach().to("cpu", copy=True)
        subject = f"{operation}, {numbers.numel()} numbers"
        wait = self._join("all_gather", operation, tuple(range(self.world)), subject, own, list)

        def finish() -> Tensor:
            values = wait()
            for peer, (digest, _) in enumerate(values):
                check_digest(self.rank, peer, operation, own[0], digest)
            return torch.stack([numbers_of_rank for _, numbers_of_rank in values])

        return Pending(finish)

    def exchange(self, value: T, operation: str) -> list[T]:
        self.collectives += 1
        wait = self._join("exchange", operation, tuple(range(self.world)), operation, encode(operation, value), list)
        values = []
        for peer, raw in enumerate(wait()):
            try:
                values.append(decode(raw, operation, value))
            except ValueError as error:
                raise CommError(f"rank {self.rank}, {operation}: rank {peer} {error}") from error
        return values

    def finish(self) -> None:
        network = self.network
        with network.changed:

            def missing() -> list[int]:
                return [peer for peer in range(self.world) if network.edges[self.rank, peer]]

            first_tag = next((str(network.edges[self.rank, peer][0].tag) for peer in missing()), "")
            finish_token = self.recorder.begin("finish", "", tuple(missing()))
            self._wait_for(f"SEND {first_tag}", missing)
        self.recorder.end(finish_token)
        for token in self._sends:
            self.recorder.end(token)
        self._sends.clear()
        self._sent.clear()

    def leave(self, reason: str, cause: CommError | None = None) -> str:
        self.network.leave(self.rank, f"it aborted: {reason}")
        for lane in self._lanes:
            self.network.hub(lane).leave(lane.index(self.rank), f"it aborted: {reason}")
        return ""

    def connect(self, lanes: Sequence[Sequence[int]]) -> dict[tuple[int, ...], Transport]:
        for lane in map(tuple, lanes):
            if self.rank in lane and lane not in self._lanes:
                self._lanes[lane] = LocalTransport(
                    lane.index(self.rank), self.network.hub(lane), device=self.device, timeout=self.timeout
                )
        return dict(self._lanes)

    def connect_all(self) -> Transport:
        return LocalTransport(self.rank, self.network.hub_of_all, timeout=self.timeout)

    def add_groups(self, groups: Sequence[Sequence[int]]) -> None:
        """No-op."""

    def add_edges(self, edges: Sequence[tuple[int, int]]) -> None:
        """No-op."""

    def _wait_for(self, operation: str, missing: Callable[[], Sequence[int]]) -> None:
        if missing_ranks := self.network.wait_for(self.rank, operation, missing, self.timeout):
            raise CommError(f"rank {self.rank}, {operation}: lost {named(missing_ranks)} ({SLOW.format(self.timeout)})")

    def _join_with(
        self, kind: str, operation: str, ranks: Sequence[int], key: str, tensor: Tensor, make: Callable[[Any], Any]
    ) -> Callable[[], Any]:
        """`_join` with a tensor, of one shape and dtype on all ranks."""
        subject = f"{key}, {list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
        return self._join(kind, operation, tuple(ranks), subject, tensor, make)

    def _join(
        self, kind: str, operation: str, ranks: tuple[int, ...], subject: str, value: T, make: Callable[[list[T]], Any]
    ) -> Callable[[], Any]:
        """Adds `value` to the next round of `ranks`; returns a function that waits for `make`(values by rank)."""
        if self.rank not in ranks:
            raise ValueError(f"rank {self.rank}, {operation}: this rank is not one of {list(ranks)}")
        network, token = self.network, self.recorder.begin(kind, operation, ranks)
        with network.changed:
            number = network.joined[self.rank, kind, ranks]
            network.joined[self.rank, kind, ranks] = number + 1
            slot = kind, ranks, number
            current = network.rounds[slot]
            current.values[self.rank] = subject, value
            if last := len(current.values) == len(ranks):
                current.last_rank = self.rank
        if last:  # outside of the lock, so that other ranks can continue
            if all(other_subject == subject for other_subject, _ in current.values.values()):
                current.result = make([current.values[rank][1] for rank in ranks])
            with network.changed:
                current.complete = True
                network.changed.notify_all()

        def missing() -> Sequence[int]:
            not_joined = [rank for rank in ranks if rank not in current.values]
            return not_joined if not_joined or current.complete else (current.last_rank,)

        def wait() -> Any:
            wait_token = self.recorder.begin("wait", operation, ranks)
            with network.changed:
                self._wait_for(operation, missing)
                current.readers += 1
                if current.readers == len(ranks):
                    del network.rounds[slot]
            for peer in ranks:
                if (peer_subject := current.values[peer][0]) != subject:
                    raise CommError(
                        f"rank {self.rank} is in {subject}, but rank {peer} is in {peer_subject}: their lists differ"
                    )
            self.recorder.end(wait_token)
            self.recorder.end(token)
            return current.result

        return wait


def _sum(tensors: list[Tensor]) -> Tensor:
    total = tensors[0].clone()
    for tensor in tensors[1:]:
        total += tensor
    return total
