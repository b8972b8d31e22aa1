"""Plot of traces: computation and link activity, a pair of lanes per run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from interlace.comm.process.trace import Span
from interlace.simulate.pictures import style

_LANES = {"compute": ("products", "language_model"), "copy": ("link", "vision")}  # kind -> (lane, name of its colour)


def plot_traces(runs: Mapping[str, Sequence[Sequence[Any]]], path: str | Path, *, title: str = "") -> None:
    """Writes a plot of one rank's spans, one run below another on a common time axis.

    runs: name -> spans, as `Trace.spans` or as rows (kind, label, start, finish) of a report, in seconds; every run
        starts at its first span.
    path: its suffix selects the format.
    """
    figure = style.canvas(10.0, 1.0 + 1.1 * len(runs), 110)
    axes = figure.add_subplot()
    colours = style.module_colours(module for _, module in _LANES.values())
    longest, ticks = 0.0, {}
    for number, (name, rows) in enumerate(runs.items()):
        spans = sorted((e for e in (Span(*row) for row in rows) if e.kind in _LANES), key=lambda e: e.start)
        first = spans[0].start if spans else 0.0
        turns = dict.fromkeys(_LANES, 0)
        for span in spans:
            lane, module = _LANES[span.kind]
            y = 2.5 * number + list(_LANES).index(span.kind)
            ticks[y] = f"{name}: {lane}"
            turns[span.kind] += 1
            axes.barh(
                y, 1e3 * (span.finish - span.start), left=1e3 * (span.start - first), height=0.8,
                color=style.shade(colours[module], 0.15 if turns[span.kind] % 2 else 0.45),
                edgecolor=style.EDGE, linewidth=0.8,
            )  # fmt: skip
            longest = max(longest, 1e3 * (span.finish - first))
    axes.set_yticks(list(ticks), list(ticks.values()))
    axes.invert_yaxis()
    axes.set_xlim(0.0, longest * 1.01 or 1.0)
    axes.set_xlabel("milliseconds", fontsize=10, color=style.QUIET)
    style.plain(axes, 10)
    if title:
        axes.set_title(title, loc="left", fontsize=12, fontweight="bold", color=style.INK)
    figure.tight_layout()
    figure.savefig(path)
