"""Output of `bench.scheduling`: a row as lines, the short table of rows with a target, the README's table.

python -m bench.scheduling_report [REPORT.json]      the README's table of a report, bench/results/scheduling.json
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from bench.scheduling_rows import EQUAL, Record

# The README's rows: of several with the same target the hardest.
README = (
    "8,192 token blocks to 16 ranks, embedded",
    "153,600 sequences to 2,560 ranks, 60 each",
    "node-wise placement, 2,560 ranks, 8 per node",
    "bottleneck matching 256 x 256, uniform",
    "deferral, 128 microbatches of 64 samples, lognormal",
    "partition 10,000 layers into 512 stages, speeds and memory",
    "orchestrate 1,296 GPUs, batch 1,920, layers, vpp 2, 80 GB",
    "template, 24 nodes x 8 GPUs x 96 layers",
    "instantiate, 1,000 nodes, batch 8,192",
    "simulate 1,003,200 actions",
)


def lines(record: Record) -> list[str]:
    """A row as text: its problem with the target and the verdict, a line per solver, and the papers' printed values."""
    head = record["problem"]
    if record["target_ms"] is not None:
        head += f"   target {record['target_ms']:g} ms"
        head += f", gap {record['target_gap']:.1%}" if record["target_gap"] is not None else ""
        head += ": " + verdict(record)
    result = [head]
    for name, each in record["solvers"].items():
        if "failed" in each:
            result.append(f"  {name:48} failed: {each['failed']}")
            continue
        ratio = f"{each['ratio']:9.3g} x" if "ratio" in each else " " * 11
        value = f"   {each['value']:.6g}" if "value" in each else ""
        gap = f" ({percent(each['gap'])} over bound)" if "gap" in each else ""
        if 0 < each.get("proved_bound", math.inf) < each.get("value", 0.0) * (1 - EQUAL):
            gap += f", proved {each['proved_bound']:.6g}"
        properties = "".join(f", {key}" for key, held in each.get("properties", {}).items() if held)
        result.append(f"  {name:48} {each['ms']:11.3f} ms {ratio}{value}{gap}{properties}")
    for name, quoted in record["quoted"].items():
        result.append(f"  {name:48} {quoted['ms']:11.3f} ms {quoted['ratio']:9.3g} x")
    result += [
        f"    {name}: {note if isinstance(note, str) else format(note, '.4g')}"
        for name, note in record["notes"].items()
    ]
    return result


def percent(gap: float) -> str:
    """ "0" for an answer that reaches its bound up to rounding, so is optimal; else at least 0.001%."""
    return "0" if gap <= 1e-8 else f"{gap:.3%}" if gap >= 1e-5 else "< 0.001%"


def verdict(record: Record) -> str:
    """ "met", or the missed part of the target."""
    missed = [name for name, kept in record["met"].items() if not kept]
    return "met" if not missed else "MISSED: " + ", ".join(missed)


def summary(rows: Iterable[Record]) -> list[str]:
    """The rows with a target: time, target, verdict, gap, and each peer's time relative to ours."""
    result = [f"{'problem':60}{'ms':>9}{'target':>8}{'gap':>9}  verdict, times that peers take longer"]
    for row in rows:
        if row["target_ms"] is None:
            continue
        ours, peers = _ours_and_peers(row)
        gap = percent(ours["gap"]) if "gap" in ours else ""
        ratios = [f"{name} {_times(each['ratio'])}" for name, each in [*peers.items(), *row["quoted"].items()]]
        line = f"{row['problem']:60}{ours['ms']:>9.3f}{row['target_ms']:>8g}{gap:>9}  "
        result.append(line + ", ".join([verdict(row), *ratios]))
    return result


def readme_table(report: dict[str, Any]) -> str:
    """Markdown for the rows in README: our time, target and gap, each peer's time relative to ours, and the papers'
    times on their own machines."""
    rows = {row["problem"]: row for row in report["rows"]}
    result = ["| problem | time | target | over its bound | peers, times our time |", "|---|---|---|---|---|"]
    for row in (rows[problem] for problem in README):
        ours, peers = _ours_and_peers(row)
        cells = [f"{name} {_times(each['ratio'])}{_worse(each, ours)}" for name, each in peers.items()]
        cells += [f"{name}: {_seconds(each['ms'])}" for name, each in row["quoted"].items()]
        figures = [f"{ours['ms']:.2g} ms", _seconds(row["target_ms"]), percent(ours["gap"])]
        result.append(f"| {' | '.join([row['problem'], *figures, ', '.join(cells)])} |")
    return "\n".join(result)


def _ours_and_peers(row: Record) -> tuple[Record, dict[str, Record]]:
    """Our record, and those of all other solvers that solved the problem."""
    ours, *others = row["solvers"].items()
    peers = {name: each for name, each in others if "ratio" in each and not name.startswith("interlace")}
    return ours[1], peers


def _seconds(milliseconds: float) -> str:
    return f"{milliseconds / 1e3:,.0f} s" if milliseconds >= 1e4 else f"{milliseconds:,.0f} ms"


def _times(ratio: float) -> str:
    return f"{ratio:,.0f}x" if ratio >= 10 else f"{ratio:.2g}x"


def _worse(peer: Record, ours: Record) -> str:
    """Excess of a peer's value over ours, if visible."""
    over = peer["value"] / ours["value"] - 1
    return f" (value {over:+.1%})" if over > 1e-3 else ""


def main(paths: list[str]) -> None:
    print(readme_table(json.loads(Path(*(paths or ["bench/results/scheduling.json"])).read_text())))


if __name__ == "__main__":
    main(sys.argv[1:])
