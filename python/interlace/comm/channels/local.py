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

from interlace.comm.channels.base import Part, Pending, Sent, Tag, check_digest, check_numbers, check_tag
from interlace.comm.process.errors import CommError
from interlace.comm.process.lost import SLOW, named
from interlace.comm.process.messages import decode, encode
from interlace.comm.process.recorder import FlightRecorder
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
        self.brought: dict[int, tuple[str, Any]] = {}  # rank -> (subject, value)
        self.result: Any = None
        self.maker = -1  # the rank that joined last
        self.made = False
        self.taken = 0


class LocalNetwork(ThreadRanks):
    """Shared state of the channels of one process. `timeout`: seconds that any of them waits."""

    def __init__(self, world: int, timeout: float) -> None:
        super().__init__(world)
        self.timeout = timeout
        self.clear()

    def clear(self) -> None:
        """Discards the state of a failed step and the aborted ranks. No thread may be inside a channel meanwhile."""
        with self.changed:
            self.edges: dict[tuple[int, int], deque[_Parcel]] = defaultdict(deque)  # (from, to)
            self.rounds: dict[tuple[str, tuple[int, ...], int], _Round] = defaultdict(_Round)
            self.joined: dict[tuple[int, str, tuple[int, ...]], int] = defaultdict(int)  # rounds joined by a rank
            self.hubs: dict[tuple[int, ...], LocalHub] = {}  # lane -> hub
            self.hub_of_all = LocalHub(self.world)
            self.gone.clear()

    def hub(self, lane: tuple[int, ...]) -> LocalHub:
        """The hub of a lane's ranks."""
        with self.changed:
            return self.hubs.setdefault(lane, LocalHub(len(lane), called=lane))


class LocalChannel:
    """Channel of one virtual rank; see `interlace.comm.channels.base.Channel`."""

    def __init__(
        self,
        rank: int,
        network: LocalNetwork,
        *,
        device: torch.device | str = "cpu",
        recorder: FlightRecorder | None = None,
    ) -> None:
        if not 0 <= rank < network.world:
            raise ValueError(f"rank must be 0 to {network.world - 1}, got {rank}")
        self.rank, self.world, self.timeout = rank, network.world, network.timeout
        self.device = torch.device(device)
        self.network = network
        self.collectives = 0
        self.recorder = recorder or FlightRecorder(rank, world=network.world)
        self._digest = 0
        self._sent = Sent()
        self._sends: list[int] = []  # recorder tokens
        self._early: dict[tuple[int, Tag], Part] = {}
        self._lanes: dict[tuple[int, ...], Transport] = {}

    def begin(self, digest: int) -> None:
        self._digest = digest

    def send(self, tensor: Tensor, peer: int, tag: Tag, rows: int = 0) -> None:
        self._sends.append(self.recorder.begin("send", tag, (peer,)))
        copy = tensor.detach().clone()
        self._sent.note(peer, tag, copy)
        with self.network.changed:
            self.network.edges[self.rank, peer].append(_Parcel(self._digest, tag, copy, rows))
            self.network.changed.notify_all()

    def receive(self, peer: int, tag: Tag) -> Tensor:
        return self.receive_part(peer, tag).tensor

    def receive_part(self, peer: int, tag: Tag, others: Collection[Tag] = ()) -> Part:
        token = self.recorder.begin("receive", tag, (peer,))
        while (part := self._early.pop((peer, tag), None)) is None:
            found, part = self._next(peer, tag, others)
            if found == tag:
                break
            self._early[peer, found] = part
        self.recorder.end(token)
        return part

    def _next(self, peer: int, tag: Tag, others: Collection[Tag]) -> tuple[Tag, Part]:
        """The next message from ``peer``: ``tag``, or one of the others."""
        with self.network.changed:
            queue = self.network.edges[peer, self.rank]
            self._wait_for(f"RECV {tag}", lambda: () if queue else (peer,))
            digest, found, tensor, rows = queue.popleft()
            self.network.changed.notify_all()
        check_digest(self.rank, peer, f"RECV {tag}", self._digest, digest)
        if found not in others:
            check_tag(self.rank, peer, tag, found)
        self._sent.check(self.rank, peer, found, tensor.shape, tensor.dtype)
        return found, Part(tensor, rows)

    def start_all_reduce(self, tensor: Tensor, ranks: Sequence[int], key: str) -> Pending:
        if len(ranks) == 1:
            return Pending()
        about = f"{key}, {list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
        wait = self._join("all_reduce", f"REDUCE {key}", tuple(ranks), about, tensor.detach(), _sum)

        def finish() -> None:
            tensor.detach().copy_(wait())

        return Pending(finish)

    def start_reduce_scatter(self, tensor: Tensor, ranks: Sequence[int], key: str) -> Pending:
        about = f"{key}, {list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
        wait = self._join("reduce_scatter", f"REDUCE {key}", tuple(ranks), about, tensor.detach(), _sum)
        return Pending(lambda: wait()[ranks.index(self.rank)].clone())

    def start_gather(self, tensor: Tensor, ranks: Sequence[int], key: str) -> Pending:
        about = f"{key}, {list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
        wait = self._join("gather", f"GATHER {key}", tuple(ranks), about, tensor.detach().clone(), torch.stack)
        return Pending(wait)

    def start_all_gather(self, numbers: Tensor, what: str, *, compare_sums: bool = False) -> Pending:
        # Mismatched sums cannot occur here: their keys are compared when ranks join.
        check_numbers(numbers)
        self.collectives += 1
        mine = self._digest, numbers.detach().to("cpu", copy=True)
        about = f"{what}, {numbers.numel()} numbers"
        wait = self._join("all_gather", what, tuple(range(self.world)), about, mine, list)

        def finish() -> Tensor:
            brought = wait()
            for peer, (digest, _) in enumerate(brought):
                check_digest(self.rank, peer, what, mine[0], digest)
            return torch.stack([each for _, each in brought])

        return Pending(finish)

    def exchange(self, value: Any, what: str) -> list[Any]:
        self.collectives += 1
        wait = self._join("exchange", what, tuple(range(self.world)), what, encode(what, value), list)
        values = []
        for peer, raw in enumerate(wait()):
            try:
                values.append(decode(raw, what, value))
            except ValueError as error:
                raise CommError(f"rank {self.rank}, {what}: rank {peer} {error}") from error
        return values

    def finish(self) -> None:
        network = self.network
        with network.changed:

            def missing() -> list[int]:
                return [peer for peer in range(self.world) if network.edges[self.rank, peer]]

            first = next((str(network.edges[self.rank, peer][0].tag) for peer in missing()), "")
            waiting = self.recorder.begin("finish", "", tuple(missing()))
            self._wait_for(f"SEND {first}", missing)
        self.recorder.end(waiting)
        for token in self._sends:
            self.recorder.end(token)
        self._sends.clear()
        self._sent.clear()

    def leave(self, reason: str, cause: CommError | None = None) -> str:
        self.network.leave(self.rank, f"it gave up: {reason}")
        for lane in self._lanes:
            self.network.hub(lane).leave(lane.index(self.rank), f"it gave up: {reason}")
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

    def close(self) -> None:
        while self._lanes:
            self._lanes.popitem()[1].close()

    def add_groups(self, groups: Sequence[Sequence[int]]) -> None:
        """No-op."""

    def add_edges(self, edges: Sequence[tuple[int, int]]) -> None:
        """No-op."""

    def _wait_for(self, what: str, missing: Callable[[], Sequence[int]]) -> None:
        if absent := self.network.wait_for(self.rank, what, missing, self.timeout):
            raise CommError(f"rank {self.rank}, {what}: lost {named(absent)} ({SLOW.format(self.timeout)})")

    def _join(
        self, kind: str, what: str, ranks: tuple[int, ...], about: str, value: T, make: Callable[[list[T]], Any]
    ) -> Callable[[], Any]:
        """Adds `value` to the next round of `ranks`; returns a function that waits for `make`(values by rank)."""
        if self.rank not in ranks:
            raise ValueError(f"rank {self.rank}, {what}: it is none of the ranks {list(ranks)}")
        network, token = self.network, self.recorder.begin(kind, what, ranks)
        with network.changed:
            number = network.joined[self.rank, kind, ranks]
            network.joined[self.rank, kind, ranks] = number + 1
            slot = kind, ranks, number
            current = network.rounds[slot]
            current.brought[self.rank] = about, value
            if last := len(current.brought) == len(ranks):
                current.maker = self.rank
        if last:  # outside of the lock, so that other ranks can continue
            if all(other == about for other, _ in current.brought.values()):
                current.result = make([current.brought[rank][1] for rank in ranks])
            with network.changed:
                current.made = True
                network.changed.notify_all()

        def missing() -> Sequence[int]:
            absent = [rank for rank in ranks if rank not in current.brought]
            return absent if absent or current.made else (current.maker,)

        def wait() -> Any:
            waiting = self.recorder.begin("wait", what, ranks)
            with network.changed:
                self._wait_for(what, missing)
                current.taken += 1
                if current.taken == len(ranks):
                    del network.rounds[slot]
            for peer in ranks:
                if (theirs := current.brought[peer][0]) != about:
                    raise CommError(
                        f"rank {self.rank} is in {about}, but rank {peer} is in {theirs}: their lists differ"
                    )
            self.recorder.end(waiting)
            self.recorder.end(token)
            return current.result

        return wait


def _sum(tensors: list[Tensor]) -> Tensor:
    total = tensors[0].clone()
    for tensor in tensors[1:]:
        total += tensor
    return total
