"""Converts the stamps' files for training: small PNGs, and mono FLAC clips at the encoders' sample rate.

Converted once: reading the package's own files costs 5 ms per picture (large PNGs, drawings) and 7 ms per clip
(Vorbis at 44 kHz). That is ten times as much as the converted files, and a run reads most files more than once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from interlace.data.builtin.stamps import ClipFile, PictureFile
from interlace.modalities.audio import SAMPLE_RATE, resampled
from interlace.modalities.errors import DecodeError
from interlace.modalities.files import library
from interlace.modalities.image import decode_image, image_size

MOST_ELONGATED = 8


def write_media(
    root: Path, folder: Path, files: Mapping[str, PictureFile | ClipFile], side: int, workers: int
) -> tuple[set[str], dict[str, str]]:
    """Writes `files`, from sources under `root`, into `folder`. Returns targets that failed, and source -> why.

    All looks at one picture are made from one decoding. Deterministic: the output depends only on sources and seeds.
    """
    jobs: dict[tuple[str, ...], list[PictureFile | ClipFile]] = {}
    for file in files.values():
        jobs.setdefault((file.source,) if isinstance(file, ClipFile) else file.sources, []).append(file)
        (folder / file.target).parent.mkdir(parents=True, exist_ok=True)
    failed: set[str] = set()
    left_out: dict[str, str] = {}

    def write(sources: tuple[str, ...], wanted: list[PictureFile | ClipFile]) -> dict[str, str]:
        first = wanted[0]
        if isinstance(first, ClipFile):
            return _write_clip(root, folder, first)
        pictures = [each for each in wanted if isinstance(each, PictureFile)]
        return _write_pictures(root, folder, sources, pictures, side)

    with ThreadPoolExecutor(workers, "interlace-stamps") as pool:
        for (sources, wanted), trouble in zip(jobs.items(), pool.map(write, *zip(*jobs.items(), strict=True))):
            left_out |= trouble
            if len(trouble) == len(sources):
                failed |= {file.target for file in wanted}
    return failed, left_out


def _write_pictures(
    root: Path, folder: Path, sources: Iterable[str], wanted: list[PictureFile], side: int
) -> dict[str, str]:
    """Writes pictures from the first readable one of `sources`. Returns the errors of those before it."""
    trouble: dict[str, str] = {}
    for source in sources:
        try:
            width, height = image_size(root / source)
            if max(width, height) > MOST_ELONGATED * min(width, height):
                raise DecodeError(f"{source}: more than {MOST_ELONGATED} times as long as wide")
            scale = min(1.0, side / max(width, height)) if not source.endswith(".svg") else side / max(width, height)
            shape = 3, max(1, round(height * scale)), max(1, round(width * scale))
            pixels = decode_image(root / source, shape)
        except (DecodeError, OSError) as error:
            trouble[source] = f"cannot be decoded: {str(error).replace(f'{root}/', '').removeprefix(f'{source}: ')}"
            continue
        for file in wanted:
            picture = library("PIL.Image").fromarray(np.ascontiguousarray(pixels.transpose(1, 2, 0)))
            made = picture if file.seed is None else distorted(picture, np.random.default_rng(file.seed))
            made.save(folder / file.target, "PNG", compress_level=1)
        break
    return trouble


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


def _write_clip(root: Path, folder: Path, file: ClipFile) -> dict[str, str]:
    soundfile = library("soundfile")
    path = str(root / file.source)
    try:
        promised = soundfile.info(path).frames
        samples, rate = soundfile.read(path, dtype="float32", always_2d=True)
    except Exception as error:  # libsndfile's own error types
        return {file.source: f"cannot be decoded: {str(error).replace(f'{root}/', '')}"}
    if len(samples) != promised or not np.isfinite(samples).all():
        return {file.source: f"cannot be decoded: has {len(samples)} samples, its header promises {promised}"}
    samples = np.clip(resampled(samples.mean(axis=1), rate), -1, 1)
    soundfile.write(str(folder / file.target), samples, SAMPLE_RATE, format="FLAC", subtype="PCM_16")
    return {}
