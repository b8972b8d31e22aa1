"""recovery.html: cost of failures, joins and leaves in an elastic run, one bar per change of generation.

One file, no network, in the style of report.html. It is rewritten after each change of generation.
"""

from __future__ import annotations

import html
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from interlace._files import write_whole
from interlace.simulate.pictures.page import page, table
from interlace.simulate.pictures.style import COLOURS
from interlace.train.report.curves import number

NAME = "recovery.html"
PARTS = ("detection", "vote", "regroup", "copy", "replay")
COLOUR = dict(zip(PARTS, (COLOURS[4], COLOURS[3], COLOURS[0], COLOURS[1], COLOURS[2]), strict=True))
WIDTH, LABEL, ROW = 900, 150, 24  # of the picture, in pixels

Line = Mapping[str, Any]


def write_page(folder: Path, name: str, lines: Sequence[Line]) -> Path:
    """Writes the page of the run `name` from the lines of its recovery.jsonl; returns its path."""
    changes = [line for line in lines if line["split"]]
    lost = sum(line["lost"] for line in changes)
    about = f"{len(changes)} changes of generation, {number(lost)} s lost in all"
    body = f"<p class=status>{about}</p>{_legend(changes)}{_bars(changes)}{_table(lines)}"
    path = folder / NAME
    write_whole(path, page(f"{name}: when nodes fail", body))
    return path


def _legend(changes: Sequence[Line]) -> str:
    """Parts of the time lost, summed over all changes."""
    tiles = "".join(
        f'<div class=tile><b style="color:{COLOUR[part]}">{number(sum(c["split"][part] for c in changes))} s</b>{part}'
        "</div>"
        for part in PARTS
    )
    return f"<div class=tiles>{tiles}</div>" if changes else ""


def _bars(changes: Sequence[Line]) -> str:
    """One row per change: its step and cause, and the parts of its time lost."""
    longest = max((change["lost"] for change in changes), default=0.0)
    if not longest:
        return ""
    rows = []
    for place, change in enumerate(changes):
        top, left = place * ROW, float(LABEL)
        label = f"step {change['step']}: {', '.join(dict.fromkeys(kind for kind, *_ in change['cause']))}"
        rows.append(f'<text x="{LABEL - 8}" y="{top + 16}" text-anchor="end">{html.escape(label[:28])}</text>')
        for part in PARTS:
            width = (WIDTH - LABEL - 70) * change["split"][part] / longest
            hint = f"<title>{part}: {change['split'][part]:.3f} s</title>"
            shape = f'x="{left:.1f}" y="{top + 4}" width="{width:.1f}" height="{ROW - 8}" fill="{COLOUR[part]}"'
            rows.append(f"<rect {shape}>{hint}</rect>")
            left += width
        rows.append(f'<text x="{left + 6:.1f}" y="{top + 16}">{change["lost"]:.2f} s</text>')
    height = len(changes) * ROW
    picture = f'<svg class=wide viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}">{"".join(rows)}</svg>'
    return f"<h2>Time lost, change by change</h2>{picture}"


def _table(lines: Sequence[Line]) -> str:
    rows = []
    for line in lines:
        cause = "; ".join(f"{kind} {node} {detail}".strip() for kind, node, _, detail in line["cause"])
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(line["time"]))
        pipelines = " · ".join(f"{len(pipeline)}" for pipeline in line["pipelines"])
        copied = f"{line['bytes'] / 2**20:,.2f} MiB in {line['transfers']} transfers" if line["bytes"] else ""
        rows.append((line["generation"], when, line["step"], cause, pipelines, copied))
    head = ("generation", "first step counted (UTC)", "step", "cause", "nodes of its pipelines", "copied")
    return f"<h2>Generations</h2>{table(rows, head)}"
