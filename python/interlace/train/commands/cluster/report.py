"""Report of `interlace doctor cluster`: a table for people, and JSON."""

from __future__ import annotations

import json
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from interlace.train.commands.cluster.facts import EQUAL, GIB, Facts, Trouble, groups_of, ranks_in_words
from interlace.train.commands.cluster.links import Link


@dataclass
class Report:
    """Report of all ranks.

    facts: of each rank; empty if the check ended earlier. clocks: (ahead of rank 0's, bound) of each rank, in seconds.
    sums: host -> bytes per second of an all-reduce there; "" for all ranks.
    """

    world: int
    timeout: float
    facts: list[Facts] = field(default_factory=list)
    clocks: list[tuple[float, float]] = field(default_factory=list)
    links: list[Link] = field(default_factory=list)
    sums: dict[str, float] = field(default_factory=dict)
    troubles: list[Trouble] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def write(report: Report, path: Path) -> None:
    """Writes the whole report as JSON, in bytes and seconds. Raises OSError."""
    table = {
        "version": 1,
        "ok": not report.troubles,
        "world": report.world,
        "timeout": report.timeout,
        "ranks": [{name: value for name, value in each.items() if name != "files"} for each in report.facts],
        "clocks": [{"ahead": ahead, "bound": bound} for ahead, bound in report.clocks],
        "links": [link._asdict() for link in report.links],
        "all_reduce": [{"host": host or None, "bandwidth": bandwidth} for host, bandwidth in report.sums.items()],
        "troubles": [trouble._asdict() for trouble in report.troubles],
        "notes": report.notes,
    }
    path.write_text(json.dumps(table, indent=1) + "\n")


def show(report: Report) -> None:
    """Prints a short table, then the problems with their remedies."""
    from rich.markup import escape

    from interlace.train.commands.tables import console_of, table_of

    columns = ("what", "found")
    table = table_of(f"interlace doctor cluster: {report.world} ranks", *columns, left=columns)
    for what, text in _rows(report):
        table.add_row(escape(what), escape(text))
    console = console_of(200)
    console.print(table)
    for note in report.notes:
        console.print(f"note: {escape(note)}", soft_wrap=True)
    for trouble in report.troubles:
        console.print(f"[red]wrong[/red]: {escape(trouble.what)}", soft_wrap=True)
        if trouble.do:
            console.print(f"       {escape(trouble.do)}", soft_wrap=True)
    console.print("nothing is wrong" if not report.troubles else f"{len(report.troubles)} wrong")


def _rows(report: Report) -> list[tuple[str, str]]:
    rows = []
    facts = report.facts
    for host, ranks in groups_of(each["host"] for each in facts).items():
        gpus = Counter(facts[rank]["gpu"].partition(",")[0] for rank in ranks if facts[rank]["gpu"])
        where = ", ".join(f"{count} x {name}" for name, count in gpus.items()) or "CPU"
        first = facts[ranks[0]]
        space = f"{_gib(first['disk'])} disk and {_gib(first['shared'])} shared memory free"
        rows.append((host, f"{ranks_in_words(ranks)} on {where}; {space}, memlock {_memlock(first['memlock'])}"))
    if facts:
        names = [name for name in EQUAL if name != "kind"]
        rows.append(("versions of rank 0", ", ".join(f"{EQUAL[name]} {facts[0][name]}" for name in names)))
    if len(report.clocks) > 1:
        rank = max(range(1, len(report.clocks)), key=lambda each: abs(report.clocks[each][0]))
        ahead, bound = report.clocks[rank]
        rows.append(("clocks", f"rank {rank} is farthest from rank 0: {ahead * 1e3:+.2f} ms, +- {bound * 1e3:.2f} ms"))
    for inside, what in ((True, "pairs within a host"), (False, "pairs between hosts")):
        kind = [link for link in report.links if (facts[link.first]["host"] == facts[link.second]["host"]) is inside]
        if kind:
            rows.append((what, _spread(kind)))
    for host, bandwidth in report.sums.items():
        rows.append((f"all-reduce on {host}" if host else "all-reduce over all ranks", f"{bandwidth / 1e6:.0f} MB/s"))
    return rows


def _spread(links: Sequence[Link]) -> str:
    speeds, waits = [link.bandwidth / 1e6 for link in links], [link.latency * 1e6 for link in links]
    return (
        f"{len(links)}: {min(speeds):.0f} to {max(speeds):.0f} MB/s, median {statistics.median(speeds):.0f}; "
        f"{min(waits):.0f} to {max(waits):.0f} us, median {statistics.median(waits):.0f}"
    )


def _gib(count: int) -> str:
    return "unknown" if count < 0 else f"{count / GIB:.1f} GiB"


def _memlock(limit: int) -> str:
    return "unlimited" if limit < 0 else f"{limit >> 10} KiB"
