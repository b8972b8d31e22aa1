"""Converts the stamps' files for training: small PNGs, and mono FLAC clips at the encoders' sample rate.

Converted once: reading the package's own files costs 5 ms per picture (large PNGs, drawings) and 7 ms per clip
(Vorbis at 44 kHz). That is ten times as much as the converted files, and a run reads most files more than once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from interlace.data.builtin.stamps import MediaFile
from interlace.modalities.audio import SAMPLE_RATE, resampled, whole_clip
from interlace.modalities.errors import DecodeError
from interlace.modalities.files import library
from interlace.modalities.image import decode_image, image_size

MOST_ELONGATED = 8


def write_media(
    root: Path, folder: Path, files: Mapping[str, MediaFile], side: int, workers: int
) -> tuple[set[str], dict[str, str]]:
    """Writes `files`, from sources under `root`, into `folder`. Returns targets that failed, and source -> why.

    All looks at one picture are made from one decoding. Deterministic: the output depends only on sources and seeds.
    """
    jobs: dict[tuple[str, ...], list[MediaFile]] = {}
    for file in files.values():
        jobs.setdefault(file.sources, []).append(file)
        (folder / file.target).parent.mkdir(parents=True, exist_ok=True)
    failed: set[str] = set()
    left_out: dict[str, str] = {}

    def write(sources: tuple[str, ...], wanted: list[MediaFile]) -> dict[str, str]:
        """Writes files from the first readable one of `sources`. Returns the errors of those before it."""
        trouble: dict[str, str] = {}
        for source in sources:
            try:
                made = _clip(root / source) if wanted[0].target.endswith(".flac") else _picture(root / source, side)
            except (DecodeError, OSError) as error:
                trouble[source] = f"cannot be decoded: {str(error).replace(f'{root}/', '').removeprefix(f'{source}: ')}"
                continue
            for file in wanted:  # not in the try: a full disk is an error of all sources
                _save(made, file, folder / file.target)
            break
        return trouble

    with ThreadPoolExecutor(workers, "interlace-stamps") as pool:
        for (sources, wanted), trouble in zip(jobs.items(), pool.map(write, *zip(*jobs.items(), strict=True))):
            left_out |= trouble
            if len(trouble) == len(sources):
                failed |= {file.target for file in wanted}
    return failed, left_out


def _picture(source: Path, side: int) -> Any:
    """A picture of at most `side` pixels; of a drawing, of exactly as many. Raises DecodeError, and OSError."""
    width, height = image_size(source)
    if max(width, height) > MOST_ELONGATED * min(width, height):
        raise DecodeError(f"{source}: more than {MOST_ELONGATED} times as long as wide")
    scale = side / max(width, height)
    scale = scale if source.suffix == ".svg" else min(1.0, scale)
    pixels = decode_image(source, (3, max(1, round(height * scale)), max(1, round(width * scale))))
    return library("PIL.Image").fromarray(np.ascontiguousarray(pixels.transpose(1, 2, 0)))


def _clip(source: Path) -> np.ndarray:
    """A clip as float32 [n] at SAMPLE_RATE. Raises DecodeError."""
    samples, rate = whole_clip(source)
    return np.clip(resampled(samples.mean(axis=1), rate), -1, 1)


def _save(made: Any, file: MediaFile, target: Path) -> None:
    """Writes a clip, or a look at a picture."""
    if isinstance(made, np.ndarray):
        library("soundfile").write(str(target), made, SAMPLE_RATE, format="FLAC", subtype="PCM_16")
        return
    picture = made if file.seed is None else distorted(made, np.random.default_rng(file.seed))
    picture.save(target, "PNG", compress_level=1)


def distorted(picture: Any, rng: np.random.Generator, *, mirrored: bool = True) -> Any:
    """A picture (PIL), randomly distorted, on white: turned by up to 12 degrees, each side scaled by 0.8 to 1.1, moved
    by up to 8 %, brightness changed by up to 20 %, and mirrored in half of the cases if allowed."""
    image_module = library("PIL.Image")
    turn, wide, high, right, down, light = rng.uniform(-1, 1, 6)
    angle = math.radians(12 * turn)
    mirror = -1.0 if mirrored and rng.random() < 0.5 else 1.0
    scale_x, scale_y = mirror / (0.95 + 0.15 * wide), 1 / (0.95 + 0.15 * high)
    a, b = math.cos(angle) * scale_x, -math.sin(angle) * scale_x
    d, e = math.sin(angle) * scale_y, math.cos(angle) * scale_y
    x, y = picture.width / 2, picture.height / 2
    c = x - a * x - b * y + 0.08 * right * picture.width
    f = y - d * x - e * y + 0.08 * down * picture.height
    moved = picture.transform(
        picture.size, image_module.Transform.AFFINE, (a, b, c, d, e, f), image_module.Resampling.BILINEAR,
        fillcolor=(255, 255, 255),
    )  # fmt: skip
    return moved.point([max(0, round(255 - (255 - value) * (1 + 0.2 * light))) for value in range(256)] * 3)
