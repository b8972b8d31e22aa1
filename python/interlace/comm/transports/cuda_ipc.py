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
import time
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch

from interlace.comm.copiers import copy_bytes, engine_missing
from interlace.comm.rendezvous import Rendezvous
from interlace.comm.transports.base import Capabilities, CommError
from interlace.comm.transports.shm import SLOTS, Segment, ShmTransport, born

SLOT_BYTES = 8 << 20  # copy engines reach their speed from about 1 MiB on
FAREWELL = 5.0  # seconds in which peers may read what they have been told of before this rank frees it
HOST_SLOT_BYTES = 4096  # of the shared host memory, whose slots are not used here
_READY = 0  # cudaSuccess


class Window(Protocol):
    """Device memory of SLOTS slots on each rank. addresses[r]: where rank r's lies, in this process."""

    addresses: list[int]

    def close(self) -> None:
        """Unmaps what is the peers' and frees what is this rank's."""


class IpcWindow:
    """A window of plain device memory, opened by handles."""

    def __init__(self, rendezvous: Rendezvous, slot_bytes: int) -> None:
        """Collective. Raises CommError on every rank, with the reasons of those that cannot."""
        self.addresses: list[int] = []
        self._own = 0
        with contextlib.ExitStack() as undo:
            undo.callback(self.close)
            size = f"{SLOTS * slot_bytes >> 20} MiB"
            with rendezvous.together("sharing device memory"), _trying(f"share {size} of device memory"):
                self._own = _cupy().malloc(SLOTS * slot_bytes)
                handle = _cupy().ipcGetMemHandle(self._own)
            handles = _exchanged(rendezvous, [handle], "exchanging handles of memory")
            with rendezvous.together("mapping device memory"):
                for rank, (found,) in enumerate(handles):
                    with _trying(f"map the device memory of rank {rank}"):
                        self.addresses.append(self._own if rank == rendezvous.rank else _cupy().ipcOpenMemHandle(found))
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

    def __init__(self, rendezvous: Rendezvous) -> None:
        """Collective. Raises CommError on every rank, with the reasons of those that cannot."""
        self._of: list[list[int]] = []  # by rank
        self._made: list[int] = []
        with contextlib.ExitStack() as undo:
            undo.callback(self.close)
            runtime, handles = _cupy(), []
            with rendezvous.together("sharing events"), _trying("share events"):
                for _ in range(SLOTS * (1 + rendezvous.world)):
                    flags = runtime.eventDisableTiming | runtime.eventInterprocess
                    self._made.append(runtime.eventCreateWithFlags(flags))
                    handles.append(runtime.ipcGetEventHandle(self._made[-1]))
            own = list(self._made)
            given = _exchanged(rendezvous, handles, "exchanging handles of events")
            with rendezvous.together("opening events"):
                for rank, found in enumerate(given):
                    self._of.append(own if rank == rendezvous.rank else [])
                    with _trying(f"open the events of rank {rank}"):
                        for handle in found if rank != rendezvous.rank else ():
                            self._made.append(runtime.ipcOpenEventHandle(handle))
                            self._of[rank].append(self._made[-1])
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
    def _open_window(cls, rendezvous: Rendezvous, slot_bytes: int) -> Window:
        return IpcWindow(rendezvous, slot_bytes)

    @classmethod
    def connect(cls, rendezvous: Rendezvous, *, slot_bytes: int = SLOT_BYTES) -> CudaIpcTransport:
        """Collective. Raises CommError on every rank, with the reasons of those that cannot."""
        segment, processes = cls.share(rendezvous, HOST_SLOT_BYTES)
        with torch.cuda.device(rendezvous.device), contextlib.ExitStack() as undo:
            _reach(rendezvous)
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
            raise RuntimeError("the transport was closed meanwhile")  # the batch says of which rank and operation
        # Batches run under the transport's stream.
        stream = 0 if self._stream is None else torch.cuda.current_stream(self.device).cuda_stream
        return self._window, self._events, stream

    def _let_peers_read(self, events: Events) -> None:
        """Waits for the copies out of this rank's slots that peers have counted, which means: enqueued."""
        deadline = time.monotonic() + min(self.timeout, FAREWELL)
        for slot, readers in enumerate(self._readers):
            for peer, _ in readers:
                process, start = self.processes[peer]
                while _cupy().eventQuery(events.read(peer, self.rank, slot)) != _READY:
                    if time.monotonic() > deadline or born(process) != start:
                        break
                    time.sleep(1e-4)

    def _shut(self) -> None:
        super()._shut()
        window, events = self._window, self._events
        self._window = self._events = None
        with contextlib.ExitStack() as device:
            if self._stream is not None:
                device.enter_context(torch.cuda.device(self.device))
                with contextlib.suppress(RuntimeError):
                    self._stream.synchronize()
            if events is not None:
                with contextlib.suppress(RuntimeError):
                    self._let_peers_read(events)
            for part in (events, window):
                if part is not None:
                    part.close()


def _reach(rendezvous: Rendezvous) -> None:
    """Collective. Raises CommError on every rank if a GPU cannot read another's. Ranks may see GPUs by other numbers:
    they are named by PCI address."""
    what, runtime = "reaching the other GPUs", _cupy()
    with rendezvous.together(what):
        name = runtime.deviceGetPCIBusId(rendezvous.device.index)
    names = rendezvous.exchange(name, what)
    with rendezvous.together(what):
        for rank, other in enumerate(names):
            try:
                index = runtime.deviceGetByPCIBusId(other)
            except Exception:
                continue  # not visible to this process: opening its handle will tell
            if other != name and not runtime.deviceCanAccessPeer(rendezvous.device.index, index):
                raise CommError(f"no peer access from {name} to {other} of rank {rank}")


def _exchanged(rendezvous: Rendezvous, handles: Sequence[bytes], what: str) -> list[list[bytes]]:
    """Every rank's handles. Raises CommError if one is not of this rank's length."""
    given = rendezvous.exchange([handle.hex() for handle in handles], what)
    with rendezvous.together(what):
        read = [[_handle(text, len(mine)) for text, mine in zip(texts, handles)] for texts in given]
    return read


def _handle(text: str, length: int) -> bytes:
    handle = bytes.fromhex(text)
    if len(handle) != length:
        raise CommError(f"a handle has {len(handle)} bytes instead of {length}")
    return handle


@contextlib.contextmanager
def _trying(what: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise CommError(f"cannot {what} ({error})") from error


def _missing() -> str:
    if why := engine_missing():
        return why
    try:
        _cupy()
    except Exception as error:  # what a library that is half there raises
        return f"CuPy cannot be imported ({error}): pip install 'interlace[cuda13]'"
    return ShmTransport.capabilities().missing


def _cupy() -> Any:
    from cupy.cuda import runtime

    return runtime
