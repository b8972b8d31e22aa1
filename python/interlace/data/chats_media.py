"""The media of chats: sizes from headers, files to what processors take, and a processor's output cut into items.

A processor is asked twice. For lengths it gets blank pictures of the right sizes, whose results are remembered by size
(`Remembered`): what it makes of a picture depends on the size alone, as far as shapes go. For pixels it gets the real
ones, when somebody reads an item. Both go through HuggingFace's own code, and `cut` deals its tensors out to the runs
of placeholders by the names that all processors of transformers share (FIELDS); there is nothing per family.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import stat
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from interlace.data.chats_shapes import BrokenSampleError
from interlace.data.chats_video import video_size
from interlace.data.media import DecodeError, _library, check_depth, clip_info, decode_image, svg_size, upright_size

BLANK = (200, 90, 30)  # no channel of it is 0 after normalisation, so padding, which is 0, can be told from it
REMEMBERED = 4096
Size = tuple[int, int]
"""(width, height) in pixels, upright."""
Runs = list[tuple[int, int]]
"""Runs of placeholders of one medium: (start, tokens)."""

# Kind of media -> the processor's tensor with its data, and what the encoder is told beside it: the processor's key ->
# the keyword of the encoder's call.
FIELDS: dict[str, tuple[tuple[str, ...], dict[str, str]]] = {
    "image": (("pixel_values",), {"image_grid_thw": "grid_thw", "image_sizes": "image_sizes"}),
    "audio": (("input_features", "input_values"), {}),
}
# Of one item each, but no data of the encoder.
MASKS = ("pixel_attention_mask",)


@dataclass(frozen=True)
class Cut:
    """One item: its shape, what the encoder is told of it, and its data unless they are blank."""

    shape: tuple[int, ...]
    about: dict[str, tuple[float, ...]]
    data: Tensor | None


def check_file(path: str) -> None:
    """Raises BrokenSampleError unless there is such a file."""
    name = path if len(path) <= 300 else f"{path[:300]}..."
    try:
        mode = os.stat(path).st_mode
    except (FileNotFoundError, NotADirectoryError):
        raise BrokenSampleError("missing file", f"{name}: no such file") from None
    except (OSError, ValueError) as error:
        if isinstance(error, OSError) and error.errno != errno.ENAMETOOLONG:
            raise BrokenSampleError("broken file", f"{name}: cannot be read: {error.strerror}") from None
        raise BrokenSampleError("no file", f"{name}: no path; inline data have to be saved to a file") from None
    if not stat.S_ISREG(mode):
        raise BrokenSampleError("no file", f"{name}: not a file")


def look_at(kind: str, path: str, *, decode: bool) -> Any:
    """What lengths follow from: (width, height) of a picture, with the seconds of a video, (samples, rate) of a clip.

    decode: all of the file is decoded, too, which finds damaged ones. Raises BrokenSampleError.
    """
    if kind == "audio":
        return clip_size(path, decode=decode)
    if kind == "image":
        return (drawing_size if path.lower().endswith(".svg") else picture_size)(path, decode=decode)
    check_file(path)
    return video_size(path, decode=decode)


def picture_size(path: str, *, decode: bool) -> Size:
    """(width, height) of a picture as it is shown (cameras write which side is up beside the pixels).

    Read from the header; decode: all of it is decoded, too, which finds damaged ones. Raises BrokenSampleError.
    """
    check_file(path)
    image_module = _library("PIL.Image")
    try:
        with image_module.open(path) as image:
            check_depth(image)
            # Pillow looks for what is up behind a PNG's pixels, too, and decodes them on the way.
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
    """(samples, rate in Hz) of a clip from its header; decode: all of it is decoded, too. Raises BrokenSampleError."""
    check_file(path)
    try:
        frames, rate = clip_info(path)
        if decode:
            found = len(_library("soundfile").read(path, dtype="float32")[0])
            if found != frames:
                raise DecodeError(f"{path}: has {found} samples, its header promises {frames}")
    except ImportError:
        raise
    except Exception as error:  # libsndfile's own error types
        raise BrokenSampleError("broken file", f"{path}: {str(error).removeprefix(f'{path}: ')}") from None
    return frames, rate


def read_picture(path: str) -> Any:
    """The upright picture, as HuggingFace's processors load it. Raises DecodeError."""
    from transformers.image_utils import load_image

    try:
        check_file(path)
        return load_image(path)
    except Exception as error:
        raise DecodeError(f"{path}: {error}") from error


@lru_cache(maxsize=8)  # a large one takes a while to fill
def blank_picture(size: Size) -> Any:
    """A picture of `size` without anything on it."""
    return _library("PIL.Image").new("RGB", size, BLANK)


class Remembered:
    """A processor's part for pictures that keeps, by the sizes of blank ones, what it made of them.

    Everything but the call is the part's own. Kept tensors are without memory: of pictures, whether each is blank
    (padding) or not, spread over its shape.
    """

    def __init__(self, part: Any) -> None:
        self._part = part
        self._kept: OrderedDict[Any, dict[str, Any]] = OrderedDict()
        self.last: Mapping[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._part, name)

    def __call__(self, images: Any, **kwargs: Any) -> Any:
        from transformers import BatchFeature

        key = (_sizes(images), repr(sorted(kwargs.items(), key=lambda item: item[0])))
        if key not in self._kept:
            made = dict(self._part(images, **kwargs))
            self._kept[key] = {name: _light(value) for name, value in made.items()}
            if len(self._kept) > REMEMBERED:
                self._kept.popitem(last=False)
        self._kept.move_to_end(key)
        self.last = self._kept[key]
        return BatchFeature(dict(self.last))


class Watched:
    """A processor's part for pictures whose last result stays visible: processors drop what they only count with."""

    def __init__(self, part: Any) -> None:
        self._part = part
        self.last: Mapping[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._part, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        made = self._part(*args, **kwargs)
        self.last = dict(made)
        return made


def _sizes(images: Any) -> Any:
    if isinstance(images, (list, tuple)):
        return tuple(_sizes(image) for image in images)
    return images.size


def _light(value: Any) -> Any:
    if isinstance(value, (list, tuple)) and value and all(isinstance(one, Tensor) for one in value):
        return [_light(one) for one in value]
    if not isinstance(value, Tensor) or not value.is_floating_point() or value.dim() < 2:
        return value
    per_item = 3 if value.dim() > 3 else value.dim()
    kept = value.abs().flatten(-per_item).amax(-1).sign()
    return kept[(..., *[None] * per_item)].expand(value.shape)


def shifted(place: int, moved: Sequence[Mapping[str, Any]]) -> int:
    """Where a character of the template's text came to stand when media were written into it."""
    gained = 0
    for replaced in moved:
        if replaced["span"][1] > place:
            break
        gained = replaced["new_span"][1] - replaced["span"][1]
    return place + gained


def runs_in(
    ids: Sequence[int], offsets: Sequence[tuple[int, int]], span: tuple[int, int], wanted: Sequence[int]
) -> tuple[int, Runs]:
    """The first token of a span of characters, and the runs (start, count) of `wanted` ids in it."""
    start, end = span
    inside = [place for place, (first, last) in enumerate(offsets) if first < end and last > start]
    runs: list[tuple[int, int]] = []
    for place in inside:
        if ids[place] not in wanted:
            continue
        if runs and runs[-1][0] + runs[-1][1] == place:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((place, 1))
    return (inside[0] if inside else 0), runs


def in_tiles(runs: Sequence[Runs], raw: Mapping[str, Any], who: str) -> list[Runs]:
    """The runs of each medium, where a processor writes the tiles of a picture as one run cut into its tiles.

    raw: what its part for pictures returned; it counts their tiles. Raises ValueError when these do not fit.
    """
    if "num_patches" not in raw:
        return list(runs)
    counts = [int(count) for count in _tensor(raw["num_patches"]).flatten()]
    if len(counts) != len(runs) or any(len(of) != 1 or of[0][1] % n for of, n in zip(runs, counts)):
        raise ValueError(f"{who} counts {counts} tiles for {len(runs)} pictures in runs of {runs}")
    pieces = [(start, tokens // n, n) for ((start, tokens),), n in zip(runs, counts, strict=True)]
    return [[(start + k * tokens, tokens) for k in range(n)] for start, tokens, n in pieces]


def cut(
    kind: str,
    out: Mapping[str, Any],
    runs: Sequence[Runs],
    who: str,
    shapes: Sequence[tuple[int, ...]] | None = None,
) -> list[Cut]:
    """The items of one kind of a sample, in the order of their runs.

    out: what the processor returned; runs: of each medium; who: the processor, for messages; shapes: of the items where
    they are known, as blank pictures told them. Raises ValueError for an output that says not which rows belong to
    which run.
    """
    names, about = FIELDS[kind]
    name = next((name for name in names if name in out), None)
    if name is None:
        raise ValueError(f"{who} returns {sorted(out)} for {kind}s and nothing of {', '.join(names)}")
    values, told = _tensor(out[name]), {about[key]: _tensor(out[key]) for key in about if key in out}
    for mask in MASKS:
        if mask in out and not bool((_tensor(out[mask]) != 0).all()):
            raise ValueError(f"{who} pads its {kind}s and says so in {mask}, which encoders here are not told")
    single = [len(of_medium) for of_medium in runs] == [1] * len(runs)
    if "grid_thw" in told:
        return _by_grid(values, told["grid_thw"], single, who)
    if "image_sizes" in told:
        return _by_size(values, told["image_sizes"], single, who, shapes)
    rows = values.flatten(0, 1) if values.dim() == 5 else values
    total = sum(len(of_medium) for of_medium in runs)
    if len(rows) != total:
        raise ValueError(
            f"{who} made {len(rows)} {kind}s of {name} {list(values.shape)} for {total} runs of placeholders"
        )
    return [Cut(tuple(row.shape), {}, row) for row in rows]


def _by_grid(values: Tensor, grid: Tensor, single: bool, who: str) -> list[Cut]:
    grids = [tuple(int(side) for side in row) for row in grid.reshape(-1, 3)]
    counts = [math.prod(sides) for sides in grids]
    if not single or values.dim() != 2 or sum(counts) != len(values):
        raise ValueError(f"{who} made patches {list(values.shape)} for grids {grids}, which do not fit")
    pieces = values.split(counts)
    return [Cut(tuple(piece.shape), {"grid_thw": sides}, piece) for piece, sides in zip(pieces, grids, strict=True)]


def _by_size(
    values: Tensor, sizes: Tensor, single: bool, who: str, shapes: Sequence[tuple[int, ...]] | None
) -> list[Cut]:
    """Tiles [n, most, C, H, W], padded with zeros where a picture has fewer."""
    pairs = [tuple(int(side) for side in row) for row in sizes.reshape(-1, 2)]
    if not single or values.dim() not in (4, 5) or len(values) != len(pairs):
        raise ValueError(f"{who} made pictures {list(values.shape)} of sizes {pairs}: it is not known which are padded")
    if values.dim() == 4:  # one tile each
        values = values.unsqueeze(1)
    made = []
    for place, (tiles, pair) in enumerate(zip(values, pairs, strict=True)):
        used = int((tiles.flatten(1) != 0).any(1).sum()) if shapes is None else shapes[place][0]
        made.append(Cut((used, *tiles.shape[1:]), {"image_sizes": pair}, tiles[:used]))
    return made


def _tensor(value: Any) -> Tensor:
    if isinstance(value, Tensor):
        return value
    if isinstance(value, (list, tuple)) and value and isinstance(value[0], Tensor):
        return torch.stack([torch.as_tensor(one) for one in value])
    return torch.as_tensor(value)


@contextlib.contextmanager
def refused_by(who: str) -> Iterator[None]:
    """Makes the errors of a processor about a picture's size those of the sample."""
    try:
        yield
    except BrokenSampleError:
        raise
    except (ValueError, ZeroDivisionError) as error:
        raise BrokenSampleError("size", f"{who} refuses it: {error}") from None
