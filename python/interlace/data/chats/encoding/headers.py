"""Headers of media files: sizes that determine token counts, and optional checks that files can be decoded."""

from __future__ import annotations

import errno
import stat
from typing import Any

import numpy as np

from interlace.data.chats.encoding.video import video_size
from interlace.data.chats.files.shapes import BrokenSampleError
from interlace.data.media import DecodeError, _library, check_depth, clip_info, decode_image, svg_size, upright_size
from interlace.data.opened import opened, size_of

Size = tuple[int, int]
"""(width, height) in pixels, upright."""


def check_file(path: str) -> None:
    """Raises BrokenSampleError unless the file exists."""
    name = path if len(path) <= 300 else f"{path[:300]}..."
    try:
        mode = size_of(path).st_mode
    except (FileNotFoundError, NotADirectoryError):
        raise BrokenSampleError("missing file", f"{name}: no such file") from None
    except (OSError, ValueError) as error:
        if isinstance(error, OSError) and error.errno != errno.ENAMETOOLONG:
            raise BrokenSampleError("broken file", f"{name}: cannot be read: {error.strerror}") from None
        raise BrokenSampleError("no file", f"{name}: no path; inline data have to be saved to a file") from None
    if not stat.S_ISREG(mode):
        raise BrokenSampleError("no file", f"{name}: not a file")


def look_at(kind: str, path: str, *, decode: bool) -> Any:
    """Size of a medium: (width, height) of a picture, plus seconds for a video; (samples, rate) of a clip.

    decode: also decode the whole file, which detects damaged ones. Raises BrokenSampleError.
    """
    if kind == "audio":
        return clip_size(path, decode=decode)
    if kind == "image":
        return (drawing_size if path.lower().endswith(".svg") else picture_size)(path, decode=decode)
    check_file(path)
    return video_size(path, decode=decode)


def picture_size(path: str, *, decode: bool) -> Size:
    """(width, height) of a picture as displayed, with its EXIF orientation applied.

    Read from the header; decode: also decode the whole file, which detects damaged ones. Raises BrokenSampleError.
    """
    check_file(path)
    image_module = _library("PIL.Image")
    try:
        with opened(path) as source, image_module.open(source) as image:
            check_depth(image)
            # For PNG, Pillow also looks for EXIF data after the pixels, and decodes them on the way.
            told = decode or image.format != "PNG" or "exif" in image.info
            width, height = upright_size(image) if told else image.size
            if decode:
                image.load()
    except Exception as error:  # pillow raises many types on broken files
        raise BrokenSampleError("broken file", f"{path}: {error}") from None
    return int(width), int(height)


def drawing_size(path: str, *, decode: bool) -> tuple[float, float]:
    """`picture_size` of an SVG file."""
    check_file(path)
    try:
        size = svg_size(path)
        if decode:
            decode_image(path, (3, 16, 16))
    except (DecodeError, OSError) as error:
        raise BrokenSampleError("broken file", str(error)) from None
    return size


def clip_size(path: str, *, decode: bool) -> tuple[int, int]:
    """(samples, rate in Hz) of a clip from its header; decode: also decode all of it. Raises BrokenSampleError."""
    check_file(path)
    try:
        frames, rate = clip_info(path)
        if decode:
            with opened(path) as file:
                samples = _library("soundfile").read(file, dtype="float32")[0]
            if len(samples) != frames:
                raise DecodeError(f"{path}: has {len(samples)} samples, its header promises {frames}")
            if not np.isfinite(samples).all():
                raise DecodeError(f"{path}: samples are not finite")
    except ImportError:
        raise
    except Exception as error:  # libsndfile's own error types
        raise BrokenSampleError("broken file", f"{path}: {str(error).removeprefix(f'{path}: ')}") from None
    return frames, rate
