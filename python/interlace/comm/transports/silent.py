"""No-op transport: for dry runs of one rank without peers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from interlace.comm.process.agreement import NO_ARGUMENTS, Arguments
from interlace.comm.transports.base import Copies, Then, Ticket, Transport


class SilentTransport(Transport):
    """For the work of one rank of `world` between its transfers: shapes and time do not depend on received values.

    computes: whether computations on received data (a sum) run, with zeros in place of the data.
    messages, bytes: number of outgoing copies, and their total size.
    """

    name = "silent"

    def __init__(self, world: int, *, device: torch.device | str = "cpu", computes: bool = False) -> None:
        self.rank, self.world, self.timeout, self.device = 0, world, 0.0, torch.device(device)
        self._computes = computes
        self.messages = self.bytes = 0

    def allocate(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Zeros if the tensor is used in computations: other content might be NaN, which takes a different time."""
        make = torch.zeros if self._computes else torch.empty
        return make(tuple(shape), dtype=dtype, device=self.device)

    def copy_batch(
        self, outgoing: Copies, incoming: Copies, label: str, then: Then = None, arguments: Arguments = NO_ARGUMENTS
    ) -> Ticket:
        self.messages += len(outgoing)
        self.bytes += sum(copy.tensor.nbytes for copy in outgoing)
        if self._computes:
            for copy in incoming:
                copy.tensor.zero_()
            if then is not None:
                then()
        return Ticket(self.device)

    def close(self) -> None:
        """No-op: there are no resources."""
