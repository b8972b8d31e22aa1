"""scikit-learn's handwritten digits in the format of the stamps' chats, for machines that cannot fetch the stamps."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from interlace.data.builtin.digits import WORDS, digit_held_out, digit_pictures
from interlace.data.builtin.stamps import Drawn, Record, Settings, walk
from interlace.data.builtin.stamps_media import distorted
from interlace.modalities.files import library

SIDE = 64
KIND = "digit"


def draw_digits(settings: Settings, folder: Path) -> Drawn:
    """Records about the digits; writes their pictures into `folder`."""
    pictures, targets = digit_pictures()
    held = [digit_held_out(picture, settings.held_out) for picture in pictures]
    places = [place for place, kept in enumerate(held) if not kept]
    drawn = Drawn()
    (folder / "media").mkdir()
    for look, place in enumerate(walk(len(places), settings.records, [settings.seed, 9])):
        number = places[place]
        drawn.train.append(_record(folder, number, look // len(places) % settings.looks, pictures, targets, settings))
    drawn.validation += [_record(folder, n, 0, pictures, targets, settings) for n, kept in enumerate(held) if kept]
    return drawn


def _record(
    folder: Path, number: int, look: int, pictures: np.ndarray, targets: np.ndarray, settings: Settings
) -> Record:
    name = f"media/{number}{f'-{look}' if look else ''}.png"
    if not (folder / name).exists():
        grey = np.minimum(pictures[number] * 16, 255).astype(np.uint8)
        image_module = library("PIL.Image")
        picture = image_module.fromarray(255 - grey).convert("RGB")
        picture = picture.resize((SIDE, SIDE), image_module.Resampling.BILINEAR)
        seed = (settings.seed, look, number)
        made = distorted(picture, np.random.default_rng(seed), mirrored=False) if look else picture
        made.save(folder / name, "PNG", compress_level=1)
    content = [{"type": "image", "image": name}, {"type": "text", "text": "What is it?"}]
    answer = {"role": "assistant", "content": WORDS[targets[number]]}
    return {"messages": [{"role": "user", "content": content}, answer], "kind": KIND}
