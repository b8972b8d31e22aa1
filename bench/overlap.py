"""Communication overlap of the chunked pipelines against a link of known speed.

    python -m bench.overlap [--chunks 1 2 4 8] [--ratio 0.7] [--out bench/results/overlap.json]

Two processes of one thread each, on a CPU. A CPU has no copy engine, so the link is emulated. Bytes move through shared
memory, and each transfer completes no earlier than latency + bytes / bandwidth after the link was free. Waiting uses no
core, as a copy engine uses no SM. The bandwidth is set from the run itself, so that communication takes `ratio` of the
computation (and could be hidden entirely).

Per operation and number of chunks, in alternation:

    serial       the same chunks, but every transfer is waited for where it is issued
    overlapped   as users get it

    hidden = (serial - overlapped) / communication, communication = time that the link was busy

A pipeline whose first transfer has nothing to hide behind can hide 1 - 1/C of C chunks. This limit does not apply to
all_gather_matmul, which multiplies this rank's own rows meanwhile. The benchmark proves the schedule. A GPU's copy
engines are measured by `bench.copy_engines`; links need a cluster.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from bench.measure import command, free_port, join_group, machine, versions, write_json
from bench.overlap_picture import plot_traces
from interlace import balance, comm
from interlace.attention import AttentionPlan
from interlace.comm.process.agreement import NO_ARGUMENTS, Arguments
from interlace.comm.transports.base import Copy, Forwarding, Ticket, Transport
from interlace.comm.transports.emulated import EmulatedTransport
from interlace.masks import BitfieldMask

WORLD = 2
LATENCY = 200e-6  # seconds


class Serial(Forwarding):
    """Transport whose batches are waited for where they are issued."""

    def __init__(self, inner: Transport) -> None:
        super().__init__(inner)
        self.batches, self.bytes = 0, 0  # for subclasses that count them

    def copy_batch(
        self, outgoing: Sequence[Copy], incoming: Sequence[Copy], label: str,
        then: Callable[[], None] | None = None, arguments: Arguments = NO_ARGUMENTS,
    ) -> Ticket:  # fmt: skip
        ticket = self.inner.copy_batch(outgoing, incoming, label, then, arguments)
        ticket.wait()
        return ticket


class _Done:
    """The ticket of a batch that is not executed."""

    def wait(self) -> None:
        pass

    def done(self) -> bool:
        return True


class Absent(Serial):
    """Moves nothing: measures the computation of an operation, and the bytes that it would move."""

    def copy_batch(
        self, outgoing: Sequence[Copy], incoming: Sequence[Copy], label: str,
        then: Callable[[], None] | None = None, arguments: Arguments = NO_ARGUMENTS,
    ) -> Ticket:  # fmt: skip
        self.batches += 1
        self.bytes += sum(tensor.nbytes for _, tensor in incoming)
        if then is not None:
            then()
        return _Done()


class Case(NamedTuple):
    """One operation. `prepare(group, chunks)` returns the timed call; its own work is not timed."""

    name: str
    prepare: Callable[[Transport, int], Callable[[], object]]


Call = Callable[[Transport, int], torch.Tensor | Sequence[torch.Tensor]]
"""An operation over a transport in the given number of chunks."""


def forward(call: Call) -> Callable[[Transport, int], Callable[[], object]]:
    """`prepare` of a Case that times `call` itself."""

    def prepare(group: Transport, chunks: int) -> Callable[[], object]:
        def run() -> object:
            with torch.no_grad():
                return call(group, chunks)

        return run

    return prepare


def backward(call: Call, inputs: list[torch.Tensor]) -> Callable[[Transport, int], Callable[[], object]]:
    """`prepare` of a Case that times the gradients of `inputs`."""

    def prepare(group: Transport, chunks: int) -> Callable[[], object]:
        for tensor in inputs:
            tensor.requires_grad_()
        result = call(group, chunks)
        outs = [result] if isinstance(result, torch.Tensor) else list(result)
        grads = [torch.ones_like(out) for out in outs]
        return lambda: torch.autograd.grad(outs, inputs, grads)

    return prepare


def cases(rank: int, quick: bool) -> list[Case]:
    """Operations that compute for some 100 ms each; every chunk count divides their sizes."""
    generator = torch.Generator().manual_seed(rank)
    rows, width = (64, 64) if quick else (1024, 1024)
    x = torch.randn(rows, width, generator=generator)
    full = torch.randn(WORLD * rows, width, generator=generator)
    weight = torch.randn(width, width, generator=torch.Generator().manual_seed(9))
    length, heads = (256, 8) if quick else (4096, 8)
    mask = BitfieldMask.causal(1, length)
    shards = balance.distribute_tokens(
        AttentionPlan.build(mask, block=64).row_blocks(), WORLD, block=64, lengths=length
    )
    local = (1, heads, shards.tokens_per_rank, 64)
    q, k, v = (torch.randn(local, generator=generator) for _ in range(3))

    def gathered(group: Transport, chunks: int) -> torch.Tensor:
        _, (y,) = comm.all_gather_matmul(x, [weight], group=group, num_chunks=chunks)
        return y

    def scattered(group: Transport, chunks: int) -> torch.Tensor:
        return comm.matmul_reduce_scatter(full, weight, group=group, num_chunks=chunks)

    def attended(group: Transport, chunks: int) -> torch.Tensor:
        return comm.context_parallel_attention(q, k, v, mask, shards, group=group, heads_per_chunk=heads // chunks)

    return [
        Case("all_gather_matmul forward", forward(gathered)),
        Case("all_gather_matmul backward", backward(gathered, [x, weight])),
        Case("matmul_reduce_scatter forward", forward(scattered)),
        Case("matmul_reduce_scatter backward", backward(scattered, [full, weight])),
        Case("context_parallel_attention forward", forward(attended)),
        Case("context_parallel_attention backward", backward(attended, [q, k, v])),
    ]


def timed(group: Transport, call: Callable[[], object]) -> float:
    """Seconds of the slowest rank for one call; all ranks start together."""
    group.barrier()
    start = time.perf_counter()
    call()
    seconds = torch.tensor([time.perf_counter() - start], dtype=torch.float64)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    return float(seconds)


def measure(case: Case, inner: Transport, chunks: int, ratio: float, repeats: int) -> dict[str, Any]:
    """One operation in `chunks` chunks, on a link whose transfers take `ratio` of the operation's own computation."""
    alone = []
    for _ in range(repeats):
        nothing = Absent(inner)
        call = case.prepare(nothing, chunks)
        nothing.batches = nothing.bytes = 0  # bytes of the forward that the backward needs
        alone.append(timed(nothing, call))
    computation, batches, size = statistics.median(alone), nothing.batches, nothing.bytes
    bandwidth = size / max(ratio * computation - batches * LATENCY, 1e-4)
    communication = size / bandwidth + batches * LATENCY
    link = EmulatedTransport(inner, bandwidth=bandwidth, latency=LATENCY)
    waited = Serial(link)
    serial, overlapped = [], []
    for _ in range(repeats):
        serial.append(timed(waited, case.prepare(waited, chunks)))
        overlapped.append(timed(link, case.prepare(link, chunks)))
    hidden = [(slow - fast) / communication for slow, fast in zip(serial, overlapped, strict=True)]
    return {
        "operation": case.name,
        "chunks": chunks,
        "bytes": size,
        "bandwidth_gb_per_s": bandwidth / 1e9,
        "communication_ms": communication * 1e3,
        "computation_ms": computation * 1e3,
        "serial_ms": statistics.median(serial) * 1e3,
        "overlapped_ms": statistics.median(overlapped) * 1e3,
        "hidden": statistics.median(hidden),
        "hidden_quartiles": statistics.quantiles(hidden, n=4)[::2] if len(hidden) > 1 else hidden * 2,
        "bound_without_own_work": 1 - 1 / chunks,
    }


def peers(rank: int, inner: Transport, quick: bool, repeats: int) -> list[dict[str, Any]]:
    """Milliseconds over the real transport between two processes here; for comparison torch's collective and matmul."""
    generator = torch.Generator().manual_seed(rank)
    rows, width = (64, 64) if quick else (1024, 1024)
    x, whole = (torch.randn(n, width, generator=generator) for n in (rows, WORLD * rows))
    weight = torch.randn(width, width, generator=torch.Generator().manual_seed(9))

    def gather_then_multiply() -> torch.Tensor:
        gathered = x.new_empty(WORLD * rows, width)
        dist.all_gather_into_tensor(gathered, x)
        return gathered @ weight.T

    def multiply_then_scatter() -> torch.Tensor:
        total = whole @ weight.T
        dist.all_reduce(total)  # gloo's own way to scatter a sum
        return total.tensor_split(WORLD)[rank]

    runs: dict[str, dict[str, Callable[[], torch.Tensor]]] = {
        "all_gather_matmul": {
            "interlace, shm": lambda: comm.all_gather_matmul(x, [weight], group=inner)[1][0],
            "gloo all_gather, then matmul": gather_then_multiply,
        },
        "matmul_reduce_scatter": {
            "interlace, shm": lambda: comm.matmul_reduce_scatter(whole, weight, group=inner),
            "matmul, then gloo all_reduce": multiply_then_scatter,
        },
    }
    result = []
    for operation, contenders in runs.items():
        times: dict[str, list[float]] = {name: [] for name in contenders}
        results = {name: run() for name, run in contenders.items()}
        for _ in range(repeats):
            for name, run in contenders.items():
                times[name].append(timed(inner, run))
        first, *others = results.values()
        for other in others:
            torch.testing.assert_close(first, other, rtol=1e-3, atol=1e-3)
        result.append({"operation": operation, "ms": {name: 1e3 * statistics.median(t) for name, t in times.items()}})
    return result


def timeline(
    inner: Transport, chunks: int, case: Case, bandwidth: float
) -> dict[str, list[tuple[str, str, float, float]]]:
    """{arm: events of this rank, in seconds from its start} of one call: data of the page's picture."""
    link = EmulatedTransport(inner, bandwidth=bandwidth, latency=LATENCY)
    arms: dict[str, list[tuple[str, str, float, float]]] = {}
    for arm, group in (("serial", Serial(link)), ("overlapped", link)):
        call = case.prepare(group, chunks)
        group.barrier()
        start = time.perf_counter()
        with comm.traced(link) as trace:
            group.trace = link.trace  # Serial's operations record their products in the trace of the link's copies
            call()
        arms[arm] = [(e.kind, e.label, e.start - start, e.finish - start) for e in trace.spans]
    return arms


def run_rank(rank: int, port: int, settings: dict[str, Any], result: str) -> None:
    torch.set_num_threads(1)
    join_group(rank, WORLD, port, 120)
    records = []
    with comm.connect(transport="shm", timeout=120) as inner:
        for case in cases(rank, settings["quick"]):
            for chunks in settings["chunks"]:
                records.append(measure(case, inner, chunks, settings["ratio"], settings["repeats"]))
                if rank == 0 and not settings["quick"]:
                    print(line(records[-1]), flush=True)
        first = cases(rank, settings["quick"])[0]
        finest = next(r for r in records if r["operation"] == first.name and r["chunks"] == max(settings["chunks"]))
        beside = peers(rank, inner, settings["quick"], settings["repeats"])
        events = timeline(inner, max(settings["chunks"]), first, finest["bandwidth_gb_per_s"] * 1e9)
    if rank == 0:
        Path(result).write_text(json.dumps({"rows": records, "peers": beside, "timeline": events}))
    dist.barrier()
    dist.destroy_process_group()


def line(row: dict[str, Any]) -> str:
    return (
        f"{row['operation']:40} {row['chunks']:3} chunks: computation {row['computation_ms']:7.1f} ms, communication "
        f"{row['communication_ms']:7.1f}, serial {row['serial_ms']:7.1f}, overlapped {row['overlapped_ms']:7.1f}: "
        f"hidden {row['hidden']:4.0%} ({row['hidden_quartiles'][0]:.0%} to {row['hidden_quartiles'][1]:.0%})"
    )


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Run the benchmark, print a line per operation and number of chunks, write the JSON and return its content."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chunks", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--ratio", type=float, default=0.7, help="communication over computation, below 1")
    parser.add_argument("--repeats", type=int, default=11)
    parser.add_argument("--quick", action="store_true", help="toy sizes, whose figures mean nothing")
    parser.add_argument("--out", type=Path, default=Path("bench/results/overlap.json"))
    parser.add_argument("--picture", type=Path, help="draw the timeline of the first operation here")
    options = parser.parse_args(argv)
    settings = {name: getattr(options, name) for name in ("chunks", "ratio", "repeats", "quick")}
    with tempfile.TemporaryDirectory() as folder:
        result = str(Path(folder) / "result.json")
        mp.spawn(run_rank, (free_port(), settings, result), nprocs=WORLD)
        found = json.loads(Path(result).read_text())
    report = {
        "benchmark": "overlap",
        "command": command("overlap", argv),
        "machine": {**machine(), "ranks": WORLD, "threads_per_rank": 1},
        "versions": versions("torch", "interlace"),
        "settings": settings | {"latency_ms": LATENCY * 1e3},
        **found,
    }
    write_json(options.out, report)
    for beside in found["peers"]:
        print(f"{beside['operation']}: " + ", ".join(f"{name} {ms:.1f} ms" for name, ms in beside["ms"].items()))
    if options.picture:
        title = f"{found['rows'][0]['operation']}, {max(options.chunks)} chunks"
        plot_traces(found["timeline"], options.picture, title=title)
    return report


def test_overlap(benchmark: Any) -> None:
    """The same under pytest-benchmark, shorter."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = ["--chunks", "4", "--repeats", "3", "--out", str(Path(folder) / "overlap.json")]
        report = benchmark.pedantic(lambda: main(arguments), rounds=1)
    for row in report["rows"]:
        benchmark.extra_info[row["operation"]] = row["hidden"]


if __name__ == "__main__":
    main()
