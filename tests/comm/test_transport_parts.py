"""Components of transports, emulated links, and leftovers of a closed transport."""

from __future__ import annotations

import errno
import gc
import mmap
import os
import re
import subprocess
import sys
import threading
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from interlace._core import Exchange
from interlace.comm import (
    CommError,
    EmulatedTransport,
    Transport,
    all_gather_into_tensor,
    all_reduce,
    connect,
    run_local,
    traced,
)
from interlace.comm.process.agreement import NO_ARGUMENTS
from interlace.comm.process.rendezvous import Rendezvous
from interlace.comm.transports import Copy, LocalHub, LocalTransport, emulated, queued, shm
from interlace.comm.transports.base import peers_of
from interlace.comm.transports.header import HEADER_BYTES, check_packed, header_of, pack, pack_abort
from interlace.comm.transports.process_group import GlooTransport, NcclTransport
from interlace.comm.transports.queued import _LastProgress, _QueuedTicket
from interlace.comm.transports.shm import Segment, ShmTransport, start_time_of
from tests.comm.jobs import TIMEOUT, batches, data, grown, on_shm_threads, used

# ---------------------------------------------------------------------- leftovers


def leaks(rank: int, kind: str) -> tuple[dict[str, int], list[dict[str, tuple[int, int]]]]:
    """Initial resources, and the growth after each way in which a transport may end."""

    def well() -> None:
        with connect(transport=kind, timeout=TIMEOUT) as group:
            all_gather_into_tensor(torch.empty(200), torch.ones(100), group)
            group.barrier()

    def forgotten() -> None:
        group = connect(transport=kind, timeout=TIMEOUT)
        all_gather_into_tensor(torch.empty(200), torch.ones(100), group)
        group.barrier()

    def wrong() -> str:
        with connect(transport=kind, timeout=TIMEOUT) as group:
            with pytest.raises(CommError) as error:
                all_gather_into_tensor(torch.empty(2 * (4 + rank)), torch.ones(4 + rank), group)
                group.barrier()
            return str(error.value)

    def late() -> str:
        with connect(transport=kind, timeout=TIMEOUT) as group:
            if rank == 1:
                dist.barrier()  # rank 0 has aborted
            group.timeout = 0.3
            with pytest.raises(CommError) as error:
                group.barrier()  # the late rank may still see that the other one had connected
                group.barrier()
            if rank == 0:
                dist.barrier()
            return str(error.value)

    well()  # sets up once-per-process resources
    dist.barrier()
    first, more = used(), []
    for way in (well, forgotten, wrong, late):
        told = [way() for _ in range(2)]
        dist.barrier()
        more.append(grown(first))
        del told
    return first, more


@pytest.mark.parametrize("kind", ["shm", "gloo"])
def test_nothing_is_left_when_a_transport_ends(pool: Any, kind: str) -> None:
    for first, more in pool.returned(2, leaks, kind, timeout=240):
        assert first["segments"] == first["named segments"] == 0
        assert more == [{}] * 4  # well, forgotten, wrong, late


def test_a_forgotten_transport_ends_its_thread() -> None:
    before = threading.active_count()
    group = LocalTransport(0, LocalHub(1))
    assert threading.active_count() == before + 1
    thread = group._thread
    del group
    gc.collect()
    thread.join(60)
    assert not thread.is_alive()


UNFINISHED = """
import os, torch
from interlace.comm.transports import Copy
from interlace.comm.transports.queued import _LastProgress, _QueuedTicket
from interlace.comm.transports.shm import Segment, ShmTransport, start_time_of
descriptor = Segment.create(2, 4096)
me = (os.getpid(), start_time_of(os.getpid()))
here, there = (ShmTransport(rank, Segment(2, 4096, descriptor), [me, me], timeout=600.0) for rank in range(2))
here.copy_batch([Copy(1, torch.ones(10_000))], [], "never taken")
print("the end")
"""


def test_a_program_ends_with_batches_under_way() -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", UNFINISHED], env=environment, capture_output=True, text=True, timeout=600
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "the end\n", "")


def without_memory(rank: int) -> str:
    def full(descriptor: int, offset: int, size: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.MonkeyPatch.context() as patch:
        if rank == 0:
            patch.setattr(os, "posix_fallocate", full)
        seen = ShmTransport.capabilities().missing
        patch.setattr(shm, "_missing", lambda: "")  # as if there had been enough a moment ago
        with pytest.raises(CommError) as error:
            connect(transport="shm", timeout=TIMEOUT)
        with connect(timeout=TIMEOUT) as group:
            assert group.name == "gloo"
            output = torch.empty(2)
            all_gather_into_tensor(output, torch.full((1,), float(rank)), group)
            assert output.tolist() == [0, 1]
    return f"{seen} | {error.value}"


def test_shm_without_memory_fails_on_all_ranks_or_falls_back(pool: Any) -> None:
    for rank, text in enumerate(pool.returned(2, without_memory)):
        seen, error = text.split(" | ")
        assert ("No space left" in seen) == (rank == 0)
        assert re.search(rf"rank {rank}, connecting by shared memory: rank 0: . MiB .* No space left", error), error


# ---------------------------------------------------------------------- parts


def ends(world: int = 2, slot_bytes: int = 4096) -> list[Exchange]:
    descriptor = Segment.create(world, slot_bytes)
    result = [Segment(world, slot_bytes, descriptor).exchange(rank) for rank in range(world)]
    os.close(descriptor)
    return result


def test_an_exchange_refuses_what_it_cannot_use() -> None:
    size = Exchange.size(2, 4096)
    memory = np.frombuffer(mmap.mmap(-1, size + 8), np.uint8)
    frozen = memory[:size].copy()
    frozen.flags.writeable = False
    for wrong, rank, message in [
        (memory[:size].view(np.int8), 0, "uint8"),
        (memory[:size].reshape(2, -1), 0, "one dimension"),
        (frozen, 0, "writable"),
        (memory[4 : size + 4], 0, "aligned to 8"),
        (memory[: size - 1], 0, f"{size} are needed"),
        (memory[:size], 2, "rank"),
        (memory[:size], -1, "rank"),
    ]:
        with pytest.raises(ValueError, match=message):
            Exchange(wrong, rank, 2, 4096)
    end, header = Exchange(memory[:size], 0, 2, 4096), bytes(HEADER_BYTES)
    for headers, copies, seconds, message in [
        ([header], [], 0.0, "a header for each rank"),
        ([header, b"short"], [], 0.0, "a header has 1024 bytes"),
        ([header, header], [(2, 0, 0)], 0.0, "rank"),
        ([header, header], [(0, 0, 0)], 0.0, "this rank itself"),
        *[([header, header], [], seconds, "seconds") for seconds in (-1.0, float("nan"), float("inf"))],
    ]:
        with pytest.raises(ValueError, match=message):
            end.run(0, headers, [header] * 2, copies, [], None, seconds)
    for call in (lambda: end.add_region(64, 0, 0, b""), lambda: end.map_region(2, 0, 0, 0), lambda: end.leave(3, b"")):
        with pytest.raises(ValueError, match="must lie between"):
            call()


def test_a_rank_that_waits_sleeps_until_it_is_rung_for() -> None:
    here, there = ends()
    assert here.wait(1, 1, 0.05) == Exchange.WAITING
    threading.Timer(0.1, there.signal, [0]).start()  # runs only if the wait has released the GIL
    start, busy = time.monotonic(), time.thread_time()
    assert here.wait(1, 1, 100.0) == Exchange.DONE
    assert time.monotonic() - start < 30 and time.thread_time() - busy < 0.05


def test_allocated_tensors_are_read_where_they_lie() -> None:
    """No staging, views included; freed memory is reused for the next tensor that fits."""

    def rank(group: Transport) -> bool:
        staged: list[str] = []
        group.before = lambda _, step: staged.append(step) if step == "stage" else None
        peers, places = peers_of(group.rank, group.world), set()
        for turn in range(4):
            mine = group.allocate((5, 20_000), torch.float32)
            mine.copy_(data(group.rank, (5, 20_000), torch.float32, turn))
            places.add(mine.data_ptr())
            arrived = {peer: torch.empty(3, 20_000) for peer in peers}
            outgoing = [Copy(peer, mine[1:4]) for peer in peers]
            group.copy_batch(outgoing, [Copy(*each) for each in arrived.items()], f"turn {turn}").wait()
            for peer, result in arrived.items():
                assert torch.equal(result, data(peer, (5, 20_000), torch.float32, turn)[1:4])
            assert group.paths[f"turn {turn}"] == {"shm, registered memory"}
            del mine, outgoing
        assert len(places) == 1 and not staged
        small, plain = group.allocate((3,), torch.int64), torch.arange(3.0)
        group.copy_batch(
            [Copy(peer, plain) for peer in peers], [Copy(peer, torch.empty(3)) for peer in peers], "z"
        ).wait()
        assert small.shape == (3,) and group.paths["z"] == {"shm"}
        return True

    assert on_shm_threads(3, rank) == [True] * 3


def test_a_tensor_in_registered_memory_outlives_its_transport() -> None:
    held = on_shm_threads(2, lambda group: group.allocate((100_000,), torch.float32).fill_(group.rank + 1.0))
    assert [float(tensor.sum()) for tensor in held] == [1e5, 2e5]


def test_without_memory_for_it_allocate_gives_any(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(size: int) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def rank(group: Transport) -> bool:
        monkeypatch.setattr(shm, "reserved", full)
        mine = group.allocate((100_000,), torch.float32).fill_(group.rank)
        output = torch.empty(200_000)
        all_gather_into_tensor(output, mine, group)
        return group.paths["all_gather_into_tensor"] == {"shm"} and float(output.sum()) == 1e5

    assert on_shm_threads(2, rank) == [True] * 2


def test_paths_are_logged_once_per_kind(caplog: pytest.LogCaptureFixture) -> None:
    def rank(group: Transport) -> dict[str, set[str]]:
        for _ in range(3):
            all_gather_into_tensor(torch.empty(6), torch.ones(3), group)
            all_reduce(torch.ones(200_000), group=group)
        return group.paths

    with caplog.at_level("INFO", logger="interlace.comm"):
        result = on_shm_threads(2, rank)
    assert result == [{"all_gather_into_tensor": {"shm"}, "all_reduce": {"shm"}}] * 2
    output = [record.getMessage() for record in caplog.records if record.name == "interlace.comm"]
    assert output == ["all_gather_into_tensor: shm", "all_reduce: shm"]  # by rank 0 alone


def test_a_process_is_known_by_its_start() -> None:
    assert start_time_of(os.getpid()) == start_time_of(os.getpid()) > 0  # type: ignore[operator]
    child = os.fork()
    if child == 0:
        os._exit(0)
    deadline = time.monotonic() + 60
    while start_time_of(child) is not None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert start_time_of(child) is None  # not waited for yet: it still has an entry
    os.waitpid(child, 0)
    assert start_time_of(child) is None


class ClockOfEachThread(threading.local):
    """A clock that advances only by the thread's sleeps, which wait until they may end."""

    now = 0.0
    may_end = threading.Event()  # of all threads

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        assert self.may_end.wait(TIMEOUT)
        self.now += seconds


def test_an_emulated_link_takes_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """0.1 s per batch on the link and 0.2 s latency: the second batch arrives 0.1 s after the first."""
    clock, both_issued = ClockOfEachThread(), threading.Barrier(2, timeout=TIMEOUT)
    monkeypatch.setattr(emulated, "time", clock)

    def rank(inner: Transport) -> None:
        group = EmulatedTransport(inner, bandwidth=4000 / 0.1, latency=0.2)
        peer, arrived, done = 1 - group.rank, [torch.zeros(1000) for _ in range(2)], []
        with traced(group) as trace:
            tickets = [
                group.copy_batch(
                    [Copy(peer, torch.full((1000,), float(n)))], [Copy(peer, to)], f"batch {n}",
                    lambda: done.append(clock.perf_counter()),
                )
                for n, to in enumerate(arrived)
            ]  # fmt: skip
            assert not any(ticket.done() for ticket in tickets)  # no call has waited for the link
            both_issued.wait()
            clock.may_end.set()
            for ticket in tickets:
                ticket.wait()
        assert done == pytest.approx([0.3, 0.4])
        assert [float(to.mean()) for to in arrived] == [0, 1]
        assert [(e.start, e.finish) for e in trace.of("copy")] == [(0.0, done[0]), (pytest.approx(0.1), done[1])]
        assert [event.label for event in trace.of("issue")] == ["batch 0", "batch 1"]
        output = torch.empty(4)
        all_gather_into_tensor(output, torch.full((2,), float(group.rank)), group)
        assert output.tolist() == [0, 0, 1, 1]
        group.barrier()

    run_local(2, rank)
    alone = LocalTransport(0, LocalHub(1))
    for wrong in ({"bandwidth": 0.0}, {"bandwidth": float("nan")}, {"bandwidth": 1.0, "latency": -1.0}):
        with pytest.raises(ValueError, match="must be a"):
            EmulatedTransport(alone, **wrong)
    alone.close()


class _Payload:
    """The part of NCCL that the transport uses, over gloo."""

    def __init__(self, group: Any) -> None:
        self.group, self.ended = group, ""

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor]) -> _Payload:
        assert len(outputs) == len(inputs) == self.group.size()
        assert all(tensor.dtype == torch.uint8 and tensor.is_contiguous() for tensor in [*outputs, *inputs])
        works = [self.group.send([tensor], peer, 9) for peer, tensor in enumerate(inputs) if tensor.numel()]
        works += [self.group.recv([tensor], peer, 9) for peer, tensor in enumerate(outputs) if tensor.numel()]
        for work in works:
            work.wait()
        return self

    def wait(self) -> None:
        pass

    def shutdown(self) -> None:
        self.ended = "shutdown"

    def abort(self) -> None:
        self.ended = "abort"


class _NcclOverGloo(NcclTransport):
    def __init__(self, rendezvous: Rendezvous) -> None:
        self._last = None
        GlooTransport.__init__(self, rendezvous)
        self._payload = _Payload(self._control)


def over_nccl(rank: int) -> list[str]:
    ended = []
    for mismatched in (False, True):
        with _NcclOverGloo(Rendezvous(dist.group.WORLD, torch.device("cpu"), TIMEOUT)) as group:
            payload = group._payload
            batches(group, 12)
            group.barrier()
            if mismatched:
                with pytest.raises(CommError, match=rf"rank {rank}\b.*operation {rank}\b"):
                    group.copy_batch([], [], f"operation {rank}").wait()
        ended.append(payload.ended)
    return ended


def test_the_transport_over_nccl_but_for_nccl(pool: Any) -> None:
    """Gloo replaces NCCL's all-to-all, as there is no GPU. Order, headers and errors are the real ones."""
    assert pool.returned(3, over_nccl) == [["shutdown", "abort"]] * 3


def test_long_texts_are_cut_for_display_but_compared_whole() -> None:
    long, tensors = "x" * 1000, [torch.empty(n) for n in range(200)]
    here = header_of(3, long, NO_ARGUMENTS, tensors)
    raw = pack(here)
    assert len(raw) == HEADER_BYTES
    check_packed(0, 1, here, raw)
    for other, message in [
        (header_of(3, long[:-1] + "y", NO_ARGUMENTS, tensors), "the ranks' programs differ"),
        (header_of(4, long, NO_ARGUMENTS, tensors), r"\(batch 4\), but rank 1 is in x+ \(batch 3\)"),
        (header_of(3, long, NO_ARGUMENTS, [*tensors[:-1], torch.empty(7)]), "rank 1 sends 0 float32 [+] 1 float32"),
    ]:
        with pytest.raises(CommError, match=message):
            check_packed(0, 1, other, raw)
    with pytest.raises(CommError, match="sent something else than a header"):
        check_packed(0, 1, here, b"\1" * HEADER_BYTES)
    with pytest.raises(CommError, match=r"rank 1 aborted \(because, é+"):
        check_packed(0, 1, here, pack_abort("because, " + "é" * 1000))


def test_a_wait_lasts_as_long_as_batches_before_it_move(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock advances by each unsuccessful wait; data moves during the first ten."""
    now, waits, progress = [100.0], list[float](), _LastProgress()
    monkeypatch.setattr(queued, "time", SimpleNamespace(monotonic=lambda: now[0]))

    class Finished:
        def wait(self, patience: float) -> bool:
            waits.append(patience)
            if len(waits) <= 10:
                now[0] += patience - 1.0
                progress.note()
                now[0] += 1.0
            elif len(waits) == 20:
                return True
            else:
                now[0] += patience
            return False

    ticket = _QueuedTicket("a batch", 1.0, torch.device("cpu"), progress)
    ticket.finished = Finished()  # type: ignore[assignment]
    with pytest.raises(CommError, match="a batch: no progress for 6 s"):
        ticket.wait()
    assert waits == [6.0] + [5.0] * 10 and now[0] == 100.0 + 6.0 + 10 * 5.0
    waits += [0.0] * 8  # the next one is the 20th
    ticket.wait()
    assert waits[-1] == 6.0
