"""Curves of a run for its page, from the lines of metrics.jsonl.

Values that are not finite, or beyond `MOST`, are gaps; their steps are listed in the caption. Of a long curve,
matplotlib leaves out points within a pixel of the line through their neighbours; every peak is kept.
"""

from __future__ import annotations

import html
import io
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from interlace.simulate.pictures.page import image
from interlace.simulate.pictures.style import COLOURS, IDLE, canvas, module_colours, plain
from interlace.train.report.metrics import BUSY, DRAWN, EPOCHS, HELD_OUT, IMBALANCE, LOSS, SHARE, TOKENS

Points = Sequence[tuple[float, float]]
"""(step, value), in order of steps."""
MOST = 1e300  # matplotlib computes margins, which overflow beyond it


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
        pictures: dict[str, str] = {}
        for name, label in wanted.items():
            of = [each for each in names if each.startswith(name)] if name.endswith("/") else [name]
            pictures |= {each: label or each.removeprefix(name) for each in of if each in names}
        drawn |= pictures.keys()
        colours = module_colours(pictures.values()) if any(name.endswith("/") for name in wanted) else {}
        colours |= {"bubble": "#8b919c", "all": "#1f2430"}
        curves = [
            Curve(label, colours.get(label, COLOURS[at % len(COLOURS)]), _points(lines, name))
            for at, (name, label) in enumerate(pictures.items())
        ]
        if curves:
            known.append(Chart(title, unit, curves))
    others = [Chart(name, "", [Curve("", COLOURS[0], _points(lines, name))]) for name in names if name not in drawn]
    return known, others


def _points(lines: Iterable[Mapping[str, float]], name: str) -> list[tuple[float, float]]:
    return [(line["step"], line[name]) for line in lines if name in line]


def figure(chart: Chart) -> str:
    """The chart as HTML: its title, unit and legend, the steps without a finite value, and the picture."""
    broken = sorted({step for curve in chart.curves for step, value in curve.points if not abs(value) < MOST})
    drawable = any(abs(value) < MOST for curve in chart.curves for _, value in curve.points)
    notes = [f"<b>{html.escape(chart.title)}</b>", html.escape(chart.unit)]
    if len(chart.curves) > 1:
        notes += [f'<i style="color: {each.colour}">&#9632;</i> {html.escape(each.label)}' for each in chart.curves]
    if broken:
        steps = f"step {', '.join(map(number, broken[:5]))}{' ...' if len(broken) > 5 else ''}"
        notes.append(f"<em>no finite number {f'at {steps}' if drawable else 'was logged'}</em>")
    picture = image(svg(chart), "svg+xml", chart.title) if drawable else ""
    return f"<figure class=chart><figcaption>{' '.join(notes)}</figcaption>{picture}</figure>"


def svg(chart: Chart) -> bytes:
    """The curves as an SVG file: the same bytes for the same curves."""
    from matplotlib import rc_context
    from matplotlib.ticker import MaxNLocator

    file = io.BytesIO()
    with rc_context({"svg.hashsalt": "interlace", "svg.fonttype": "none", "path.simplify_threshold": 1.0}):
        drawn = canvas(4.4, 1.9, 100)
        axes = drawn.add_axes((0.12, 0.13, 0.85, 0.82))
        for curve in chart.curves:
            steps, values = np.array(curve.points, float).reshape(-1, 2).T
            values[~(np.abs(values) < MOST)] = np.nan
            axes.plot(steps, values, color=curve.colour, linewidth=1.2)
            finite = np.isfinite(np.pad(values, 1, constant_values=np.nan))
            alone = finite[1:-1] & ~finite[:-2] & ~finite[2:]  # no line shows these
            axes.plot(steps[alone], values[alone], ".", color=curve.colour)
        axes.grid(axis="y", color=IDLE)
        axes.margins(x=0.01)
        for axis, whole in ((axes.xaxis, True), (axes.yaxis, False)):
            axis.set_major_locator(MaxNLocator(5, integer=whole, steps=(1, 2, 2.5, 5, 10)))
            axis.set_major_formatter(lambda value, _: number(value))
        plain(axes, 8)
        drawn.savefig(file, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    return file.getvalue()


def number(value: float) -> str:
    """Short text of a number."""
    size = abs(value)
    for least, unit, sign in ((1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if math.inf > size >= least:
            return f"{value / unit:.4g}{sign}"
    return f"{value:.3g}" if 0 < size < 1 else f"{value:.4g}"
