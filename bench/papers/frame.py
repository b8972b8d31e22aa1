"""Reproduced tables: their parts, printing and storage.

A table has cases (a data set, a model, a failure rate). Each case runs alone and returns rows: the paper's printed
figures beside ours. Claims are derived from all rows, and from nothing else. A claim is a direction that the paper
states, and if ours shows it. So a test can replay one case of a stored report and get the same claims from the stored
rows.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from bench.measure import machine, versions, write_json

RESULTS = Path(__file__).parents[1] / "results" / "papers"
MARGIN = 0.02
"""Smaller differences count as none: assumptions and drawn samples change figures by more than that."""

Value = Any  # a number, a text, or None


@dataclass(frozen=True)
class Row:
    """One figure of one case. theirs: as printed, None if the paper prints none; ours: None if it was not run."""

    case: str
    what: str
    theirs: Value
    ours: Value
    unit: str = ""


@dataclass(frozen=True)
class Claim:
    """A direction that the paper states. theirs, ours: the figures that show it, as text. why: reason if they differ.

    assumed: the line follows from a constant that was assumed, or fitted to the figures that it is compared with.
    """

    says: str
    theirs: str
    ours: str
    holds: bool
    why: str = ""
    assumed: bool = False

    @property
    def verdict(self) -> str:
        """ "holds", "differs", or "follows": holds, but only as a consequence of what was assumed or fitted."""
        return "differs" if not self.holds else "follows" if self.assumed else "holds"


def ahead(ratio: float) -> bool:
    """True if it exceeds 1 by more than `MARGIN`."""
    return ratio > 1 + MARGIN


def behind(ratio: float) -> bool:
    """True if it is below 1 by more than `MARGIN`."""
    return ratio < 1 - MARGIN


def rises(values: Sequence[float]) -> bool:
    """True if the last is ahead of the first, and none is behind its predecessor."""
    return ahead(values[-1] / values[0]) and not any(behind(b / a) for a, b in pairwise(values))


class Rows:
    """Rows by (case, what): `rows.ours("BERT", "1h")`."""

    def __init__(self, rows: Iterable[Row]) -> None:
        self._rows = {(row.case, row.what): row for row in rows}

    def __iter__(self) -> Iterator[Row]:
        return iter(self._rows.values())

    def ours(self, case: str, what: str) -> Any:
        return self._rows[case, what].ours

    def theirs(self, case: str, what: str) -> Any:
        return self._rows[case, what].theirs

    def cases(self) -> list[str]:
        """The cases that have rows, in their order."""
        return list(dict.fromkeys(case for case, _ in self._rows))


@dataclass(frozen=True)
class Table:
    """A table or figure of a paper, and how its figures are reproduced here.

    name: of the command. source: paper, table and section. about: one line.
    cases, run: `run(case, small)` returns the rows of one case, the same at every call unless `timed`; small: a size
        that takes a second at most; its figures are no result.
    conclude: the claims that follow from the rows of any of the cases.
    assumed: inputs that the paper does not print. missing: parts that cannot be reproduced, and why.
    timed: ours are wall-clock seconds on this machine. draw: writes the figure's pictures into a folder.
    """

    name: str
    source: str
    about: str
    cases: tuple[str, ...]
    run: Callable[[str, bool], list[Row]]
    conclude: Callable[[Rows], list[Claim]]
    assumed: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    timed: bool = False
    draw: Callable[[Path], None] | None = None


def run_table(table: Table, small: bool = False) -> dict[str, Any]:
    """The report of a table, in its stored form."""
    rows = [row for case in table.cases for row in table.run(case, small)]
    report: dict[str, Any] = {
        "name": table.name,
        "source": table.source,
        "about": table.about,
        "command": f"python -m bench.papers {table.name}",
        "versions": versions("interlace", "numpy"),
        "assumed": list(table.assumed),
        "missing": list(table.missing),
        "rows": [asdict(row) for row in rows],
        "claims": [asdict(claim) for claim in table.conclude(Rows(rows))],
    }
    return report | ({"machine": machine()} if table.timed else {})


def store(report: dict[str, Any], folder: Path = RESULTS) -> Path:
    """Writes a report to its file and returns the path."""
    path = folder / f"{report['name']}.json"
    write_json(path, report)
    return path


def stored(name: str, folder: Path = RESULTS) -> dict[str, Any] | None:
    """The stored report of a table, None if it does not exist."""
    path = folder / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else None


def rows_of(report: dict[str, Any]) -> list[Row]:
    """The rows of a report."""
    return [Row(**row) for row in report["rows"]]


def claims_of(report: dict[str, Any]) -> list[Claim]:
    """The claims of a report."""
    return [Claim(**claim) for claim in report["claims"]]


def show(value: Value, unit: str = "") -> str:
    """A figure formatted for readers."""
    if value is None:
        return "-"
    if isinstance(value, float):
        large = abs(value) >= 1000
        value = f"{value:,.0f}" if large else f"{value:.4g}" if abs(value) < 100 else f"{value:.1f}"
    return f"{value} {unit}".rstrip()


def text(report: dict[str, Any]) -> str:
    """A report for a terminal."""
    lines = [f"{report['name']}: {report['source']}", report["about"], ""]
    rows = rows_of(report)
    width = max((len(row.what) for row in rows), default=0)
    case = None
    for row in rows:
        if row.case != case:
            lines.append(f"  {row.case}")
            case = row.case
        theirs, ours = show(row.theirs, row.unit), show(row.ours, row.unit)
        lines.append(f"    {row.what:{width}}  theirs {theirs:>18}  ours {ours:>18}")
    lines.append("")
    for claim in claims_of(report):
        verdict = claim.verdict if claim.holds else "DIFFERS"
        lines.append(f"  {verdict:8}{claim.says}: theirs {claim.theirs}, ours {claim.ours}")
        if claim.why:
            lines.append(f"          {claim.why}")
    lines += [f"  assumed: {each}" for each in report["assumed"]]
    lines += [f"  not reproducible: {each}" for each in report["missing"]]
    return "\n".join(lines)
