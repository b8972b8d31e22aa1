"""Small tars in the layouts that users have, made in tmp_path."""

from __future__ import annotations

import io
import json
import tarfile
import wave
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image


def picture(
    width: int = 40, height: int = 24, colour: tuple[int, int, int] = (250, 10, 10), kind: str = "PNG"
) -> bytes:
    """An image of one colour."""
    file = io.BytesIO()
    Image.new("RGB", (width, height), colour).save(file, kind)
    return file.getvalue()


def clip(seconds: float = 0.5, rate: int = 16_000) -> bytes:
    """A tone as WAV."""
    samples = (np.sin(np.arange(round(seconds * rate)) / 20) * 9_000).astype("<i2")
    file = io.BytesIO()
    with wave.open(file, "wb") as sound:
        sound.setnchannels(1)
        sound.setsampwidth(2)
        sound.setframerate(rate)
        sound.writeframes(samples.tobytes())
    return file.getvalue()


def text(said: Any) -> bytes:
    """JSON."""
    return json.dumps(said).encode()


def write_tar(path: Path, members: Mapping[str, bytes], *, form: int = tarfile.PAX_FORMAT) -> Path:
    """A tar of these members, in this order."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w", format=form) as tar:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


def captioned(count: int, start: int = 0) -> dict[str, bytes]:
    """Members of `count` samples: an image of its own colour and size, and a caption."""
    result: dict[str, bytes] = {}
    for number in range(start, start + count):
        result[f"{number:04d}.png"] = picture(16 + 8 * (number % 4), 24, (number % 256, 10, 200))
        result[f"{number:04d}.txt"] = f"this is number {number}".encode()
    return result
