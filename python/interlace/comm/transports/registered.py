"""Registered memory: tensors of one rank that peers map and read in place.

Regions are created on demand and kept. The region of a freed tensor is reused by the next tensor that fits. Peers map a
region when they first read from it.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from interlace._core import Exchange

LEAST = 64 << 10  # bytes; smaller tensors are not worth one of the few regions


class Memory(Protocol):
    """Source of regions."""

    def create(self, size: int) -> tuple[Any, bytes, Callable[[], None]]:
        """(new memory, handle for peers to map it, function that releases the handle). Raises OSError if out of
        memory.
        """

    def lease(self, memory: Any) -> tuple[Any, Tensor]:
        """(an object that lives as long as the tensor's storage, a uint8 tensor of all the memory)."""

    def address(self, memory: Any) -> int: ...

    def map(self, rank: int, handle: bytes, size: int) -> tuple[int, Any]:
        """(address of a peer's region in this process, object that keeps it mapped)."""


class _Region(NamedTuple):
    number: int
    memory: Any
    size: int


class Regions:
    """The registered memory of one rank, and its mappings of peers' regions."""

    def __init__(self, exchange: Exchange, memory: Memory) -> None:
        self._exchange: Exchange | None = exchange
        self._memory = memory
        self._free: list[_Region] = []
        self._count = 0
        self._mapped: list[Any] = []
        self._releases = contextlib.ExitStack()

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor | None:
        """A tensor in registered memory; None if it is too small for a region, or if no memory is left."""
        size = math.prod(shape) * dtype.itemsize
        if size < LEAST or self._exchange is None:
            return None
        region = self._take(size)
        if region is None:
            return None
        lease, tensor = self._memory.lease(region.memory)
        weakref.finalize(lease, self._free.append, region)
        return tensor[:size].view(dtype).view(shape)

    def _take(self, size: int) -> _Region | None:
        """The smallest free region that fits, unless most of it would be unused; else a new one."""
        fitting = [region for region in self._free if size <= region.size <= 2 * size + mmap.PAGESIZE]
        if fitting:
            region = min(fitting, key=lambda region: region.size)
            self._free.remove(region)
            return region
        if self._count == Exchange.REGIONS or self._exchange is None:
            return None
        rounded = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        try:
            memory, handle, end = self._memory.create(rounded)
        except OSError:
            return None
        self._releases.callback(end)
        region = _Region(self._count, memory, rounded)
        self._count += 1
        self._exchange.add_region(region.number, self._memory.address(memory), rounded, handle)
        return region

    def map(self, rank: int, number: int) -> None:
        """Maps a region of a peer. Raises CommError or OSError."""
        if self._exchange is None:
            return
        size, handle = self._exchange.region_of(rank, number)
        address, keeps = self._memory.map(rank, handle, size)
        self._mapped.append(keeps)
        self._exchange.map_region(rank, number, address, size)

    def close(self) -> None:
        """Ends new mappings by peers, and unmaps the peers' regions. Tensors stay valid."""
        self._exchange = None
        self._mapped.clear()
        self._free.clear()
        self._releases.close()
