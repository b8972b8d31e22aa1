"""Pictures of loads: bars per rank.

A step lasts as long as its heaviest rank. The grey above a bar is the time spent waiting for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike, NDArray

from interlace.simulate.pictures.style import IDLE, INK, QUIET, canvas, module_colours, plain, shade

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Floats = NDArray[np.float64]

_DPI = 140
_WIDTH = 10.0  # inches; 9 points stay legible at 850 pixels, the width on code hosts
MOST_BARS = 128
_BLUE, _ORANGE = module_colours(["language_model", "vision"]).values()


def plot_loads(
    loads: Mapping[str, ArrayLike], path: str | Path, *, title: str = "", unit: str = "load", item: str = "rank"
) -> None:
    """Draws bars of load per rank, one panel per distribution of the work, on one scale, at most four panels in a row.

    Args:
        loads: name of the panel -> real numbers [ranks], finite and not negative, in the order of the panels.
        path: output file; its suffix selects the format (usually PNG).
        title: title of the picture.
        unit: unit of the loads, for the axis. item: meaning of a bar (rank, stage, microbatch).

    Raises:
        ValueError: there is nothing to draw, or a load is not a finite, non-negative number (the message names it).
    """
    panels = {name: _checked(name, values) for name, values in loads.items()}
    if not panels:
        raise ValueError("loads is empty: give at least one row of loads")
    columns = min(len(panels), 4)
    rows = -(-len(panels) // columns)
    height = 1.05 + 2.45 * rows
    figure = canvas(_WIDTH, height, _DPI)
    top = max(float(values.max()) for values in panels.values()) or 1.0
    grid = figure.add_gridspec(
        rows, columns, left=0.075, right=0.99, wspace=0.07, hspace=0.62, top=1 - 0.92 / height, bottom=0.73 / height
    )
    for index, (name, values) in enumerate(panels.items()):
        axes = figure.add_subplot(grid[index // columns, index % columns])
        _bars(axes, values)
        axes.set_ylim(0.0, top * 1.04)
        plain(axes, 9)
        axes.set_title(name, loc="left", fontsize=10.5, weight="bold", color=INK, pad=17)
        axes.text(0, 1.03, _verdict(values), transform=axes.transAxes, fontsize=9, color=QUIET)
        axes.set_xlabel(item, fontsize=9, color=QUIET, labelpad=2)
        if index % columns:
            axes.tick_params(labelleft=False)
        else:
            axes.set_ylabel(unit, fontsize=9, color=QUIET)
    _heading(figure, title)
    _legend(figure, bar=f"one {item}", heaviest="the heaviest", waiting="waits for the heaviest", line="mean")
    figure.savefig(path, dpi=_DPI)


def _checked(name: str, values: ArrayLike) -> Floats:
    array = np.asarray(values)
    if array.ndim != 1 or not array.size or array.dtype.kind not in "fiu":
        raise ValueError(f"{name}: loads must be real numbers [ranks], got {array.dtype} {list(array.shape)}")
    wrong = np.flatnonzero(~(np.isfinite(array) & (array >= 0)))
    if wrong.size:
        raise ValueError(f"{name}: load {wrong[0]} is {array[wrong[0]]}: it must be finite and not negative")
    return array.astype(np.float64)


def _bars(axes: Axes, values: Floats) -> None:
    """Draws bars, with the heaviest in orange, grey up to its height, and a line at the mean."""
    heaviest, positions = int(values.argmax()), np.arange(len(values))
    if len(values) <= MOST_BARS:
        axes.bar(positions, values[heaviest] - values, 0.8, bottom=values, color=IDLE, linewidth=0)
        axes.bar(positions, values, 0.8, color=shade(_BLUE, 0.25), linewidth=0)
    else:  # one outline, since bars narrower than a pixel may vanish
        axes.fill_between(positions, values, values[heaviest], step="mid", color=IDLE, linewidth=0)
        axes.fill_between(positions, values, step="mid", color=shade(_BLUE, 0.25), linewidth=0)
    axes.bar(heaviest, values[heaviest], max(0.8, len(values) / 250), color=_ORANGE, linewidth=0)
    axes.axhline(values.mean(), color=INK, linewidth=1.0, linestyle=(0, (4, 3)))
    axes.set_xlim(-0.7, len(values) - 0.3)
    axes.locator_params(axis="x", nbins=6, integer=True)


def _verdict(values: Floats) -> str:
    mean, heaviest = float(values.mean()), float(values.max())
    if heaviest == 0:
        return "no load"
    return f"{heaviest / mean:.3f} × mean, {1 - mean / heaviest:.1%} waiting"


def _heading(figure: Figure, title: str) -> None:
    width, height = figure.get_size_inches()
    figure.text(0.2 / width, 1 - 0.24 / height, title, fontsize=12.5, weight="bold", color=INK, va="center_baseline")


def _legend(figure: Figure, **meanings: str) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles = {
        "bar": Patch(color=shade(_BLUE, 0.25), linewidth=0),
        "heaviest": Patch(color=_ORANGE, linewidth=0),
        "waiting": Patch(color=IDLE, linewidth=0),
        "line": Line2D([], [], color=INK, linewidth=1.2, linestyle=(0, (4, 3))),
    }
    figure.legend(
        [handles[name] for name in meanings], list(meanings.values()), loc="lower center", ncols=len(meanings),
        frameon=False, fontsize=9, labelcolor=INK, borderpad=0.3, handlelength=1.8, handleheight=1.0, columnspacing=1.8,
        handletextpad=0.5, borderaxespad=0.2,
    )  # fmt: skip
