"""Writes docs/papers.md from the stored reports, so that it matches them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bench.papers.frame import Claim, claims_of, stored
from bench.papers.tables import TABLES

PAGE = Path(__file__).parents[2] / "docs" / "papers.md"

INTRODUCTION = """# What the papers print, again

Interlace takes its ideas from five papers, and here it is held against them. Each line below is something that a paper
says with a figure: theirs, and ours from the project's own planner, balancer, generators and simulator. *holds* says
that the direction is the same, not the figure; where it is not, a note says why. A difference below 2 % counts as none,
so that a line which says that one is ahead does not hold there. *follows*: it holds, but from a constant that was
assumed or fitted, so that it is no evidence. What a paper does not print (lengths of its data, seconds of its machines)
had to be assumed, and is named under the table. *(figure)*: drawn, not printed.

The page is written by `python -m bench.papers --all` from the reports in `bench/results/papers/`.
"""


def render() -> str:
    """The page of the stored reports, as Markdown."""
    lines = [INTRODUCTION, "| from | it says | theirs | ours | |", "|---|---|---|---|---|"]
    reports = {name: stored(name) for name in TABLES}
    result = {name: report for name, report in reports.items() if report is not None}
    for name, report in result.items():
        lines += [_line(name, claim) for claim in claims_of(report)]
    claims = [claim for report in result.values() for claim in claims_of(report)]
    follow, hold = (sum(claim.verdict == word for claim in claims) for word in ("follows", "holds"))
    lines[1:1] = [f"{hold} of {len(claims)} lines hold, {follow} follow, {len(claims) - hold - follow} differ.", ""]
    lines += ["", "`python -m bench.papers NAME` makes the lines of a name; the figures behind them are in its report."]
    for paper in dict.fromkeys(map(_paper, result)):
        lines += _section(paper, {name: report for name, report in result.items() if _paper(name) == paper})
    waiting = [f"`python -m bench.papers {name}`" for name, report in reports.items() if report is None]
    if waiting:
        lines += [
            "",
            "## Not run yet",
            "",
            f"No report of these is stored; the command makes it: {', '.join(waiting)}.",
        ]
    return "\n".join(lines) + "\n"


def _paper(name: str) -> str:
    """The paper of a table: the part before its number, without "table" or "figure"."""
    return name.rpartition("-")[0].removesuffix("-table").removesuffix("-figure")


def _section(paper: str, reports: dict[str, dict[str, Any]]) -> list[str]:
    """Details of one paper: its tables, reasons for differences, assumptions, and what cannot be reproduced."""
    lines = ["", f"## {paper}", ""]
    lines += [f"- `{name}`: {report['source']}. {report['about']}" for name, report in reports.items()]
    differs = [
        f"- `{name}`, {claim.says}: {claim.why}"
        for name, report in reports.items()
        for claim in claims_of(report)
        if claim.why
    ]
    for title, notes in (
        ("Beside the figures:", differs),
        ("Assumed:", _once(reports, "assumed")),
        ("Not reproducible:", _once(reports, "missing")),
    ):
        if notes:
            lines += ["", title, "", *notes]
    return lines


def _once(reports: dict[str, dict[str, Any]], key: str) -> list[str]:
    """Each note once, with the names of its tables unless it applies to all."""
    of: dict[str, list[str]] = {}
    for name, report in reports.items():
        for note in report[key]:
            of.setdefault(note, []).append(f"`{name}`")
    return [
        f"- {note}" + ("" if len(names) == len(reports) else f" ({', '.join(names)})") for note, names in of.items()
    ]


def _line(name: str, claim: Claim) -> str:
    cells = [f"`{name}`", claim.says, claim.theirs, claim.ours, claim.verdict if claim.holds else "**differs**"]
    return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"
