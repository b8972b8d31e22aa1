"""Copies that the chunked pipelines hide behind matrix products, on one CUDA GPU.

    python -m bench.overlap_gpu [--rows 512 2048 8192] [--chunks 1 2 4 8] [--out bench/results/overlap_gpu.json]

One rank of two, whose peer is a mirror: everything the rank sends is returned as its received data, through the copier
under test. The GPU therefore computes one rank's products and moves one rank's bytes. Copiers: "engine" (batched copies
on the copy engines), "plain" (the framework's copy, on the SMs) and "sm_16" (a copy kernel of 16 programs).

    hidden = (serial - overlapped) / copies, each of them measured; serial waits for every transfer where it is issued

The link is the GPU's own memory, at some 86 GB/s through a copy engine; NVLink has several times that. The figures show
that schedule and engines overlap, not the gain on several GPUs. --dry: toy sizes, on a CPU too.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from bench.copy_engines import sm_copies
from bench.measure import command, device, machine, reason, versions, write_json
from bench.overlap import Serial
from interlace import comm
from interlace.comm.transports.base import Capabilities, Copy, Transport
from interlace.comm.transports.copiers import Copier, engine_copies, plain_copies
from interlace.comm.transports.queued import Batch, QueueTransport

WIDTH = 4096
OPERATIONS = ("all_gather_matmul", "matmul_reduce_scatter")


class Mirror(QueueTransport):
    """Rank 0 of 2; data sent to rank 1 is returned as data received from it."""

    name = "mirror"

    def __init__(self, at: torch.device, copier: Copier) -> None:
        super().__init__(0, 2, device=at, timeout=60.0)
        self.copier = copier

    @classmethod
    def capabilities(cls) -> Capabilities:
        return Capabilities("mirror", "any")

    def _run(self, batch: Batch) -> None:
        self.copier([(to.tensor, source.tensor) for to, source in zip(batch.incoming, batch.outgoing, strict=True)])


class Volume(Serial):
    """Counts the data that an operation moves: a (to, from) pair per copy, of fresh memory."""

    def __init__(self, inner: Transport) -> None:
        super().__init__(inner)
        self.sizes: list[list[int]] = []  # bytes, by batch

    def copy_batch(self, outgoing: Sequence[Copy], incoming: Sequence[Copy], *rest: Any) -> Any:
        self.sizes.append([copy.tensor.nbytes for copy in incoming])
        return super().copy_batch(outgoing, incoming, *rest)


def seconds(at: torch.device, call: Callable[[], object]) -> float:
    """Seconds of a call, from an idle device to an idle device."""
    if at.type == "cuda":
        torch.cuda.synchronize(at)
    start = time.perf_counter()
    call()
    if at.type == "cuda":
        torch.cuda.synchronize(at)
    return time.perf_counter() - start


def measure(at: torch.device, copier: Copier, operation: str, rows: int, chunks: int, repeats: int, width: int) -> Any:
    """One record: a rank with `rows` rows, products of [2 * rows, width] x [width, width]."""
    dtype = torch.bfloat16 if at.type == "cuda" else torch.float32
    x, whole, weight = (torch.randn(n, width, device=at).to(dtype) for n in (rows, 2 * rows, width))
    with Mirror(at, copier) as mirror, torch.no_grad():

        def call(group: Transport) -> object:
            if operation == "all_gather_matmul":
                return comm.all_gather_matmul(x, [weight], group=group, num_chunks=chunks)
            return comm.matmul_reduce_scatter(whole, weight, group=group, num_chunks=chunks)

        volume = Volume(mirror)
        call(volume)
        batches = [
            [tuple(torch.empty(2, size, dtype=torch.uint8, device=at).unbind()) for size in sizes]
            for sizes in volume.sizes
        ]

        def copies() -> None:
            for batch in batches:
                mirror.copy_batch(
                    [Copy(1, source) for _, source in batch], [Copy(1, to) for to, _ in batch], "copies"
                ).wait()

        arms: dict[str, Callable[[], object]] = {
            "copies": copies,
            "serial": lambda: call(Serial(mirror)),
            "overlapped": lambda: call(mirror),
        }
        times: dict[str, list[float]] = {name: [] for name in arms}
        for step in range(repeats + 2):
            for name, arm in arms.items():
                elapsed = seconds(at, arm)
                if step >= 2:
                    times[name].append(elapsed)
    median = {name: statistics.median(values) for name, values in times.items()}
    return {
        "operation": operation,
        "rows": rows,
        "chunks": chunks,
        "bytes": sum(map(sum, volume.sizes)),
        **{f"{name}_ms": value * 1e3 for name, value in median.items()},
        "hidden": (median["serial"] - median["overlapped"]) / median["copies"],
    }


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Run, print a line per record, write the JSON and return its content."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[512, 2048, 8192], help="rows of one rank")
    parser.add_argument("--chunks", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--dry", action="store_true", help="toy sizes, and allowed without CUDA")
    parser.add_argument("--out", type=Path, default=Path("bench/results/overlap_gpu.json"))
    options = parser.parse_args(argv)
    at, width = device(), WIDTH
    if at.type != "cuda" and not options.dry:
        parser.error("there is no CUDA GPU; --dry runs the same lines on the CPU at toy sizes")
    if options.dry:
        options.rows, options.chunks, options.repeats, width = [16], [1, 2], 1, 32
    copiers: dict[str, Copier] = {"engine": engine_copies, "plain": plain_copies, "sm_16": sm_copies(16)}
    report: dict[str, Any] = {
        "benchmark": "overlap_gpu",
        "command": command("overlap_gpu", argv),
        "machine": machine(at),
        "versions": versions(),
        "dry": options.dry,
        "width": width,
        "rows": [],
        "missing": {},
    }
    for name, copier in copiers.items():
        for operation in OPERATIONS:
            for rows in options.rows:
                for chunks in options.chunks:
                    if name in report["missing"]:
                        continue
                    try:
                        row = measure(at, copier, operation, rows, chunks, options.repeats, width)
                    except (RuntimeError, ImportError) as error:
                        report["missing"][name] = reason(error)
                        print(f"{name}: not run ({report['missing'][name]})")
                        continue
                    report["rows"].append({"copier": name, **row})
                    print(
                        f"{name:7} {operation:22} {rows:6} rows, {chunks} chunks: copies {row['copies_ms']:7.3f} ms, "
                        f"serial {row['serial_ms']:7.3f}, overlapped {row['overlapped_ms']:7.3f}: "
                        f"hidden {row['hidden']:.0%}",
                        flush=True,
                    )
                write_json(options.out, report)
    return report


if __name__ == "__main__":
    main()
