"""Symmetric-memory transport: as `cuda_ipc`, with the slots in memory of torch's symmetric allocator.

For machines that cannot open handles of plain allocations, as in some containers: torch then exports memory by file
descriptor or fabric handle, and maps it on every rank. Events are shared as in `cuda_ipc`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from interlace.comm.process.rendezvous import Rendezvous
from interlace.comm.transports.cuda_ipc import SLOTS, CudaIpcTransport, Window


class SymmetricWindow:
    """A window that torch allocates and maps."""

    def __init__(self, rendezvous: Rendezvous, slot_bytes: int) -> None:
        """Collective. Raises CommError on every rank, with the reasons of the failed ranks."""
        self.addresses: list[int] = []
        with rendezvous.collective_step("allocating symmetric memory"):
            import torch.distributed._symmetric_memory as memory

            self._tensor: Any = memory.empty(SLOTS * slot_bytes, dtype=torch.uint8, device=rendezvous.device)
        with rendezvous.collective_step("mapping symmetric memory"):
            self._handle: Any = memory.rendezvous(self._tensor, rendezvous.process_group.group_name)
            self.addresses = list(self._handle.buffer_ptrs)

    def close(self) -> None:
        self.addresses, self._handle, self._tensor = [], None, None


class SymmMemTransport(CudaIpcTransport):
    """One rank over symmetric memory. Made by `interlace.comm.connect`."""

    name = "symm_mem"
    path = "symm_mem copy engines"

    def allocate(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Plain memory: handles of plain allocations may not open here, so everything is staged."""
        return torch.empty(tuple(shape), dtype=dtype, device=self.device)

    @classmethod
    def _open_window(cls, rendezvous: Rendezvous, slot_bytes: int) -> Window:
        return SymmetricWindow(rendezvous, slot_bytes)
