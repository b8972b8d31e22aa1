"""What an executor speaks to: tensors along directed edges, sums and small numbers over all ranks.

    channel.begin(table.digest)                      a step; every header says of which table it is
    channel.send(rows, peer, tag)                    returns at once
    rows = channel.receive(peer, tag)                blocks
    pending = channel.start_all_reduce(flat, ranks, "gradients of llm[0]");  ...;  pending.wait()
    channel.finish()                                 what was sent has been taken

Two implementations: `channel_local`, where every rank is a thread of one process (how most tests run), and
`channel_group`, between the processes of torch.distributed. Every wait is bounded by the channel's timeout and ends in
a `CommError` that names this rank, what it waited for and whom. Messages on one edge come in the order in which they
were sent; each says what it is, so that two schedules that contradict each other are reported and not computed with.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from interlace.comm.recorder import FlightRecorder
from interlace.comm.transports.base import CommError, Transport

__all__ = ["Channel", "CommError", "Part", "Pending", "Sent", "Tag", "check_digest", "check_numbers", "check_tag"]


class Tag(NamedTuple):
    """Identity of rows in flight: what chunk `other` reads of the output of (module, stage) for `chunk`, or, with
    `grad`, the gradient of these rows on its way back. Both chunks are the same one between stages of a pipeline."""

    module: str
    stage: int
    chunk: int
    other: int
    grad: bool

    def __str__(self) -> str:
        text = f"{'gradient of ' if self.grad else ''}{self.module}[{self.stage}] chunk {self.chunk}"
        return text if self.other == self.chunk else f"{text} for chunk {self.other}"


class Part(NamedTuple):
    """What was received, and the rows (dimension -2) of the whole message of which it is a part; 0: not said."""

    tensor: Tensor
    rows: int


class Pending:
    """A collective that this rank has joined. finish: what waits for it, within the channel's timeout."""

    def __init__(self, finish: Callable[[], Any] = lambda: None) -> None:
        self._finish: Callable[[], Any] | None = finish
        self._result: Any = None

    def wait(self) -> Any:
        """Its result; a second call returns the same. Raises CommError."""
        if self._finish is not None:
            self._result = self._finish()
            self._finish = None
        return self._result


class Channel(Protocol):
    """One rank's end. All methods raise CommError, none hangs; a channel that raised one is of no more use.

    rank, world: among all ranks. timeout: of every wait, in seconds. device: where what is received lies.
    collectives: how many all_gathers and exchanges were begun, so that a test can say what a step costs.
    recorder: what this rank did last.
    """

    rank: int
    world: int
    timeout: float
    device: torch.device
    collectives: int
    recorder: FlightRecorder

    def begin(self, digest: int) -> None:
        """A new step. digest: 48 bits of its table; a message of another table is refused by whoever receives it."""

    def send(self, tensor: Tensor, peer: int, tag: Tag, rows: int = 0) -> None:
        """Start sending; returns at once. ``tensor`` must be left alone until `finish`. rows: see `Part`."""

    def receive(self, peer: int, tag: Tag) -> Tensor:
        """The next tensor from ``peer``, which must be ``tag``; a gradient has the shape and dtype of what was sent."""

    def receive_part(self, peer: int, tag: Tag, others: Collection[Tag] = ()) -> Part:
        """The same with what the sender said of the whole.

        others: of ``peer`` too, and as likely to come first, because the two ranks meet in several lanes: what is one
        of these is kept for the call that asks for it.
        """

    def start_all_reduce(self, tensor: Tensor, ranks: Sequence[int], key: str) -> Pending:
        """Begin to sum ``tensor`` in place over ``ranks``, the same bits on each; to be left alone until `wait`.

        ranks: in ascending order, this one among them. The ranks of a group begin the same sums in the same order;
        `key` says which. Several may be in flight.
        """

    def start_reduce_scatter(self, tensor: Tensor, ranks: Sequence[int], key: str) -> Pending:
        """Begin to sum ``tensor`` [len(ranks), n] over ``ranks``; `wait` returns the row of the sum at this rank's
        place among them, [n]. Otherwise as `start_all_reduce`."""

    def start_gather(self, tensor: Tensor, ranks: Sequence[int], key: str) -> Pending:
        """Begin to gather every rank's ``tensor`` [n]; `wait` returns [len(ranks), n], in the order of ``ranks``.
        Otherwise as `start_all_reduce`."""

    def start_all_gather(self, numbers: Tensor, what: str, *, compare_sums: bool = False) -> Pending:
        """Begin one collective of all ranks; `wait` returns every rank's ``numbers``, float64 [world, n], on the CPU.

        numbers: float64 [n], as many on every rank. The ranks' digests of the step are compared on the way, and with
        `compare_sums` also which sums they have begun so far: for the end of a step, where these must agree.
        """

    def exchange(self, value: Any, what: str) -> list[Any]:
        """Every rank's ``value`` (small, what JSON can hold, of one form everywhere) by rank. Slow, through rank 0.

        A rank that is lost is named. Also compared: whether the ranks of each group have begun the same sums so far.
        """

    def finish(self) -> None:
        """Wait until everything sent in this step has been taken."""

    def leave(self, reason: str, cause: CommError | None = None) -> str:
        """This rank gives up: peers that wait for it are told so at once (between processes: when they give up too,
        but in lanes at once).

        cause: what says for whom it waited in vain, if that is the reason. Returns who is lost and why, in words, where
        `reason` does not say so; it takes a word with the others, so it may last seconds.
        """

    def close(self) -> None:
        """Ends the transports of lanes and edges."""

    def add_groups(self, groups: Sequence[Sequence[int]]) -> None:
        """Prepare sums and gathers over each of ``groups``. Collective: every rank passes the same."""

    def connect(self, lanes: Sequence[Sequence[int]]) -> dict[tuple[int, ...], Transport]:
        """Lane -> a transport between its ranks, of those lanes that this rank is in.

        lanes: ranks in ascending order. Collective: every rank passes the same lanes in the same order; later calls
        name none that the first one did not, and return all of them.
        """

    def connect_all(self) -> Transport:
        """A transport of its own between all ranks, for tensors on the host. Collective; who asked for it closes it."""

    def add_edges(self, edges: Sequence[tuple[int, int]]) -> None:
        """Prepare sending tensors over each (from, to) of ``edges``. Collective: every rank passes the same."""


class Sent(dict[tuple[int, Tag], tuple[torch.Size, torch.dtype]]):
    """Activations that went out in this step: what comes back as their gradient has their shape and dtype."""

    def note(self, peer: int, tag: Tag, tensor: Tensor) -> None:
        if not tag.grad:
            self[peer, tag] = tensor.shape, tensor.dtype

    def check(self, rank: int, peer: int, tag: Tag, shape: torch.Size, dtype: torch.dtype) -> None:
        """Raises CommError where ``tag`` is a gradient of something else than was sent to ``peer``."""
        if tag.grad and (sent := self.get((peer, tag._replace(grad=False)), (shape, dtype))) != (shape, dtype):
            raise CommError(
                f"rank {rank}: {tag} from rank {peer} is {dtype} {list(shape)}, but {sent[1]} {list(sent[0])} was sent"
            )


def check_digest(rank: int, peer: int, what: object, mine: int, theirs: int) -> None:
    """Raises CommError where two ranks have made different tables of the step."""
    if mine != theirs:
        raise CommError(
            f"rank {rank}, {what}: rank {peer} works on another step table ({theirs:012x}, here {mine:012x}): its "
            "samples differ; every rank must be given the same seed, config, data and place in it"
        )


def check_tag(rank: int, peer: int, due: Tag, found: Tag) -> None:
    if found != due:
        raise CommError(f"rank {rank} expected {due} from rank {peer} but received {found}")


def check_numbers(numbers: Tensor) -> None:
    if numbers.dtype is not torch.float64 or numbers.dim() != 1:
        raise ValueError(f"start_all_gather takes float64 [n], got {numbers.dtype} {list(numbers.shape)}")
