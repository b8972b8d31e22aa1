"""Weights from folders that HuggingFace's ``save_pretrained`` wrote, a rank's part of them alone.

A module finds its own among those of a larger model, too: a vision encoder in a folder of all of SigLIP, Whisper's
encoder in one of Whisper.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from interlace.parallel.region import Region
from interlace.train.families import read_json

INDEX, WEIGHTS = "model.safetensors.index.json", "model.safetensors"
MADE_ANEW = (".inv_freq", ".position_ids")  # buffers that older versions of the library saved


class Stored(NamedTuple):
    """A tensor in a safetensors file."""

    file: Path
    key: str

    def read(self, region: Region | None = None) -> Tensor:
        """The tensor, or what `region` has of it. Raises ValueError when it cannot be read any more."""
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(self.file, framework="pt") as file:  # anew each time: pages of an open map count as ours
                if region is None:
                    return file.get_tensor(self.key)
                found = file.get_slice(self.key)
                boxes = [
                    found[tuple(slice(start, start + n) for start, n in zip(box.offsets, box.sizes, strict=True))]
                    for box in region.boxes
                ]
        except (OSError, SafetensorError) as error:
            raise ValueError(f"{self.file}: cannot read {self.key}: {error}") from None
        return boxes[0] if len(boxes) == 1 else torch.cat(boxes, region.dim)


def find(module: nn.Module, folder: Path) -> dict[str, Stored]:
    """Where `folder` has each parameter of `module`, by its first name.

    The module's names and those of the folder may differ by what stands before all of them. Raises ValueError when a
    parameter is missing or of another shape, and when the folder has more than the module beside a parameter or among
    the layers: a bias, a norm or a layer that would be left out changes every result.
    """
    stored = contents(folder)
    names = dict(module.named_parameters(remove_duplicate=False))
    wanted = dict(module.named_parameters())
    own, theirs = _prefixes(wanted, stored)
    key_of = {name: theirs + name.removeprefix(own) for name in names}
    kind = type(module).__name__
    if missing := [name for name in wanted if key_of[name] not in stored or not name.startswith(own)]:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ValueError(f"{folder} has no weight {key_of[missing[0]]!r}{more}, which {kind} needs")
    if left := _left_over(set(stored) - set(key_of.values()), key_of.values()):
        raise ValueError(
            f"{folder} has {left[0]!r}, which {kind} with this config has not: it would compute something else than "
            "the model that was saved; leave out family and config, so that they are read from the folder"
        )
    check_shapes(wanted, {name: stored[key_of[name]] for name in wanted})
    return {name: stored[key_of[name]] for name in wanted}


def _left_over(more: Collection[str], used: Collection[str]) -> list[str]:
    """Those of the keys `more` that lie beside keys that are `used`, or in the same list of layers."""
    beside = {key.rpartition(".")[0] for key in used}
    lists = {match[1] for key in used if (match := re.match(r"(.*?\.)\d+\.", key))}
    return sorted(
        key
        for key in more
        if (key.rpartition(".")[0] in beside or any(key.startswith(each) for each in lists))
        and not key.endswith(MADE_ANEW)
    )


def _prefixes(wanted: Collection[str], stored: Collection[str]) -> tuple[str, str]:
    """What to take away before the module's names, and what to put there, to meet most of the folder's."""
    votes: Counter[tuple[str, str]] = Counter()
    for name in wanted:
        parts = name.split(".")
        for cut in range(min(3, len(parts) - 1)):
            own, rest = "".join(f"{part}." for part in parts[:cut]), ".".join(parts[cut:])
            votes.update((own, key.removesuffix(rest)) for key in stored if f".{key}".endswith(f".{rest}"))
    return max(votes, key=lambda pair: (votes[pair], -len(pair[0]), -len(pair[1])), default=("", ""))


def contents(folder: Path) -> dict[str, Stored]:
    """Every tensor of a folder's safetensors files, by key."""
    if (folder / INDEX).exists():
        files = read_json(folder / INDEX).get("weight_map")
        named = set(files.values()) if isinstance(files, dict) else {None}
        if lost := [n for n in named if not isinstance(n, str) or n != Path(n).name or not (folder / n).is_file()]:
            raise ValueError(f"{folder / INDEX} names {lost[0]!r}, which is not there; copy the folder again, whole")
        return {key: Stored(folder / name, key) for key, name in (files or {}).items()}
    if (folder / WEIGHTS).exists():
        return {key: Stored(folder / WEIGHTS, key) for key in _shapes(folder / WEIGHTS)}
    other = sorted(path.name for path in folder.glob("*") if path.suffix in (".bin", ".pt", ".pth"))
    also = f", only {other[0]}, which is a pickle: save the model again with safetensors" if other else ""
    raise ValueError(f"{folder} has no {WEIGHTS} and no {INDEX}{also}")


def _shapes(file: Path) -> dict[str, list[int]]:
    """The shape of every tensor in a file, by key."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="pt") as opened:
            keys: Any = opened.keys()
            return {key: opened.get_slice(key).get_shape() for key in keys}
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{file} is damaged: {error}; copy it again") from None


def check_shapes(wanted: Mapping[str, Tensor], found: Mapping[str, Stored]) -> None:
    shapes = {file: _shapes(file) for file in {stored.file for stored in found.values()}}
    for name, parameter in wanted.items():
        file, key = found[name]
        if key not in shapes[file]:
            raise ValueError(f"{file} has no {key!r}, where {INDEX} says it is; copy the folder again, whole")
        if shapes[file][key] != list(parameter.shape):
            raise ValueError(f"{file}: {key} is {shapes[file][key]}, the config makes it {list(parameter.shape)}")
