"""Files of a checkpoint: a safetensors file per rank, and a manifest in JSON. No pickle: no code in them can run.

``manifest.json`` lists every file with its size and SHA-256, and for every tensor the bytes and files that hold it
(whole, or cut into chunks by rank). Manifests may come from untrusted sources, so reading checks types, names of files,
and that all byte ranges are inside the files. Allocations never exceed the sizes of these files.

The files are in the safetensors format, so that the weights can be read without Interlace. They are read with plain
reads, not through a memory map: if a file is truncated meanwhile, a read is an error, but a map would kill the process.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from torch import Tensor

MANIFEST = "manifest.json"
FORMAT = 4
MOST_DIMENSIONS = 8  # of a tensor in several chunks
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_CODES = {dtype: code for code, dtype in DTYPES.items()}
Size = Annotated[int, Field(ge=0, lt=2**62)]


class CheckpointError(RuntimeError):
    """A checkpoint cannot be used; the message names the file or the difference, and a remedy."""


class TornCheckpoint(CheckpointError):
    """Files of a checkpoint are missing, cut short or changed."""


class _Entry(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class File(_Entry):
    """A file of a checkpoint: its size in bytes, and its SHA-256 in hexadecimal."""

    size: Size
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")


class StoredChunk(_Entry):
    """A rectangle of a tensor: its offset and length along each dimension, its file, its first byte."""

    offsets: list[Size]
    sizes: list[Size]
    file: str
    begin: Size


class Stored(_Entry):
    """A tensor: safetensors' name of its dtype, its shape, and its chunks."""

    dtype: str
    shape: list[Size]
    chunks: list[StoredChunk]

    @model_validator(mode="after")
    def _fits(self) -> Stored:
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype {self.dtype!r}")
        volume = 0
        for chunk in self.chunks:
            if not len(chunk.offsets) == len(chunk.sizes) == len(self.shape):
                raise ValueError("a chunk has other dimensions than its tensor")
            for offset, size, whole in zip(chunk.offsets, chunk.sizes, self.shape, strict=True):
                if offset + size > whole:
                    raise ValueError("a chunk is outside its tensor")
            volume += math.prod(chunk.sizes)
        if volume != math.prod(self.shape) or not _tiled(self.shape, self.chunks):
            raise ValueError("the chunks do not cover their tensor")
        return self


def _tiled(shape: Sequence[int], chunks: Sequence[StoredChunk]) -> bool:
    """True if chunks inside a tensor, whose volumes add up to its volume, tile it: none empty, no overlap, no hole.

    The check uses corners: where chunks touch, corners come in pairs. The remaining corners are those of the region
    that an odd number of chunks cover. If these are the whole's corners, every place is covered, and the volume shows
    that it is covered once.
    """
    if len(chunks) == 1:
        return True
    if len(shape) > MOST_DIMENSIONS or not all(math.prod(chunk.sizes) for chunk in chunks):
        return False
    odd: set[tuple[int, ...]] = set()
    boxes = [(chunk.offsets, chunk.sizes) for chunk in chunks]
    for offsets, sizes in [*boxes, ([0] * len(shape), shape)]:
        sides = [(offset, offset + size) for offset, size in zip(offsets, sizes, strict=True)]
        for corner in itertools.product(*sides):
            odd ^= {corner}
    return not odd


class BaseWeight(_Entry):
    """A frozen weight that is stored in a folder of weights and not in the checkpoint.

    It has the folder, and a print of the folder's values (`interlace.train.checkpoint.base`).
    """

    folder: str
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")


class Manifest(_Entry):
    """Manifest of a checkpoint. `model` is the identity of its model; `base` lists its weights that are stored
    elsewhere."""

    format: int
    step: int = Field(ge=0)
    time: str
    ranks: int = Field(ge=1)
    model: Identity
    files: dict[str, File]
    tensors: dict[str, Stored]
    base: dict[str, BaseWeight]

    @model_validator(mode="after")
    def _is_complete(self) -> Manifest:
        for name in self.files:
            if not re.fullmatch(r"[A-Za-z0-9_-]+\.safetensors", name):
                raise ValueError(f"file {name!r}")
        for name, stored in self.tensors.items():
            for chunk in stored.chunks:
                if chunk.file not in self.files:
                    raise ValueError(f"{name} is in {chunk.file}, which is not listed in the manifest")
                if chunk.begin + math.prod(chunk.sizes) * DTYPES[stored.dtype].itemsize > self.files[chunk.file].size:
                    raise ValueError(f"{name} is outside the bytes of {chunk.file}")
        known = {f"model.{name}" for name in self.base} | self.tensors.keys()
        missing = [name for name in self.model.parameters if f"model.{name}" not in known]
        if missing:
            raise ValueError(f"the parameter {missing[0]} is in none of the files ({len(missing)} are missing)")
        return self


class Identity(_Entry):
    """Identity of a checkpoint's model: the architecture table, every parameter's shape and dtype."""

    sha256: str
    architecture: dict[str, Any]
    parameters: dict[str, Annotated[tuple[list[Size], str], Field(strict=False)]]


Manifest.model_rebuild()


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> tuple[File, dict[str, int]]:
    """Writes a safetensors file and syncs it to disk. Returns its entry for the manifest and the start of each tensor.

    Raises OSError, and ValueError for a dtype that the format lacks.
    """
    # The largest elements first, so that every tensor begins at a multiple of its element's size.
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header: dict[str, Any] = {}
    end = 0
    for name in order:
        tensor = tensors[name]
        begin, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": code_of(name, tensor.dtype), "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    head = len(text).to_bytes(8, "little") + text
    state = hashlib.sha256(head)
    with path.open("wb") as file:
        file.write(head)
        for name in order:
            flat = tensors[name].detach().cpu().contiguous().reshape(-1)
            data = flat.view(torch.uint8).numpy().data
            file.write(data)
            state.update(data)
        file.flush()
        os.fsync(file.fileno())
    begins = {name: len(head) + header[name]["data_offsets"][0] for name in order}
    return File(size=len(head) + end, sha256=state.hexdigest()), begins


def read_chunk(
    folder: Path, stored: Stored, chunk: StoredChunk, part: tuple[Sequence[int], Sequence[int]] | None = None
) -> Tensor:
    """One chunk of a tensor, on the CPU, or the `part` of it with these (offsets, sizes).

    Reads only the rows of the part. Raises TornCheckpoint if the file is shorter than in the manifest.
    """
    offsets, sizes = part if part is not None else ([0] * len(chunk.sizes), chunk.sizes)
    row = math.prod(chunk.sizes[1:]) * DTYPES[stored.dtype].itemsize
    first, rows = (offsets[0], sizes[0]) if sizes else (0, 1)
    begin, length = chunk.begin + first * row, rows * row
    path = folder / chunk.file
    try:
        with path.open("rb") as file:
            left = os.fstat(file.fileno()).st_size - begin
            buffer = bytearray(length if left >= length else 0)  # never larger than the remaining file
            file.seek(begin)
            left = min(left, file.readinto(buffer))
    except FileNotFoundError:
        raise TornCheckpoint(f"checkpoint {folder} is torn: {path} is missing") from None
    if left < length:
        raise TornCheckpoint(f"checkpoint {folder} is torn: {path} is shorter than the manifest says")
    dtype = DTYPES[stored.dtype]
    flat = torch.frombuffer(buffer, dtype=dtype) if length else torch.empty(0, dtype=dtype)
    tensor = flat.reshape(rows, *chunk.sizes[1:]) if sizes else flat.reshape(())
    for dimension in range(1, len(sizes)):
        tensor = tensor.narrow(dimension, offsets[dimension], sizes[dimension])
    return tensor


def code_of(name: str, dtype: torch.dtype) -> str:
    """Safetensors' name of the dtype of the tensor `name`. Raises ValueError if it has none."""
    if dtype not in _CODES:
        raise ValueError(f"{name} is {dtype}, which safetensors does not support")
    return _CODES[dtype]


def make_manifest(**table: Any) -> Manifest:
    """A manifest of this version's format. Raises CheckpointError if an entry is wrong or missing."""
    try:
        return Manifest.model_validate({"format": FORMAT, **table})
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise CheckpointError(f"{where}: {first['msg'].removeprefix('Value error, ')}"[:500].lstrip(": ")) from None


def dump_manifest(manifest: Manifest) -> str:
    """Text of a manifest, with a checksum of itself."""
    table = manifest.model_dump()
    return json.dumps({**table, "sha256": _digest_of(table)})


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint folder.

    Raises TornCheckpoint if it is missing or damaged, CheckpointError if this version cannot read it.
    """
    path = folder / MANIFEST
    damaged = TornCheckpoint(f"checkpoint {folder} is torn: {path} is damaged")
    try:
        table = json.loads(path.read_bytes())
        whole = table.pop("sha256") == _digest_of(table)
        version = table["format"]
    except FileNotFoundError:
        raise TornCheckpoint(f"checkpoint {folder} is torn: {path} is missing") from None
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
        raise damaged from None
    if not whole:
        raise damaged
    if version != FORMAT:
        raise CheckpointError(
            f"{folder}: checkpoint format {version!r}, but this version of Interlace reads {FORMAT}"
            + ("; continue with the version of Interlace that wrote it" if version in range(1, FORMAT) else "")
        )
    try:
        return make_manifest(**table)
    except CheckpointError as error:
        raise TornCheckpoint(f"checkpoint {folder} is torn: {path} is wrong: {error}") from None


def digest(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        state = hashlib.sha256()
        while chunk := file.read(1 << 20):
            state.update(chunk)
        return state.hexdigest()


def write_synced(path: Path, text: str) -> None:
    """Writes a text file and syncs it to disk."""
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Syncs the names in a folder to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _digest_of(table: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(table, sort_keys=True).encode()).hexdigest()
