"""What the attention kernels use on GPUs that are not here: registers, spills, shared memory, tensor-core instructions.

Compiles every kernel configuration in use ahead of time for sm_80, sm_90 and sm_100 under each version of Triton in
`bench.triton_versions`, and reads their machine code. Nothing is run and no speed is claimed; the static gate
(tests/kernels) fails on what `problems` finds.

    python -m bench.kernel_report [--architectures 80 90] [--head-dims 64 128] [--out bench/results/kernel_report.json]

writes the JSON and, beside the other docs, the same as a table (--table docs/kernel-report.md).
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from bench.compile_worker import Configuration
from bench.measure import command, write_json
from bench.triton_versions import ROOT, VERSIONS, environment
from interlace.kernels.bitfield_launch import block_d
from interlace.kernels.bitfield_tiles import width

ARCHITECTURES = (80, 90, 100)
HEAD_DIMS = (64, 128, 256)
PADDED_HEAD_DIMS = (16, 72, 80, 96)  # of small models, SigLIP, Qwen2-VL's vision and Phi-3: rounded up to 64 or 128
VALUE_DIMS = {192: 128, 96: 64}  # of v beside q and k: DeepSeek-V2 and V3, MiniCPM3
TENSOR_CORES = {80: "mma", 90: "wgmma", 100: "tcgen"}
SHARED_MEMORY = {80: 101_376, 90: 232_448, 100: 232_448}  # bytes per program; 80: of 8.6, 8.9 and 12.0, the least
GLUON_HEAD_DIM = 128
DOTS = ("forward_kernel", "query_gradient_kernel", "key_gradient_kernel", "key_gradient_kernel fused")
GLUON = "gluon_forward_kernel"

HMMA_ON_HOPPER = {("key_gradient_kernel", dim, "capped") for dim in (192, 256)}  # see bitfield_tiles.CAPPED

# dK/dV on Hopper, by `width` of the tiles: the most that may spill (bytes of stack and local instructions). On an H200
# these tiles were 1.2 to 1.7 times as fast as the best that spilled nothing; 192 spills one register and has not run.
SPILLS_OF_DKDV = {64: 40, 128: 170, 192: 16, 256: 280}
# Elsewhere a register or two, since the index of the next block is read ahead: (kernel, architecture, head dimension,
# dtype, variant) -> the most.
SPILLS = {
    ("query_gradient_kernel", 80, 64, "bfloat16", "ragged"): 10,
    ("forward_kernel", 90, 128, "float32", "plain"): 24,
    ("query_gradient_kernel", 90, 128, "float32", "plain"): 10,
    ("key_gradient_kernel", 100, 64, "float32", "plain"): 20,
    ("query_gradient_kernel", 100, 128, "float32", "plain"): 23,
}

Report = dict[Configuration, dict[str, dict[str, int]]]


def sweep(architectures: Iterable[int] = ARCHITECTURES, head_dims: Iterable[int] = HEAD_DIMS) -> list[Configuration]:
    """Every configuration in use. fp16 differs from bf16 in the names of instructions only, so one of it will do."""
    found = []
    for architecture in architectures:
        found.append(Configuration(architecture, part="plan"))
        found += [Configuration(architecture, dtype=dtype, part="ranks") for dtype in ("bfloat16", "float32")]
        for head_dim in head_dims:
            if architecture == 90 and head_dim <= GLUON_HEAD_DIM:
                found += [Configuration(90, head_dim, "bfloat16", v, "gluon") for v in _variants(head_dim)]
            found += [Configuration(architecture, head_dim, "bfloat16", v) for v in _variants(head_dim)]
            if head_dim not in PADDED_HEAD_DIMS:
                found.append(Configuration(architecture, head_dim, "float32"))
            if head_dim == 128:
                found.append(Configuration(architecture, head_dim, "float16"))
        found += mixed(architecture)
    return found


def mixed(architecture: int) -> list[Configuration]:
    """Values of another head dimension than the keys'."""
    return [
        Configuration(architecture, head_dim, "bfloat16", variant, value_dim=value_dim)
        for head_dim, value_dim in VALUE_DIMS.items()
        for variant in (("plain", "ragged", "capped") if head_dim > 128 else ("plain",))  # else tiles of 128
    ] + [Configuration(architecture, 192, "float32", value_dim=128)]


def tested() -> list[Configuration]:
    """The part of the sweep that the tests compile: what is left out has the code of another one, or part of it."""

    def adds(c: Configuration) -> bool:
        if c.variant == "ragged":  # "capped" has the same tiles and more code, but where its tile is smaller
            return any(head_dim == c.head_dim for _, head_dim, _ in HMMA_ON_HOPPER) and c.part == "attention"
        return c.dtype != "float16"

    return [c for c in sweep(head_dims=(*HEAD_DIMS, 72)) if adds(c)]


def _variants(head_dim: int) -> tuple[str, ...]:
    return ("plain",) if head_dim in PADDED_HEAD_DIMS else ("plain", "ragged", "capped")


def compile_all(configurations: list[Configuration], version: str) -> Report:
    """What each kernel of each configuration uses under one version of Triton, compiled in one process.

    Raises Unavailable when that Triton cannot be had, RuntimeError with the compiler's words when a kernel fails.
    """
    process = subprocess.run(
        [sys.executable, "-m", "bench.compile_worker"],
        cwd=ROOT,
        env=environment(version),
        input="".join(json.dumps(configuration._asdict()) + "\n" for configuration in configurations),
        capture_output=True,
        text=True,
    )
    if process.returncode != 0:
        raise RuntimeError(f"compiling under Triton {version} failed: {process.stderr[-4000:]}")
    return dict(zip(configurations, map(json.loads, process.stdout.splitlines()), strict=True))


def problems(report: Report) -> list[str]:
    """Spills, dots that miss the tensor cores, and shared memory beyond the limit, in words."""
    found = []
    for configuration, kernels in report.items():
        tensor_cores = TENSOR_CORES[configuration.architecture]
        for name, used in kernels.items():
            where = f"{name}, sm_{configuration.architecture}, {configuration}: {used}"
            if used["spills"] > allowed_spills(configuration, name):
                found.append(f"spills: {where}")
            if used["shared"] > SHARED_MEMORY[configuration.architecture]:
                found.append(f"more than {SHARED_MEMORY[configuration.architecture]} bytes of shared memory: {where}")
            excused = (name, configuration.head_dim, configuration.variant) in HMMA_ON_HOPPER and used["mma"]
            dots = name in (*DOTS, GLUON) and configuration.dtype != "float32"
            if dots and not used[tensor_cores] and not excused:
                found.append(f"no {tensor_cores} instruction: {where}")
            if name == GLUON and not used["tma"]:
                found.append(f"no UTMALDG instruction: {where}")
    return found


def allowed_spills(c: Configuration, name: str) -> int:
    if name != "key_gradient_kernel" or c.architecture != 90 or c.dtype == "float32":
        return SPILLS.get((name, c.architecture, c.head_dim, c.dtype, c.variant), 0)
    padded = (block_d(head_dim, c.architecture) for head_dim in (c.head_dim, c.value_dim or c.head_dim))
    return SPILLS_OF_DKDV[width(*padded)]


def table(reports: dict[str, Report]) -> str:
    """Markdown: a table per architecture, a row per kernel and configuration, a column per version of Triton."""
    lines = [
        "# What the kernels use, by static analysis",
        "",
        "Written by `python -m bench.kernel_report` from machine code compiled ahead of time; nothing was run, and",
        "none of it says how fast a kernel is. Each cell: registers per thread / spills / KiB of shared memory per",
        "program / tensor-core instructions (HMMA on sm_80, HGMMA on sm_90, UTCHMMA on sm_100; fp32 uses none, its",
        "products are exact). *ragged*: the last blocks of queries and keys are short; *capped*: so they are, and",
        "there is a softcap. 192/128: q and k have the first head dimension, v the second.",
    ]
    for architecture in sorted({c.architecture for report in reports.values() for c in report}):
        lines += ["", f"## sm_{architecture}", ""]
        lines += ["| kernel | head dimension | dtype | " + " | ".join(f"Triton {v}" for v in reports) + " |"]
        lines += ["|---|---|---|" + "---|" * len(reports)]
        first = next(iter(reports.values()))
        rows = [(name, c) for c, kernels in first.items() if c.architecture == architecture for name in kernels]
        order = list(dict.fromkeys(name for name, _ in rows))
        for name, c in sorted(
            rows, key=lambda row: (order.index(row[0]), row[1].head_dim, row[1].value_dim, row[1].dtype, row[1].variant)
        ):
            cells = [cell(report[c][name], architecture) for report in reports.values()]
            dtype = c.dtype + ("" if c.variant == "plain" else f", {c.variant}")
            lines.append(f"| {name} | {head_dims(c)} | {dtype} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def head_dims(c: Configuration) -> str:
    """As a table has it: 128, or 192/128 where that of v is another; nothing for kernels without."""
    return f"{c.head_dim}/{c.value_dim}" if c.value_dim else str(c.head_dim or "")


def cell(used: dict[str, int], architecture: int) -> str:
    shared = f"{used['shared'] / 1024:.1f}"
    return f"{used['registers']} / {used['spills']} / {shared} / {used[TENSOR_CORES[architecture]]}"


def as_json(reports: dict[str, Report], line: str) -> dict[str, Any]:
    return {
        "command": line,
        "machine": f"{platform.machine()}, no GPU: compiled ahead of time, not run",
        "python": platform.python_version(),
        "limits": {"shared memory, bytes": SHARED_MEMORY},
        "problems": {version: problems(report) for version, report in reports.items()},
        "kernels": [
            {"triton": version, **configuration._asdict(), "kernel": name, **used}
            for version, report in reports.items()
            for configuration, kernels in report.items()
            for name, used in kernels.items()
        ],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--architectures", type=int, nargs="+", default=list(ARCHITECTURES))
    parser.add_argument("--head-dims", type=int, nargs="+", default=[*HEAD_DIMS, *PADDED_HEAD_DIMS])
    parser.add_argument("--triton", nargs="+", default=list(VERSIONS), metavar="VERSION")
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results" / "kernel_report.json")
    parser.add_argument("--table", type=Path, default=ROOT / "docs" / "kernel-report.md")
    options = parser.parse_args()
    configurations = sweep(options.architectures, sorted(options.head_dims))
    with ThreadPoolExecutor() as pool:  # a process per version of Triton
        reports = dict(zip(options.triton, pool.map(lambda v: compile_all(configurations, v), options.triton)))
    write_json(options.out, as_json(reports, command("kernel_report")))
    options.table.write_text(table(reports))
    for version, report in reports.items():
        found = problems(report)
        print(f"Triton {version}: {sum(map(len, report.values()))} kernels, {len(found)} problems")
        print(*(f"  {problem}" for problem in found), sep="\n", end="\n" if found else "")


if __name__ == "__main__":
    main()
