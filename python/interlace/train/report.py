"""What a finished run shows: the closing table, held-out answers as a page and a picture, and how many are right.

All from the best checkpoint, where the run keeps that, or the last, loaded whole into one process: so it also proves
that the checkpoint can be read.
"""

from __future__ import annotations

import base64
import html
import io
import json
import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from interlace.train import answers as greedy
from interlace.train.schema import Config

Pixels = Mapping[str, tuple[Any, Any] | None]


@dataclass
class Answer:
    """One held-out sample: what it shows, what it wants, what the model said."""

    sample: Any
    truth: str
    said: str

    @property
    def right(self) -> bool:
        """Whether the answer is exactly the one wanted."""
        return self.truth == self.said


def held_out_answers(model: Any, dataset: Any, indices: Sequence[int], tokenizer: Any, config: Config) -> list[Answer]:
    """The model's greedy answers to the held-out samples at `indices`."""
    return answers_to([dataset.sample(i, 0) for i in indices], model, tokenizer, config)


def answers_to(samples: Sequence[Any], model: Any, tokenizer: Any, config: Config) -> list[Answer]:
    """The model's greedy answers to samples."""
    said = greedy.answer(
        model,
        [greedy.prompt_of(sample, model.placeholders) for sample in samples],
        end=tokenizer.EOS,
        max_new_tokens=config.log.max_new_tokens,
    )
    return [
        Answer(sample, tokenizer.decode(greedy.truth_of(sample, tokenizer.EOS)), tokenizer.decode(tokens))
        for sample, tokens in zip(samples, said, strict=True)
    ]


@dataclass
class Accuracy:
    """Shares of held-out questions of a kind answered exactly right: `right` by the model, `majority` by always saying
    what is most often right, `swapped` by the model when each question comes with the media of one that has another
    answer (None where all have the same): as many as `right` if it does not use them. count: questions."""

    kind: str
    count: int
    right: float
    majority: float
    swapped: float | None

    def rows(self) -> dict[str, float]:
        """For the summary."""
        rows = {f"{self.kind}_accuracy": self.right, f"{self.kind}_majority_accuracy": self.majority}
        return rows if self.swapped is None else rows | {f"{self.kind}_swapped_media_accuracy": self.swapped}


def accuracies(model: Any, dataset: Any, tokenizer: Any, config: Config) -> list[Accuracy]:
    """Of each kind of question that the dataset has, at most ``log.accuracy_samples`` spread over the split."""
    found = []
    for kind, recipes in dataset.questions().items():
        count = min(len(recipes), config.log.accuracy_samples)
        asked = [recipes[i * len(recipes) // count] for i in range(count)]
        right, swapped = _share_right(model, dataset, asked, tokenizer, config), None
        if len({recipe.answer for recipe in asked}) > 1:
            others = [replace(recipe, media=_another(asked, i).media) for i, recipe in enumerate(asked)]
            swapped = _share_right(model, dataset, others, tokenizer, config)
        most = max(Counter(recipe.answer for recipe in asked).values())
        found.append(Accuracy(kind, count, right, most / count, swapped))
    return found


def _another(recipes: Sequence[Any], index: int) -> Any:
    """The first recipe with another answer, from half way round on."""
    turned = ((index + len(recipes) // 2 + step) % len(recipes) for step in range(len(recipes)))
    return next(recipes[i] for i in turned if recipes[i].answer != recipes[index].answer)


def _share_right(model: Any, dataset: Any, recipes: Sequence[Any], tokenizer: Any, config: Config) -> float:
    answers = answers_to([dataset.sample_of(recipe) for recipe in recipes], model, tokenizer, config)
    return sum(answer.right for answer in answers) / len(answers)


def spread_by_kind(dataset: Any, count: int) -> list[int]:
    """Indices of up to `count` held-out samples that take the kinds of samples in turn."""
    kinds: dict[str, list[int]] = {}
    for index in range(min(len(dataset), 64 * max(count, 1))):
        kinds.setdefault(dataset.kind(index), []).append(index)
    chosen: list[int] = []
    while len(chosen) < count and any(kinds.values()):
        for indices in kinds.values():
            if indices and len(chosen) < count:
                chosen.append(indices.pop(0))
    return chosen


def write_page(
    answers: Sequence[Answer], folder: Path, config: Config, pixels: Pixels, counted: Sequence[Accuracy] = ()
) -> None:
    """samples.html (self-contained) and samples.png: media, true answer, generated answer of each sample; in the page
    above them what was `counted`.

    pixels: mean and std of what each encoder sees; None of one that hears.
    """
    cards = []
    for answer in answers:
        pictures = "".join(
            f'<img src="data:image/png;base64,{_png(image)}" alt="{kind}">' for kind, image in _pictures(answer, pixels)
        )
        verdict = "right" if answer.right else "other"
        cards.append(
            f'<div class="card"><div class="media">{pictures or "<em>text only</em>"}</div>'
            f"<p class=name>{html.escape(answer.sample.name)}</p>"
            f"<p><b>wanted</b> {html.escape(answer.truth)}</p>"
            f'<p class="{verdict}"><b>said</b> {html.escape(answer.said)}</p></div>'
        )
    page = _PAGE.format(title=html.escape(config.run.name), cards="\n".join(cards), counted=_table(counted))
    (folder / "samples.html").write_text(page, encoding="utf-8")
    _draw(answers, folder / "samples.png", config, pixels)


def write_summary(folder: Path, rows: Mapping[str, Any]) -> None:
    """summary.json, what `print_summary` shows."""
    (folder / "summary.json").write_text(json.dumps(rows, indent=1) + "\n")


def print_summary(rows: Mapping[str, Any], title: str) -> None:
    """The closing table on the terminal."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, show_header=False, title_justify="left")
    for name, value in rows.items():
        table.add_row(name.replace("_", " "), _shown(name, value))
    Console(highlight=False).print(table)


def _shown(name: str, value: Any) -> str:
    if isinstance(value, float):
        if name.endswith("accuracy"):
            return f"{100 * value:.1f} %"
        if "loss" in name or "baseline" in name:
            return f"{value:.3f} nats per token"
        return f"{value:,.1f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _pictures(answer: Answer, pixels: Pixels) -> list[tuple[str, np.ndarray]]:
    """The sample's images as uint8 [H, W, 3] and its clips as grey spectrograms."""
    pictures = []
    for name, scale in pixels.items():
        for item in answer.sample.media.get(name, []):
            if scale is not None and len(item.shape) != 3:  # patches or tiles, as a processor cut them
                continue
            if scale is not None:
                mean, std = (torch.tensor(values).view(3, 1, 1) for values in scale)
                image = (item.data.float() * std + mean).clamp(0, 1)
                pictures.append(("image", (image * 255).round().byte().permute(1, 2, 0).numpy()))
                continue
            mel = item.data.float().flip(0)
            low, high = float(mel.min()), float(mel.max())
            grey = ((mel - low) / max(high - low, 1e-6) * 255).byte().numpy()
            pictures.append(("speech", np.repeat(grey[:, :, None], 3, axis=2)))
    return pictures


def _png(image: np.ndarray) -> str:
    from matplotlib.image import imsave

    buffer = io.BytesIO()
    imsave(buffer, image, format="png")
    return base64.b64encode(buffer.getvalue()).decode()


def _draw(answers: Sequence[Answer], path: Path, config: Config, pixels: Pixels) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = 4
    rows = max(1, -(-len(answers) // columns))
    figure = Figure(figsize=(3.4 * columns, 3.0 * rows), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(rows, columns, squeeze=False)
    for axes in grid.flat:
        axes.axis("off")
    for axes, answer in zip(grid.flat, answers):
        pictures = [picture for _, picture in _pictures(answer, pixels)]
        if pictures:
            axes.imshow(_side_by_side(pictures), aspect="equal", interpolation="nearest")
        else:
            axes.text(0.5, 0.5, "(no media)", ha="center", va="center", fontsize=8, color="#57606a")
        colour = "#1a7f37" if answer.right else "#24292f"
        text = f"wanted: {_short(answer.truth)}\nsaid: {_short(answer.said)}"
        axes.set_title(text, fontsize=7, color=colour, loc="left", parse_math=False)
    figure.suptitle(f"{config.run.name}: held-out samples", fontsize=10)
    figure.savefig(path, dpi=110)


def _side_by_side(pictures: Sequence[np.ndarray]) -> np.ndarray:
    """Images of any size on one white canvas."""
    height = max(picture.shape[0] for picture in pictures)
    width = sum(picture.shape[1] for picture in pictures) + 2 * (len(pictures) - 1)
    canvas = np.full((height, width, 3), 255, dtype=np.uint8)
    left = 0
    for picture in pictures:
        canvas[: picture.shape[0], left : left + picture.shape[1]] = picture
        left += picture.shape[1] + 2
    return canvas


def _short(text: str) -> str:
    printable = "".join(c if c.isprintable() else " " for c in text)
    return "\n".join(textwrap.wrap(textwrap.shorten(printable, 120, placeholder="..."), 48)) or "(nothing)"


def _table(counted: Sequence[Accuracy]) -> str:
    if not counted:
        return ""
    rows = "".join(
        f"<tr><td>{html.escape(each.kind)}<td>{each.count}<td>{100 * each.right:.1f} %<td>{100 * each.majority:.1f} %"
        f"<td>{'' if each.swapped is None else f'{100 * each.swapped:.1f} %'}"
        for each in counted
    )
    head = "<tr><th>question<th>held out<th>right<th>always the most frequent answer<th>with media of another sample"
    return f"<table>{head}{rows}</table>"


_PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>{title}: held-out samples</title>
<style>
 body {{ font: 14px system-ui, sans-serif; margin: 2rem; color: #24292f; }}
 .cards {{ display: grid; grid-template-columns: repeat(auto-fill, minmax(280px, 1fr)); gap: 1rem; }}
 .card {{ border: 1px solid #d0d7de; border-radius: 8px; padding: .8rem; }}
 .media img {{ max-width: 100%; height: 96px; image-rendering: pixelated; margin-right: 4px; }}
 .name {{ color: #57606a; font-size: 12px; overflow-wrap: anywhere; }}
 .right {{ color: #1a7f37; }}
 td, th {{ text-align: left; padding: .2rem 1rem .2rem 0; }}
</style>
<h1>{title}: held-out samples</h1>
{counted}
<div class="cards">
{cards}
</div></html>
"""
