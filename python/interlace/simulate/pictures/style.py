"""Style of the pictures: text colours, module colours, an empty figure.

Main contrasts are blue and orange, which are distinguishable with red-green colour blindness. Important parts are also
hatched or labelled.
"""

from __future__ import annotations

import colorsys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.collections import PolyCollection
    from matplotlib.figure import Figure

_HUES = {"language_model": "#3b6fb6", "vision": "#d9772b", "audio": "#3a9a5b"}
_PALETTE = ("#8a5cb8", "#c2435a", "#2c9aa6", "#a08a1f", "#7a5a45", "#b85a9c")
COLOURS = (*_HUES.values(), *_PALETTE)
INK, QUIET, GREY, IDLE, EDGE = "#1f2430", "#555c6b", "#8b919c", "#eceef1", "#ffffff"


def canvas(width: float, height: float, dpi: int) -> Figure:
    """An empty white matplotlib figure, size in inches, that needs no display."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=dpi, facecolor="white")
    FigureCanvasAgg(figure)
    return figure


def module_colours(modules: Iterable[str]) -> dict[str, str]:
    """A colour per module, in the order given; the language model is always blue."""
    names = list(dict.fromkeys(modules))
    others = [name for name in names if name not in _HUES]
    return {name: _HUES.get(name) or _PALETTE[others.index(name) % len(_PALETTE)] for name in names}


def shade(colour: str, amount: float) -> tuple[float, float, float]:
    """A lighter (amount > 0) or darker (amount < 0) colour, by up to 1."""
    red, green, blue = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    hue, light, saturation = colorsys.rgb_to_hls(red, green, blue)
    light = light + (1 - light) * amount if amount > 0 else light * (1 + amount)
    return colorsys.hls_to_rgb(hue, light, saturation)


def boxes(left: ArrayLike, wide: ArrayLike, low: ArrayLike, tall: ArrayLike, **style: Any) -> PolyCollection:
    """Boxes as one collection, which draws thousands quickly. Numbers for all boxes, or [n]."""
    from matplotlib.collections import PolyCollection

    x, width, y, height = np.broadcast_arrays(left, wide, low, tall)
    corners = np.stack([x, y, x, y + height, x + width, y + height, x + width, y], axis=-1)
    return PolyCollection(list(corners.reshape(-1, 4, 2)), zorder=2, **style)


def time_unit(seconds: float) -> tuple[float, str]:
    """Units per second, and their name, in which this time is at least 1 (or microseconds)."""
    return (1.0, "s") if seconds >= 1.0 else (1e3, "ms") if seconds >= 1e-3 else (1e6, "µs")


def plain(axes: Axes, size: float) -> None:
    """Hides the top and right spines, and draws ticks in grey."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(GREY)
    axes.tick_params(labelsize=size, color=GREY, labelcolor=INK)
