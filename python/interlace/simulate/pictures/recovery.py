"""Picture of recovery costs: throughput over time, nodes, and lost time per system.

Like dissertation figures 2.10 and 2.11.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from interlace.simulate.pictures.style import COLOURS, EDGE, GREY, IDLE, INK, QUIET, canvas, plain, shade
from interlace.simulate.recovery import KINDS, Floats, Spent, Stretch, throughput_over_time

NAMES = {
    "effective": "effective",
    "redundant": "computed twice",
    "fallback": "lost work",
    "saving": "saving",
    "restarting": "restart or copy",
    "waiting": "too few nodes",
}
_DPI = 140
_WIDTH = 10.0
_WINDOWS = 96
_BLUE, _ORANGE = COLOURS[:2]
_KINDS = dict(
    zip(KINDS, (_BLUE, shade(_BLUE, 0.55), _ORANGE, shade(_ORANGE, 0.6), GREY, IDLE), strict=True)
)  # blue: effective and redundant compute; orange: lost work and saving; grey: no compute


def plot_recovery(
    runs: Mapping[str, Sequence[Stretch]], nodes: tuple[Floats, Floats], path: str | Path, *, title: str = ""
) -> None:
    """Draws the runs of some systems over the same trace.

    Each point of a line is the average of one of 96 time windows, so a short stop is a dip, not a zero.

    Args:
        runs: name of the system -> result of `replay`; all with the same end.
        nodes: (seconds, nodes present from then on), both [n].
        path: output file; its suffix selects the format (usually PNG).

    Raises:
        ValueError: there is no run, or a run is empty.
    """
    if not runs or not all(runs.values()):
        raise ValueError("no run to draw: give the result of `replay` for at least one system")
    until = next(iter(runs.values()))[-1].stop
    edges = np.linspace(0.0, until, _WINDOWS + 1)
    height = 5.0 + 0.42 * len(runs)
    figure = canvas(_WIDTH, height, _DPI)
    grid = figure.add_gridspec(
        3, 1, left=0.145, right=0.975, top=1 - 0.75 / height, bottom=0.75 / height, hspace=0.42,
        height_ratios=(2.6, 0.8, 0.42 * len(runs)),
    )  # fmt: skip
    lines, nodes_present, bars = (figure.add_subplot(grid[row]) for row in range(3))
    for (name, stretches), colour in zip(runs.items(), COLOURS, strict=False):
        throughput = throughput_over_time(stretches, edges)
        mean = Spent.sum(each.spent for each in stretches).throughput
        lines.step(edges / 3600, [*throughput, throughput[-1]], where="post", color=colour, linewidth=1.3, label=name)
        lines.axhline(mean, color=colour, linewidth=1.0, linestyle=":")
    lines.set_ylabel("samples per second", fontsize=9, color=QUIET)
    lines.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=len(runs), frameon=False, fontsize=9, labelcolor=INK)
    nodes_present.step(np.append(nodes[0], until) / 3600, np.append(nodes[1], nodes[1][-1]), where="post", color=INK)
    nodes_present.set_ylabel("nodes", fontsize=9, color=QUIET)
    nodes_present.set_xlabel("hours", fontsize=9, color=QUIET, labelpad=1)
    for axes in (lines, nodes_present):
        axes.set_xlim(0, until / 3600)
        axes.set_ylim(bottom=0)
        plain(axes, 9)
    lines.tick_params(labelbottom=False)
    names = list(runs)
    left = np.zeros(len(names))
    totals = [Spent.sum(run.spent for run in runs[name]) for name in names]
    for kind in KINDS:
        shares = np.array([getattr(spent, kind) / spent.total for spent in totals])
        if shares.any():
            bars.barh(names, shares, left=left, color=_KINDS[kind], edgecolor=EDGE, linewidth=0.6, label=NAMES[kind])
        left += shares
    bars.set_xlim(0, 1)
    bars.invert_yaxis()
    bars.xaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    plain(bars, 9)
    bars.legend(
        loc="upper center", bbox_to_anchor=(0.45, -0.28), ncols=len(KINDS), frameon=False, fontsize=9, labelcolor=INK
    )
    figure.text(0.01, 1 - 0.25 / height, title, fontsize=11, weight="bold", color=INK, va="center_baseline")
    figure.savefig(path, dpi=_DPI)
