"""Copies by engines and by SMs of one CUDA GPU, alone and under matrix products.

    python -m bench.copy_engines [--sizes 4096 8192] [--megabytes 64] [--out bench/results/copy_engines.json]

Arms, each alone and under matrix products, in alternation:

    engine         batched copies that request overlap (`comm.overlap.copiers.engine_copies`): copy engines
    plain          the framework's copy between two tensors of the GPU: a kernel on its SMs
    sm_8 ... sm_32 a copy kernel of that many programs, like collectives that run on SMs
    to_host, from_host   pinned memory over PCIe

For each: GB/s alone and under the products, and the products' slow-down. A gate decides if an arm needs SMs: a waiting
kernel fills every thread slot of every SM. An arm whose copy ends before that kernel needed no SM. A copy kernel goes
through the gate first: if even that needs no SM, the gate is inconclusive.

The link is the GPU's own memory: the figures do not apply to several GPUs. On a machine without CUDA, --dry runs
the same lines at toy sizes on the CPU. Nothing overlaps there and the figures have no meaning.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.measure import command, device, machine, reason, versions, write_json
from interlace.comm.transports.copiers import Copier, engine_copies, engine_missing, plain_copies

Arm = Callable[[], object]
SM_PROGRAMS = (8, 16, 32)
PIECE = 8 << 20  # bytes of one copy of a batch


def sm_copies(programs: int) -> Copier:
    """Copies by a kernel of `programs` programs, each on its own SM if there are enough."""
    if programs < 1:
        raise ValueError(f"programs must be at least 1, got {programs}")

    def copy(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        from interlace.kernels.ranks import copy_call

        for to, source in pairs:
            words = to.nbytes // 4
            if to.nbytes % 4 or (to.data_ptr() | source.data_ptr()) % 16:
                to.copy_(source)
            elif words:
                copy_call(to.view(-1).view(torch.int32), source.view(-1).view(torch.int32), programs).run()

    return copy


class Bench:
    """Buffers and streams of one run."""

    def __init__(self, at: torch.device, size: int, megabytes: int, products: int) -> None:
        self.at, self.cuda = at, at.type == "cuda"
        dtype = torch.bfloat16 if self.cuda else torch.float32
        self.a, self.b = (torch.randn(size, size, device=at).to(dtype) for _ in range(2))
        self.c = torch.empty(size, size, device=at, dtype=dtype)
        self.products = products
        self.source, self.to = (torch.zeros(megabytes << 18, dtype=torch.int32, device=at) for _ in range(2))
        self.host = torch.zeros(megabytes << 18, dtype=torch.int32, pin_memory=self.cuda)
        self.side = torch.cuda.Stream(at, priority=-1) if self.cuda else None

    def multiply(self) -> None:
        for _ in range(self.products):
            torch.mm(self.a, self.b, out=self.c)

    def arms(self) -> tuple[dict[str, Arm], dict[str, str]]:
        """The arms that run here, and the reasons why the others do not."""
        pairs = list(zip(self.to.split(PIECE // 4), self.source.split(PIECE // 4), strict=True))
        arms: dict[str, Arm] = {"plain": lambda: plain_copies(pairs)}
        missing = {}
        if why := engine_missing():
            missing["engine"] = why
        else:
            arms["engine"] = lambda: engine_copies(pairs)
        if self.cuda:
            for programs in SM_PROGRAMS:
                copy = sm_copies(programs)
                arms[f"sm_{programs}"] = lambda copy=copy: copy([(self.to, self.source)])  # type: ignore[misc]
        arms["to_host"] = lambda: self.host.copy_(self.source, non_blocking=True)
        arms["from_host"] = lambda: self.to.copy_(self.host, non_blocking=True)
        return arms, missing

    def time(self, copy: Arm | None, compute: bool, copies: int = 1) -> tuple[float, float]:
        """Milliseconds of (the copies, the products), both started at once."""
        if self.side is None:
            start = time.perf_counter()
            for _ in range(copies if copy else 0):
                copy()  # type: ignore[misc]
            middle = time.perf_counter()
            if compute:
                self.multiply()
            return (middle - start) * 1e3, (time.perf_counter() - middle) * 1e3
        torch.cuda.synchronize(self.at)
        main = torch.cuda.current_stream(self.at)
        go, copied, computed = (torch.cuda.Event(enable_timing=True) for _ in range(3))
        torch.cuda._sleep(2_000_000)  # until both are enqueued
        go.record(main)
        self.side.wait_event(go)
        if copy is not None:
            with torch.cuda.stream(self.side):
                for _ in range(copies):
                    copy()
                copied.record(self.side)
        if compute:
            self.multiply()
            computed.record(main)
        torch.cuda.synchronize(self.at)
        return (
            go.elapsed_time(copied) if copy is not None else 0.0,
            go.elapsed_time(computed) if compute else 0.0,
        )

    def needs_no_sm(self, copy: Arm) -> bool | None:
        """True if a copy ends while a kernel holds every thread slot of every SM; None if that cannot be decided."""
        if self.side is None:
            return None
        from interlace.kernels.ranks import busy_call

        programs = 2 * torch.cuda.get_device_properties(self.at).multi_processor_count
        call = busy_call(torch.empty(programs, 1024, device=self.at), 4_000_000)  # about 20 ms
        torch.cuda.synchronize(self.at)
        call.run()
        busy, copied = torch.cuda.Event(), torch.cuda.Event()
        busy.record()
        with torch.cuda.stream(self.side):
            copy()
            copied.record(self.side)
        while not (copied.query() or busy.query()):
            pass
        first = copied.query() and not busy.query()
        torch.cuda.synchronize(self.at)
        return first


def measure(bench: Bench, repeats: int) -> list[dict[str, Any]]:
    """A record per arm."""
    arms, missing = bench.arms()
    records: list[dict[str, Any]] = [{"arm": name, "missing": why} for name, why in missing.items()]
    good = {}
    for name, copy in arms.items():
        try:
            bench.time(copy, True)  # warms up: kernels are compiled here
            good[name] = copy
        except Exception as error:
            records.append({"arm": name, "missing": reason(error)})
    alone: dict[str, list[float]] = {name: [] for name in good}
    under, slowed = ({name: [] for name in good} for _ in range(2))
    products: list[float] = []
    # Enough copies to outlast the products, so that all products run under a copy.
    enough = {}
    for name, copy in good.items():
        copied, computed = bench.time(copy, False)[0], bench.time(None, True)[1]
        enough[name] = max(1, round(1.5 * computed / max(copied, 1e-3)))
    for _ in range(repeats):
        products.append(bench.time(None, True)[1])
        for name, copy in good.items():
            alone[name].append(bench.time(copy, False, enough[name])[0])
            copied, computed = bench.time(copy, True, enough[name])
            under[name].append(copied)
            slowed[name].append(computed)
    control = next((copy for name, copy in good.items() if name.startswith("sm_")), None)
    gate_holds = control is not None and bench.needs_no_sm(control) is False
    for name, copy in good.items():
        size = bench.source.nbytes * enough[name]
        records.append(
            {
                "arm": name,
                "needs_no_sm": bench.needs_no_sm(copy) if gate_holds else None,
                "gb_per_s_alone": size / statistics.median(alone[name]) / 1e6,
                "gb_per_s_under_products": size / statistics.median(under[name]) / 1e6,
                "products_ms_alone": statistics.median(products),
                "products_ms_under_copies": statistics.median(slowed[name]),
                "products_left": statistics.median(products) / statistics.median(slowed[name]),
            }
        )
    return records


def table(report: dict[str, Any]) -> str:
    lines = [
        f"{report['machine'].get('gpu', report['machine']['cpu'])}: GB/s alone, under products; products' speed left"
    ]
    for case in report["cases"]:
        lines.append(f"products of {case['size']}^3, copies of {case['megabytes']} MiB")
        for arm in case["arms"]:
            if "missing" in arm:
                lines.append(f"  {arm['arm']:10} not run: {arm['missing']}")
                continue
            engine = {True: "copy engine", False: "on the SMs", None: "not told apart"}[arm["needs_no_sm"]]
            lines.append(
                f"  {arm['arm']:10} {arm['gb_per_s_alone']:8.1f} {arm['gb_per_s_under_products']:8.1f} "
                f"{arm['products_left']:8.1%}  {engine}"
            )
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Run, print the table, write the JSON and return its content."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[4096, 8192], help="n of the n^3 products")
    parser.add_argument("--megabytes", type=int, default=64, help="MiB that each copy moves")
    parser.add_argument("--products", type=int, default=8, help="products in a row")
    parser.add_argument("--repeats", type=int, default=11)
    parser.add_argument("--dry", action="store_true", help="toy sizes, and allowed without CUDA")
    parser.add_argument("--out", type=Path, default=Path("bench/results/copy_engines.json"))
    options = parser.parse_args(argv)
    at = device()
    if at.type != "cuda" and not options.dry:
        parser.error("there is no CUDA GPU; --dry runs the same lines on the CPU at toy sizes")
    if options.dry:
        options.sizes, options.megabytes, options.products, options.repeats = [64], 1, 1, 2
    report: dict[str, Any] = {
        "benchmark": "copy_engines",
        "command": command("copy_engines", argv),
        "machine": machine(at),
        "versions": versions(),
        "dry": options.dry,
        "cases": [],
    }
    for size in options.sizes:
        bench = Bench(at, size, options.megabytes, options.products)
        report["cases"].append({"size": size, "megabytes": options.megabytes, "arms": measure(bench, options.repeats)})
        write_json(options.out, report)
    print(table(report))
    return report


if __name__ == "__main__":
    main()
