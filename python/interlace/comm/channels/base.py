"""Channel: tensors along directed edges, sums and small numbers over all ranks, for the executor.

    channel.begin(table.digest)                      a step; every header carries the digest of its table
    channel.send(rows, peer, tag)                    returns at once
    rows = channel.receive(peer, tag)                blocks
    pending = channel.start_all_reduce(flat, ranks, "gradients of llm[0]");  ...;  pending.wait()
    channel.finish()                                 everything sent has been received

Two implementations: `channels.local`, where every rank is a thread of one process (used by most tests), and
`channels.process_group`, between processes of torch.distributed. Every wait is bounded by the channel's timeout. A
failed wait raises a `CommError` that names this rank, the operation and the missing peer. Messages on one edge arrive
in sending order. Each carries its identity, so contradictory schedules are reported and wrong data is not used.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from interlace.comm.process.errors import CommError
from interlace.comm.process.recorder import FlightRecorder
from interlace.comm.transports.base import Transport

T = TypeVar("T")


class Tag(NamedTuple):
    """Identity of rows in flight: rows of the output of (module, stage) for `chunk` that chunk `other` reads.

    With `grad`, the gradient of these rows on its way back. Between stages of a pipeline both chunks are the same.
    """

    module: str
    stage: int
    chunk: int
    other: int
    grad: bool

    def __str__(self) -> str:
        text = f"{'gradient of ' if self.grad else ''}{self.module}[{self.stage}] chunk {self.chunk}"
        return text if self.other == self.chunk else f"{text} for chunk {self.other}"


class Part(NamedTuple):
    """A received tensor, and the number of rows (dimension -2) of the whole message; 0: unknown."""

    tensor: Tensor
    rows: int


class Pending:
    """A collective that this rank has joined. finish: waits for it, within the channel's timeout."""

    def __init__(self, finish: Callable[[], Any] = lambda: None) -> None:
        self._finish: Callable[[], Any] | None = finish
        self._result: Any = None

    def wait(self) -> Any:
        """The result; a second call returns the same. Raises CommError."""
        if self._finish is not None:
            self._result = self._finish()
            self._finish = None
        return self._result


class Channel(ABC):
    """One rank's end of the connections. All methods raise CommError instead of hanging. After an error it is unusable.

    rank, world: among all ranks. timeout: of every wait, in seconds. device: of received tensors.
    collectives: number of all_gathers and exchanges begun, so that tests can check the cost of a step.
    recorder: flight recorder of this rank.
    """

    def __init__(self, rank: int, world: int, timeout: float, device: torch.device | str) -> None:
        self.rank, self.world, self.timeout, self.device = rank, world, timeout, torch.device(device)
        self.collectives = 0
        self.recorder = FlightRecorder(rank, world=world)
        self._digest = 0
        self._sent = Sent()
        self._early: dict[tuple[int, Tag], Part] = {}  # messages that arrived before they were requested
        self._lanes: dict[tuple[int, ...], Transport] = {}

    def begin(self, digest: int) -> None:
        """Starts a step. digest: 48 bits of its table. Receivers refuse messages of another table."""
        self._digest = digest

    def close(self) -> None:
        """Closes the transports of lanes and edges."""
        while self._lanes:
            self._lanes.popitem()[1].close()

    @abstractmethod
    def _next(self, peer: int, tag: Tag, others: Collection[Tag]) -> tuple[Tag, Part]:
        """The next message from ``peer``: ``tag``, or one of the others."""

    def receive(self, peer: int, tag: Tag) -> Tensor:
        """The next tensor from ``peer``, which must be ``tag``. A gradient must have the sent tensor's shape and
        dtype.
        """
        return self.receive_part(peer, tag).tensor

    def receive_part(self, peer: int, tag: Tag, others: Collection[Tag] = ()) -> Part:
        """As `receive`, with the row count that the sender gave for the whole.

        others: further tags expected from ``peer``, which may arrive first because the two ranks share several lanes.
        Such a message is kept for the call that requests it.
        """
        token = self.recorder.begin("receive", tag, (peer,))
        while (part := self._early.pop((peer, tag), None)) is None:
            received, part = self._next(peer, tag, others)
            if received == tag:
                break
            self._early[peer, received] = part
        self.recorder.end(token)
        return part

    @abstractmethod
    def send(self, tensor: Tensor, peer: int, tag: Tag, rows: int = 0) -> None:
        """Start sending; returns at once. ``tensor`` must not be modified until `finish`. rows: see `Part`."""

    @abstractmethod
    def start_all_reduce(self, tensor: Tensor, ranks: Sequence[int], key: str) -> Pending:
        """Begin to sum ``tensor`` in place over ``ranks``, bitwise identical on each. Do not modify it until `wait`.

        ranks: in ascending order, including this one. The ranks of a group begin the same sums in the same order,
        identified by `key`. Several may be in flight.
        """

    @abstractmethod
    def start_reduce_scatter(self, tensor: Tensor, ranks: Sequence[int], key: str) -> Pending:
        """Begin to sum ``tensor`` [len(ranks), n] over ``ranks``; `wait` returns this rank's row of the sum, [n].

        The row index is this rank's index in ``ranks``. Otherwise as `start_all_reduce`.
        """

    @abstractmethod
    def start_gather(self, tensor: Tensor, ranks: Sequence[int], key: str) -> Pending:
        """Begin to gather every rank's ``tensor`` [n]; `wait` returns [len(ranks), n], in the order of ``ranks``.
        Otherwise as `start_all_reduce`.
        """

    @abstractmethod
    def start_all_gather(self, numbers: Tensor, operation: str, *, compare_sums: bool = False) -> Pending:
        """Begin one collective of all ranks; `wait` returns every rank's ``numbers``, float64 [world, n], on the CPU.

        numbers: float64 [n], the same n on every rank.

        Also compares the ranks' digests of the step. With `compare_sums` it compares the sums begun so far too: for the
        end of a step, where these must agree.
        """

    @abstractmethod
    def exchange(self, value: T, operation: str) -> list[T]:
        """Every rank's ``value`` by rank (small, JSON-serializable, same form everywhere). Slow: goes through rank 0.

        An error names the lost rank. Also compared: whether the ranks of each group have begun the same sums so far.
        """

    @abstractmethod
    def finish(self) -> None:
        """Wait until everything sent in this step has been received."""

    @abstractmethod
    def leave(self, reason: str, cause: CommError | None = None) -> str:
        """This rank aborts and notifies peers that wait for it: at once in lanes; other processes, when they abort too.

        cause: the error that names the ranks waited for in vain, if that is the reason.

        Returns a description of the lost ranks and the reason, if `reason` does not contain it. Takes up to seconds,
        since it exchanges reports with the other ranks.
        """

    @abstractmethod
    def add_groups(self, groups: Sequence[Sequence[int]]) -> None:
        """Prepare sums and gathers over each of ``groups``. Collective: every rank passes the same."""

    @abstractmethod
    def connect(self, lanes: Sequence[Sequence[int]]) -> dict[tuple[int, ...], Transport]:
        """Lane -> a transport between its ranks, for the lanes that include this rank.

        lanes: ranks in ascending order. Collective: every rank passes the same lanes in the same order. Later calls may
        only name lanes of the first call, and return all of them.
        """

    @abstractmethod
    def connect_all(self) -> Transport:
        """A separate transport between all ranks, for tensors on the host. Collective; the caller closes it."""

    @abstractmethod
    def add_edges(self, edges: Sequence[tuple[int, int]]) -> None:
        """Prepare sending tensors over each (from, to) of ``edges``. Collective: every rank passes the same."""

    def _check_message(self, peer: int, tag: Tag, others: Collection[Tag], digest: int, received: Tag) -> None:
        """Raises CommError unless `received`, sent in a step of `digest`, is ``tag`` or one of the others."""
        check_digest(self.rank, peer, f"RECV {tag}", self._digest, digest)
        if received != tag and received not in others:
            raise CommError(f"rank {self.rank} expected {tag} from rank {peer} but received {received}")


class Sent(dict[tuple[int, Tag], tuple[torch.Size, torch.dtype]]):
    """Activations sent in this step. Their gradients must come back with the same shape and dtype."""

    def note(self, peer: int, tag: Tag, tensor: Tensor) -> None:
        if not tag.grad:
            self[peer, tag] = tensor.shape, tensor.dtype

    def check(self, rank: int, peer: int, tag: Tag, shape: torch.Size, dtype: torch.dtype) -> None:
        """Raises CommError if ``tag`` is a gradient whose shape or dtype differs from the tensor sent to ``peer``."""
        if tag.grad and (sent := self.get((peer, tag._replace(grad=False)), (shape, dtype))) != (shape, dtype):
            raise CommError(
                f"rank {rank}: {tag} from rank {peer} is {dtype} {list(shape)}, but {sent[1]} {list(sent[0])} was sent"
            )


def check_digest(rank: int, peer: int, operation: object, own: int, other: int) -> None:
    """Raises CommError if two ranks have different tables of the step."""
    if own != other:
        raise CommError(
            f"rank {rank}, {operation}: rank {peer} has another step table ({other:012x}, here {own:012x}): use the "
            "same seed, config, data and data position on every rank"
        )


def check_numbers(numbers: Tensor) -> None:
    if numbers.dtype is not torch.float64 or numbers.dim() != 1:
        raise ValueError(f"start_all_gather takes float64 [n], got {numbers.dtype} {list(numbers.shape)}")
