"""Held-out answers as HTML cards and as one picture: media, prompt, expected answer and model answer."""

from __future__ import annotations

import html
import io
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from interlace.modalities import named
from interlace.modalities.base import Scaling
from interlace.simulate.pictures.page import image
from interlace.simulate.pictures.style import canvas
from interlace.train.report.closing import Answer

Scalings = Mapping[str, tuple[str, Scaling | None]]
"""Encoder -> name of its modality, and mean and std of its pixels, if it takes pixels."""


def cards(answers: Sequence[Answer], scalings: Scalings) -> str:
    """One HTML card per answer."""
    made = []
    for answer in answers:
        pictures = "".join(image(_png(picture), "png", label) for label, picture in pictures_of(answer, scalings))
        verdict = "right" if answer.right else "other"
        made.append(
            f'<div class="card"><div class="media">{pictures or "<em>text only</em>"}</div>'
            f"<p class=name>{html.escape(answer.sample.name)}</p>"
            f"<p><b>asked</b> {html.escape(answer.asked)}</p>"
            f"<p><b>wanted</b> {html.escape(answer.truth)}</p>"
            f'<p class="{verdict}"><b>said</b> {html.escape(answer.generated) or "(nothing)"}</p></div>'
        )
    return "\n".join(made)


def pictures_of(answer: Answer, scalings: Scalings) -> list[tuple[str, np.ndarray]]:
    """The sample's media that can be shown, as (label, uint8 [H, W, 3])."""
    items = [
        named(kind).picture(item.data, scaling)
        for name, (kind, scaling) in scalings.items()
        for item in answer.sample.media.get(name, [])
        if item.data is not None
    ]
    return [item for item in items if item is not None]


def _png(picture: np.ndarray) -> bytes:
    from matplotlib.image import imsave

    buffer = io.BytesIO()
    imsave(buffer, picture, format="png")
    return buffer.getvalue()


def draw(answers: Sequence[Answer], path: Path, name: str, scalings: Scalings) -> None:
    """Draws the answers as one picture (PNG), for use outside the page."""
    columns = 4
    rows = max(1, -(-len(answers) // columns))
    figure = canvas(3.4 * columns, 3.0 * rows, 110)
    figure.set_layout_engine("constrained")
    grid = figure.subplots(rows, columns, squeeze=False)
    for axes in grid.flat:
        axes.axis("off")
    for axes, answer in zip(grid.flat, answers):
        pictures = [picture for _, picture in pictures_of(answer, scalings)]
        if pictures:
            axes.imshow(_side_by_side(pictures), aspect="equal", interpolation="nearest")
        else:
            axes.text(0.5, 0.5, "(no media)", ha="center", va="center", fontsize=8, color="#57606a")
        colour = "#1a7f37" if answer.right else "#24292f"
        text = f"asked: {_short(answer.asked)}\nwanted: {_short(answer.truth)}\nsaid: {_short(answer.generated)}"
        axes.set_title(text, fontsize=7, color=colour, loc="left", parse_math=False)
    figure.suptitle(f"{name}: held-out samples", fontsize=10)
    figure.savefig(path)


def _side_by_side(pictures: Sequence[np.ndarray]) -> np.ndarray:
    """Images of any size side by side on a white canvas."""
    height, gap = max(map(len, pictures)), 2
    padded = [np.pad(each, ((0, height - len(each)), (0, gap), (0, 0)), constant_values=255) for each in pictures]
    return np.hstack(padded)[:, :-gap]


def _short(text: str) -> str:
    printable = "".join(c if c.isprintable() else " " for c in text)
    return "\n".join(textwrap.wrap(textwrap.shorten(printable, 120, placeholder="..."), 48)) or "(nothing)"
