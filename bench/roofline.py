"""Roofline sheet of the attention kernels on H100 (docs/roofline.md): clocks by resource, predicted and measured speed.

Written by `python -m bench.kernel_report` from machine code that was compiled ahead of time; nothing is run.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from bench.compile_worker import Configuration
from bench.hot_loops import CLOCK, MULTIPROCESSORS, PAIRS, HotLoop, multiply_adds
from bench.kernel_exceptions import head_dims
from bench.triton_versions import ROOT

NAMES = {
    "forward_kernel": "forward, Triton",
    "gluon_forward_kernel": "forward, Gluon",
    "query_gradient_kernel": "dQ",
    "gluon_query_gradient_kernel": "dQ, Gluon",
    "gluon_key_gradient_kernel": "dK/dV, Gluon",
    "key_gradient_kernel": "dK/dV",
    "key_gradient_kernel of keys": "dK",
    "key_gradient_kernel of values": "dV",
}
ARMS = {  # names in bench.kernel_times
    "forward_kernel": "forward",
    "gluon_forward_kernel": "gluon",
    "gluon_query_gradient_kernel": "gluon_query_gradient",
    "gluon_key_gradient_kernel": "gluon_key_gradient",
    "query_gradient_kernel": "query_gradient",
    "key_gradient_kernel": "key_gradient",
}
TIMES = ROOT / "bench" / "results" / "gpu"
HBM = 3.35e12  # bytes per second
HBM_PER_CLOCK = HBM / MULTIPROCESSORS / CLOCK  # of one SM
PEAK = 4096 * MULTIPROCESSORS * CLOCK / 1e12  # TFLOP/s

INTRODUCTION = """# Roofline of the attention kernels on H100

**A model, not a measurement.** `python -m bench.kernel_report` writes this page from machine code that was compiled
ahead of time for sm_90 (Triton {version}, bf16, no softcap, whole blocks). Runs on a GPU are held against it.

## The model

Each hot loop is read from the machine code: its instructions, the shapes of its HGMMA, its accesses to shared memory.
Scaled to 128 x 128 pairs of one query head, they cost one SM so many clocks of each resource:

| resource | rate per SM and clock | counted |
|---|---|---|
| products | 4,096 FLOP (989 TFLOP/s, 132 SMs, 1.83 GHz) | HGMMA; longer where its operands exceed 128 B/clk |
| shared memory | 128 bytes | operands of HGMMA, loads and stores of the loop, tiles copied in |
| issue | 4 instructions of a warp | all instructions of the loop |
| half rate | 2 instructions of a warp | compares, selects, minima, integers, logic, packing: 64 lanes |
| exp2 | 16 lanes | MUFU |

- **Overlapped**: all resources work side by side, and the scarcest one sets the time: the most that is possible.
- **In turns**: nothing else runs beside the products, so their clocks and those of the busiest of issue, half rate and
  exp2 add up. Kernels that wait for each product are near it, unless several programs share an SM.
- TFLOP/s are of 132 SMs that do only this loop. Prologues, the ends of lists, latency and power are not in the model.
- FLOPs are counted at the head dimensions of the model; kernels compute at padded ones (192 as 256).
- *Loaded* is what the SM reads from L2 or HBM. HBM gives {hbm:.1f} bytes per SM and clock (3.35 TB/s), so L2 has to
  serve the share in the last column for the predicted speed (overlapped).
"""


class Row(NamedTuple):
    kernel: str
    configuration: Configuration
    tile: dict[str, int]
    loop: HotLoop

    @property
    def key(self) -> tuple[str, Configuration, str]:
        return self.kernel, self.configuration, self.loop.loop

    @property
    def label(self) -> str:
        return f"| {NAMES.get(self.kernel, self.kernel)} | {head_dims(self.configuration)} | {self.loop.loop} "

    @property
    def flops(self) -> int:
        """FLOPs per 128 x 128 pairs, at the head dimensions of the model: those of the kernel are padded."""
        c = self.configuration
        return 2 * PAIRS * multiply_adds(self.kernel, c.head_dim, c.value_dim or c.head_dim)

    @property
    def loaded(self) -> float:
        """Bytes from global memory per 128 x 128 pairs, without padding, which is not read."""
        c = self.configuration
        padded = self.tile["head_dim"] + self.tile["value_dim"]
        return self.loop.loaded * (c.head_dim + (c.value_dim or c.head_dim)) / padded

    def tflops(self, clocks: float) -> float:
        return self.flops / clocks * MULTIPROCESSORS * CLOCK / 1e12


def page(rows: list[Row], version: str, times: Path = TIMES) -> str:
    """Markdown page; rows in the order of the page."""
    lines = [INTRODUCTION.format(version=version, hbm=HBM_PER_CLOCK)]
    lines += ["## Clocks of one SM per 128 x 128 pairs", ""]
    resources = list(rows[0].loop.clocks)
    lines += ["| kernel | head dimension | loop | MFLOP | " + " | ".join(resources) + " | bound |"]
    lines += ["|---" * (5 + len(resources)) + "|"]
    for row in rows:
        clocks = " | ".join(f"{value:,.0f}" for value in row.loop.clocks.values())
        lines.append(f"{row.label}| {row.flops / 1e6:.1f} | {clocks} | {row.loop.bound} |")
    lines += ["", "## Bytes per 128 x 128 pairs", ""]
    lines += [
        "| kernel | head dimension | loop | shared memory, KiB | loaded, KiB | from L2, at least |",
        "|---" * 6 + "|",
    ]
    for row in rows:
        from_l2 = max(0.0, 1 - HBM_PER_CLOCK * row.loop.overlapped / row.loaded)
        sizes = f"{row.loop.shared / 1024:.0f} | {row.loaded / 1024:.0f} | {from_l2:.0%}"
        lines.append(f"{row.label}| {sizes} |")
    measured, peak = _measured(times)
    lines += [
        "",
        "## Predicted for H100, measured on H200",
        "",
        f"TFLOP/s, and their share of a peak: {PEAK:.0f} for predictions; for measurements {peak:.0f}, which a matrix",
        "product reached on that H200 (the same SMs, Triton 3.6.0). FULL was timed on the mask with the smallest share",
        "of PARTIAL blocks at that head dimension; PARTIAL loops with bitmaps have not been timed. Timed were the",
        "kernels that the [kernel report](kernel-report.md) lists as before. A tile (queries x keys, warps, stages)",
        "stands where the timed one was not today's. The clock of the GPU was not recorded, so shares compare roughly.",
        "All results: `bench/results/gpu/`.",
        "",
        "| kernel | head dimension | loop | in turns | overlapped | H200 |",
        "|---" * 6 + "|",
    ]
    for row in rows:
        cells = [
            f"{value:.0f} ({value / PEAK:.0%})" for value in map(row.tflops, (row.loop.in_turns, row.loop.overlapped))
        ]
        cells.append(_on_h200(row, measured, peak))
        lines.append(f"{row.label}| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _measured(times: Path) -> tuple[dict[tuple[str, str, int], dict[str, Any]], float]:
    """({(arm's kernel, loop, head dimension): arm}, TFLOP/s of a matrix product)."""
    result: dict[tuple[str, str, int], dict[str, Any]] = {}
    tuned = json.loads((times / "kernel_times_tuned.json").read_text())
    cases = sorted(tuned["cases"], key=lambda case: case["plan"]["partial"] / case["plan"]["blocks"])
    for case in cases:
        for arm in case["arms"]:
            result.setdefault((arm["kernel"], "FULL", _head_dim(case)), arm)
    return result, tuned["peak"]["tflops"]


def _head_dim(case: dict[str, Any]) -> int:
    return int(case["case"].split(":")[2])


def _on_h200(row: Row, measured: dict[tuple[str, str, int], dict[str, Any]], peak: float) -> str:
    c = row.configuration
    arm = None if c.value_dim else measured.get((ARMS.get(row.kernel, row.kernel), row.loop.loop, c.head_dim))
    if arm is None:
        return "–"
    m, n, warps, stages = arm["tile"]
    shape = (row.tile["m"], row.tile["n"], row.tile["warps"], row.tile["stages"])
    other = "" if m is None or shape == (m, n, warps, stages) else f", {m} x {n}, {warps}, {stages}"
    return f"{arm['tflops']:.0f} ({arm['tflops'] / peak:.0%}{other})"
