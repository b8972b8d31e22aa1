"""Picture of a timeline: one row per rank, one colour per module, light forwards, dark backwards.

Numbers in the boxes are chunks, counted within their replica if the timeline has a table. They are omitted in boxes
that are too narrow. Grey is idle time.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from interlace.schedule.actions import COMPUTE, Action, Op
from interlace.simulate.pictures.style import (
    EDGE,
    GREY,
    IDLE,
    INK,
    QUIET,
    boxes,
    canvas,
    module_colours,
    shade,
    time_unit,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from interlace.simulate.timeline import Timeline

_SHADES = {Op.FORWARD: 0.45, Op.BACKWARD: 0.0, Op.BACKWARD_INPUT: 0.0, Op.BACKWARD_WEIGHT: -0.3}
_NAMES = {
    Op.FORWARD: "forward",
    Op.BACKWARD: "backward",
    Op.BACKWARD_INPUT: "backward (inputs)",
    Op.BACKWARD_WEIGHT: "backward (weights)",
}
_DPI = 120


def plot(timeline: Timeline, path: str | Path, *, title: str | None = None) -> None:
    """Writes the picture to `path` (its suffix selects the format, usually PNG).

    title: replaces the schedule's name in the title; ranks, chunks of a replica, makespan and bubble follow it.
    """
    computed = [record for record in timeline.records() if record.action.op in COMPUTE]
    numbers: dict[str, set[int]] = {}
    for record in computed:
        numbers.setdefault(record.action.module, set()).add(timeline.number(record.action.chunk))
    microbatches = max(map(len, numbers.values()), default=0)
    colours = module_colours(record.action.module for record in computed)
    scale, unit = time_unit(timeline.makespan)
    span = max(timeline.makespan, 1e-12) * scale

    # Wide enough for numbers in typical boxes, within the limits of a screen or page. Everything else scales with the
    # width, so that a large picture stays legible at a small size.
    durations = sorted(record.finish - record.start for record in computed) or [1.0]
    typical = max(durations[len(durations) // 4] * scale, span / 2000)
    names = [_hosted(actions) for actions in timeline.actions]
    letters = max(map(len, names), default=0)
    width = min(max(9.5, span / typical * 0.16 + 3.0) + 0.05 * letters, 28.0)
    zoom = min(max(width / 14, 1.0), 2.0)
    row = (0.42 if timeline.num_ranks <= 8 else 0.34) * zoom
    height = timeline.num_ranks * row + 1.6 * zoom
    figure = canvas(width, height, _DPI)
    left = (0.075 * letters + 0.75) * zoom / width
    right = 1 - 0.6 * zoom / width
    axes = figure.add_axes((left, 0.6 * zoom / height, right - left, timeline.num_ranks * row / height))
    axes.set_xlim(0.0, span)
    axes.set_ylim(timeline.num_ranks - 0.5, -0.5)
    pixels = (right - left) * width * _DPI / span  # per unit of time

    for rank in range(timeline.num_ranks):
        axes.broken_barh([(0.0, span)], (rank - 0.42, 0.84), facecolor=IDLE, linewidth=0, zorder=0)
    groups: dict[tuple[str, Op], list[tuple[int, int, float, float]]] = {}
    for rank, action, start, finish in computed:
        place = (rank, timeline.number(action.chunk), (start - timeline.begin) * scale, (finish - start) * scale)
        groups.setdefault((action.module, action.op), []).append(place)
    edge = 0.8 if pixels * typical > 6 else 0.25
    for (module, op), rows in groups.items():
        ranks, _, starts, lengths = np.array(rows).T
        style = {"facecolor": shade(colours[module], _SHADES[op]), "edgecolor": EDGE, "linewidth": edge}
        axes.add_collection(boxes(starts, lengths, ranks - 0.42, 0.84, **style))
    for ops in ({Op.FORWARD}, set(_SHADES) - {Op.FORWARD}):
        rows = [place for (_, op), members in groups.items() if op in ops for place in members]
        if rows:
            _number(axes, ops, rows, pixels, row, zoom)

    _label(axes, timeline, names, unit, zoom)
    heading = title if title is not None else (timeline.name.upper() or "timeline")
    facts = (
        f"{timeline.num_ranks} rank{'s' * (timeline.num_ranks != 1)} × {microbatches} "
        f"microbatch{'es' * (microbatches != 1)}   ·   {span:.4g} {unit}   ·   bubble {timeline.bubble:.1%}"
    )
    top = 1 - 0.28 * zoom / height
    written = figure.text(left, top, heading, fontsize=13 * zoom, weight="bold", color=INK, va="center_baseline")
    offset = written.get_window_extent().x1 / (width * _DPI) + 0.2 * zoom / width
    figure.text(offset, top, facts, fontsize=11 * zoom, color=QUIET, va="center_baseline")
    _legend(figure, set(groups), colours, (left, 1 - 0.6 * zoom / height), zoom)
    figure.savefig(path, dpi=_DPI)


def _number(
    axes: Axes, ops: Iterable[Op], rows: list[tuple[int, int, float, float]], pixels: float, row: float, zoom: float
) -> None:
    """Writes the chunks' numbers into boxes (rank, number, start, length) of the same kind, in one format.

    Numbers are upright if the boxes are wide enough, else rotated by 90 degrees. Much smaller boxes get none.
    """
    digits = max(len(str(number)) for _, number, _, _ in rows)
    letter = 0.62 * digits + 0.35  # width of the number and its margins, as a share of the font size
    tall = row * 0.84 * 72  # points

    def fit(length: float) -> tuple[float, float]:
        room = length * pixels / _DPI * 72
        return min(9.0 * zoom, tall * 0.5, room / letter), min(8.0 * zoom, room * 0.85, tall / letter)

    usual = sorted(length for _, _, _, length in rows)[len(rows) // 4]
    upright, turned = fit(usual)
    turn = upright < 6.0 * zoom and turned > upright
    colour = INK if Op.FORWARD in ops else "white"
    for rank, number, start, length in rows:
        size = min(turned if turn else upright, fit(length)[turn])
        if size >= 4.0:
            axes.text(
                start + length / 2, rank, str(number), ha="center", va="center" if turn else "center_baseline",
                fontsize=size, rotation=90 if turn else 0, color=colour, zorder=3,
            )  # fmt: skip


def _label(axes: Axes, timeline: Timeline, names: list[str], unit: str, zoom: float) -> None:
    size = 8.5 * zoom
    axes.set_yticks(range(timeline.num_ranks), [f"{name}   {rank}" for rank, name in enumerate(names)], fontsize=size)
    for rank, seconds in enumerate(timeline.busy_per_rank):
        share = seconds / timeline.makespan if timeline.makespan else 0.0
        axes.annotate(
            f"{share:.0%}", (1, rank), xycoords=("axes fraction", "data"), xytext=(7 * zoom, 0),
            textcoords="offset points", va="center_baseline", fontsize=size, color=INK,
        )  # fmt: skip
    for text, side, shift, align in (("busy", 1, 7, "left"), ("stages   rank", 0, -4, "right")):
        axes.annotate(
            text, (side, 1), xycoords="axes fraction", xytext=(shift * zoom, 2 * zoom), textcoords="offset points",
            fontsize=7.5 * zoom, color=QUIET, ha=align,
        )  # fmt: skip
    axes.tick_params(axis="y", length=0, labelcolor=INK)
    axes.tick_params(axis="x", labelsize=size, color=GREY, labelcolor=INK)
    axes.set_xlabel(f"time ({unit})", fontsize=size, color=QUIET)
    axes.spines[["top", "left", "right"]].set_visible(False)
    axes.spines["bottom"].set_color(GREY)


def _hosted(actions: Iterable[Action]) -> str:
    """Short list of the stages that run in these actions: vision/0-3, audio/0."""
    of: dict[str, set[int]] = {}
    for action in actions:
        if action.op in COMPUTE:
            of.setdefault(action.module, set()).add(action.stage)
    parts = []
    for module, indices in of.items():
        first, last = min(indices), max(indices)
        contiguous = len(indices) > 1 and len(indices) == last - first + 1
        text = f"{first}-{last}" if contiguous else ",".join(map(str, sorted(indices)))
        parts.append(f"{'llm' if module == 'language_model' else module}/{text}")
    text = ", ".join(parts) or "idle"
    return text if len(text) <= 28 else text[:27] + "…"


def _legend(
    figure: Figure, used: set[tuple[str, Op]], colours: dict[str, str], corner: tuple[float, float], zoom: float
) -> None:
    from matplotlib.legend_handler import HandlerTuple
    from matplotlib.patches import Patch

    # A pair of shades per module, then the meaning of the shades.
    handles: list[Any] = []
    labels: list[str] = []
    ops = [op for op in _SHADES if any(op is seen for _, seen in used)]
    for module, colour in (colours | {"": GREY} if used else {}).items():
        shades = tuple(Patch(facecolor=shade(colour, _SHADES[op])) for op in ops if not module or (module, op) in used)
        handles.append(shades)
        labels.append(module or ", ".join(_NAMES[op] for op in ops))
    handles.append(Patch(facecolor=IDLE))
    labels.append("idle")
    figure.legend(
        handles, labels, handler_map={tuple: HandlerTuple(ndivide=None, pad=0)}, loc="center left",
        bbox_to_anchor=corner, ncols=len(handles), frameon=False,
        fontsize=8 * zoom, borderpad=0, borderaxespad=0, handlelength=2.0, handleheight=1.0, columnspacing=1.6,
        handletextpad=0.5, labelcolor=INK,
    )  # fmt: skip
