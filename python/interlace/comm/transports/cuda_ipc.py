"""CUDA IPC transport: processes of one host, CUDA tensors. Copy engines move the bytes, so the SMs stay free.

The driver and its protocol are those of `shm` (`csrc/comm/exchange.h`): headers, counters and bells in shared host
memory. Only slots and regions are in device memory. Interprocess events signal when a copy is done. Everything is
enqueued on the transport's stream, so a batch costs one host call and no SM time.

CuPy allocates and exports the memory: a handle refers to the base of an allocation, which torch's allocator does not
expose. The driver calls functions of libcuda: its batched copy uses copy engines even between two tensors of one GPU.
`symm_mem` is the same with memory of torch's symmetric allocator.
"""

from __future__ import annotations

import contextlib
import ctypes
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from interlace._core import Exchange
from interlace.comm.process.errors import CommError
from interlace.comm.process.rendezvous import Rendezvous
from interlace.comm.transports.base import Capabilities
from interlace.comm.transports.copiers import engine_missing
from interlace.comm.transports.registered import Memory
from interlace.comm.transports.shm import Segment, ShmTransport, start_time_of

SLOTS = Exchange.SLOTS
SLOT_BYTES = 8 << 20  # copy engines reach full speed from about 1 MiB on
FAREWELL = 5.0  # seconds in which peers may read announced memory before this rank frees it
EVENTS = SLOTS + 1  # of a sender or reader: one per slot, and one for all regions
HOST_SLOT_BYTES = 4096  # slots of the shared host memory are not used here
_READY = 0  # cudaSuccess
_CUDA = 13000  # the CUDA version whose signatures `exchange.h` declares
_FUNCTIONS = ("cuMemcpyBatchAsync", "cuEventRecord", "cuStreamWaitEvent")


class Window(Protocol):
    """Device memory of SLOTS slots on each rank. addresses[r]: address of rank r's memory in this process."""

    addresses: list[int]

    def close(self) -> None:
        """Unmaps the peers' memory and frees this rank's memory."""


class IpcWindow:
    """A window of plain device memory, opened by handles."""

    def __init__(self, rendezvous: Rendezvous, slot_bytes: int) -> None:
        """Collective. Raises CommError on every rank, with the reasons of the failed ranks."""
        self.addresses: list[int] = []
        self._own = 0
        with contextlib.ExitStack() as undo:
            undo.callback(self.close)
            size = f"{SLOTS * slot_bytes >> 20} MiB"
            with rendezvous.collective_step("sharing device memory"), _as_comm_error(f"share {size} of device memory"):
                self._own = _cupy().malloc(SLOTS * slot_bytes)
                handle = _cupy().ipcGetMemHandle(self._own)
            handles = _exchanged(rendezvous, [handle], "exchanging handles of memory")
            with rendezvous.collective_step("mapping device memory"):
                for rank, (handle_of_rank,) in enumerate(handles):
                    with _as_comm_error(f"map the device memory of rank {rank}"):
                        self.addresses.append(
                            self._own if rank == rendezvous.rank else _cupy().ipcOpenMemHandle(handle_of_rank)
                        )
            undo.pop_all()

    def close(self) -> None:
        own_address, self._own = self._own, 0
        addresses, self.addresses = self.addresses, []
        for address in addresses:
            if address != own_address:
                with contextlib.suppress(Exception):
                    _cupy().ipcCloseMemHandle(address)
        if own_address:
            with contextlib.suppress(Exception):
                _cupy().free(own_address)


class _DeviceMemory:
    """Device memory of this process that peers can map; freed when no longer referenced."""

    def __init__(self, size: int) -> None:
        self.size, self.address = size, _cupy().malloc(size)

    def __del__(self) -> None:
        if address := self.__dict__.get("address"):
            with contextlib.suppress(Exception):
                _cupy().free(address)


class _Lease:
    """Object that a tensor in such memory references."""

    def __init__(self, memory: _DeviceMemory) -> None:
        self.memory = memory

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {"shape": (self.memory.size,), "typestr": "|u1", "data": (self.memory.address, False), "version": 3}


class _Mapped:
    """Device memory of a peer."""

    def __init__(self, handle: bytes) -> None:
        self.address = _cupy().ipcOpenMemHandle(handle)

    def __del__(self) -> None:
        if address := self.__dict__.get("address"):
            with contextlib.suppress(Exception):
                _cupy().ipcCloseMemHandle(address)


class IpcMemory:
    """Regions of device memory, for `Regions`."""

    def create(self, size: int) -> tuple[_DeviceMemory, bytes, Callable[[], None]]:
        try:
            memory = _DeviceMemory(size)
            return memory, _cupy().ipcGetMemHandle(memory.address), lambda: None  # handles need no cleanup
        except Exception as error:
            raise OSError(f"cannot share {size >> 20} MiB of device memory ({error})") from error

    def lease(self, memory: _DeviceMemory) -> tuple[_Lease, Tensor]:
        lease = _Lease(memory)
        return lease, torch.as_tensor(lease, device="cuda")

    def address(self, memory: _DeviceMemory) -> int:
        return memory.address

    def map(self, rank: int, handle: bytes, size: int) -> tuple[int, _Mapped]:
        with _as_comm_error(f"map {size >> 20} MiB of the device memory of rank {rank}"):
            mapped = _Mapped(handle)
        return mapped.address, mapped


class Events:
    """Events recorded by one rank and waited for by others.

    Each sender has one per slot and one for its regions; each reader of a sender has the same.
    """

    def __init__(self, rendezvous: Rendezvous) -> None:
        """Collective. Raises CommError on every rank, with the reasons of the failed ranks."""
        self._by_rank: list[list[int]] = []  # rank -> events
        self._events: list[int] = []
        with contextlib.ExitStack() as undo:
            undo.callback(self.close)
            runtime, handles = _cupy(), []
            with rendezvous.collective_step("sharing events"), _as_comm_error("share events"):
                for _ in range(EVENTS * (1 + rendezvous.world)):
                    flags = runtime.eventDisableTiming | runtime.eventInterprocess
                    self._events.append(runtime.eventCreateWithFlags(flags))
                    handles.append(runtime.ipcGetEventHandle(self._events[-1]))
            own_events = list(self._events)
            handles_of_ranks = _exchanged(rendezvous, handles, "exchanging handles of events")
            with rendezvous.collective_step("opening events"):
                for rank, rank_handles in enumerate(handles_of_ranks):
                    self._by_rank.append(own_events if rank == rendezvous.rank else [])
                    with _as_comm_error(f"open the events of rank {rank}"):
                        for handle in rank_handles if rank != rendezvous.rank else ():
                            self._events.append(runtime.ipcOpenEventHandle(handle))
                            self._by_rank[rank].append(self._events[-1])
            undo.pop_all()

    @property
    def ready(self) -> list[int]:
        """[sender, slot]: recorded by the sender when the slot holds a piece."""
        return [event for events in self._by_rank for event in events[:EVENTS]]

    @property
    def read(self) -> list[int]:
        """[reader, sender, slot]: recorded by the reader when it has read that piece."""
        return [event for events in self._by_rank for event in events[EVENTS:]]

    def close(self) -> None:
        events, self._events = self._events, []
        for event in events:
            with contextlib.suppress(Exception):
                _cupy().eventDestroy(event)


class CudaIpcTransport(ShmTransport):
    """One rank of several processes on one host, which have a GPU each or share one. Made by `connect`."""

    name = "cuda_ipc"
    path = "cuda_ipc copy engines"
    direct_path = "cuda_ipc copy engines, registered memory"

    def __init__(
        self,
        rank: int,
        segment: Segment,
        processes: Sequence[tuple[int, int]],
        *,
        device: torch.device,
        timeout: float,
        slot_bytes: int,
        window: Window,
        events: Events,
    ) -> None:
        super().__init__(rank, segment, processes, timeout=timeout, device=device)
        self._window: Window | None = window
        self._events: Events | None = events
        self._read = events.read
        assert self._exchange is not None
        with self._stream or contextlib.nullcontext():
            stream = 0 if self._stream is None else torch.cuda.current_stream(self.device).cuda_stream
        self._exchange.use_device(
            _driver_functions(), stream, slot_bytes, window.addresses, events.ready, self._read
        )  # fmt: skip

    def _memory_for_peers(self) -> Memory:
        return IpcMemory()

    @classmethod
    def capabilities(cls) -> Capabilities:
        return Capabilities(cls.name, "cuda", one_host=True, copy_engine=True, missing=_missing())

    @classmethod
    def _open_window(cls, rendezvous: Rendezvous, slot_bytes: int) -> Window:
        return IpcWindow(rendezvous, slot_bytes)

    @classmethod
    def connect(cls, rendezvous: Rendezvous, *, slot_bytes: int = SLOT_BYTES) -> CudaIpcTransport:
        """Collective. Raises CommError on every rank, with the reasons of the failed ranks."""
        segment, processes = cls.share(rendezvous, HOST_SLOT_BYTES)
        with torch.cuda.device(rendezvous.device), contextlib.ExitStack() as undo:
            _check_peer_access(rendezvous)
            window = cls._open_window(rendezvous, slot_bytes)
            undo.callback(window.close)
            events = Events(rendezvous)
            undo.callback(events.close)
            transport = cls(
                rendezvous.rank, segment, processes,
                device=rendezvous.device, timeout=rendezvous.timeout, slot_bytes=slot_bytes,
                window=window, events=events,
            )  # fmt: skip
            undo.pop_all()
        return transport

    def _wait_for_readers(self, exchange: Exchange) -> None:
        """Waits until copies out of this rank's memory are done, as far as peers have counted (enqueued) them."""
        deadline = time.monotonic() + min(self.timeout, FAREWELL)
        for slot, peer in exchange.readers():
            process, start = self.processes[peer]
            event = self._read[(peer * self.world + self.rank) * EVENTS + slot]
            while _cupy().eventQuery(event) != _READY:
                if time.monotonic() > deadline or start_time_of(process) != start:
                    break
                time.sleep(1e-4)

    def _shut(self) -> None:
        window, events, exchange = self._window, self._events, self._exchange
        self._window = self._events = None
        with contextlib.ExitStack() as device:
            if self._stream is not None:
                device.enter_context(torch.cuda.device(self.device))
                with contextlib.suppress(RuntimeError):
                    self._stream.synchronize()
            if events is not None and exchange is not None:
                with contextlib.suppress(RuntimeError):
                    self._wait_for_readers(exchange)
            super()._shut()
            for part in (events, window):
                if part is not None:
                    part.close()


def _check_peer_access(rendezvous: Rendezvous) -> None:
    """Checks that each GPU can read the others' memory. Collective. Otherwise raises CommError on every rank.

    GPUs are identified by PCI address, since ranks may number them differently.
    """
    operation, runtime = "reaching the other GPUs", _cupy()
    with rendezvous.collective_step(operation):
        name = runtime.deviceGetPCIBusId(rendezvous.device.index)
    names = rendezvous.exchange(name, operation)
    with rendezvous.collective_step(operation):
        for rank, peer_name in enumerate(names):
            try:
                index = runtime.deviceGetByPCIBusId(peer_name)
            except Exception:
                continue  # not visible to this process: opening its handle will show whether it works
            if peer_name != name and not runtime.deviceCanAccessPeer(rendezvous.device.index, index):
                raise CommError(f"no peer access from {name} to {peer_name} of rank {rank}")


def _exchanged(rendezvous: Rendezvous, handles: Sequence[bytes], operation: str) -> list[list[bytes]]:
    """Every rank's handles. Raises CommError if a handle has another length than this rank's."""
    answers = rendezvous.exchange([handle.hex() for handle in handles], operation)
    with rendezvous.collective_step(operation):
        read = [[_handle(text, len(own)) for text, own in zip(texts, handles)] for texts in answers]
    return read


def _handle(text: str, length: int) -> bytes:
    handle = bytes.fromhex(text)
    if len(handle) != length:
        raise CommError(f"a handle has {len(handle)} bytes, expected {length}")
    return handle


@contextlib.contextmanager
def _as_comm_error(action: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise CommError(f"cannot {action} ({error})") from error


def _driver_functions() -> list[int]:
    """Addresses of the functions that the driver of `exchange.h` calls. Raises CommError if libcuda lacks one."""
    with _as_comm_error("use libcuda"):
        find = ctypes.CDLL("libcuda.so.1").cuGetProcAddress_v2
        addresses = []
        for name in _FUNCTIONS:
            address, not_found = ctypes.c_void_p(), ctypes.c_int()
            flags = ctypes.c_uint64(0)
            status = find(name.encode(), ctypes.byref(address), ctypes.c_int(_CUDA), flags, ctypes.byref(not_found))
            if status or not_found.value or not address.value:
                raise CommError(f"the driver has no {name} of CUDA 13: update it to 580 or later")
            addresses.append(address.value)
    return addresses


def _missing() -> str:
    if reason := engine_missing():
        return reason
    try:
        _driver_functions()
    except CommError as error:
        return str(error)
    try:
        _cupy()
    except Exception as error:  # a partially installed library may raise anything
        return f"CuPy cannot be imported ({error}): pip install 'interlace[cuda13]'"
    return ShmTransport.capabilities().missing


def _cupy() -> Any:
    from cupy.cuda import runtime

    return runtime
