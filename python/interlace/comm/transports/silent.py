"""The transport of a rank that computes with what it has: nobody answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from interlace.comm.transports.base import NO_ARGUMENTS, Arguments, Capabilities, CommError, Copy, Ticket, Transport


class SilentTransport(Transport):
    """For what a rank of `world` does between its transfers: shapes, and time, need no answer.

    computes: whether what would be done with what arrives (a sum) is done with the zeros that stand for it.
    messages, bytes: how many copies went out, and how large they were.
    """

    name = "silent"

    def __init__(self, world: int, *, device: torch.device | str = "cpu", computes: bool = False) -> None:
        self.rank, self.world, self.timeout, self.device = 0, world, 0.0, torch.device(device)
        self._computes = computes
        self.messages = self.bytes = 0

    @classmethod
    def capabilities(cls) -> Capabilities:
        return Capabilities(cls.name, "cpu")

    def allocate(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Zeros where they are computed with: any other content might be no number, which takes other time."""
        make = torch.zeros if self._computes else torch.empty
        return make(tuple(shape), dtype=dtype, device=self.device)

    def copy_batch(
        self,
        outgoing: Sequence[Copy],
        incoming: Sequence[Copy],
        label: str,
        then: Callable[[], None] | None = None,
        arguments: Arguments = NO_ARGUMENTS,
    ) -> Ticket:
        self.messages += len(outgoing)
        self.bytes += sum(copy.tensor.numel() * copy.tensor.element_size() for copy in outgoing)
        if self._computes:
            for copy in incoming:
                copy.tensor.zero_()
            if then is not None:
                then()
        return _Done()

    def signal(self, peer: int) -> None:
        """Nobody sees it."""

    def wait(self, peer: int) -> None:
        """For nobody."""

    def close(self) -> None:
        """Nothing is held."""


class _Done:
    error: CommError | None = None
    event: torch.Event | None = None

    def wait(self) -> None:
        """There is nothing to wait for."""

    def done(self) -> bool:
        return True
