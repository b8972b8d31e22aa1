"""Scheduling algorithms and their peers, side by side in one run: milliseconds, values, bounds and targets.

    python -m bench.scheduling [--only balance,microbatch,plan] [--quick] [--limit 10] [--out FILE]

Peers (prtpy, SciPy, OR-tools CP-SAT, cvxpy with Clarabel, Pyomo) are installed by `pip install -e ".[peers]"`; missing
ones are left out and listed. Exact peers stop after `--limit` seconds. A row with a target is marked "met", or lists
what was missed: the time, the gap to a proven bound, or a value beside a peer's. The JSON in bench/results has every
row. Exit status 1 if one of our answers did not meet its row's requirements. Times do not affect the exit status, since
targets are for 2 otherwise idle cores of a server.

On a busy machine, `chrt -f 50 python -m bench.scheduling` measures nearly as on an idle one.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from bench import scheduling_balance, scheduling_microbatch, scheduling_plan
from bench.measure import command, machine, versions, write_json
from bench.scheduling_report import lines, summary
from bench.scheduling_rows import PACKAGES, Record, Row, installed, measure

PARTS: dict[str, Callable[[bool, float], Iterator[Row]]] = {
    "balance": scheduling_balance.rows,
    "microbatch": scheduling_microbatch.rows,
    "plan": scheduling_plan.rows,
}


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Run the benchmark, print the table as it grows, write the JSON; returns the report."""
    options = parse(argv)
    rows: list[Record] = []
    for part in options.only:
        for row in PARTS[part](options.quick, options.limit):
            rows.append({"part": part, **measure(row, options.repeats, options.seconds)})
            print("\n" + "\n".join(lines(rows[-1])), flush=True)
    report = {
        "benchmark": "scheduling",
        "command": command("scheduling", argv),
        "machine": machine(),
        "versions": versions("interlace", "numpy", *PACKAGES),
        "settings": {name: getattr(options, name) for name in ("quick", "repeats", "seconds", "limit")},
        "missing_peers": [package for package in PACKAGES if not installed(package)],
        "rows": rows,
    }
    print("\n" + "\n".join(summary(rows)))
    if report["missing_peers"]:
        print(f"not installed: {', '.join(report['missing_peers'])}; pip install -e '.[peers]'")
    if options.out is not None:
        write_json(options.out, report)
    return report


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=_parts, default=list(PARTS), metavar="PART,...", help=", ".join(PARTS))
    parser.add_argument("--quick", action="store_true", help="seconds: smaller problems, without the slowest peers")
    parser.add_argument("--repeats", type=int, default=15, help="measured calls of each solver at most; medians count")
    parser.add_argument("--seconds", type=float, default=1.0, help="of measured calls per solver and row")
    parser.add_argument("--limit", type=float, default=10.0, help="seconds that an exact peer may take per instance")
    parser.add_argument("--out", type=Path, help="JSON; default bench/results/scheduling.json for a whole run")
    options = parser.parse_args(argv)
    if options.repeats < 1:
        parser.error("--repeats must be at least 1")
    if options.out is None and not options.quick and options.only == list(PARTS):
        options.out = Path("bench/results/scheduling.json")
    if options.quick:
        options.repeats, options.seconds, options.limit = min(options.repeats, 3), 0.1, 1.0
    return options


def _parts(text: str) -> list[str]:
    chosen = text.split(",")
    wrong = [part for part in chosen if part not in PARTS]
    if wrong:
        raise argparse.ArgumentTypeError(f"no part {wrong[0]!r}: use {', '.join(PARTS)}")
    return chosen


def failures(report: dict[str, Any]) -> list[str]:
    """Rows whose answer does not meet their requirements, whatever the time."""
    return [
        f"{row['problem']}: {name}"
        for row in report["rows"]
        for name, kept in row["met"].items()
        if not kept and name != "time"
    ]


def test_scheduling(benchmark: Any) -> None:
    """The same under pytest-benchmark, quick."""
    with tempfile.TemporaryDirectory() as folder:
        out = str(Path(folder) / "scheduling.json")
        report = benchmark.pedantic(lambda: main(["--quick", "--out", out]), rounds=1)
    assert not failures(report)
    for row in report["rows"]:
        benchmark.extra_info[row["problem"]] = next(iter(row["solvers"].values()))["ms"]


if __name__ == "__main__":
    problems = failures(main())
    print("\n".join(problems), file=sys.stderr)
    sys.exit(1 if problems else 0)
