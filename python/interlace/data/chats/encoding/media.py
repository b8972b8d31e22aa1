"""Media of chats: splits a processor's output into items.

`cut` assigns the tensors of a processor (processor.py) to the runs of placeholders. It uses the key names that all
processors of transformers share (`Modality.processor_data`); it has no code for single model families.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from interlace.modalities import named
from interlace.modalities.errors import BrokenSampleError

Runs = list[tuple[int, int]]
"""Runs of placeholders of one medium: (start, tokens)."""

COUNTED = ("feature_attention_mask",)  # masks: the number of set entries is passed
# Per item, but not data of the encoder.
MASKS = ("pixel_attention_mask",)


@dataclass(frozen=True)
class Cut:
    """One item: its shape, its extra encoder arguments, and its data unless they are blank."""

    shape: tuple[int, ...]
    about: dict[str, tuple[float, ...]]
    data: Tensor | None


def shifted(place: int, moved: Sequence[Mapping[str, Any]]) -> int:
    """Position of a character of the template's text after media were inserted into it."""
    gained = 0
    for replaced in moved:
        if replaced["span"][1] > place:
            break
        gained = replaced["new_span"][1] - replaced["span"][1]
    return place + gained


def runs_in(
    ids: Sequence[int], offsets: Sequence[tuple[int, int]], span: tuple[int, int], wanted: Sequence[int]
) -> tuple[int, Runs]:
    """The first token of a span of characters, and the runs (start, count) of `wanted` ids in the span."""
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
    """The runs of each picture. If a processor writes all tiles of a picture as one run, the run is split into tiles.

    raw: output of the processor's picture part, with tile counts. Raises ValueError when these do not fit.
    """
    if "num_patches" not in raw:
        return list(runs)
    counts = [int(count) for count in _tensor(raw["num_patches"]).flatten()]
    if len(counts) != len(runs) or any(len(of) != 1 or of[0][1] % n for of, n in zip(runs, counts)):
        raise ValueError(f"{who} counts {counts} tiles for {len(runs)} pictures in runs of {runs}")
    pieces = [(start, tokens // n, n) for ((start, tokens),), n in zip(runs, counts, strict=True)]
    return [[(start + k * tokens, tokens) for k in range(n)] for start, tokens, n in pieces]


def source_of(kind: str, out: Mapping[str, Any]) -> str:
    """The modality under whose keys a processor's output has media of `kind`: frames may be pictures."""
    modality = named(kind)
    return kind if any(name in out for name in modality.processor_data) else modality.encoded_by


def cut(
    kind: str,
    out: Mapping[str, Any],
    runs: Sequence[Runs],
    who: str,
    shapes: Sequence[tuple[int, ...]] | None = None,
) -> list[Cut]:
    """The items of one kind in a sample, in the order of their runs.

    out: output of the processor; runs: of each medium; who: the processor, for messages; shapes: of the items,
    if known from blank pictures. Raises ValueError for an output that does not show which rows belong to which run.
    """
    names, about = named(kind).processor_data, named(kind).processor_about
    name = next((name for name in names if name in out), None)
    if name is None:
        raise ValueError(f"{who} returns {sorted(out)} for {kind}s and nothing of {', '.join(names)}")
    values, facts = _tensor(out[name]), {about[key]: _told(key, out[key]) for key in about if key in out}
    for mask in MASKS:
        if mask in out and not bool((_tensor(out[mask]) != 0).all()):
            raise ValueError(f"{who} pads its {kind}s and says so in {mask}, which encoders here are not told")
    single = [len(of_medium) for of_medium in runs] == [1] * len(runs)
    if "grid_thw" in facts:
        return _by_grid(values, facts, runs, who)
    if "image_sizes" in facts:
        return _by_size(values, facts["image_sizes"], single, who, shapes)
    rows = values.flatten(0, 1) if values.dim() == 5 else values
    total = sum(len(of_medium) for of_medium in runs)
    if len(rows) != total or any(len(each) != total for each in facts.values()):
        raise ValueError(
            f"{who} made {len(rows)} {kind}s of {name} {list(values.shape)} for {total} runs of placeholders"
        )
    return [
        Cut(tuple(row.shape), {key: _numbers(each[place]) for key, each in facts.items()}, row)
        for place, row in enumerate(rows)
    ]


def _told(key: str, value: Any) -> Tensor:
    tensor = _tensor(value)
    return tensor.sum(-1) if key in COUNTED else tensor


def _numbers(value: Tensor) -> tuple[float, ...]:
    return tuple(value.reshape(-1).tolist())


def _by_grid(values: Tensor, facts: Mapping[str, Tensor], runs: Sequence[Runs], who: str) -> list[Cut]:
    """For concatenated patches of all media. A video may have one run per frame, as many as its grid has frames."""
    grids = [tuple(int(side) for side in row) for row in facts["grid_thw"].reshape(-1, 3)]
    counts = [math.prod(sides) for sides in grids]
    fits = len(grids) == len(runs) and all(len(of) in (1, sides[0]) for of, sides in zip(runs, grids))
    if not fits or values.dim() != 2 or sum(counts) != len(values):
        raise ValueError(f"{who} made patches {list(values.shape)} for grids {grids}, which do not fit")
    made = []
    for place, (piece, sides, of) in enumerate(zip(values.split(counts), grids, runs, strict=True)):
        more = {key: _numbers(each[place]) for key, each in facts.items() if key != "grid_thw"}
        parts = [piece] if len(of) == 1 else piece.chunk(len(of))
        grid = (sides[0] // len(of), *sides[1:])
        made += [Cut(tuple(part.shape), {"grid_thw": grid, **more}, part) for part in parts]
    return made


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
    """Converts a processor's errors about a picture's size to errors of the sample."""
    try:
        yield
    except BrokenSampleError:
        raise
    except (ValueError, ZeroDivisionError) as error:
        raise BrokenSampleError("size", f"{who} refuses it: {error}") from None
