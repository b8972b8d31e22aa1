"""Reads weights from folders written by HuggingFace's ``save_pretrained``; a rank reads its own part only.

A module finds its weights among those of a larger model, too: a vision encoder in a folder of all of SigLIP, Whisper's
encoder in one of Whisper.
"""

from __future__ import annotations

import contextlib
import copy
import math
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from interlace.model.checkpoints.tied import log_untied, own_parameter
from interlace.model.patterns import base_name, is_adapter
from interlace.parallel.region import Region
from interlace.train.checkpoint.identity import canonical_names
from interlace.train.models.architectures import read_json

if TYPE_CHECKING:
    from transformers.core_model_loading import WeightConverter

INDEX, WEIGHTS = "model.safetensors.index.json", "model.safetensors"
FLOATS = ("F64", "F32", "F16", "BF16")
MADE_ANEW = (".inv_freq", ".position_ids")  # buffers that older versions of the library saved


@contextlib.contextmanager
def _opened(file: Path, problem: str, remedy: str = "") -> Iterator[Any]:
    """A safetensors file, open. Errors of the block become ValueErrors that begin with `problem`."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="pt") as opened:
            yield opened
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{problem}: {error}{remedy}") from None


class Stored(NamedTuple):
    """A tensor in a safetensors file."""

    file: Path
    key: str

    def tensors(self) -> list[Stored]:
        """Tensors in files that it is made of."""
        return [self]

    def read(self, region: Region | None = None) -> Tensor:
        """The tensor, or its part `region`. Raises ValueError if it can no longer be read."""
        # Reopened each time: pages of an open map count as our memory.
        with _opened(self.file, f"{self.file}: cannot read {self.key}") as file:
            if region is None:
                boxes = [file.get_tensor(self.key)]
            else:
                tensor = file.get_slice(self.key)
                boxes = [box.of(tensor) for box in region.boxes]
        if not all(map(_finite, boxes)):
            raise ValueError(
                f"{self.file}: {self.key} has values that are not finite: copy the file again, or use an earlier "
                "checkpoint"
            )
        return boxes[0] if len(boxes) == 1 or region is None else torch.cat(boxes, region.dim)


def _finite(tensor: Tensor) -> bool:
    """True if all values are finite. Uses minimum and maximum, which also show NaN: a mask of all values would take
    memory."""
    if not tensor.numel():
        return True
    least, greatest = torch.aminmax(tensor)
    return bool(torch.isfinite(least) & torch.isfinite(greatest))


class Made(NamedTuple):
    """A weight that files store in other pieces than the library's module: separate experts, or two maps in one.

    sources: (pattern of the library's converter, tensor), in order.
    first: first name among the weights that the converter makes of them.
    name: the weight meant here.
    module: the library's module, which some converters need for a shape.
    """

    converter: WeightConverter
    sources: list[tuple[str, Stored]]
    first: str
    name: str
    module: nn.Module

    def tensors(self) -> list[Stored]:
        """Tensors in files that it is made of."""
        return [stored for _, stored in self.sources]

    def read(self, region: Region | None = None) -> Tensor:
        """The tensor, or its part `region`. Raises ValueError if it can no longer be read."""
        whole = self.made_of([stored.read() for stored in self.tensors()])
        return whole if region is None else region.piece(whole)

    def made_of(self, tensors: Sequence[Tensor]) -> Tensor:
        """Result of the library's conversion of the sources' tensors. Raises ValueError if it fails."""
        converter = copy.deepcopy(self.converter)
        for (pattern, stored), tensor in zip(self.sources, tensors, strict=True):
            converter.add_tensor(self.first, stored.key, pattern, tensor)
        try:
            config = getattr(self.module, "config", None)
            made = converter.convert(self.first, model=self.module, config=config)[self.name]
        except Exception as error:  # pieces that do not fit each other may raise anything
            raise ValueError(f"{self.name} cannot be made of {self.sources[0][1].key} and others: {error}") from None
        result: Tensor = made[0] if isinstance(made, list) else made
        return result


Source = Stored | Made
CHUNK = 1 << 24  # numbers compared at a time


def same_values(left: Source, right: Source) -> bool:
    """True if two sources hold the same tensor, whatever its dtype. Reads files in chunks to limit memory."""
    if not isinstance(left, Stored) or not isinstance(right, Stored):
        return _equal(left.read(), right.read())
    problem = f"{left.file}: cannot compare {left.key} with {right.key}"
    with _opened(left.file, problem) as first, _opened(right.file, problem) as second:
        mine, theirs = first.get_slice(left.key), second.get_slice(right.key)
        shape = list(mine.get_shape())
        if shape != list(theirs.get_shape()):
            return False
        if not shape:
            return _equal(first.get_tensor(left.key), second.get_tensor(right.key))
        rows = max(1, CHUNK // max(1, math.prod(shape[1:])))
        return all(_equal(mine[at : at + rows], theirs[at : at + rows]) for at in range(0, shape[0], rows))


def _equal(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.float(), other.float())


def untie(module: nn.Module, key_of: Mapping[str, str], stored: Mapping[str, Source]) -> None:
    """Unties weights of `module`, which is on meta, if a folder holds different values for them.

    HuggingFace's from_pretrained does the same, regardless of the ties in the config. key_of: name of a parameter ->
    its key in `stored`. Raises ValueError for weights that the model's code shares: HuggingFace keeps the last of
    these.
    """
    declared: dict[str, str] = getattr(module, "all_tied_weights_keys", None) or {}
    names_of: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if key_of.get(name) in stored:
            names_of.setdefault(id(parameter), []).append(name)
    for names in names_of.values():
        first, *others = sorted(names, key=lambda name: name in declared)  # names that others are tied to come first
        for name in others:
            if same_values(stored[key_of[first]], stored[key_of[name]]):
                continue
            if name not in declared:
                raise ValueError(
                    f"{stored[key_of[name]].tensors()[0].file.parent} has different values for {key_of[first]!r} and "
                    f"{key_of[name]!r}, which are one weight of {type(module).__name__}: remove the one that is wrong"
                )
            own_parameter(module, name)
    log_untied(module)


def untie_module(module: nn.Module, folder: Path) -> None:
    """As `untie`, for a module and the folder that it is read from."""
    stored, key_of = located(module, folder)
    untie(module, key_of, stored)


def find(module: nn.Module, folder: Path) -> dict[str, Source]:
    """First name of each parameter of `module` -> its source in `folder`. Adapters (LoRA) are not in such folders.

    The names of the module and of the folder may differ by a common prefix, and by the library's own conversions.
    Raises ValueError if a parameter is missing or has another shape. Raises it also if the folder has extra weights
    beside a parameter or among the layers: a bias, norm or layer that is left out changes every result. Buffers are not
    read, so a folder with buffers is rejected.
    """
    parameters = {name: weight for name, weight in module.named_parameters() if not is_adapter(name)}
    kind = type(module).__name__
    stored, key_of = located(module, folder)
    sources = present(module, key_of, stored)
    refuse_missing(folder, [key_of[name] for name in parameters if name not in sources], kind)
    every = _keys(parameters, [*module.state_dict(), *key_of], stored)
    refuse_buffers(folder, stored.keys() & set(every.values()) - set(key_of.values()))
    if left := _unused_keys(set(stored) - set(key_of.values()), key_of.values()):
        raise ValueError(
            f"{folder} has {left[0]!r}, but {kind} with this config does not, so it would not compute the same as "
            "the saved model; omit config to read it from the folder"
        )
    check_shapes(parameters, sources)
    return sources


def located(module: nn.Module, folder: Path) -> tuple[Mapping[str, Source], dict[str, str]]:
    """The contents of `folder` under the names that fit `module` best, and the key there of each of its parameters.

    A tied parameter has a key for each of its names. Adapters (LoRA) are not in such folders. Raises ValueError for a
    folder that cannot be read, or that has the weights twice.
    """
    files = contents_of(folder)
    names = [name for name, _ in module.named_parameters(remove_duplicate=False) if not is_adapter(name)]
    wanted = [name for name, _ in module.named_parameters() if not is_adapter(name)]
    stored: Mapping[str, Source] = files
    key_of = _keys(wanted, names, stored)
    if any(key_of[name] not in stored for name in wanted):
        renamed = converted(module, files)
        keys = _keys(wanted, names, renamed)
        if sum(keys[name] in renamed for name in wanted) >= sum(key_of[name] in stored for name in wanted):
            stored, key_of = renamed, keys
    return stored, key_of


def present(module: nn.Module, key_of: Mapping[str, str], stored: Mapping[str, Source]) -> dict[str, Source]:
    """Sources of the parameters of `module`, by first name; of tied ones, the first name that `stored` has."""
    sources: dict[str, Source] = {}
    for name, first in canonical_names(module).items():
        if key_of.get(name) in stored:
            sources.setdefault(first, stored[key_of[name]])
    return sources


def refuse_missing(folder: Path, missing: Sequence[str], kind: str) -> None:
    """Raises ValueError for a folder that lacks the keys `missing` of a model of class `kind`."""
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ValueError(f"{folder} has no weight {missing[0]!r}{more}, which {kind} needs; copy the folder again")


def refuse_buffers(folder: Path, kept: Collection[str]) -> None:
    """Raises ValueError for keys of a folder that are buffers of the model.

    Buffers are not read, so a run would begin with the initial values of a new model, mostly zeros. Buffers that every
    version of the library recomputes are accepted.
    """
    if left := sorted(key for key in kept if not key.endswith(MADE_ANEW)):
        more = f" and {len(left) - 1} more" if len(left) > 1 else ""
        raise ValueError(
            f"{folder} has {left[0]!r}{more} in a buffer, which is not loaded yet: it would start as in a new model; "
            "use a model without such buffers"
        )


def _keys(wanted: Collection[str], names: Collection[str], stored: Collection[str]) -> dict[str, str]:
    """Name of a parameter -> the key that it should have in the folder."""
    base = {name: base_name(name) for name in names}
    own, theirs = _prefixes([base[name] for name in wanted], stored)
    return {name: theirs + key.removeprefix(own) if key.startswith(own) else key for name, key in base.items()}


def converted(module: nn.Module, contents: Mapping[str, Stored]) -> dict[str, Source]:
    """The contents of a folder under the names that the library gives them when it reads them into `module`."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, rename_source_key

    conversions = get_model_conversion_mapping(module)
    converters = [each for each in conversions if isinstance(each, WeightConverter)]
    renamings = [each for each in conversions if not isinstance(each, WeightConverter)]
    converter_of = {pattern: each for each in converters for pattern in each.source_patterns}
    sources_of: dict[str, Source] = {}
    pieces: dict[str, list[tuple[str, Stored]]] = {}
    for key in sorted(contents, key=_natural):
        name, pattern = rename_source_key(key, renamings, converters)
        if pattern is not None:
            pieces.setdefault(name, []).append((pattern, contents[key]))
        elif name in sources_of and name != key:
            sources_of[key] = contents[key]  # two parts of a larger model have it: keep it as it is
        elif name in sources_of and not same_values(sources_of[name], contents[key]):
            raise ValueError(
                f"{contents[key].file.parent} has {key!r} twice, with different values: the other one is "
                f"{sources_of[name].tensors()[0].key!r}, an older name of it; remove the one that is wrong"
            )
        else:
            sources_of[name] = contents[key]
    for first, sources in pieces.items():
        converter = converter_of[sources[0][0]]
        start = converter.target_patterns[0]
        for target in converter.target_patterns:
            name = first.replace(start, target, 1)
            sources_of[name] = Made(converter, sources, first, name, module)
    return sources_of


def _natural(key: str) -> list[tuple[int, int, str]]:
    """Sort key that sorts experts 2 and 10 as numbers."""
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in key.split(".")]


def _unused_keys(more: Collection[str], used: Collection[str]) -> list[str]:
    """Keys in `more` that are beside `used` keys, or in the same list of layers."""
    beside = {key.rpartition(".")[0] for key in used}
    lists = {match[1] for key in used if (match := re.match(r"(.*?\.)\d+\.", key))}
    return sorted(
        key
        for key in more
        if (key.rpartition(".")[0] in beside or any(key.startswith(each) for each in lists))
        and not key.endswith(MADE_ANEW)
    )


def _prefixes(wanted: Collection[str], stored: Collection[str]) -> tuple[str, str]:
    """Prefix to remove from the module's names, and prefix to add, so that most names match the folder's.

    Raises ValueError if two places in the folder match all of them.
    """
    before: dict[str, list[str]] = {}  # end of a key -> its prefixes
    for key in stored:
        parts = key.split(".")
        for cut in range(len(parts)):
            before.setdefault(".".join(parts[cut:]), []).append("".join(f"{part}." for part in parts[:cut]))
    votes: Counter[tuple[str, str]] = Counter()
    for name in wanted:
        parts = name.split(".")
        for cut in range(min(3, len(parts) - 1)):
            own = "".join(f"{part}." for part in parts[:cut])
            votes.update((own, theirs) for theirs in before.get(".".join(parts[cut:]), ()))
    whole = sorted(theirs for (own, theirs), count in votes.items() if not own and count == len(wanted))
    if len(whole) > 1:
        raise ValueError(
            f"the folder has these weights twice, under {whole[0]!r} and {whole[1]!r}: save only one of them"
        )
    return max(votes, key=lambda pair: (votes[pair], -len(pair[0]), -len(pair[1])), default=("", ""))


def has_weights(folder: Path) -> bool:
    """True if all files of weights exist. A folder with a config only, and perhaps an index, is enough for planning."""
    return not _shards(folder)[1] if (folder / INDEX).exists() else (folder / WEIGHTS).exists()


def contents_of(folder: Path) -> dict[str, Stored]:
    """Every tensor of a folder's safetensors files, by key."""
    if (folder / INDEX).exists():
        files, lost = _shards(folder)
        if lost:
            raise ValueError(f"{folder / INDEX} names {lost[0]!r}, which is missing; copy the folder again")
        return {key: Stored(folder / name, key) for key, name in files.items()}
    if (folder / WEIGHTS).exists():
        return {key: Stored(folder / WEIGHTS, key) for key in _heads(folder / WEIGHTS)}
    other = sorted(path.name for path in folder.glob("*") if path.suffix in (".bin", ".pt", ".pth"))
    also = f", only the pickle {other[0]}: save the model again with safetensors" if other else ""
    raise ValueError(f"{folder} has no {WEIGHTS} and no {INDEX}{also}")


def _shards(folder: Path) -> tuple[dict[str, Any], list[Any]]:
    """The file of each key, by the index of a folder, and the missing files."""
    files = read_json(folder / INDEX).get("weight_map")
    named = set(files.values()) if isinstance(files, dict) else {None}
    lost = [n for n in named if not isinstance(n, str) or n != Path(n).name or not (folder / n).is_file()]
    return files if isinstance(files, dict) else {}, lost


def shapes_of(folder: Path) -> dict[str, list[int]]:
    """Shape of every tensor of a folder, by key."""
    files = {stored.file for stored in contents_of(folder).values()}
    return {key: shape for file in files for key, (shape, _) in _heads(file).items()}


def _heads(file: Path) -> dict[str, tuple[list[int], str]]:
    """Shape and dtype (as named by safetensors) of every tensor in a file, by key."""
    with _opened(file, f"{file} is damaged", "; copy it again") as opened:
        slices = {key: opened.get_slice(key) for key in opened.keys()}
        return {key: (piece.get_shape(), piece.get_dtype()) for key, piece in slices.items()}


def check_shapes(parameters: Mapping[str, Tensor], sources: Mapping[str, Source]) -> None:
    """Raises ValueError for a source that is missing, quantized, or of another shape than its parameter."""
    used = [each for source in sources.values() for each in source.tensors()]
    heads = {file: _heads(file) for file in {stored.file for stored in used}}
    for file, key in used:
        if key not in heads[file]:
            raise ValueError(f"{file} has no {key!r}, where {INDEX} says it is; copy the folder again")
        if (dtype := heads[file][key][1]) not in FLOATS:
            raise ValueError(
                f"{file}: {key} is of dtype {dtype}: quantized weights are not supported: give the unquantized model"
            )
    for name, parameter in parameters.items():
        source = sources[name]
        theirs = [torch.empty(heads[file][key][0], device="meta") for file, key in source.tensors()]
        shape = list((theirs[0] if isinstance(source, Stored) else source.made_of(theirs)).shape)
        file, key = source.tensors()[0]
        if shape != list(parameter.shape):
            raise ValueError(f"{file}: {key} has shape {shape}, but {list(parameter.shape)} follows from the config")
