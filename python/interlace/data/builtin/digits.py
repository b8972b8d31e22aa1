"""Chats about scikit-learn's 1,797 handwritten digits: picture -> "seven". Real data without a download.

With only some 1,460 pictures to train on, each use of one has another distortion, up to `looks` of them. Held-out
pictures are not distorted.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np

from interlace.data.builtin.stamps import Drawn, Record, Settings, walk
from interlace.data.builtin.stamps_media import distorted
from interlace.modalities.files import library

SIDE = 64
KIND = "digit"
WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


def digit_pictures() -> tuple[np.ndarray, np.ndarray]:
    """The digits, uint8 [1797, 8, 8] with values 0..16, and their labels, int64 [1797]."""
    digits = library("sklearn.datasets").load_digits()
    return digits.images.astype(np.uint8), digits.target


def digit_held_out(picture: np.ndarray, fraction: float) -> bool:
    """True if a digit is held out, by a hash of its pixels: equal pictures stay together."""
    return int.from_bytes(hashlib.sha256(picture.tobytes()).digest()[:8], "big") < fraction * 2**64


def digit_settings(settings: Settings) -> dict[str, Any]:
    """The settings that the digits depend on, in JSON form."""
    own = ("records", "vocabulary") if settings.byte_encoders is None else ("side", "byte_encoders")
    return {key: value for key, value in settings.table().items() if key in ("seed", "held_out", "looks", *own)}


def draw_digits(settings: Settings, folder: Path) -> Drawn:
    """Records about the digits; writes their pictures into `folder`."""
    pictures, targets = digit_pictures()
    held = [digit_held_out(picture, settings.held_out) for picture in pictures]
    places = [place for place, kept in enumerate(held) if not kept]
    records = settings.records if settings.byte_encoders is None else settings.looks * len(places)
    drawn = Drawn()
    (folder / "media").mkdir()
    for look, place in enumerate(walk(len(places), records, [settings.seed, 9])):
        number = places[place]
        drawn.train.append(_record(folder, number, look // len(places) % settings.looks, pictures, targets, settings))
    drawn.validation += [_record(folder, n, 0, pictures, targets, settings) for n, kept in enumerate(held) if kept]
    return drawn


def _record(
    folder: Path, number: int, look: int, pictures: np.ndarray, targets: np.ndarray, settings: Settings
) -> Record:
    name = f"media/{number}{f'-{look}' if look else ''}.png"
    side, invert = (SIDE, False) if settings.byte_encoders is None else (settings.side, True)
    if not (folder / name).exists():
        grey = np.minimum(pictures[number] * 16.0, 255).astype(np.uint8)
        image_module = library("PIL.Image")
        picture = image_module.fromarray(255 - grey).convert("RGB")
        picture = picture.resize((side, side), image_module.Resampling.BILINEAR)
        seed = (settings.seed, look, number)
        made = distorted(picture, np.random.default_rng(seed), mirrored=False) if look else picture
        made = made.point([255 - value for value in range(256)] * 3) if invert else made
        made.save(folder / name, "PNG", compress_level=1)
    question = [{"type": "text", "text": "What is it?"}] if settings.byte_encoders is None else []
    answer = {"role": "assistant", "content": WORDS[targets[number]]}
    return {
        "messages": [{"role": "user", "content": [{"type": "image", "image": name}, *question]}, answer],
        "kind": KIND,
    }
