"""Gate on compiled kernels: problems found in machine code against the table of accepted ones.

`kernel_exceptions.csv` has a row per kernel and problem, a figure per version of Triton (empty: no problem there), and
the reason. `changes` lists every difference in both directions: a new problem, another figure, a problem that is gone.
`python -m bench.kernel_report --accept` writes new figures and keeps the reasons. A new row takes the reason of its
kernel, loop and problem at other head dimensions, if these share one. Otherwise the reason is empty, and the gate fails
until it is filled in.
"""

from __future__ import annotations

import csv
import functools
import json
import math
from pathlib import Path
from typing import Any, NamedTuple

from bench import hot_loops
from bench.compile_worker import Configuration
from bench.triton_versions import ROOT, VERSIONS

TABLE = Path(__file__).with_suffix(".csv")
BEFORE = ROOT / "bench" / "results" / "kernel_loops_before.json"  # of main shapes, which must not issue more
TENSOR_CORES = {80: "mma", 90: "wgmma", 100: "tcgen"}
SHARED_MEMORY = {80: 101_376, 90: 232_448, 100: 232_448}  # bytes per program; 80: the least of 8.6, 8.9 and 12.0
DOTS = ("forward_kernel", "query_gradient_kernel", "key_gradient_kernel")

Report = dict[Configuration, dict[str, dict[str, Any]]]


class Problem(NamedTuple):
    kernel: str
    architecture: str
    head_dim: str  # 128, or 192/128 if v has another
    dtype: str
    variant: str
    loop: str  # FULL, PARTIAL, or empty: the whole kernel
    problem: str


class Accepted(NamedTuple):
    figures: dict[str, float]  # by version of Triton
    reason: str


def head_dims(c: Configuration) -> str:
    """Head dimensions as in tables: 128, or 192/128 if that of v differs; empty for kernels without."""
    return f"{c.head_dim}/{c.value_dim}" if c.value_dim else str(c.head_dim or "")


def problems(report: Report, version: str) -> dict[Problem, float]:
    """Problems of the kernels of a report under one version of Triton: {problem: figure}."""
    result = {}
    for configuration, kernels in report.items():
        for name, used in kernels.items():
            before = _issued_before().get((version, name, configuration), math.inf)
            for (loop, problem), figure in _of_kernel(configuration, name, used, before).items():
                result[Problem(*_kernel(configuration, name), loop, problem)] = figure
    return result


@functools.cache
def _issued_before() -> dict[tuple[str, str, Configuration], float]:
    """{(version of Triton, kernel, configuration): instructions of its FULL loop per 128 x 128 pairs}."""
    rows = json.loads(BEFORE.read_text())["loops"]
    keys = [Configuration(**{name: row[name] for name in Configuration._fields}) for row in rows]
    return {
        (row["triton"], row["kernel"], key): row["per_pairs"] for row, key in zip(rows, keys) if row["loop"] == "FULL"
    }


def _kernel(c: Configuration, name: str) -> tuple[str, str, str, str, str]:
    return name, str(c.architecture), head_dims(c), c.dtype, c.variant


def _of_kernel(c: Configuration, name: str, used: dict[str, Any], before: float) -> dict[tuple[str, str], float]:
    """before: the most instructions that the FULL loop may issue per 128 x 128 pairs."""
    result: dict[tuple[str, str], float] = {}
    if used["spills"]:
        result["", "spills"] = used["spills"]
    if used["shared"] > SHARED_MEMORY[c.architecture]:
        result["", f"more than {SHARED_MEMORY[c.architecture]} bytes of shared memory"] = used["shared"]
    tensor_cores = TENSOR_CORES[c.architecture]
    if (name.startswith(DOTS) or name.startswith(hot_loops.GLUON)) and c.dtype != "float32" and not used[tensor_cores]:
        result["", f"no {tensor_cores}; HMMA"] = used["mma"]
    if name.startswith(hot_loops.GLUON) and not used["tma"]:
        result["", "no UTMALDG"] = 0
    if "loops" in used and c.variant != "computed":  # plans too large for bitmaps have no speed requirement
        if loops := hot_loops.figures(name, used):
            result |= hot_loops.problems(*loops)
            if loops[0].per_pairs > before:
                result["FULL", "instructions over before"] = round(loops[0].per_pairs / before, 2)
        else:
            result["", "hot loops"] = len(used["loops"])
    return result


def exceptions(path: Path = TABLE) -> dict[Problem, Accepted]:
    result = {}
    with path.open(newline="") as lines:
        for row in csv.DictReader(lines):
            figures = {version: float(row[version]) for version in VERSIONS if row[version]}
            result[Problem(*(row[name] for name in Problem._fields))] = Accepted(figures, row["reason"])
    return result


def changes(report: Report, version: str, accepted: dict[Problem, Accepted] | None = None) -> list[str]:
    """Differences between the problems of a report and the accepted ones, under one version of Triton, in words."""
    accepted = exceptions() if accepted is None else accepted
    compiled = {_kernel(c, name) for c, kernels in report.items() for name in kernels}
    expected = {
        problem: row.figures[version]
        for problem, row in accepted.items()
        if version in row.figures and problem[:5] in compiled
    }
    result = problems(report, version)
    words = [f"no reason given: {describe(problem)}" for problem in expected if not accepted[problem].reason]
    for problem in sorted({*result, *expected}):
        is_, was = result.get(problem), expected.get(problem)
        if is_ != was:
            what = "new" if was is None else "gone" if is_ is None else "changed"
            words.append(f"{what}: {problem.problem}, {_figure(was)} -> {_figure(is_)}: {describe(problem)}")
    return words


def describe(problem: Problem) -> str:
    loop = f", {problem.loop} loop" if problem.loop else ""
    return (
        f"{problem.kernel}{loop}, sm_{problem.architecture}, head dimension {problem.head_dim}, "
        f"{problem.dtype}, {problem.variant}"
    )


def _figure(value: float | None) -> str:
    return "none" if value is None else f"{value:g}"


def accept(reports: dict[str, Report], path: Path = TABLE) -> None:
    """Write the problems of the reports as accepted, with the reasons that the table has already.

    Figures for versions that are not in `reports`, and for kernels that these do not have, are removed.
    """
    known = exceptions(path) if path.exists() else {}
    common: dict[tuple[str, ...], set[str]] = {}
    for problem, row in known.items():
        common.setdefault(_class(problem), set()).add(row.reason)
    result = {version: problems(report, version) for version, report in reports.items()}
    with path.open("w", newline="") as lines:
        table = csv.writer(lines, lineterminator="\n")
        table.writerow([*Problem._fields, *VERSIONS, "reason"])
        for problem in sorted({problem for of_version in result.values() for problem in of_version}, key=_order):
            figures = [result.get(version, {}).get(problem) for version in VERSIONS]
            cells = ["" if figure is None else f"{figure:g}" for figure in figures]
            reasons = {known[problem].reason} if problem in known else common.get(_class(problem), set())
            table.writerow([*problem, *cells, reasons.pop() if len(reasons) == 1 else ""])


def _class(problem: Problem) -> tuple[str, ...]:
    return problem.kernel, problem.architecture, problem.loop, problem.problem


def _order(problem: Problem) -> tuple[Any, ...]:
    numbers = [int(x) for x in problem.head_dim.split("/") if x]
    return (problem.architecture, problem.kernel, problem.problem, numbers, *problem)
