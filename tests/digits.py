"""A dataset of the tests, in memory: scikit-learn's handwritten digits, picture -> "seven", in bytes.

Configs name it by `DATA`, or as "tests.digits:Digits".
"""

from __future__ import annotations

import hashlib
import math
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from interlace.data import (
    IGNORE,
    ByteTokenizer,
    DatasetSetup,
    ImageSpec,
    Media,
    Question,
    Sample,
    SampleDataset,
)
from interlace.data.builtin.byte_tokenizer import write_byte_tokenizer
from interlace.data.builtin.digits import WORDS, digit_held_out, digit_pictures
from interlace.data.reading import Reading

DATA: dict[str, Any] = {"dataset": "tests.digits:Digits", "workers": 0}


class Digits(SampleDataset, Reading):
    """One sample per digit of the split. length: only the first ones. jitter: strength of distortions of training
    pictures, drawn anew in every epoch."""

    name = "digits"
    unit = "byte"

    def __init__(self, split: str, setup: DatasetSetup, *, length: int | None = None, jitter: float = 0.0) -> None:
        Reading.__init__(self)
        self.split, self.seed, self.tokenizer = split, setup.seed, ByteTokenizer(setup.tokens)
        specs = setup.specs if setup.processor is None else {"vision": ImageSpec(4)}
        self.specs = {name: spec for name, spec in specs.items() if isinstance(spec, ImageSpec)}
        sides = {name: -(-8 // spec.patch_size) * spec.patch_size for name, spec in self.specs.items()}
        self.items = {name: ((3, side, side), setup.tokens[name]((3, side, side))) for name, side in sides.items()}
        self.jitter = jitter if split == "train" else 0.0
        self.varies = bool(self.jitter)
        pictures, targets = digit_pictures()
        chosen = [i for i, p in enumerate(pictures) if digit_held_out(p, setup.held_out) == (split == "heldout")]
        self.indices = chosen[:length]
        self.words = [WORDS[targets[number]] for number in self.indices]
        self.pictures = {number: pictures[number] for number in self.indices}

    def __len__(self) -> int:
        return len(self.indices)

    @property
    def token_lengths(self) -> np.ndarray:
        """int64 [n], tokens of each sample."""
        return np.array([len(self._prompt()) + len(word) for word in self.words], np.int64)

    def _prompt(self) -> list[int]:
        return self.tokenizer.prompt([(name, count) for name, (_, count) in self.items.items()], "en")

    def sample(self, index: int, epoch: int | None = None) -> Sample:
        index = range(len(self))[index]
        number, source = self.indices[index], f"digit/{self.indices[index]}"
        moved: tuple[float, ...] = ()
        if self.jitter:
            drawn = np.random.default_rng([self.seed, 5, epoch or 0, number])
            moved = tuple(float(f"{self.jitter * value:.4f}") for value in drawn.uniform(-1, 1, 5))
            source += "".join(f" {value:.4f}" for value in moved)
        media = {
            name: [Media(shape, count, load=partial(self._load, name, number, moved))]
            for name, (shape, count) in self.items.items()
        }
        prompt = self._prompt()
        tokens = torch.tensor([*prompt, *self.tokenizer.encode(self.words[index]), self.tokenizer.EOS])
        labels = tokens[1:].clone()
        labels[: len(prompt) - 1] = IGNORE
        return Sample(tokens[:-1], labels, media, f"digit [en] {' + '.join([source] * len(media))}")

    def _load(self, name: str, number: int, moved: tuple[float, ...]) -> torch.Tensor:
        shape = self.items[name][0]
        return self.read_or_blank(
            f"digit/{number}",
            lambda: self.specs[name].tensor(self.picture(number, shape, moved)),
            lambda: torch.zeros(shape),
        )

    def picture(self, number: int, shape: tuple[int, ...], moved: tuple[float, ...]) -> np.ndarray:
        """uint8 pixels of a digit."""
        grey = Image.fromarray(np.minimum(self.pictures[number] * 16.0, 255).astype(np.uint8))
        if moved:
            grey = grey.transform(grey.size, Image.Transform.AFFINE, _affine(*moved), Image.Resampling.BILINEAR)
        if grey.size != shape[1:]:
            grey = grey.resize(shape[1:], Image.Resampling.BILINEAR)
        return np.repeat(np.asarray(grey)[None], 3, axis=0)

    def answer(self, index: int, epoch: int | None = None) -> list[int]:
        return [*self.tokenizer.encode(self.words[index]), self.tokenizer.EOS]

    def kind(self, index: int) -> str:
        return "digit"

    def questions(self) -> dict[str, list[Question]]:
        return {"digit": [Question(index, word, tuple(self.items)) for index, word in enumerate(self.words)]}

    def fingerprint(self) -> str:
        said = (self.split, self.seed, self.indices, self.jitter, self.tokenizer.vocab_size, self.items, self.specs)
        return hashlib.sha256(repr(said).encode()).hexdigest()[:16]


def digits(split: str = "train", *, tokens: int = 4, held_out: float = 0.2, seed: int = 0, **options: Any) -> Digits:
    """The dataset for an encoder of patches of 4 pixels that gives each picture so many tokens."""
    tokenizer = ByteTokenizer()
    setup = DatasetSetup(
        tokenizer,
        tokenizer.placeholders,
        {"vision": lambda shape: tokens},
        {"vision": ImageSpec(4)},
        processor=None,
        max_tokens=None,
        seed=seed,
        held_out=held_out,
        train=(),
        validation=(),
        cache=Path(),
    )
    return Digits(split, setup, **options)


def write_processor(folder: Path) -> None:
    """Gives the folder of a LLaVA with patches of 4 pixels a processor, with bytes as tokens."""
    from transformers import AutoTokenizer, CLIPImageProcessor, LlavaProcessor

    write_byte_tokenizer(folder, [])
    pictures = CLIPImageProcessor(size={"height": 8, "width": 8}, crop_size={"height": 8, "width": 8})
    LlavaProcessor(
        pictures, AutoTokenizer.from_pretrained(folder), patch_size=4, vision_feature_select_strategy="default"
    ).save_pretrained(folder)


def _affine(right: float, down: float, turn: float, width: float, height: float) -> tuple[float, ...]:
    """Pillow's six coefficients of up to half a pixel, 8 degrees and 10 %, about the centre."""
    angle = math.radians(8.0 * turn)
    a, b = math.cos(angle) * (1 + 0.1 * width), -math.sin(angle)
    d, e = math.sin(angle), math.cos(angle) * (1 + 0.1 * height)
    return a, b, 4 - 4 * (a + b) + 0.5 * right, d, e, 4 - 4 * (d + e) + 0.5 * down
