"""Curves of a run as SVG for its page, from the lines of metrics.jsonl.

A long curve is thinned to at most `MOST_POINTS` points: the minimum and maximum of each stretch, so that every peak is
kept. Values that are not finite are gaps; their steps are listed in the chart.
"""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from interlace.simulate.pictures.style import module_colours
from interlace.train.report.metrics import BUSY, DRAWN, EPOCHS, HELD_OUT, IMBALANCE, LOSS, SHARE, TOKENS

MOST_POINTS = 1000
WIDTH, HEIGHT = 440, 210
LEFT, RIGHT, TOP, BOTTOM = 54, 14, 36, 26
COLOURS = ("#3b6fb6", "#d9772b", "#3a9a5b", "#8a5cb8", "#c2435a", "#2c9aa6", "#a08a1f")

Points = Sequence[tuple[float, float]]
"""(step, value), in order of steps."""


class Curve(NamedTuple):
    """One line of a chart."""

    label: str
    colour: str
    points: Points


class Chart(NamedTuple):
    """Chart with a title and the unit of its values."""

    title: str
    unit: str
    curves: list[Curve]


# Title, unit, and curves: metric -> label. A metric that ends with "/" stands for all modules.
CHARTS: tuple[tuple[str, str, Mapping[str, str]], ...] = (
    ("Loss", "nats per token", {LOSS: "training", HELD_OUT: "held out"}),
    ("Held-out loss of each source", "nats per token", {f"{HELD_OUT}/": ""}),
    ("Shares of the sources", "% of the samples", {SHARE: ""}),
    ("Passes over each source", "epochs", {EPOCHS: ""}),
    ("Learning rate", "", {"lr": "learning rate"}),
    ("Gradient norm", "before clipping", {"grad_norm": "gradient norm"}),
    ("Throughput", "tokens per second", {TOKENS: ""}),
    ("Waiting for data", "% of the time, slowest rank", {"time_metrics/data_loading(%)": "data"}),
    ("Costliest replica", "of the mean", {IMBALANCE: ""}),
    ("Costliest replica, were samples left as drawn", "of the mean", {DRAWN: ""}),
    ("Busy", "% of a step", {BUSY: "", "bubble(%)": "bubble"}),
    ("Memory", "GiB, fullest rank", {"memory/max_active(GiB)": "used", "memory/max_reserved(GiB)": "reserved"}),
    ("Use of the devices", "% of their peak", {"mfu(%)": "MFU", "hfu(%)": "HFU"}),
    ("Computed", "TFLOP/s per device", {"tflops": "all", "tflops/": ""}),
)
NOT_DRAWN = {"step", "loss_metrics/step_loss", "throughput(tps)", "throughput(samples/s)"}
"""Metrics that another curve shows already."""


def charts(lines: Sequence[Mapping[str, float]]) -> tuple[list[Chart], list[Chart]]:
    """Charts of a run's metrics: those in `CHARTS`, and one for each other metric."""
    names = list(dict.fromkeys(name for line in lines for name in line))
    drawn = set(NOT_DRAWN)
    known: list[Chart] = []
    for title, unit, wanted in CHARTS:
        found: dict[str, str] = {}
        for name, label in wanted.items():
            of = [each for each in names if each.startswith(name)] if name.endswith("/") else [name]
            found |= {each: label or each.removeprefix(name) for each in of if each in names}
        drawn |= found.keys()
        colours = module_colours(found.values()) if any(name.endswith("/") for name in wanted) else {}
        colours |= {"bubble": "#8b919c", "all": "#1f2430"}
        curves = [
            Curve(label, colours.get(label, COLOURS[at % len(COLOURS)]), _points(lines, name))
            for at, (name, label) in enumerate(found.items())
        ]
        if curves:
            known.append(Chart(title, unit, curves))
    others = [Chart(name, "", [Curve("", COLOURS[0], _points(lines, name))]) for name in names if name not in drawn]
    return known, others


def _points(lines: Iterable[Mapping[str, float]], name: str) -> list[tuple[float, float]]:
    return [(line["step"], line[name]) for line in lines if name in line]


def thin(points: Points, most: int = MOST_POINTS) -> Points:
    """At most `most` of the points (and one per gap): minimum and maximum of each stretch, in order."""
    if len(points) <= most:
        return points
    stretch = -(-len(points) // (most // 2))
    kept: list[tuple[float, float]] = []
    for start in range(0, len(points), stretch):
        piece = points[start : start + stretch]
        finite = [point for point in piece if math.isfinite(point[1])]
        ends = {min(finite, key=_value), max(finite, key=_value)} if finite else {piece[0]}
        kept += sorted(ends)
    return kept


def _value(point: tuple[float, float]) -> float:
    return point[1]


def svg(chart: Chart) -> str:
    """The chart as an SVG element."""
    broken = sorted({step for curve in chart.curves for step, value in curve.points if not math.isfinite(value)})
    curves = [curve._replace(points=thin(curve.points)) for curve in chart.curves]
    finite = [point for curve in curves for point in curve.points if math.isfinite(point[1])]
    title = html.escape(chart.title)
    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{title}">']
    parts.append(f'<text class="title" x="{LEFT}" y="16">{title}</text>')
    parts.append(f'<text class="unit" x="{WIDTH - RIGHT}" y="16" text-anchor="end">{html.escape(chart.unit)}</text>')
    if not finite:
        parts.append(f'<text class="unit" x="{LEFT}" y="{HEIGHT / 2}">no finite number was logged</text></svg>')
        return "".join(parts)
    xs, ys = _ticks([x for x, _ in finite], whole=True), _ticks([y for _, y in finite])
    low, high = min(x for x, _ in finite), max(x for x, _ in finite)
    width, height = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM

    def across(x: float) -> float:
        return LEFT + width * ((x - low) / (high - low) if high > low else 0.5)

    def up(y: float) -> float:
        return TOP + height * (1 - (y - ys[0]) / (ys[-1] - ys[0]))

    for y in ys:
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{up(y):.1f}" y2="{up(y):.1f}"/>')
        parts.append(f'<text class="tick" x="{LEFT - 6}" y="{up(y) + 3.5:.1f}" text-anchor="end">{number(y)}</text>')
    for x in xs:
        if low <= x <= high:
            place = f'x="{across(x):.1f}" y="{HEIGHT - BOTTOM + 15}"'
            parts.append(f'<text class="tick" {place} text-anchor="middle">{number(x)}</text>')
    for curve in curves:
        parts += _line(curve, across, up)
    if len(curves) > 1:
        parts += _legend(curves)
    if broken:
        told = ", ".join(number(step) for step in broken[:5]) + (" ..." if len(broken) > 5 else "")
        parts.append(f'<text class="broken" x="{LEFT + 4}" y="{TOP + 24}">no finite number at step {told}</text>')
    parts.append("</svg>")
    return "".join(parts)


def _line(curve: Curve, across: Callable[[float], float], up: Callable[[float], float]) -> list[str]:
    """SVG pieces between gaps; a piece with one point is a dot."""
    pieces: list[list[str]] = [[]]
    for x, y in curve.points:
        if math.isfinite(y):
            pieces[-1].append(f"{across(x):.1f},{up(y):.1f}")
        else:
            pieces.append([])
    made = []
    for piece in filter(None, pieces):
        if len(piece) == 1:
            left, top = piece[0].split(",")
            made.append(f'<circle cx="{left}" cy="{top}" r="2.5" fill="{curve.colour}"/>')
        else:
            made.append(f'<polyline class="curve" stroke="{curve.colour}" points="{" ".join(piece)}"/>')
    return made


def _legend(curves: Sequence[Curve]) -> list[str]:
    parts, x = [], float(LEFT)
    for curve in curves:
        label = html.escape(curve.label)
        parts.append(f'<rect x="{x:.0f}" y="{TOP - 11}" width="9" height="9" rx="2" fill="{curve.colour}"/>')
        parts.append(f'<text class="tick" x="{x + 13:.0f}" y="{TOP - 3}">{label}</text>')
        x += 13 + 6.2 * len(curve.label) + 14
    return parts


def _ticks(values: Sequence[float], *, whole: bool = False, wanted: int = 4) -> list[float]:
    """Round tick values, about `wanted` steps, from below the minimum to above the maximum."""
    low, high = min(values), max(values)
    if high <= low:
        room = abs(low) * 0.1 or 1.0
        low, high = low - room, high + room
    rough = (high - low) / wanted
    power = 10.0 ** math.floor(math.log10(rough))
    step = next((power * factor for factor in (1, 2, 2.5, 5) if power * factor >= rough), 10 * power)
    step = max(step, 1.0) if whole else step
    first, last = math.floor(low / step), math.ceil(high / step)
    return [place * step for place in range(first, last + 1)]


def number(value: float) -> str:
    """Short text of a number."""
    if not math.isfinite(value):
        return str(value)
    size = abs(value)
    for least, sign in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if size >= least:
            return f"{value / {'G': 1e9, 'M': 1e6, 'k': 1e3}[sign]:.4g}{sign}"
    if size >= 1 or size == 0:
        return f"{value:.4g}"
    return f"{value:.3g}"
