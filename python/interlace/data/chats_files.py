"""Files of chats -> their records one by one, each with where it stands and how it is found again.

JSON lines are read in place: a record is an offset into the user's own file. What has no such places (JSON lists,
parquet, folders of HuggingFace `datasets`) is written out once as JSON lines, pictures inside of it as files.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


class ChatFileError(ValueError):
    """A data file that cannot be read at all; the message names it and says what to do."""


@dataclass(frozen=True)
class Raw:
    """A record as its file has it. number: of the line or record, from 1; offset: of the line in the file, if any."""

    path: Path
    number: int
    line: bytes
    offset: int

    @property
    def where(self) -> str:
        return f"{self.path}:{self.number}"


def find(names: Sequence[str | Path]) -> list[Path]:
    """The files and folders as absolute paths. Raises ChatFileError for one that is not there or of no known kind."""
    paths = [Path(name).expanduser().absolute() for name in names]
    for path in paths:
        if not path.exists():
            raise ChatFileError(f"{path}: no such file; data.train and data.validation are paths of local files")
        kind_of(path)
    if len(set(paths)) != len(paths):
        twice = next(path for path in paths if paths.count(path) > 1)
        raise ChatFileError(f"{twice}: named twice; each sample would be seen twice as often")
    return paths


def kind_of(path: Path) -> str:
    """ "lines", "list", "parquet" or "datasets". Raises ChatFileError for what is none of these."""
    if path.is_dir():
        if (path / "state.json").is_file():
            return "datasets"
        if (path / "dataset_dict.json").is_file():
            parts = sorted(child.name for child in path.iterdir() if (child / "state.json").is_file())
            raise ChatFileError(
                f"{path}: holds several parts; name one of them: {', '.join(str(path / p) for p in parts)}"
            )
        raise ChatFileError(f"{path}: a folder that datasets' save_to_disk did not write (it has no state.json)")
    ending = path.suffix.lower()
    if ending == ".parquet":
        return "parquet"
    if ending == ".json":
        with open(path, "rb") as file:
            return "list" if file.read(4096).lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"[") else "lines"
    if ending in (".jsonl", ".ndjson"):
        return "lines"
    raise ChatFileError(f"{path}: of no known kind; give .jsonl, .json, .parquet or a folder of HuggingFace datasets")


def signature(path: Path) -> list[Any]:
    """What tells whether a file is still the same: path, size and time of all that belongs to it."""
    files = sorted(path.rglob("*")) if path.is_dir() else [path]
    stats = [(str(file), file.stat()) for file in files if file.is_file()]
    return [[name, stat.st_size, stat.st_mtime_ns] for name, stat in stats]


def records(path: Path, media: Path) -> Iterator[Raw]:
    """The records of a file in order; blank lines are none. `media`: where pictures inside of tables are written.

    Raises ChatFileError when it cannot be read, ImportError naming what to install.
    """
    kind = kind_of(path)
    try:
        if kind == "lines":
            yield from _lines(path)
            return
        rows = {"list": _list, "parquet": _parquet, "datasets": _datasets}[kind](path)
        for number, row in enumerate(rows, 1):
            line = json.dumps(_without_bytes(row, media), ensure_ascii=False, default=str).encode(
                "utf-8", "surrogatepass"
            )
            yield Raw(path, number, line, -1)
    except OSError as error:
        raise ChatFileError(f"{path}: cannot be read: {error.strerror or error}") from None


def _lines(path: Path) -> Iterator[Raw]:
    offset = 0
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if number == 1 and line.startswith(b"\xef\xbb\xbf"):  # the mark that editors on Windows write
                line, offset = line[3:], 3
            if line.strip():
                yield Raw(path, number, line, offset)
            offset += len(line)


def _list(path: Path) -> Iterator[Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise ChatFileError(f"{path}: no JSON ({error}); with a record on each line it is read line by line") from None
    yield from found


def _parquet(path: Path) -> Iterator[Any]:
    try:
        from pyarrow import lib, parquet
    except ImportError as error:
        raise ImportError(f"{path}: pyarrow is needed to read parquet: pip install pyarrow ({error})") from error
    try:
        for batch in parquet.ParquetFile(path).iter_batches(batch_size=64):
            yield from batch.to_pylist()
    except lib.ArrowException as error:
        raise ChatFileError(f"{path}: no parquet that can be read: {error}") from None


def _datasets(path: Path) -> Iterator[Any]:
    try:
        import datasets
    except ImportError as error:
        raise ImportError(f"{path}: a folder of HuggingFace datasets: pip install datasets ({error})") from error
    try:
        table = datasets.load_from_disk(str(path)).with_format("arrow")  # pictures stay the bytes that they are
    except (ValueError, KeyError, FileNotFoundError) as error:
        raise ChatFileError(f"{path}: datasets cannot load it: {error}") from None
    for batch in table.iter(batch_size=64):
        yield from batch.to_pylist()


def _without_bytes(value: Any, media: Path) -> Any:
    """`value` with each {"bytes": ..., "path": ...} as the path of a file in `media` that holds the bytes."""
    if isinstance(value, dict):
        data = value.get("bytes")
        if isinstance(data, bytes):
            name = hashlib.sha256(data).hexdigest()[:32] + Path(str(value.get("path") or "")).suffix
            target = media / name
            if not target.exists():
                media.mkdir(parents=True, exist_ok=True)
                temporary = target.with_name(f".{name}.{os.getpid()}")
                temporary.write_bytes(data)
                os.replace(temporary, target)
            return str(target)
        return {key: _without_bytes(inner, media) for key, inner in value.items() if inner is not None}
    if isinstance(value, (list, tuple)):
        return [_without_bytes(inner, media) for inner in value]
    return value
