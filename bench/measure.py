"""Common parts of benchmarks: a clock for either device, machine and versions of a report, the matmul peak."""

from __future__ import annotations

import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")

HEAD_START = 4_000_000  # GPU cycles (about 2 ms) during which the host enqueues what is then timed without gaps
FLUSH_BYTES = 256 << 20  # more than any GPU's L2


class Clock:
    """Times calls in milliseconds: by events on CUDA, by wall time on a CPU.

    On CUDA the L2 cache is overwritten first, and the call waits behind a short sleep on the device. Launch overhead,
    which a training step hides, is therefore not timed; `wall` includes it.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.cuda = device.type == "cuda"
        self._flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device=device) if self.cuda else None

    def __call__(self, call: Callable[[], T]) -> tuple[T, float]:
        """(what `call` returns, milliseconds)."""
        if self._flush is None:
            start = time.perf_counter()
            result = call()
            return result, (time.perf_counter() - start) * 1e3
        self._flush.zero_()
        torch.cuda._sleep(HEAD_START)
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        events[0].record()
        result = call()
        events[1].record()
        events[1].synchronize()
        return result, events[0].elapsed_time(events[1])

    def wall(self, call: Callable[[], Any], repeats: int = 5) -> float:
        """Median milliseconds of the host until the device is done, after one warm-up call."""
        times = []
        for _ in range(repeats + 1):
            self.synchronize()
            start = time.perf_counter()
            call()
            self.synchronize()
            times.append((time.perf_counter() - start) * 1e3)
        return statistics.median(times[1:])

    def synchronize(self) -> None:
        if self.cuda:
            torch.cuda.synchronize(self.device)


def device() -> torch.device:
    """The CUDA device, else the CPU; INTERLACE_BENCH_DEVICE overrides it."""
    return torch.device(os.environ.get("INTERLACE_BENCH_DEVICE") or ("cuda:0" if torch.cuda.is_available() else "cpu"))


def peak_bytes() -> int:
    """Peak memory of this process.

    getrusage would start from the memory of the process before exec, which is its parent's.
    """
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM"))


def matmul_peak(clock: Clock, dtype: torch.dtype, size: int | None = None) -> dict[str, Any]:
    """TFLOP/s of a square matrix product of `dtype`, the best of ten: the reference for attention."""
    size = size or (8192 if clock.cuda else 2048)
    a, b = (torch.randn(size, size, device=clock.device).to(dtype) for _ in range(2))
    times = [clock(lambda: a @ b)[1] for _ in range(13)][3:]
    return {"size": size, "dtype": str(dtype).removeprefix("torch."), "tflops": 2 * size**3 / min(times) / 1e9}


def command(benchmark: str, argv: Sequence[str] | None = None) -> str:
    """Command line that repeats a benchmark; argv: arguments of its `main` (None: those of this process)."""
    return " ".join([f"python -m bench.{benchmark}", *(sys.argv[1:] if argv is None else argv)])


def machine(at: torch.device | None = None) -> dict[str, Any]:
    """The CPU and its cores; with a device also torch's threads, and for CUDA the GPU with its driver."""
    about: dict[str, Any] = {"cpu": cpu(), "cores": os.cpu_count()}
    if at is not None:
        about["threads"] = torch.get_num_threads()
    if at is not None and at.type == "cuda":
        properties = torch.cuda.get_device_properties(at)
        about |= {
            "gpu": properties.name,
            "multiprocessors": properties.multi_processor_count,
            "gpu_memory_gib": round(properties.total_memory / 2**30, 1),
            "compute_capability": f"{properties.major}.{properties.minor}",
            "driver": _driver(),
            "cuda": torch.version.cuda,
        }
    return about


def cpu() -> str:
    """The processor's name, if the system reports it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def versions(*packages: str) -> dict[str, str]:
    """Versions of Python and of installed packages; by default of the packages that attention uses."""
    result = {"python": platform.python_version()}
    for package in packages or ("torch", "triton", "flash-attn", "interlace"):
        try:
            result[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return result


def free_port() -> int:
    """A currently free port of this machine."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def join_group(rank: int, world: int, port: int, timeout: float) -> None:
    """Make this process a rank of the default process group, on this machine."""
    from interlace.comm.process.store import tcp_store

    store = tcp_store("127.0.0.1", port, rank, world, timeout)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=timeout))


def write_json(path: Path, report: dict[str, Any]) -> None:
    """Replace the file atomically, so that an interrupted run leaves the last complete one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(".tmp")
    draft.write_text(json.dumps(report, indent=1) + "\n")
    draft.replace(path)


def parse_heads(text: str) -> tuple[int, int]:
    """ "64:8" -> (64 query heads, 8 key heads); "8" -> (8, 8). Raises ValueError when they do not divide."""
    heads, _, kv_heads = text.partition(":")
    q, kv = int(heads), int(kv_heads or heads)
    if q < 1 or kv < 1 or q % kv:
        raise ValueError(f"{text!r}: query heads must be a multiple of key heads")
    return q, kv


def reason(error: BaseException) -> str:
    """One line with the cause of the error."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}"


def out_of_memory(error: BaseException) -> bool:
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "can't allocate memory" in str(error)


def _driver() -> str | None:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        lines = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout.split()
    except (OSError, subprocess.SubprocessError):
        return None
    return lines[0] if lines else None
