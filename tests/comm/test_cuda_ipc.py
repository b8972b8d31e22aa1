"""The protocol of cuda_ipc without a GPU. Ranks are threads, device memory is host memory, and the models of streams
and events make copies happen late. A missing wait shows as wrong bytes.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import queue
import random
import re
import threading
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from interlace.comm import CommError
from interlace.comm.channels.edges import TransportEdge
from interlace.comm.process.paths import Paths
from interlace.comm.process.rendezvous import Rendezvous
from interlace.comm.transports import cuda_ipc
from interlace.comm.transports.base import Copy, peers_of
from interlace.comm.transports.cuda_ipc import EVENTS, SLOTS, CudaIpcTransport
from interlace.comm.transports.shm import Segment, start_time_of

SLOT_BYTES = 256
ERROR = 999
ADDRESSES, SIZES = ctypes.POINTER(ctypes.c_uint64), ctypes.POINTER(ctypes.c_size_t)
SIGNATURES = {  # of cuMemcpyBatchAsync, cuEventRecord and cuStreamWaitEvent in cuda.h of CUDA 13
    "batch": [ADDRESSES, ADDRESSES, SIZES, ctypes.c_size_t, ctypes.POINTER(ctypes.c_int), SIZES, ctypes.c_size_t,
              ctypes.c_void_p],
    "record": [ctypes.c_void_p, ctypes.c_void_p],
    "wait": [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint],
}  # fmt: skip


class Device:
    """Streams that run late, and events with CUDA semantics: a wait is for the last record before it was enqueued."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.recorded: dict[int, int] = defaultdict(int)  # event -> times recorded on the host
        self.reached: dict[int, int] = defaultdict(int)  # event -> times reached by a stream
        self.changed = threading.Condition()
        self.streams: dict[threading.Thread, queue.Queue] = {}
        self.waits, self.skips_waits = 0, False
        self.memories: list[torch.Tensor] = []
        self.functions = [
            ctypes.CFUNCTYPE(ctypes.c_int, *types)(self._answered(getattr(self, name)))
            for name, types in SIGNATURES.items()
        ]

    def addresses(self) -> list[int]:
        """Addresses of the functions for compiled code."""
        return [ctypes.cast(function, ctypes.c_void_p).value for function in self.functions]

    @staticmethod
    def _answered(function: Any) -> Any:
        def call(*arguments: Any) -> int:
            try:
                function(*arguments)
            except AssertionError:
                return ERROR
            return 0

        return call

    def stream(self) -> queue.Queue:
        """The stream of the calling thread: each transport has one thread."""
        with self.changed:
            thread = threading.current_thread()
            if thread not in self.streams:
                work = self.streams[thread] = queue.Queue()
                threading.Thread(target=self._run, args=(work,), daemon=True).start()
            return self.streams[thread]

    def _run(self, work: queue.Queue) -> None:
        while True:
            call = work.get()
            time.sleep(self.random.random() * 1e-3)
            call()
            work.task_done()

    def batch(self, to, source, sizes, count, attributes, starts, attribute_count, stream) -> None:
        assert attributes[:6] == [1, 0, 0, 0, 0, 1]  # in the order of the stream, no hints, concurrent with computation
        assert (attribute_count, starts[0], stream) == (1, 0, None)
        self.copy_bytes(to[:count], source[:count], sizes[:count])

    def copy_bytes(self, to: list[int], source: list[int], sizes: list[int]) -> None:
        for arguments in zip(to, source, sizes):
            self.stream().put(lambda arguments=arguments: ctypes.memmove(*arguments))

    def record(self, event: int, stream: int) -> None:
        with self.changed:
            self.recorded[event] += 1
            count = self.recorded[event]

        def reach() -> None:
            with self.changed:
                self.reached[event] = count
                self.changed.notify_all()

        self.stream().put(reach)

    def wait(self, stream: int, event: int, flags: int) -> None:
        with self.changed:
            count = self.recorded[event]
            self.waits += 1
        assert count, "waits for an event that was never recorded"
        if self.skips_waits:
            return

        def wait() -> None:
            with self.changed:
                assert self.changed.wait_for(lambda: self.reached[event] >= count, 20)

        self.stream().put(wait)

    def eventQuery(self, event: int) -> int:
        with self.changed:
            return 0 if self.reached[event] == self.recorded[event] else 600

    def drain(self) -> None:
        for work in list(self.streams.values()):
            work.join()


class Window:
    def __init__(self, memories: list[torch.Tensor]) -> None:
        self.addresses = [memory.data_ptr() for memory in memories]
        self.closed = False

    def close(self) -> None:
        self.closed = True


def events(world: int) -> SimpleNamespace:
    first = 1 + world * EVENTS
    return SimpleNamespace(
        ready=[*range(1, first)], read=[*range(first, first + world * world * EVENTS)], close=lambda: None
    )


class HostRegions:
    """Registered memory of the model."""

    def create(self, size: int) -> Any:
        memory = torch.zeros(size, dtype=torch.uint8)
        return memory, memory.data_ptr().to_bytes(64, "little"), lambda: None

    def lease(self, memory: torch.Tensor) -> Any:
        array = memory.numpy()
        return array, torch.from_numpy(array)

    def address(self, memory: torch.Tensor) -> int:
        return memory.data_ptr()

    def map(self, rank: int, handle: bytes, size: int) -> Any:
        return int.from_bytes(handle, "little"), None


@pytest.fixture
def ranks(monkeypatch):
    made, devices = [], []

    def make(world: int, seed: int = 0, timeout: float = 20.0):
        device = Device(seed)
        devices.append(device)
        monkeypatch.setattr(cuda_ipc, "_driver_functions", device.addresses)
        monkeypatch.setattr(cuda_ipc, "IpcMemory", HostRegions)
        monkeypatch.setattr(cuda_ipc, "_cupy", lambda: device)
        descriptor = Segment.create(world, 4096)
        memories = [torch.zeros(SLOTS * SLOT_BYTES, dtype=torch.uint8) for _ in range(world)]
        device.memories = memories  # kept while its streams may run
        process = (os.getpid(), start_time_of(os.getpid()))
        transports = [
            CudaIpcTransport(
                rank, Segment(world, 4096, descriptor), [process] * world, device="cpu", timeout=timeout,
                slot_bytes=SLOT_BYTES, window=Window(memories), events=events(world),
            )
            for rank in range(world)
        ]  # fmt: skip
        os.close(descriptor)
        made.extend(transports)
        return device, transports, memories

    yield make
    for transport in made:
        transport.close()
    for device in devices:
        device.drain()


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("seed", range(4))
def test_bytes_arrive_whole_though_streams_run_late(ranks, world, seed):
    """Sizes from zero to many slots; every batch overwrites the sent and received data of the previous one."""
    device, transports, _ = ranks(world, seed)
    sizes = [0, 1, SLOT_BYTES, 5 * SLOT_BYTES * SLOTS + 7, 100]
    sources = [torch.zeros(max(sizes), dtype=torch.uint8) for _ in range(world)]
    arrived = [[torch.zeros(max(sizes), dtype=torch.uint8) for _ in range(world)] for _ in range(world)]
    for step, size in enumerate(sizes * 2):
        wanted = [torch.randint(0, 256, (size,), dtype=torch.uint8) for _ in range(world)]
        tickets = []
        for rank, transport in enumerate(transports):
            sources[rank][:size] = wanted[rank]
            outgoing = [Copy(peer, sources[rank][:size]) for peer in peers_of(rank, world)]
            incoming = [Copy(peer, arrived[rank][peer][:size]) for peer in peers_of(rank, world)]
            tickets.append(transport.copy_batch(outgoing, incoming, f"step {step}"))
        for ticket in tickets:
            ticket.wait()
        device.drain()  # on a GPU: the wait for the ticket's event
        for rank in range(world):
            for peer in peers_of(rank, world):
                assert torch.equal(arrived[rank][peer][:size], wanted[peer])
    assert device.waits > 0


def test_messages_of_a_pipeline_edge_are_sent_ahead(ranks):
    """The sender finishes all messages before the receiver asks for the first. They fill the slots many times."""
    device, transports, _ = ranks(2)
    edges = [TransportEdge(transport, Paths(0)) for transport in transports]
    messages = [torch.randint(0, 256, (size,), dtype=torch.uint8) for size in (1, 50 * SLOT_BYTES + 3, SLOT_BYTES, 7)]
    sent = [edges[0].send(message, 1) for message in messages]
    arrived = [torch.zeros_like(message) for message in messages]
    for tensor in arrived:
        edges[1].receive(tensor, 0).wait()
    for work in sent:
        work.wait()
        assert work.is_completed()
    device.drain()  # on a GPU: the wait of the receiving stream
    assert all(torch.equal(*pair) for pair in zip(messages, arrived, strict=True))
    assert [transport.paths for transport in transports] == [{"pipeline edge": {"cuda_ipc copy engines"}}] * 2


@pytest.mark.parametrize("skips_waits", [False, True])
def test_registered_memory_is_read_before_it_is_written_anew(ranks, skips_waits):
    """The sender's stream overwrites memory after the batch ends there: with waits, after its readers' reads."""
    wrong = False
    for seed in range(40 if skips_waits else 3):  # threads may come in the right order by chance
        device, transports, _ = ranks(3, seed)
        device.skips_waits = skips_waits
        sources = [transport.allocate((100_000,), torch.uint8) for transport in transports]
        wanted = [torch.randint(1, 256, (100_000,), dtype=torch.uint8) for _ in transports]
        arrived = [[torch.zeros(100_000, dtype=torch.uint8) for _ in transports] for _ in transports]
        tickets = []
        for rank, transport in enumerate(transports):
            sources[rank].copy_(wanted[rank])
            outgoing = [Copy(peer, sources[rank]) for peer in peers_of(rank, 3)]
            incoming = [Copy(peer, arrived[rank][peer]) for peer in peers_of(rank, 3)]
            overwrite = sources[rank].zero_
            tickets.append(
                transport.copy_batch(outgoing, incoming, "x", lambda call=overwrite, on=device: on.stream().put(call))
            )
        for ticket in tickets:
            ticket.wait()
        device.drain()
        assert [transport.paths["x"] for transport in transports] == [{"cuda_ipc copy engines, registered memory"}] * 3
        pairs = [(arrived[rank][peer], wanted[peer]) for rank in range(3) for peer in peers_of(rank, 3)]
        wrong = not all(torch.equal(result, right) for result, right in pairs)
        if wrong:
            break
    assert wrong == skips_waits


def test_a_failure_of_the_driver_is_an_error(ranks):
    device, transports, _ = ranks(2)
    device.functions[0] = ctypes.CFUNCTYPE(ctypes.c_int, *SIGNATURES["batch"])(lambda *_: ERROR)
    transports[0]._exchange.use_device(device.addresses(), 0, SLOT_BYTES, [0, 0], [1] * 2 * EVENTS, [1] * 4 * EVENTS)
    tickets = [t.copy_batch([Copy(1 - r, torch.ones(4))], [], "x") for r, t in enumerate(transports)]
    with pytest.raises(CommError, match=r"rank 0, x .batch 0.: RuntimeError: cuMemcpyBatchAsync: CUDA error 999"):
        tickets[0].wait()


def test_a_missing_wait_is_caught_by_this_model(ranks):
    """Check of the model: without the waits for "ready" or "read", bytes are wrong."""
    wrong = 0
    for seed in range(5):
        device, transports, _ = ranks(2, seed)
        device.skips_waits = True
        source = [torch.randint(0, 256, (40 * SLOT_BYTES,), dtype=torch.uint8) for _ in range(2)]
        arrived = [torch.zeros(40 * SLOT_BYTES, dtype=torch.uint8) for _ in range(2)]
        tickets = [
            t.copy_batch([Copy(1 - r, source[r])], [Copy(1 - r, arrived[r])], "x") for r, t in enumerate(transports)
        ]
        for ticket in tickets:
            ticket.wait()
        device.drain()
        wrong += not all(torch.equal(arrived[r], source[1 - r]) for r in range(2))
    assert wrong


def test_shapes_that_differ_are_named_and_nothing_hangs(ranks):
    device, transports, _ = ranks(2, timeout=5.0)
    sources, arrived = [torch.zeros(4), torch.zeros(5)], [torch.zeros(4), torch.zeros(4)]
    tickets = [
        t.copy_batch([Copy(1 - r, sources[r])], [Copy(1 - r, arrived[r])], "gather") for r, t in enumerate(transports)
    ]
    for ticket in tickets:
        with pytest.raises(CommError, match=r"gather.*(5 float32, 4 float32 expected|aborted)"):
            ticket.wait()
    device.drain()  # before the tensors are freed: enqueued copies still read them


def test_close_frees_the_window_once(ranks):
    _, transports, _ = ranks(2)
    window = transports[0]._window
    transports[0].close()
    transports[0].close()
    assert window.closed
    with pytest.raises(CommError, match="closed"):
        transports[0].copy_batch([], [], "late")


def test_memory_is_freed_only_after_peers_have_read_it(ranks, monkeypatch):
    device, transports, memories = ranks(3)
    slow = threading.Event()
    copy = device.copy_bytes

    def late(to, source, sizes):
        if any(memories[0].data_ptr() <= address < memories[0].data_ptr() + SLOTS * SLOT_BYTES for address in source):
            device.stream().put(lambda: slow.wait(60))
        copy(to, source, sizes)

    monkeypatch.setattr(device, "copy_bytes", late)
    source, arrived = torch.randint(0, 256, (100,), dtype=torch.uint8), torch.zeros(2, 100, dtype=torch.uint8)
    tickets = [transports[0].copy_batch([Copy(1, source), Copy(2, source)], [], "x")]
    tickets += [transports[n].copy_batch([], [Copy(0, arrived[n - 1])], "x") for n in (1, 2)]
    for ticket in tickets:
        ticket.wait()  # everything is enqueued
    assert not arrived.any()
    transports[0]._window.close = memories[0].zero_
    threading.Timer(0.3, slow.set).start()
    transports[0].close()
    assert slow.is_set()
    device.drain()
    assert all(torch.equal(result, source) for result in arrived)


# ---------------------------------------------------------------------- connecting


class Runtime:
    """The part of CuPy's runtime used to connect: counts open resources, and may fail in one call of one rank."""

    eventDisableTiming, eventInterprocess = 2, 4

    def __init__(self, fails: tuple[str, int] | None = None) -> None:
        self.fails, self.lock = fails, threading.Lock()
        self.calls: dict[tuple[str, int], int] = defaultdict(int)
        self.held: set[tuple[str, int]] = set()

    def __getattr__(self, name: str) -> Any:
        opens = {"malloc": "free", "ipcOpenMemHandle": "ipcCloseMemHandle"}
        opens |= dict.fromkeys(("eventCreateWithFlags", "ipcOpenEventHandle"), "eventDestroy")
        if name.startswith("_"):
            raise AttributeError(name)

        def call(*arguments: Any) -> Any:
            rank = int(threading.current_thread().name.rpartition("_")[2])
            with self.lock:
                count = self.calls[name, rank] = self.calls[name, rank] + 1
                number = sum(self.calls.values())
                if (name, rank) == self.fails and count == (2 if name == "ipcOpenEventHandle" else 1):
                    raise KeyError("no more of that")
                if name in opens:
                    self.held.add((opens[name], number))
                elif name in opens.values():
                    self.held.remove((name, arguments[0]))  # once, and by the matching call
            if name == "deviceGetPCIBusId":
                return f"0000:{rank:02d}:00.0"
            if name in ("ipcGetMemHandle", "ipcGetEventHandle"):
                return number.to_bytes(64, "little")
            return {"deviceGetByPCIBusId": 0, "deviceCanAccessPeer": 1, "eventQuery": 0}.get(name, number)

        return call


class Table(Rendezvous):
    """Rendezvous of threads."""

    def __init__(self, rank: int, world: int, board: dict[Any, Any], together: threading.Barrier) -> None:
        self.rank, self.world, self.board, self.barrier = rank, world, board, together
        self.global_ranks, self.global_rank = range(world), rank
        self.device, self.timeout, self.round = torch.device("cpu", 0), 20.0, 0

    def exchange(self, value: Any, what: str, since: float | None = None) -> list[Any]:
        self.round += 1
        self.board[self.round, self.rank] = what, json.loads(json.dumps(value))
        self.barrier.wait(20)
        result = [self.board[self.round, rank] for rank in range(self.world)]
        assert {theirs for theirs, _ in result} == {what}
        return [value for _, value in result]


def connected(monkeypatch: Any, runtime: Runtime, world: int = 3) -> list[Any]:
    """The transport of each rank, or its error."""
    monkeypatch.setattr(cuda_ipc, "_cupy", lambda: runtime)
    monkeypatch.setattr(cuda_ipc, "_driver_functions", lambda: [0, 0, 0])
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    board, together = {}, threading.Barrier(world)

    def rank(number: int) -> Any:
        threading.current_thread().name = f"rank_{number}"
        try:
            return CudaIpcTransport.connect(Table(number, world, board, together), slot_bytes=1 << 20)
        except CommError as error:
            return str(error)

    with ThreadPoolExecutor(world) as threads:
        return list(threads.map(rank, range(world)))


def test_what_connecting_took_is_given_back(monkeypatch):
    runtime = Runtime()
    transports = connected(monkeypatch, runtime)
    memories, events = 3 + 3 * 2, 3 * 3 * EVENTS * 4
    assert len(runtime.held) == memories + events
    for rank, transport in enumerate(transports):
        threading.current_thread().name = f"rank_{rank}"
        transport.close()
    threading.current_thread().name = "MainThread"
    assert not runtime.held


@pytest.mark.parametrize(
    ("fails", "said"),
    [
        ("deviceGetPCIBusId", "reaching the other GPUs: rank 1: KeyError"),
        ("malloc", "sharing device memory: rank 1: cannot share 4 MiB of device memory .'no more of that'."),
        ("ipcGetMemHandle", "sharing device memory: rank 1: cannot share 4 MiB of device memory"),
        ("ipcOpenMemHandle", "mapping device memory: rank 1: cannot map the device memory of rank 0"),
        ("eventCreateWithFlags", "sharing events: rank 1: cannot share events"),
        ("ipcGetEventHandle", "sharing events: rank 1: cannot share events"),
        ("ipcOpenEventHandle", "opening events: rank 1: cannot open the events of rank 0"),
    ],
)
def test_failed_connect_names_the_rank_and_frees_everything(monkeypatch, fails, said):
    runtime = Runtime((fails, 1))
    for rank, text in enumerate(connected(monkeypatch, runtime)):
        assert re.match(f"rank {rank}, {said}", text), text
    assert not runtime.held


def test_without_a_gpu_it_says_why():
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert CudaIpcTransport.capabilities().missing == "no GPU or no driver"
