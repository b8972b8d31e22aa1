"""Kernel report: resource use of attention kernels on GPUs that are not present, from code compiled ahead of time.

Registers, spills, shared memory and tensor-core instructions for sm_80, sm_90 and sm_100 under each version of Triton
in `bench.triton_versions`; on Hopper in 16 bits also every hot loop (`bench.hot_loops`). Nothing is run. The static
gate (tests/kernels) fails on every difference from the accepted problems (`bench.kernel_exceptions`).

    python -m bench.kernel_report [--architectures 80 90] [--head-dims 64 128] [--out bench/results/kernel_report.json]

This writes the JSON, docs/kernel-report.md and docs/roofline.md. `--accept` accepts the problems that it finds.
`--before` saves the hot loops of the main shapes. Later reports show them beside their own, and their FULL loops must
not issue more.
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

from bench import kernel_exceptions, roofline
from bench.compile_worker import Configuration
from bench.hot_loops import HotLoop, figures
from bench.kernel_exceptions import BEFORE, SHARED_MEMORY, TENSOR_CORES, Report, head_dims
from bench.measure import command, write_json
from bench.triton_versions import ROOT, VERSIONS, environment

ARCHITECTURES = (80, 90, 100)
HEAD_DIMS = (64, 128, 256)
PADDED_HEAD_DIMS = (
    16,
    72,
    80,
    96,
)  # of small models, SigLIP, Qwen2-VL's vision and Phi-3: rounded up to 64 or 128, in Gluon to 80 and 96
VALUE_DIMS = {192: 128, 96: 64}  # of v beside q and k: DeepSeek-V2 and V3, MiniCPM3
GLUON_HEAD_DIM = 128
MAIN = [(64, 0), (128, 0), (192, 128), (256, 0)]  # head dimensions that come first, without softcap


def sweep(architectures: Iterable[int] = ARCHITECTURES, head_dims: Iterable[int] = HEAD_DIMS) -> list[Configuration]:
    """Every configuration in use. fp16 differs from bf16 only in instruction names, so one configuration covers it."""
    result = []
    for architecture in architectures:
        result.append(Configuration(architecture, part="plan"))
        result += [Configuration(architecture, dtype=dtype, part="ranks") for dtype in ("bfloat16", "float32")]
        for head_dim in head_dims:
            if architecture == 90 and head_dim <= GLUON_HEAD_DIM:
                result += [Configuration(90, head_dim, "bfloat16", v, "gluon") for v in _variants(head_dim)]
            result += [Configuration(architecture, head_dim, "bfloat16", v) for v in _variants(head_dim)]
            if head_dim not in PADDED_HEAD_DIMS:
                result.append(Configuration(architecture, head_dim, "float32"))
            if head_dim == 128:
                result.append(Configuration(architecture, head_dim, "float16"))
        result += mixed(architecture)
    return result


def mixed(architecture: int) -> list[Configuration]:
    """Configurations where v has another head dimension than k."""
    return [
        Configuration(architecture, head_dim, "bfloat16", variant, value_dim=value_dim)
        for head_dim, value_dim in VALUE_DIMS.items()
        for variant in (("plain", "computed", "capped") if head_dim > 128 else ("plain",))  # else tiles of 128
    ] + [Configuration(architecture, 192, "float32", value_dim=128)]


def tested() -> list[Configuration]:
    """The part of the sweep that the tests compile: a configuration left out has the code of another, or part of it."""

    def adds(c: Configuration) -> bool:
        if c.variant == "computed":
            return c.head_dim in (128, 256)
        return c.dtype != "float16"

    return [c for c in sweep(head_dims=(*HEAD_DIMS, 72)) if adds(c)]


def main_shapes() -> list[Configuration]:
    """Main shapes of the sweep, on Hopper."""
    return [c for c in sweep([90], HEAD_DIMS) if is_main(c)]


def is_main(c: Configuration) -> bool:
    return (c.head_dim, c.value_dim) in MAIN and c.variant == "plain" and c.dtype == "bfloat16"


def _variants(head_dim: int) -> tuple[str, ...]:
    return ("plain",) if head_dim in PADDED_HEAD_DIMS else ("plain", "computed", "capped")


def compile_all(configurations: list[Configuration], version: str) -> Report:
    """Resources of each kernel of each configuration under one version of Triton, compiled in one process.

    Raises Unavailable if that Triton cannot be installed, RuntimeError with the compiler's message if a kernel fails.
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


def loop_rows(report: Report, main: bool = True) -> list[roofline.Row]:
    """FULL and PARTIAL loops of the main shapes, or of all other kernels; most expensive kernel first by prediction."""
    kernels = []
    for c, used in report.items():
        for name in used:
            if "loops" in used[name] and is_main(c) == main and (loops := figures(name, used[name])):
                kernels.append([roofline.Row(name, c, used[name]["tile"], loop) for loop in loops])
    return [row for rows in sorted(kernels, key=lambda rows: -rows[0].loop.in_turns) for row in rows]


def table(reports: dict[str, Report]) -> str:
    """Markdown: hot loops on Hopper, accepted problems, and a table of resources per architecture."""
    lines = [
        "# Kernel report: machine code on GPUs",
        "",
        "Written by `python -m bench.kernel_report` from machine code compiled ahead of time. Nothing was run.",
        "[Roofline](roofline.md) predicts speeds from it. *capped*: with a softcap; *computed*: for a plan without",
        "bitmaps, which computes the mask of PARTIAL blocks. 192/128: q and k have the first head dimension, v the",
        "second.",
    ]
    rows, others = ({version: loop_rows(report, main) for version, report in reports.items()} for main in (True, False))
    before = read_before()
    if any(rows.values()):
        lines += ["", "## Hot loops on Hopper (sm_90, 16 bits)", ""]
        lines += [
            "By predicted cost, the dearest first. Tile: queries x keys, warps, stages. HGMMA per iteration and warp,",
            "operand A from shared memory (s) or registers (r). A cell per version of Triton:",
            "",
            "1. multiply-adds issued over those of the tile, at padded head dimensions (limit 1.05)",
            "2. shared memory operands of the worst HGMMA in bytes per clock (limit 128), in brackets of all",
            "3. wait: groups of copies still in flight after it; Gluon: of HGMMA, and 0 unless nine tenths of exp2 are",
            "   issued while HGMMA are in flight (at least 1)",
            "4. instructions of a warp per iteration",
            "5. instructions of all warps per 128 x 128 pairs, in brackets before (FULL: not above; PARTIAL: at most",
            "   1.6 times FULL)",
            "6. spills in the loop (none)",
            "",
            "### Main shapes",
            "",
            *loop_table(rows, before),
            "",
            "### Main shapes, before",
            "",
            *loop_table(before),
        ]
        if any(others.values()):
            lines += ["", "### Other shapes and variants", "", *loop_table(others)]
    lines += [
        "",
        "## Accepted problems",
        "",
        "The gate fails on a new problem, on another figure, and on a problem that is gone",
        "(`bench/kernel_exceptions.csv`). Cells: the figure, and the head dimensions that have it (bf16 and plain",
        "unless said).",
        "",
        *exception_table(kernel_exceptions.exceptions(), list(reports)),
    ]
    lines += [
        "",
        "## All kernels",
        "",
        "Each cell: registers per thread / spills (bytes of stack, and local loads and stores) / KiB of shared memory",
        "per program / tensor-core instructions (HMMA on sm_80, HGMMA on sm_90, UTCHMMA on sm_100; fp32 uses none,",
        "its products are exact).",
    ]
    for architecture in sorted({c.architecture for report in reports.values() for c in report}):
        lines += ["", f"### sm_{architecture}", ""]
        lines += ["| kernel | head dimension | dtype | " + " | ".join(f"Triton {v}" for v in reports) + " |"]
        lines += ["|---|---|---|" + "---|" * len(reports)]
        first = next(iter(reports.values()))
        pairs = [(name, c) for c, kernels in first.items() if c.architecture == architecture for name in kernels]
        order = list(dict.fromkeys(name for name, _ in pairs))
        for name, c in sorted(
            pairs, key=lambda x: (order.index(x[0]), x[1].head_dim, x[1].value_dim, x[1].dtype, x[1].variant)
        ):
            cells = [cell(report[c][name], architecture) for report in reports.values()]
            lines.append(f"| {name} | {head_dims(c)} | {_kind(c)} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def loop_table(
    reports: dict[str, list[roofline.Row]], before: dict[str, list[roofline.Row]] | None = None
) -> list[str]:
    """A row per loop, in the order of the first version; `before`: rows of the same kernels in an earlier state."""
    versions = list(reports)
    lines = ["| kernel | head dimension | dtype | loop | tile | HGMMA | " + " | ".join(versions) + " |"]
    lines += ["|---" * (6 + len(versions)) + "|"]
    now, was = ({v: {row.key: row for row in rows} for v, rows in x.items()} for x in (reports, before or {}))
    for row in reports[versions[0]]:
        tile = f"{row.tile['m']} x {row.tile['n']}, {row.tile['warps']}, {row.tile['stages']}"
        cells = [loop_cell(now[v][row.key].loop, was.get(v, {}).get(row.key)) for v in versions]
        names = f"{row.kernel} | {head_dims(row.configuration)} | {_kind(row.configuration)} | {row.loop.loop}"
        lines.append(f"| {names} | {tile} | {_products(row.loop)} | " + " | ".join(cells) + " |")
    return lines


def loop_cell(loop: HotLoop, before: roofline.Row | None) -> str:
    was = f" ({before.loop.per_pairs:,.0f})" if before else ""
    return (
        f"{loop.ratio:.2f} / {loop.traffic:.0f} ({loop.mean_traffic:.0f}) / {loop.wait} / {loop.instructions:,} / "
        f"{loop.per_pairs:,.0f}{was} / {loop.spills}"
    )


def _products(loop: HotLoop) -> str:
    return ", ".join(f"{n} {shape.replace('hared', '').replace('egisters', '')}" for shape, n in loop.products.items())


def _kind(c: Configuration) -> str:
    return c.dtype + ("" if c.variant == "plain" else f", {c.variant}")


def exception_table(
    accepted: dict[kernel_exceptions.Problem, kernel_exceptions.Accepted], versions: list[str]
) -> list[str]:
    """Merges rows of one kernel, loop and reason; a cell has the head dimensions, dtypes and variants of a figure."""
    lines = [
        "| problem | kernel | sm | loop | " + " | ".join(versions) + " | reason |",
        "|---" * (5 + len(versions)) + "|",
    ]
    rows: dict[tuple[str, ...], dict[str, dict[str, list[str]]]] = {}
    for p, row in accepted.items():
        what = " ".join([p.head_dim, *{p.dtype, p.variant}.difference(["bfloat16", "plain"])])
        cells = rows.setdefault((p.problem, p.kernel, p.architecture, p.loop, row.reason), {v: {} for v in versions})
        for version in cells:
            if version in row.figures:
                cells[version].setdefault(f"{row.figures[version]:g}", []).append(what)
    for (*names, reason), cells in rows.items():
        texts = ["; ".join(f"**{figure}**: {', '.join(of)}" for figure, of in cells[v].items()) for v in versions]
        lines.append(f"| {' | '.join(names)} | " + " | ".join(texts) + f" | {reason} |")
    return lines


def write_before(reports: dict[str, Report], line: str) -> None:
    rows = [
        {"triton": version, "kernel": row.kernel, **row.configuration._asdict(), "tile": row.tile, **row.loop._asdict()}
        for version, report in reports.items()
        for row in loop_rows(report)
    ]
    write_json(BEFORE, {"command": line, "loops": rows})


def read_before() -> dict[str, list[roofline.Row]]:
    result: dict[str, list[roofline.Row]] = {}
    for row in json.loads(BEFORE.read_text())["loops"]:
        configuration = Configuration(**{name: row[name] for name in Configuration._fields})
        loop = HotLoop(**{name: row[name] for name in HotLoop._fields})
        result.setdefault(row["triton"], []).append(roofline.Row(row["kernel"], configuration, row["tile"], loop))
    return result


def cell(used: dict[str, Any], architecture: int) -> str:
    shared = f"{used['shared'] / 1024:.1f}"
    return f"{used['registers']} / {used['spills']} / {shared} / {used[TENSOR_CORES[architecture]]}"


def as_json(reports: dict[str, Report], line: str) -> dict[str, Any]:
    return {
        "command": line,
        "machine": f"{platform.machine()}, no GPU: compiled ahead of time, not run",
        "python": platform.python_version(),
        "limits": {"shared memory, bytes": SHARED_MEMORY},
        "problems": {
            version: [
                {**problem._asdict(), "figure": figure}
                for problem, figure in kernel_exceptions.problems(report, version).items()
            ]
            for version, report in reports.items()
        },
        "hot loops": [
            {
                "triton": version,
                "kernel": row.kernel,
                **row.configuration._asdict(),
                "tile": row.tile,
                **row.loop._asdict(),
                "clocks in turns": row.loop.in_turns,
            }
            for version, report in reports.items()
            for main in (True, False)
            for row in loop_rows(report, main)
        ],
        "kernels": [
            {"triton": version, **configuration._asdict(), "kernel": name, **_without_loops(used)}
            for version, report in reports.items()
            for configuration, kernels in report.items()
            for name, used in kernels.items()
        ],
    }


def _without_loops(used: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in used.items() if name != "loops"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--architectures", type=int, nargs="+", default=list(ARCHITECTURES))
    parser.add_argument("--head-dims", type=int, nargs="+", default=[*HEAD_DIMS, *PADDED_HEAD_DIMS])
    parser.add_argument("--triton", nargs="+", default=list(VERSIONS), metavar="VERSION")
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results" / "kernel_report.json")
    parser.add_argument("--table", type=Path, default=ROOT / "docs" / "kernel-report.md")
    parser.add_argument("--roofline", type=Path, default=ROOT / "docs" / "roofline.md")
    parser.add_argument("--accept", action="store_true", help="accept the problems found, after a look at them")
    parser.add_argument("--before", action="store_true", help="save the hot loops for comparison with later ones")
    options = parser.parse_args()
    configurations = sweep(options.architectures, sorted(options.head_dims))
    with ThreadPoolExecutor() as pool:  # a process per version of Triton
        reports = dict(zip(options.triton, pool.map(lambda v: compile_all(configurations, v), options.triton)))
    line = command("kernel_report")
    changes = {version: kernel_exceptions.changes(report, version) for version, report in reports.items()}
    if options.accept:
        kernel_exceptions.accept(reports)
    if options.before:
        write_before(reports, line)
    write_json(options.out, as_json(reports, line))
    options.table.write_text(table(reports))
    version, report = list(reports.items())[-1]
    if rows := loop_rows(report):
        options.roofline.write_text(roofline.page(rows, version))
    for version, report in reports.items():
        print(
            f"Triton {version}: {sum(map(len, report.values()))} kernels, {len(changes[version])} changes of problems"
        )
        print(*(f"  {change}" for change in changes[version]), sep="\n", end="\n" if changes[version] else "")


if __name__ == "__main__":
    main()
