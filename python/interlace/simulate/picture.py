"""A timeline as a picture: one row per rank, one colour per module, light forwards, dark backwards.

Numbers in the boxes are microbatches; they are left out where a box is too narrow for them. Grey is idle time.
"""

from __future__ import annotations

import colorsys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from interlace.schedule.actions import COMPUTE, Action, Op
from interlace.simulate.timeline import Timeline

_HUES = {"language_model": "#3b6fb6"}
_PALETTE = ("#d9772b", "#3a9a5b", "#8a5cb8", "#c2435a", "#2c9aa6", "#a08a1f", "#7a5a45", "#b85a9c")
_SHADES = {Op.FORWARD: 0.45, Op.BACKWARD: 0.0, Op.BACKWARD_INPUT: 0.0, Op.BACKWARD_WEIGHT: -0.3}
_NAMES = {Op.FORWARD: "forward", Op.BACKWARD: "backward", Op.BACKWARD_INPUT: "backward, inputs"}
_NAMES[Op.BACKWARD_WEIGHT] = "backward, weights"
_INK, _IDLE, _EDGE = "#1f2430", "#eceef1", "#ffffff"
_DPI = 120


def plot(timeline: Timeline, path: str | Path, *, title: str | None = None) -> None:
    """Writes the picture to `path` (its ending chooses the format; PNG is meant).

    title: replaces the schedule's name in the title; ranks, microbatches, makespan and bubble follow it.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    boxes = [record for record in timeline.records() if record.action.op in COMPUTE]
    microbatches = len({record.action.microbatch for record in boxes})
    colours = module_colours(record.action.module for record in boxes)
    scale, unit = _unit(timeline.makespan)
    span = max(timeline.makespan, 1e-12) * scale

    # Wide enough that a typical box takes its number, within what a screen or a page can show.
    durations = sorted(record.finish - record.start for record in boxes) or [1.0]
    typical = max(durations[len(durations) // 4] * scale, span / 2000)
    width = min(max(9.0, span / typical * 0.16 + 3.0), 44.0)
    row = 0.42 if timeline.num_ranks <= 8 else 0.34
    height = timeline.num_ranks * row + 1.75
    figure = Figure(figsize=(width, height), dpi=_DPI, facecolor="white")
    FigureCanvasAgg(figure)
    left, right = 1.9 / width, 1 - 0.75 / width
    axes = figure.add_axes((left, 0.85 / height, right - left, timeline.num_ranks * row / height))
    axes.set_xlim(0.0, span)
    axes.set_ylim(timeline.num_ranks - 0.5, -0.5)
    pixels = (right - left) * width * _DPI / span  # per unit of time

    for rank in range(timeline.num_ranks):
        axes.broken_barh([(0.0, span)], (rank - 0.42, 0.84), facecolor=_IDLE, linewidth=0, zorder=0)
    groups: dict[tuple[int, str, Op], list[tuple[float, float]]] = {}
    for rank, action, start, finish in boxes:
        place = ((start - timeline.begin) * scale, (finish - start) * scale)
        groups.setdefault((rank, action.module, action.op), []).append(place)
        _number(axes, rank, action, place, pixels, row)
    for (rank, module, op), places in groups.items():
        colour = _shade(colours[module], _SHADES[op])
        line = 0.8 if pixels * typical > 6 else 0.25
        axes.broken_barh(places, (rank - 0.42, 0.84), facecolor=colour, edgecolor=_EDGE, linewidth=line, zorder=2)

    _label(axes, timeline, span, unit)
    heading = title if title is not None else (timeline.name.upper() or "timeline")
    facts = (
        f"{timeline.num_ranks} rank{'s' * (timeline.num_ranks != 1)} × {microbatches} "
        f"microbatch{'es' * (microbatches != 1)}   ·   {span:.4g} {unit}   ·   bubble {timeline.bubble:.1%}"
    )
    top = 1 - 0.34 / height
    heading_text = figure.text(left, top, heading, fontsize=13, weight="bold", color=_INK, va="center")
    figure.canvas.draw()
    extent = heading_text.get_window_extent()
    offset = extent.x1 / (width * _DPI) + 0.22 / width
    figure.text(offset, top, facts, fontsize=11, color="#555c6b", va="center")
    _legend(figure, groups, colours, left, 1 - 0.68 / height)
    figure.savefig(path, dpi=_DPI)


def module_colours(modules: Iterable[str]) -> dict[str, str]:
    """A colour per module, in the order given; the language model is always blue."""
    names = list(dict.fromkeys(modules))
    others = sorted(name for name in names if name not in _HUES)
    return {name: _HUES.get(name) or _PALETTE[others.index(name) % len(_PALETTE)] for name in names}


def _number(axes: Any, rank: int, action: Action, place: tuple[float, float], pixels: float, row: float) -> None:
    text = str(action.microbatch)
    room = place[1] * pixels / _DPI * 72  # points
    size = min(9.0, row * 72 * 0.42, room / (0.62 * len(text) + 0.25))
    if size >= 4.0:
        colour = _INK if action.op is Op.FORWARD else "white"
        middle = place[0] + place[1] / 2
        axes.text(middle, rank, text, ha="center", va="center_baseline", fontsize=size, color=colour, zorder=3)


def _label(axes: Any, timeline: Timeline, span: float, unit: str) -> None:
    names = []
    for rank, actions in enumerate(timeline.actions):
        stages = dict.fromkeys((a.module, a.stage) for a in actions if a.op in COMPUTE)
        names.append(f"{_hosted(list(stages))}   {rank}")
    axes.set_yticks(range(timeline.num_ranks), names, fontsize=8.5, color=_INK)
    for rank, seconds in enumerate(timeline.busy_per_rank):
        share = seconds / timeline.makespan if timeline.makespan else 0.0
        axes.annotate(
            f"{share:.0%}", (1, rank), xycoords=("axes fraction", "data"), xytext=(8, 0), textcoords="offset points",
            va="center", fontsize=8.5, color=_INK,
        )  # fmt: skip
    axes.annotate(
        "busy", (1, 1), xycoords="axes fraction", xytext=(8, 3), textcoords="offset points", fontsize=8, color="#555c6b"
    )
    axes.annotate(
        "stages   rank", (0, 1), xycoords="axes fraction", xytext=(-8, 3), textcoords="offset points", fontsize=8,
        color="#555c6b", ha="right",
    )  # fmt: skip
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", labelsize=8.5, color="#9aa1ad", labelcolor=_INK)
    axes.set_xlabel(f"time ({unit})", fontsize=9, color="#555c6b")
    for side in ("top", "left", "right"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color("#9aa1ad")


def _hosted(stages: list[tuple[str, int]]) -> str:
    """Stages in few words: vision/0-3, audio/0."""
    of: dict[str, list[int]] = {}
    for module, index in stages:
        of.setdefault(module, []).append(index)
    parts = []
    for module, indices in of.items():
        indices.sort()
        contiguous = len(indices) > 1 and indices == list(range(indices[0], indices[-1] + 1))
        text = f"{indices[0]}-{indices[-1]}" if contiguous else ",".join(map(str, indices))
        parts.append(f"{'llm' if module == 'language_model' else module}/{text}")
    text = ", ".join(parts) or "idle"
    return text if len(text) <= 24 else text[:23] + "…"


def _legend(figure: Any, groups: Iterable[tuple[int, str, Op]], colours: dict[str, str], x: float, y: float) -> None:
    from matplotlib.patches import Patch

    used = {(module, op) for _, module, op in groups}
    handles = []
    for module, op in ((module, op) for module in colours for op in _SHADES if (module, op) in used):
        handles.append(Patch(facecolor=_shade(colours[module], _SHADES[op]), label=f"{module} {_NAMES[op]}"))
    handles.append(Patch(facecolor=_IDLE, label="idle"))
    figure.legend(
        handles=handles, loc="center left", bbox_to_anchor=(x, y), ncols=len(handles), frameon=False, fontsize=8.5,
        borderpad=0, borderaxespad=0, handlelength=1.2, handleheight=1.0, columnspacing=1.4, labelcolor=_INK,
    )  # fmt: skip


def _shade(colour: str, amount: float) -> tuple[float, float, float]:
    """Lighter (amount > 0) or darker (< 0) by up to 1."""
    red, green, blue = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    hue, light, saturation = colorsys.rgb_to_hls(red, green, blue)
    light = light + (1 - light) * amount if amount > 0 else light * (1 + amount)
    return colorsys.hls_to_rgb(hue, light, saturation)


def _unit(seconds: float) -> tuple[float, str]:
    for scale, unit, least in ((1.0, "s", 1.0), (1e3, "ms", 1e-3)):
        if seconds >= least:
            return scale, unit
    return 1e6, "µs"
