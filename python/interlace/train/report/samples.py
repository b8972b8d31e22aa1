"""Held-out answers as HTML cards and as one picture: media, prompt, expected answer and model answer."""

from __future__ import annotations

import html
import io
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from interlace.simulate.pictures.page import image
from interlace.simulate.pictures.style import canvas
from interlace.train.report.closing import Answer

Pixels = Mapping[str, tuple[Any, Any] | None]
"""Encoder -> mean and std of its input images; None for audio."""


def cards(answers: Sequence[Answer], pixels: Pixels) -> str:
    """One HTML card per answer."""
    made = []
    for answer in answers:
        pictures = "".join(image(_png(picture), "png", kind) for kind, picture in pictures_of(answer, pixels))
        verdict = "right" if answer.right else "other"
        made.append(
            f'<div class="card"><div class="media">{pictures or "<em>text only</em>"}</div>'
            f"<p class=name>{html.escape(answer.sample.name)}</p>"
            f"<p><b>asked</b> {html.escape(answer.asked)}</p>"
            f"<p><b>wanted</b> {html.escape(answer.truth)}</p>"
            f'<p class="{verdict}"><b>said</b> {html.escape(answer.said)}</p></div>'
        )
    return "\n".join(made)


def pictures_of(answer: Answer, pixels: Pixels) -> list[tuple[str, np.ndarray]]:
    """The sample's images as uint8 [H, W, 3] and its clips as grey spectrograms."""
    pictures = []
    for name, scale in pixels.items():
        for item in answer.sample.media.get(name, []):
            if scale is not None and len(item.shape) != 3:  # patches or tiles of a processor
                continue
            if scale is not None:
                mean, std = (torch.tensor(values).view(3, 1, 1) for values in scale)
                scaled = (item.data.float() * std + mean).clamp(0, 1)
                pictures.append(("image", (scaled * 255).round().byte().permute(1, 2, 0).numpy()))
                continue
            mel = item.data.float().flip(0)
            low, high = float(mel.min()), float(mel.max())
            grey = ((mel - low) / max(high - low, 1e-6) * 255).byte().numpy()
            pictures.append(("speech", np.repeat(grey[:, :, None], 3, axis=2)))
    return pictures


def _png(picture: np.ndarray) -> bytes:
    from matplotlib.image import imsave

    buffer = io.BytesIO()
    imsave(buffer, picture, format="png")
    return buffer.getvalue()


def draw(answers: Sequence[Answer], path: Path, name: str, pixels: Pixels) -> None:
    """Draws the answers as one picture (PNG), for use outside the page."""
    columns = 4
    rows = max(1, -(-len(answers) // columns))
    figure = canvas(3.4 * columns, 3.0 * rows, 110)
    figure.set_layout_engine("constrained")
    grid = figure.subplots(rows, columns, squeeze=False)
    for axes in grid.flat:
        axes.axis("off")
    for axes, answer in zip(grid.flat, answers):
        pictures = [picture for _, picture in pictures_of(answer, pixels)]
        if pictures:
            axes.imshow(_side_by_side(pictures), aspect="equal", interpolation="nearest")
        else:
            axes.text(0.5, 0.5, "(no media)", ha="center", va="center", fontsize=8, color="#57606a")
        colour = "#1a7f37" if answer.right else "#24292f"
        text = f"asked: {_short(answer.asked)}\nwanted: {_short(answer.truth)}\nsaid: {_short(answer.said)}"
        axes.set_title(text, fontsize=7, color=colour, loc="left", parse_math=False)
    figure.suptitle(f"{name}: held-out samples", fontsize=10)
    figure.savefig(path)


def _side_by_side(pictures: Sequence[np.ndarray]) -> np.ndarray:
    """Images of any size side by side on a white canvas."""
    height = max(picture.shape[0] for picture in pictures)
    width = sum(picture.shape[1] for picture in pictures) + 2 * (len(pictures) - 1)
    made = np.full((height, width, 3), 255, dtype=np.uint8)
    left = 0
    for picture in pictures:
        made[: picture.shape[0], left : left + picture.shape[1]] = picture
        left += picture.shape[1] + 2
    return made


def _short(text: str) -> str:
    printable = "".join(c if c.isprintable() else " " for c in text)
    return "\n".join(textwrap.wrap(textwrap.shorten(printable, 120, placeholder="..."), 48)) or "(nothing)"
