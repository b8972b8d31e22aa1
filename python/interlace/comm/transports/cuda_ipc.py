"""Processes of one host, CUDA tensors: copy engines move the bytes, so that the SMs are left to computation.

The protocol is that of `shm` (headers, counters and bells in shared host memory); only the slots lie in device memory,
which every rank allocates and all map. The host counts what was enqueued, events between processes say when it is done:

    sender     wait until the slot's readers have counted it read, and for their events; copy a piece into the slot;
               record the slot's "ready" event; count the piece as published
    receiver   see the count; wait for the "ready" event; copy the piece out; record "read"; count it as taken

all on the transport's stream, so a batch costs the host a few microseconds per piece and the SMs nothing. Events are
recorded before they are counted, so whoever waits for one waits for that record or a later one; and a later one does
not come before the count that frees the slot.

CuPy allocates and exports (a handle refers to the base of an allocation, which torch's allocator does not let out);
cuda-bindings copy (a batched copy is what goes to the copy engines, between two tensors of one GPU too).
`symm_mem` is the same with memory of torch's symmetric allocator.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from interlace.comm.copiers import copy_bytes, engine_missing
from interlace.comm.transports.base import Capabilities, CommError
from interlace.comm.transports.meeting import Meeting
from interlace.comm.transports.shm import SLOTS, Segment, ShmTransport

SLOT_BYTES = 8 << 20  # copy engines reach their speed from about 1 MiB on
HOST_SLOT_BYTES = 4096  # of the shared host memory, whose slots are not used here


class Window(Protocol):
    """Device memory of SLOTS slots on each rank. addresses[r]: where rank r's lies, in this process."""

    addresses: list[int]

    def close(self) -> None:
        """Unmaps what is the peers' and frees what is this rank's."""


class IpcWindow:
    """A window of plain device memory, opened by handles."""

    def __init__(self, meeting: Meeting, slot_bytes: int) -> None:
        """Collective. Raises CommError on every rank, with the reasons of those that cannot."""
        self.addresses: list[int] = []
        self._own = 0
        with contextlib.ExitStack() as undo:
            undo.callback(self.close)
            failure, handle = "", b""
            try:
                self._own = _cupy().malloc(SLOTS * slot_bytes)
                handle = _cupy().ipcGetMemHandle(self._own)
            except Exception as error:
                failure = f"cannot share {SLOTS * slot_bytes >> 20} MiB of device memory ({error})"
            meeting.agree(failure, "sharing device memory")
            for rank, found in enumerate(meeting.exchange(handle, "exchanging handles of memory")):
                try:
                    self.addresses.append(self._own if rank == meeting.rank else _cupy().ipcOpenMemHandle(found))
                except Exception as error:
                    failure = f"cannot map the device memory of rank {rank} ({error})"
                    break
            meeting.agree(failure, "mapping device memory")
            undo.pop_all()

    def close(self) -> None:
        own, self._own = self._own, 0
        addresses, self.addresses = self.addresses, []
        for address in addresses:
            if address != own:
                with contextlib.suppress(Exception):
                    _cupy().ipcCloseMemHandle(address)
        if own:
            with contextlib.suppress(Exception):
                _cupy().free(own)


class Events:
    """Events that one rank records and others wait for: one per slot of a sender, and one per slot and reader of it."""

    def __init__(self, meeting: Meeting) -> None:
        """Collective. Raises CommError on every rank, with the reasons of those that cannot."""
        self._of: list[list[int]] = []  # by rank
        self._made: list[int] = []
        with contextlib.ExitStack() as undo:
            undo.callback(self.close)
            runtime, failure, handles = _cupy(), "", []
            try:
                for _ in range(SLOTS * (1 + meeting.world)):
                    flags = runtime.eventDisableTiming | runtime.eventInterprocess
                    self._made.append(runtime.eventCreateWithFlags(flags))
                    handles.append(runtime.ipcGetEventHandle(self._made[-1]))
            except Exception as error:
                failure = f"cannot share events ({error})"
            own = list(self._made)
            meeting.agree(failure, "sharing events")
            for rank, found in enumerate(meeting.exchange(handles, "exchanging handles of events")):
                self._of.append(own if rank == meeting.rank else [])
                try:
                    for handle in found if rank != meeting.rank else ():
                        self._made.append(runtime.ipcOpenEventHandle(handle))
                        self._of[rank].append(self._made[-1])
                except Exception as error:
                    failure = f"cannot open the events of rank {rank} ({error})"
                    break
            meeting.agree(failure, "opening events")
            undo.pop_all()

    def ready(self, sender: int, slot: int) -> int:
        """What `sender` records when a piece lies in its slot."""
        return self._of[sender][slot]

    def read(self, reader: int, sender: int, slot: int) -> int:
        """What `reader` records when it has read that piece."""
        return self._of[reader][SLOTS * (1 + sender) + slot]

    def close(self) -> None:
        events, self._made = self._made, []
        for event in events:
            with contextlib.suppress(Exception):
                _cupy().eventDestroy(event)


class CudaIpcTransport(ShmTransport):
    """One rank of several processes on one host, each with a GPU of its own or all with one. Made by `connect`."""

    name = "cuda_ipc"

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
        self.piece_bytes = slot_bytes
        self._window: Window | None = window
        self._events: Events | None = events

    @classmethod
    def capabilities(cls) -> Capabilities:
        return Capabilities(cls.name, "cuda", one_host=True, copy_engine=True, missing=_missing())

    @classmethod
    def _open_window(cls, meeting: Meeting, slot_bytes: int) -> Window:
        return IpcWindow(meeting, slot_bytes)

    @classmethod
    def connect(cls, meeting: Meeting, *, slot_bytes: int = SLOT_BYTES) -> CudaIpcTransport:
        """Collective. Raises CommError on every rank, with the reasons of those that cannot."""
        segment, processes = cls.share(meeting, HOST_SLOT_BYTES)
        with torch.cuda.device(meeting.device), contextlib.ExitStack() as undo:
            meeting.agree(_unreachable(meeting), "reaching the other GPUs")
            window = cls._open_window(meeting, slot_bytes)
            undo.callback(window.close)
            events = Events(meeting)
            undo.pop_all()
        return cls(
            meeting.rank, segment, processes,
            device=meeting.device, timeout=meeting.timeout, slot_bytes=slot_bytes, window=window, events=events,
        )  # fmt: skip

    def _copy_in(self, segment: Segment, slot: int, address: int, size: int) -> None:
        window, events, stream = self._parts()
        for reader, _ in self._readers[slot]:  # they have counted it read, so their events are recorded
            _cupy().streamWaitEvent(stream, events.read(reader, self.rank, slot))
        copy_bytes([window.addresses[self.rank] + slot * self.piece_bytes], [address], [size])
        _cupy().eventRecord(events.ready(self.rank, slot), stream)

    def _copy_out(self, segment: Segment, peer: int, slot: int, address: int, size: int) -> None:
        window, events, stream = self._parts()
        _cupy().streamWaitEvent(stream, events.ready(peer, slot))
        copy_bytes([address], [window.addresses[peer] + slot * self.piece_bytes], [size])
        _cupy().eventRecord(events.read(self.rank, peer, slot), stream)

    def _parts(self) -> tuple[Window, Events, int]:
        if self._window is None or self._events is None:
            raise CommError(f"rank {self.rank}: the {self.name} transport is closed")
        return self._window, self._events, 0 if self._stream is None else self._stream.cuda_stream

    def _shut(self) -> None:
        super()._shut()
        window, events = self._window, self._events
        self._window = self._events = None
        with contextlib.ExitStack() as device:
            if self._stream is not None:
                device.enter_context(torch.cuda.device(self.device))
                with contextlib.suppress(RuntimeError):
                    self._stream.synchronize()
            for part in (events, window):
                if part is not None:
                    part.close()


def _unreachable(meeting: Meeting) -> str:
    """Why this rank's GPU cannot read those of the others, "" if it can. By PCI address: ranks may see GPUs apart."""
    runtime = _cupy()
    name = runtime.deviceGetPCIBusId(meeting.device.index)
    for rank, other in enumerate(meeting.exchange(name, "naming the GPUs")):
        if other == name:
            continue
        try:
            index = runtime.deviceGetByPCIBusId(other)
        except Exception:
            continue  # not visible to this process: opening its handle will tell
        if not runtime.deviceCanAccessPeer(meeting.device.index, index):
            return f"no peer access from {name} to {other} of rank {rank}"
    return ""


def _missing() -> str:
    if why := engine_missing():
        return why
    try:
        _cupy()
    except ImportError as error:
        return f"CuPy cannot be imported ({error}): pip install 'interlace[cuda13]'"
    return ShmTransport.capabilities().missing


def _cupy() -> Any:
    from cupy.cuda import runtime

    return runtime
