"""Processor time of a collective besides its copies: the host time of a rank for each, with copy engines too.

    python -m bench.collective_time [--repeats 41] [--out bench/results/collective_time.json]

Two processes of one thread each, over shared memory. Its driver is that of the copy engines, but copies nothing here.
Figures are medians and quartiles over repeats of CALLS calls. They cover the calling thread, without its waiting for
the peer (spins and system calls: the next column), and the transport's own thread, which runs operations that are
not awaited at once. "sums": with the sums of reduce_scatter and all_reduce, which are not part of the driver.
"sleeps": as in use, where a waiting rank sleeps and resumes with cold caches; else it spins.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from bench.measure import command, free_port, join_group, machine, versions, write_json
from interlace import comm
from interlace.comm import Transport
from interlace.comm.collectives import rows as collectives
from interlace.comm.transports.shm import ShmTransport

WORLD = 2
CALLS = 20
SPINS, AWAKE = 100, 1 << 20  # polls of the bell before a rank sleeps: as in use, and hardly ever asleep
SIZES = (1 << 10, 64 << 10, 1 << 20, 16 << 20)  # bytes of a rank's piece


def operations(group: Transport, size: int) -> dict[str, Callable[[], object]]:
    """Operations by the names of their paths. A rank's piece is a view of the whole, so nothing is copied into it."""
    whole = torch.zeros(group.world * size // 4)
    piece = whole[group.rank * size // 4 : (group.rank + 1) * size // 4]
    return {
        "all_gather_into_tensor": lambda: comm.all_gather_into_tensor(whole, piece, group),
        "reduce_scatter_tensor": lambda: comm.reduce_scatter_tensor(piece, whole, group=group),
        "all_reduce": lambda: comm.all_reduce(piece, group=group),
    }


@contextmanager
def without_sums() -> Iterator[None]:
    kept = collectives.reduce_in_order
    collectives.reduce_in_order = lambda *_: None
    try:
        yield
    finally:
        collectives.reduce_in_order = kept


def measure(group: ShmTransport, size: int, repeats: int, spins: int) -> list[dict[str, Any]]:
    """A record per operation, with and without its sums: microseconds per call of this rank."""
    assert group._exchange is not None and group._thread.ident is not None
    exchange = group._exchange
    exchange.measures, exchange.spins = True, spins
    clock, rows = time.pthread_getcpuclockid(group._thread.ident), []
    for name, call in operations(group, size).items():
        for sums in (False, True) if name != "all_gather_into_tensor" else (False,):
            caller: list[float] = []
            waiting: list[float] = []
            thread: list[float] = []
            with without_sums() if not sums else torch.no_grad():
                for _ in range(repeats):
                    group.barrier()
                    spent = [time.thread_time_ns(), exchange.waited, time.clock_gettime_ns(clock)]
                    for _ in range(CALLS):
                        call()
                    after = [time.thread_time_ns(), exchange.waited, time.clock_gettime_ns(clock)]
                    all_of_it, wait, other = ((now - then) / CALLS / 1e3 for now, then in zip(after, spent))
                    caller.append(all_of_it - wait)
                    waiting.append(wait)
                    thread.append(other)
            rows.append({
                "operation": name, "bytes": size, "sums": sums, "sleeps": spins == SPINS,
                "path": sorted(group.paths[name]),
                "caller_us": statistics.median(caller), "caller_us_quartiles": statistics.quantiles(caller)[::2],
                "caller_us_best": min(caller), "waiting_us": statistics.median(waiting),
                "thread_us": statistics.median(thread),
            })  # fmt: skip
    return rows


def run_rank(rank: int, port: int, repeats: int, result: str) -> None:
    torch.set_num_threads(1)
    join_group(rank, WORLD, port, 120)
    rows = []
    with comm.connect(transport="shm", timeout=120) as group:
        assert isinstance(group, ShmTransport)
        for size in SIZES:
            measure(group, size, 2, SPINS)  # warms up
            for spins in (SPINS, AWAKE):
                rows += measure(group, size, repeats, spins)
                if rank == 0:
                    print(*map(line, rows[-5:]), sep="\n", flush=True)
        group.barrier()
    if rank == 0:
        Path(result).write_text(json.dumps(rows))
    dist.barrier()
    dist.destroy_process_group()


def line(row: dict[str, Any]) -> str:
    low, high = row["caller_us_quartiles"]
    kind = f"{', sums' if row['sums'] else ''}, {'sleeps' if row['sleeps'] else 'spins'}"
    return (
        f"{row['operation']:22} {row['bytes']:9} bytes{kind:15}: {row['caller_us']:7.1f} us "
        f"({low:.1f} to {high:.1f}, best {row['caller_us_best']:.1f}), waiting {row['waiting_us']:.1f}, "
        f"other thread {row['thread_us']:.1f}"
    )


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Run the benchmark, print a line per operation and size, write the JSON and return its content."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=41)
    parser.add_argument("--out", type=Path, default=Path("bench/results/collective_time.json"))
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        result = str(Path(folder) / "result.json")
        mp.spawn(run_rank, (free_port(), options.repeats, result), nprocs=WORLD)
        rows = json.loads(Path(result).read_text())
    report = {
        "benchmark": "collective_time",
        "command": command("collective_time", argv),
        "machine": {**machine(), "ranks": WORLD, "threads_per_rank": 1},
        "versions": versions("torch", "interlace"),
        "rows": rows,
    }
    write_json(options.out, report)
    return report


if __name__ == "__main__":
    main()
