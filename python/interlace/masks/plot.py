"""Pictures of BitfieldMask. Public API: BitfieldMask.plot."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

if TYPE_CHECKING:
    from interlace.masks.mask import BitfieldMask

CELLS = 1024  # tokens drawn per side; longer masks are sampled evenly
HIDDEN, PADDING = (0.96, 0.96, 0.96), (0.80, 0.80, 0.80)


def plot(mask: BitfieldMask, keys: BitfieldMask, path: Path, row: int, title: str, names: Mapping[int, str]) -> Path:
    """Draw one row of `mask` against `keys`; see BitfieldMask.plot."""
    if not 0 <= row < mask.batch:
        raise IndexError(f"row {row} is out of range: the mask has {mask.batch} rows")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    q, k = _sample(mask, row), _sample(keys, row)
    seen = q.to_dense(k)[0].numpy()
    q_colours, k_colours = _colours(q), _colours(k)
    image = np.broadcast_to(np.asarray(HIDDEN), (*seen.shape, 3)).copy()
    image[seen] = np.broadcast_to(k_colours[None], image.shape)[seen]

    figure = Figure(figsize=(8.6, 7.6), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.add_gridspec(2, 2, width_ratios=(1, 34), height_ratios=(1, 34), hspace=0.0, wspace=0.0)
    axes = figure.add_subplot(grid[1, 1])
    extent = (0, keys.length, mask.length, 0)
    axes.imshow(image, extent=extent, aspect="auto", interpolation="nearest")
    top = figure.add_subplot(grid[0, 1], sharex=axes)
    top.imshow(k_colours[None], extent=(0, keys.length, 1, 0), aspect="auto", interpolation="nearest")
    left = figure.add_subplot(grid[1, 0], sharey=axes)
    left.imshow(q_colours[:, None], extent=(0, 1, mask.length, 0), aspect="auto", interpolation="nearest")
    for strip in (top, left):
        strip.tick_params(left=False, bottom=False, labelleft=False, labelbottom=False)
    _edges(axes.axhline, left.axhline, mask, row)
    _edges(axes.axvline, top.axvline, keys, row)
    axes.set_xlabel("key")
    left.set_ylabel("query")
    axes.tick_params(labelleft=False, left=False)
    left.tick_params(labelleft=True, left=True)
    top.set_title(title or f"{mask.length} x {keys.length} tokens, {seen.mean():.1%} of pairs visible", fontsize=11)

    streams = sorted({int(s) for side in (q, k) for s in side.own[0][_real(side)].tolist()})
    names = {0: "text", **names}
    patches = [Patch(color=_palette(s), label=names.get(s, f"stream {s}")) for s in streams]
    patches.append(Patch(color=HIDDEN, label="not visible"))
    if not (bool(_real(q).all()) and bool(_real(k).all())):
        patches.append(Patch(color=PADDING, label="padding"))
    figure.legend(handles=patches, loc="outside lower center", ncols=min(6, len(patches)), frameon=False, fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    return path


def _sample(mask: BitfieldMask, row: int) -> BitfieldMask:
    count = min(mask.length, CELLS)
    index = torch.arange(count, device=mask.device) * mask.length // max(count, 1)
    return mask.select(index).mapped(lambda tensor: tensor[row : row + 1]).to("cpu")


def _real(mask: BitfieldMask) -> torch.Tensor:
    return mask.tokens().doc[0] >= 0


def _palette(stream: int) -> tuple[float, float, float]:
    from matplotlib import colormaps

    red, green, blue, _ = colormaps["tab20"](stream * 2 % 20 + (stream // 10) % 2)
    return red, green, blue


def _colours(mask: BitfieldMask) -> NDArray[np.float64]:
    """[T, 3]: one hue per stream, lighter for every second document and every second span."""
    tokens = mask.tokens()
    colours: NDArray[np.float64] = np.array([_palette(stream) for stream in mask.own[0].tolist()]).reshape(-1, 3)
    doc, span = tokens.doc[0].numpy(), tokens.span[0].numpy()
    light = 0.22 * (doc % 2) + 0.22 * ((span >= 0) & (span % 2 == 1))
    colours = colours + (1 - colours) * light[:, None]
    colours[doc < 0] = PADDING
    return colours


def _edges(line: Callable[..., object], strip_line: Callable[..., object], mask: BitfieldMask, row: int) -> None:
    """Lines at document boundaries, thinner ones at span boundaries. A field with over 200 boundaries gets none."""
    tokens = mask.tokens()
    for field, width in ((tokens.doc, 0.8), (tokens.span, 0.25)):
        values = field[row].cpu()
        places = (values[1:] != values[:-1]).nonzero().flatten() + 1
        if places.numel() <= 200:
            for place in places.tolist():
                line(place, color="black", linewidth=width)
                strip_line(place, color="black", linewidth=width)
