"""Picture of pipeline templates as trees (nodes, stages, layers), and of the combinations that use all nodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike

from interlace.simulate.pictures.style import EDGE, GREY, IDLE, INK, QUIET, Colour, canvas, module_colours, shade

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from interlace.plan import PipelineTemplate

_DPI = 140
_WIDTH, _LEFT, _RIGHT = 10.0, 1.15, 9.85  # inches: of the picture, and where trees begin and end
_BOX, _GAP = 0.25, 0.13
_TREE = 3 * _BOX + 2 * _GAP + 0.3  # one template with the space below it
_ROW = 0.46  # one combination
_SHOWN = 8  # combinations


def plot_templates(
    templates: Sequence[PipelineTemplate],
    path: str | Path,
    *,
    modules: Mapping[str, int] | None = None,
    nodes: int | None = None,
    pipelines: int = 1,
    times: ArrayLike | None = None,
    microbatches: int = 0,
    unit: str = "ms",
    title: str = "",
) -> None:
    """Draws each template as a tree, and below them the combinations of templates that use all nodes.

    Args:
        templates: from `plan.pipeline_template`, all for the same layers.
        path: output file; its suffix selects the format (usually PNG).
        modules: name -> number of layers, in the order of the layers, for their colours.
        nodes: nodes of the cluster; None draws no combinations. The first eight are drawn, in the order of
            `plan.combinations`.
        pipelines: the fewest pipelines of a combination, f + 1.
        times: positive numbers [templates], time per microbatch of a template's pipeline, as for `plan.instantiate`.
            With times, each combination has the best split of `microbatches`, and the fastest one is marked.
        unit: unit of the times. title: title of the picture.

    Raises:
        ValueError: no template, templates for different models, modules that do not add up to their layers, no
            combination, or times and microbatches that do not fit.
    """
    if not templates:
        raise ValueError("templates is empty: give at least one")
    depth = int(templates[0].boundaries[-1])
    if any(int(template.boundaries[-1]) != depth for template in templates):
        raise ValueError("the templates are for models of different depth: draw them separately")
    parts = {"layers": depth} if modules is None else dict(modules)
    if sum(parts.values()) != depth:
        raise ValueError(f"the modules have {sum(parts.values())} layers, but the templates {depth}")
    rows = [] if nodes is None else _combinations(templates, nodes, pipelines, times, microbatches)

    height = 0.85 + _TREE * len(templates) + (0.55 + _ROW * len(rows) if rows else 0.0)
    figure = canvas(_WIDTH, height, _DPI)
    axes = figure.add_axes((0, 0, 1, 1))  # in inches
    axes.set_xlim(0, _WIDTH)
    axes.set_ylim(0, height)
    axes.axis("off")
    pen = _Pen(axes)
    pen.text(0.2, height - 0.26, title, size=12.5, weight="bold", left=True)
    colours = _legend(pen, parts, height - 0.58)
    top = height - 0.85
    for template in templates:
        _tree(pen, template, colours, top)
        top -= _TREE
    if nodes is not None:
        _forest(pen, rows, nodes, pipelines, unit, top)
    figure.savefig(path, dpi=_DPI)


class _Pen:
    """Draws boxes and text on axes in inches."""

    def __init__(self, axes: Axes) -> None:
        self.axes = axes

    def text(
        self, x: float, y: float, words: str, *, size: float = 9, colour: str = INK, left: bool = False, **more: Any
    ) -> None:
        align = "left" if left else "center"
        self.axes.text(x, y, words, fontsize=size, color=colour, ha=align, va="center_baseline", **more)

    def box(self, left: float, right: float, top: float, tall: float, face: Colour, edge: str = EDGE) -> None:
        from matplotlib.patches import Rectangle

        self.axes.add_patch(
            Rectangle((left, top - tall), right - left, tall, facecolor=face, edgecolor=edge, linewidth=1.0)
        )

    def line(self, *points: tuple[float, float]) -> None:
        self.axes.plot(*zip(*points, strict=True), color=GREY, linewidth=1.0, solid_capstyle="butt", zorder=0.5)


def _legend(pen: _Pen, parts: Mapping[str, int], y: float) -> list[Colour]:
    """Draws the legend of modules; returns the colour of each layer."""
    hues = module_colours(parts)
    x = _LEFT
    for name in parts if len(parts) > 1 else ():
        pen.box(x, x + 0.26, y + 0.07, 0.14, shade(hues[name], 0.6))
        pen.text(x + 0.34, y, f"layers of {name.replace('_', ' ')}", left=True)
        x += 0.75 + 0.075 * len(f"layers of {name}")
    pen.box(x, x + 0.09, y + 0.045, 0.09, INK)
    pen.text(x + 0.17, y, "a GPU", left=True)
    return [shade(hues[name], 0.6) for name, count in parts.items() for _ in range(count)]


def _tree(pen: _Pen, template: PipelineTemplate, colours: Sequence[Colour], top: float) -> None:
    """Draws three rows: nodes, their stages, their layers. Each box is as wide as its layers."""
    stages = len(template.gpus)
    per_node = int(template.gpus.sum()) // template.nodes
    node_of = (np.cumsum(template.gpus) - 1) // per_node
    wide = (_RIGHT - _LEFT) / len(colours)
    edges = _LEFT + wide * template.boundaries.astype(float)
    levels = [top - index * (_BOX + _GAP) for index in range(3)]

    name = f"{template.nodes} node{'s' * (template.nodes != 1)}"
    pen.text(0.2, levels[0] - _BOX / 2, name, size=10.5, weight="bold", left=True)
    pen.text(0.2, levels[1] - _BOX / 2, f"{stages} stage{'s' * (stages != 1)}", colour=QUIET, left=True)
    pen.text(0.2, levels[2] - _BOX / 2, f"{len(colours)} layers", colour=QUIET, left=True)
    for node in range(template.nodes):
        own = np.flatnonzero(node_of == node)
        left, right = edges[own[0]] + 0.03, edges[own[-1] + 1] - 0.03
        pen.box(left, right, levels[0], _BOX, IDLE, GREY)
        pen.text((left + right) / 2, levels[0] - _BOX / 2, f"node {node}" if right - left > 0.65 else str(node))
    for stage in range(stages):
        left, right = edges[stage] + 0.03, edges[stage + 1] - 0.03
        middle = (left + right) / 2
        pen.line((middle, levels[0] - _BOX), (middle, levels[1]))
        pen.box(left, right, levels[1], _BOX, "white", GREY)
        _gpus(pen, int(template.gpus[stage]), f"stage {stage}", left, right, levels[1] - _BOX / 2)
        for layer in range(template.boundaries[stage], template.boundaries[stage + 1]):
            start, stop = _LEFT + wide * layer, _LEFT + wide * (layer + 1)
            start = left if layer == template.boundaries[stage] else start
            stop = right if layer + 1 == template.boundaries[stage + 1] else stop
            pen.line(((start + stop) / 2, levels[1] - _BOX), ((start + stop) / 2, levels[2]))
            pen.box(start, stop, levels[2], _BOX, colours[layer])
            if wide > 0.17:
                pen.text((start + stop) / 2, levels[2] - _BOX / 2, str(layer), size=8.5)


def _gpus(pen: _Pen, gpus: int, name: str, left: float, right: float, y: float) -> None:
    """Draws the name of a stage and one square per GPU, as far as there is room."""
    squares, room = gpus * 0.12 - 0.03, right - left - 0.02
    words = next((words for words in (name, name.split()[-1], "") if squares + 0.08 + 0.063 * len(words) <= room), None)
    if words is None:
        words, gpus, squares = str(gpus), 1, 0.09  # a number in place of many squares
    letters = 0.063 * len(words) + 0.08 * bool(words)
    x = (left + right - squares - letters) / 2
    if words:
        pen.text(x, y, words, size=8.5, left=True)
    for index in range(gpus):
        start = x + letters + index * 0.12
        pen.box(start, start + 0.09, y + 0.045, 0.09, INK)


@dataclass(frozen=True)
class _Row:
    """One combination: nodes of each pipeline, its microbatches if known, and the time of the slowest pipeline."""

    nodes: list[int]
    shares: list[int] | None
    time: float


def _combinations(
    templates: Sequence[PipelineTemplate], nodes: int, pipelines: int, times: ArrayLike | None, microbatches: int
) -> list[_Row]:
    from itertools import islice

    from interlace.plan import combinations, split_batch

    sizes = [template.nodes for template in templates]
    per_template = None if times is None else np.asarray(times, dtype=np.float64)
    if per_template is not None and per_template.shape != (len(sizes),):
        raise ValueError(f"times must have shape ({len(sizes)},), one number per template, got {per_template.shape}")
    rows = []
    for counts in islice(combinations(sizes, nodes, pipelines), _SHOWN):
        shown = np.repeat(sizes, counts).tolist()
        if per_template is None:
            rows.append(_Row(shown, None, 0.0))
            continue
        each = np.repeat(per_template, counts)
        shares = split_batch(each, microbatches)
        rows.append(_Row(shown, shares.tolist(), float((shares * each).max())))
    if not rows:
        raise ValueError(
            f"no combination of templates of {sizes} nodes uses {nodes} nodes in {pipelines} or more pipelines"
        )
    return rows


def _forest(pen: _Pen, rows: Sequence[_Row], nodes: int, pipelines: int, unit: str, top: float) -> None:
    """Draws the cluster as the root, a branch per combination, a box per pipeline."""
    words = f"{nodes} nodes in at least {pipelines} pipeline{'s' * (pipelines != 1)}: possible combinations"
    pen.text(0.2, top - 0.12, words, size=10.5, weight="bold", left=True)
    first = top - 0.42
    centres = [first - index * _ROW - _BOX / 2 for index in range(len(rows))]
    root = (centres[0] + centres[-1]) / 2
    pen.box(0.2, 0.9, root + _BOX / 2, _BOX, IDLE, GREY)
    pen.text(0.55, root, f"{nodes} nodes")
    each = min(0.95, (_RIGHT - _LEFT - 1.9) / nodes)
    fastest = min(rows, key=lambda row: row.time)
    for row, y in zip(rows, centres, strict=True):
        pen.line((0.9, root), (1.02, root), (1.02, y), (_LEFT, y))
        x, marked = _LEFT, row is fastest and row.shares is not None
        face = shade(module_colours(["language_model"])["language_model"], 0.6 if marked else 0.85)
        for index, size in enumerate(row.nodes):
            stop = x + each * size - 0.08
            pen.box(x, stop, y + _BOX / 2, _BOX, face, GREY)
            text = f"{size} nodes"
            if row.shares is not None:
                text += f", {row.shares[index]} microbatches"
            pen.text((x + stop) / 2, y, text if 0.072 * len(text) < stop - x else str(size))
            x = stop + 0.08
        if row.shares is not None:
            weight = "bold" if marked else "normal"
            pen.text(x + 0.08, y, f"{row.time:.4g} {unit}{', fastest' if marked else ''}", left=True, weight=weight)
