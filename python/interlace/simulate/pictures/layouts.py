"""Picture of a layout: ranks x modules with a box per stage, and a bar of each rank's memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from interlace.layout import Layout
from interlace.simulate.pictures.style import EDGE, GREY, IDLE, INK, QUIET, canvas, module_colours, plain, shade

_DPI = 120
_ROW, _TOP, _BOTTOM = 0.34, 0.85, 0.75  # inches
_CELL, _BARS = 1.5, 5.0
_SHADES = {"weights": "#3b6fb6", "gradients": "#8fb0dc", "optimizer": "#1f3a63", "activations": "#d9772b"}


def plot_layout(layout: Layout, held: Sequence[Mapping[str, int]], path: str | Path, *, title: str = "") -> None:
    """Draws the first ranks of a layout, one row each, with a box of layers per stage and a bar of the rank's bytes.

    Args:
        held: for each drawn rank, from 0 on, kind -> bytes. The bar shows them side by side, in this order.
        path: output file; its suffix selects the format (PNG or SVG).
        title: title of the picture.

    Raises:
        ValueError: no rank, or more than the layout has.
    """
    ranks, names = len(held), list(layout.modules)
    if not 1 <= ranks <= layout.world:
        raise ValueError(f"held is for {ranks} ranks, but the layout has {layout.world}: give 1 to {layout.world}")
    width, height = 0.9 + _CELL * len(names) + _BARS + 0.9, _TOP + _ROW * ranks + _BOTTOM
    figure = canvas(width, height, _DPI)
    colours = module_colours(names)
    low, tall = _BOTTOM / height, _ROW * ranks / height
    grid = figure.add_axes((0.8 / width, low, _CELL * len(names) / width, tall))
    grid.set_xlim(0, len(names))
    grid.set_ylim(ranks - 0.5, -0.5)
    for rank in range(ranks):
        for column, name in enumerate(names):
            stages = [stage for stage in layout.of_rank(rank) if stage.module == name]
            face = shade(colours[name], 0.15 * ((stages[0].index % 3) + 1)) if stages else IDLE
            grid.broken_barh([(column + 0.03, 0.94)], (rank - 0.42, 0.84), facecolor=face, edgecolor=EDGE)
            text = " ".join(f"{stage.start}:{stage.stop}" for stage in stages)
            grid.text(column + 0.5, rank, text, ha="center", va="center", fontsize=8, color=INK)
    grid.set_xticks([column + 0.5 for column in range(len(names))], names, fontsize=9)
    grid.xaxis.tick_top()
    grid.set_yticks(range(ranks), [f"rank {rank}" for rank in range(ranks)], fontsize=8)
    grid.tick_params(length=0, labelcolor=INK)
    grid.spines[:].set_visible(False)

    bars = figure.add_axes(((0.8 + _CELL * len(names) + 0.3) / width, low, _BARS / width, tall))
    most = max(sum(labels.values()) for labels in held)
    scale, unit = next((s, u) for s, u in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1, "B")) if most >= s / 2)
    begin = [0.0] * ranks
    for kind in held[0]:
        sizes = [labels[kind] / scale for labels in held]
        bars.barh(range(ranks), sizes, 0.7, begin, color=_SHADES.get(kind, GREY), edgecolor=EDGE, label=kind)
        begin = [a + b for a, b in zip(begin, sizes, strict=True)]
    bars.set_ylim(ranks - 0.5, -0.5)
    bars.set_xlim(0, max(begin) * 1.02 or 1.0)
    bars.set_yticks([])
    bars.set_xlabel(unit, fontsize=8, color=QUIET)
    plain(bars, 8)
    bars.spines["left"].set_visible(False)
    bars.legend(
        loc="lower left", bbox_to_anchor=(0, 1.0), ncols=len(held[0]), frameon=False, fontsize=8, handlelength=1.2,
        columnspacing=1.0, labelcolor=INK, borderpad=0.2,
    )  # fmt: skip
    figure.text(0.1 / width, 1 - 0.22 / height, title, fontsize=12, weight="bold", color=INK, va="center")
    figure.savefig(path, dpi=_DPI)
