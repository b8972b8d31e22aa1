"""Pictures of loads: bars per rank, and samples deferred between microbatches.

A step lasts as long as its heaviest rank or microbatch. The grey above a bar is the time spent waiting for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike, NDArray

from interlace.simulate.pictures.style import EDGE, GREY, IDLE, INK, QUIET, boxes, canvas, module_colours, plain, shade

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from interlace.balance import MicrobatchPlan

Floats = NDArray[np.float64]

_DPI = 140
_WIDTH = 10.0  # inches; 9 points stay legible at 850 pixels, the width on code hosts
MOST_ARROWED = 16  # microbatches: with more, arrows clutter the picture, and only hatching marks deferred samples
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
        "sample": Patch(facecolor=shade(_BLUE, 0.6), linewidth=0),
        "deferred": Patch(facecolor=shade(_BLUE, 0.3), edgecolor=EDGE, hatch="////"),
        "gone": Patch(facecolor="none", edgecolor=GREY, linestyle=(0, (3, 2))),
        "waiting": Patch(color=IDLE, linewidth=0),
        "line": Line2D([], [], color=INK, linewidth=1.2, linestyle=(0, (4, 3))),
    }
    figure.legend(
        [handles[name] for name in meanings], list(meanings.values()), loc="lower center", ncols=len(meanings),
        frameon=False, fontsize=9, labelcolor=INK, borderpad=0.3, handlelength=1.8, handleheight=1.0, columnspacing=1.8,
        handletextpad=0.5, borderaxespad=0.2,
    )  # fmt: skip


def plot_deferral(
    plan: MicrobatchPlan,
    encoder_cost: ArrayLike,
    llm_cost: ArrayLike,
    path: str | Path,
    *,
    title: str = "",
    unit: str = "cost",
) -> None:
    """Draws the result of `balance.assign_microbatches`, like Figure 4.8 of the dissertation.

    Three columns: the samples cut in the order given, the encoder balanced, the LLM deferred. A box is a sample, as
    tall as its cost, with LLM costs above and encoder costs below. The dashed line is the costliest microbatch.
    Deferred samples are hatched. Arrows lead from the microbatch that encodes them to the one whose LLM consumes them;
    they are omitted if there are too many microbatches.

    Args:
        plan: from `assign_microbatches(encoder_cost, llm_cost, ...)`.
        encoder_cost, llm_cost: the same costs [n].
        path, title: as in `plot_loads`. unit: unit of the costs, for the axes.

    Raises:
        ValueError: the costs are not those of the plan.
    """
    costs = {"LLM": _checked("llm_cost", llm_cost), "encoder": _checked("encoder_cost", encoder_cost)}
    planned = {"LLM": (plan.llm_loads, plan.llm_of), "encoder": (plan.encoder_loads, plan.encoder_of)}
    for side, (loads, chosen) in planned.items():
        cost = costs[side]
        if len(cost) != len(chosen) or not np.allclose(np.bincount(chosen, cost, plan.microbatches), loads):
            raise ValueError(f"the {side} costs differ from those of the plan: pass the same arrays")
    count, n = plan.microbatches, len(plan.llm_of)
    given = (np.arange(n) * count // n).astype(np.int32)
    columns = (
        ("samples in the order given", {"LLM": given, "encoder": given}, "microbatch"),
        ("encoder balanced", {"LLM": plan.encoder_of, "encoder": plan.encoder_of}, "microbatch, in order of execution"),
        ("LLM samples deferred", {"LLM": plan.llm_of, "encoder": plan.encoder_of}, "microbatch, in order of execution"),
    )
    heaviest = {
        side: [float(np.bincount(of[side], cost, count).max()) for _, of, _ in columns] for side, cost in costs.items()
    }

    width = min(max(_WIDTH, 3 * count * 0.3), 16.0)
    figure = canvas(width, 5.2, _DPI)
    grid = figure.add_gridspec(
        2, 3, left=0.72 / width, right=1 - 0.1 / width, wspace=0.08, hspace=0.07, top=0.84, bottom=0.155,
        height_ratios=(2.0, 1.0),
    )  # fmt: skip
    deferred = np.zeros(n, bool)
    deferred[list(plan.deferred)] = True
    for index, (name, of, label) in enumerate(columns):
        upper, lower = figure.add_subplot(grid[0, index]), figure.add_subplot(grid[1, index])
        # Deferred samples are on top of their stack, where their arrows start.
        last, feet = deferred if index else np.zeros(n, bool), {}
        for axes, side, colour in ((upper, "LLM", _BLUE), (lower, "encoder", _ORANGE)):
            top = max(heaviest[side]) or 1.0
            feet[side] = _stacks(axes, costs[side], of[side], count, last, colour, top)
            if index:
                axes.tick_params(labelleft=False)
            else:
                axes.set_ylabel(f"{side} ({unit})", fontsize=9, color=QUIET)
        lower.invert_yaxis()
        if index == 2:
            _arrows(upper, plan, costs["LLM"], feet["LLM"])
        upper.set_title(name, loc="left", fontsize=10.5, weight="bold", color=INK, pad=19)
        upper.text(
            0, 1.035, f"costliest: LLM {heaviest['LLM'][index]:.4g}, encoder {heaviest['encoder'][index]:.4g}",
            transform=upper.transAxes, fontsize=9, color=QUIET,
        )  # fmt: skip
        upper.tick_params(labelbottom=False, length=0, axis="x")
        lower.set_xlabel(label, fontsize=9, color=QUIET)
    _heading(figure, title)
    _legend(
        figure, sample="a sample, by number", deferred="deferred", gone="without deferral",
        waiting="waits for the costliest", line="costliest microbatch",
    )  # fmt: skip
    figure.savefig(path, dpi=_DPI)


def _stacks(
    axes: Axes,
    cost: Floats,
    microbatch_of: NDArray[np.int32],
    count: int,
    last: NDArray[np.bool_],
    colour: str,
    top: float,
) -> Floats:
    """Draws a stack of samples per microbatch, those in `last` on top and hatched; returns each sample's start, [n]."""
    loads = np.bincount(microbatch_of, cost, count)
    feet, height = np.zeros(len(cost)), np.zeros(count)
    axes.bar(range(count), loads.max() - loads, 0.82, bottom=loads, color=IDLE, linewidth=0)
    axes.axhline(loads.max(), color=INK, linewidth=1.2, linestyle=(0, (4, 3)), zorder=3)
    for sample in np.lexsort((np.arange(len(cost)), last)):
        at = microbatch_of[sample]
        feet[sample] = height[at]
        height[at] += cost[sample]
    line = 1.0 if len(cost) <= 16 * count and count <= 16 else 0.2  # thicker edges would hide the smallest
    for chosen, light, hatch in ((~last, 0.6, None), (last, 0.3, "////")):
        seen = np.flatnonzero(chosen & (cost > 0))
        style = {"facecolor": shade(colour, light), "edgecolor": EDGE, "linewidth": line, "hatch": hatch}
        axes.add_collection(boxes(microbatch_of[seen] - 0.41, 0.82, feet[seen], cost[seen], **style))
    axes.set_ylim(0.0, top * 1.06)
    axes.set_xlim(-0.6, count - 0.4)
    if count <= 16:
        axes.set_xticks(range(count))
    axes.locator_params(axis="y", nbins=5, steps=[1, 2, 5, 10])
    plain(axes, 9)
    _numbers(axes, cost, microbatch_of, feet, last)
    return feet


def _numbers(axes: Axes, cost: Floats, microbatch_of: NDArray[np.int32], feet: Floats, last: NDArray[np.bool_]) -> None:
    """Draws the number of each sample in its box if there is room."""
    box = axes.get_window_extent()
    low, high = axes.get_xlim()
    wide = box.width / (high - low) * 0.82 / _DPI * 72
    if wide < 9 * len(str(len(cost))):
        return
    tall = box.height / axes.get_ylim()[1] / _DPI * 72
    for sample in np.flatnonzero(cost * tall >= 9):
        axes.text(
            microbatch_of[sample], feet[sample] + cost[sample] / 2, str(sample), fontsize=8.5, color=INK, zorder=4,
            ha="center", va="center_baseline",
            bbox={"boxstyle": "round,pad=0.12", "facecolor": EDGE, "edgecolor": "none"} if last[sample] else None,
        )  # fmt: skip


def _arrows(axes: Axes, plan: MicrobatchPlan, cost: Floats, feet: Floats) -> None:
    """Draws an arrow from each deferred sample's outline on its old stack to its place on the next."""
    samples, targets = np.array(list(plan.deferred), int), np.array(list(plan.deferred.values()), int)
    sources, left = plan.encoder_of[samples], np.array(plan.llm_loads)
    outlines = np.zeros(len(samples))
    for index, (sample, source) in enumerate(zip(samples, sources, strict=True)):
        outlines[index] = left[source]
        left[source] += cost[sample]
    style = {"facecolor": "none", "edgecolor": GREY, "linewidth": 1.0, "linestyle": (0, (3, 2))}
    if plan.microbatches > MOST_ARROWED:
        once = np.unique(sources)
        axes.add_collection(boxes(once - 0.39, 0.78, plan.llm_loads[once], (left - plan.llm_loads)[once], **style))
        return
    axes.add_collection(boxes(sources - 0.39, 0.78, outlines, cost[samples], **style))
    for sample, source, target, outline in zip(samples, sources, targets, outlines, strict=True):
        axes.annotate(
            "", (target - 0.36, feet[sample] + cost[sample] / 2), (source + 0.1, outline + cost[sample] / 2),
            arrowprops={
                "arrowstyle": "-|>", "color": INK, "linewidth": 1.2, "shrinkA": 0, "shrinkB": 0,
                "connectionstyle": "arc3,rad=-0.2", "mutation_scale": 9,
            },
            zorder=5,
        )  # fmt: skip
