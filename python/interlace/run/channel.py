"""What an executor speaks to: tensors move in FIFO order along a directed edge, each with a header that names it.

`Channel` is the interface, `LocalChannel` plays all ranks inside one process (the default on one device, and how
most tests run). `interlace.run.distributed.DistributedChannel` is the one between processes.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from interlace.schedule import Action


class PipelineError(RuntimeError):
    """A step cannot go on: names the rank, the action and what was being waited for."""


class Tag(NamedTuple):
    """Identity of a tensor in flight: output of (module, stage) for a microbatch, or the gradient of it."""

    module: str
    stage: int
    microbatch: int
    grad: bool

    @classmethod
    def of(cls, action: Action) -> Tag:
        """Tag of the tensor that a SEND or RECV action moves."""
        return cls(action.module, action.stage, action.microbatch, action.grad)

    def __str__(self) -> str:
        what = "gradient of " if self.grad else ""
        return f"{what}{self.module}[{self.stage}] microbatch {self.microbatch}"


class Channel(Protocol):
    """Moves tensors between the ranks of one step. All methods raise PipelineError, never hang."""

    def send(self, tensor: Tensor, peer: int, tag: Tag) -> None:
        """Start sending; returns at once and keeps ``tensor`` until `finish`."""

    def receive(self, peer: int, tag: Tag) -> Tensor | None:
        """Next tensor from ``peer``, which must be ``tag``. None: not there yet (in-process channel only)."""

    def all_reduce(self, tensor: Tensor, ranks: Sequence[int], key: str) -> bool:
        """Sum ``tensor`` in place over ``ranks``, the same bits on each. False: call again later (in-process only)."""

    def finish(self) -> None:
        """Wait until everything sent in this step has been taken."""


class LocalNetwork:
    """Mailboxes that the `LocalChannel` objects of one process share."""

    def __init__(self) -> None:
        self.edges: dict[tuple[int, int], deque[tuple[Tag, Tensor]]] = defaultdict(deque)
        self.posted: dict[tuple[str, tuple[int, ...]], dict[int, Tensor]] = defaultdict(dict)
        self.collected: dict[tuple[str, tuple[int, ...]], set[int]] = defaultdict(set)

    def clear(self) -> None:
        """Forget what a step that failed has left."""
        self.edges.clear()
        self.posted.clear()
        self.collected.clear()


class LocalChannel:
    """Channel of one virtual rank inside this process."""

    def __init__(self, rank: int, network: LocalNetwork):
        self.rank = rank
        self.network = network

    def send(self, tensor: Tensor, peer: int, tag: Tag) -> None:
        # A copy, as between processes: sender and receiver must not share storage.
        self.network.edges[self.rank, peer].append((tag, tensor.detach().clone()))

    def receive(self, peer: int, tag: Tag) -> Tensor | None:
        queue = self.network.edges[peer, self.rank]
        if not queue:
            return None
        found, tensor = queue.popleft()
        if found != tag:
            raise PipelineError(f"rank {self.rank} expected {tag} from rank {peer} but {found} is next on that edge")
        return tensor

    def all_reduce(self, tensor: Tensor, ranks: Sequence[int], key: str) -> bool:
        slot = (key, tuple(ranks))
        posted = self.network.posted[slot]
        posted.setdefault(self.rank, tensor.detach().clone())
        if len(posted) < len(ranks):
            return False
        total = torch.zeros_like(tensor)
        for rank in ranks:  # fixed order: the same bits on every rank
            total += posted[rank]
        tensor.copy_(total)
        done = self.network.collected[slot]
        done.add(self.rank)
        if len(done) == len(ranks):
            del self.network.posted[slot], self.network.collected[slot]
        return True

    def finish(self) -> None:
        """Nothing to wait for: what was sent is a copy, and the checker proved that somebody takes it."""
