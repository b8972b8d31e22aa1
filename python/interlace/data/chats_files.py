"""Files of chats -> their records one by one, each with where it stands and how it is found again.

JSON lines are read in place: a record is an offset into the user's own file. What has no such places (JSON lists,
parquet, folders of HuggingFace `datasets`, tars) is written out once as JSON lines; pictures inside of tables as files,
those inside of tars stay there. Large files are read in pieces, which processes may share (`chats_index`).
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from interlace.data import chats_tar
from interlace.data.chats_tar import Fields, TarError, braces, energon_folder

PIECE = 2 << 20  # bytes of JSON lines that are read at once: some 5,000 records
TASTE, TASTED = 4096, 256  # bytes of a block, and files, that `tastes` reads: three blocks of each file
MARK = b"\xef\xbb\xbf"  # that editors on Windows write


class ChatFileError(ValueError):
    """A data file that cannot be read at all; the message names it and says what to do."""


@dataclass(frozen=True)
class Raw:
    """A record as its file has it. number: of the line or record, from 1 (0: not counted); offset: of the line in the
    file, -1: it has none. broken: why it cannot be read at all."""

    path: Path
    number: int
    line: bytes
    offset: int
    broken: str = ""

    @property
    def where(self) -> str:
        return f"{self.path}:{self.number}" if self.number else f"{self.path} at byte {self.offset:,}"


@dataclass(frozen=True)
class Piece:
    """What is read at once of a data file.

    path: as it is named; file: the one on the disk; start, end: bytes of JSON lines, of which a line belongs to the
    piece that it begins in; of other files end is -1, and they are one piece. fields, excluded: see
    `chats_tar.energon`.
    """

    path: Path
    file: Path
    start: int = 0
    end: int = -1
    fields: Fields | None = None
    excluded: frozenset[str] = frozenset()

    @property
    def size(self) -> int:
        """Bytes that are read."""
        return self.file.stat().st_size if self.end < 0 else self.end - self.start


def find(names: Sequence[str | Path]) -> list[Path]:
    """The files and folders as absolute paths, `{000..015}` in names written out. Raises ChatFileError for one that is
    not there or of no known kind."""
    paths = [path for name in names for path in expand(name)]
    for path in paths:
        if not path.exists() and energon_folder(path) is None:
            raise ChatFileError(f"{path}: no such file; data.train and data.validation are paths of local files")
        kind_of(path)
    if len(set(paths)) != len(paths):
        twice = next(path for path, count in Counter(paths).items() if count > 1)
        raise ChatFileError(f"{twice}: named twice; each sample would be seen twice as often")
    return paths


def expand(name: str | Path) -> list[Path]:
    """The absolute paths that a name stands for (`chats_tar.braces`); one that is there is itself."""
    path = Path(name).expanduser().absolute()
    return [path] if path.exists() else [Path(each) for each in braces(str(path))]


def kind_of(path: Path) -> str:
    """ "lines", "list", "parquet", "datasets", "tar" or "energon". Raises ChatFileError for what is none of these."""
    if energon_folder(path) is not None:
        return "energon"
    if path.is_dir():
        if (path / "state.json").is_file():
            return "datasets"
        if (path / "dataset_dict.json").is_file():
            parts = sorted(child.name for child in path.iterdir() if (child / "state.json").is_file())
            raise ChatFileError(
                f"{path}: holds several parts; name one of them: {', '.join(str(path / p) for p in parts)}"
            )
        raise ChatFileError(
            f"{path}: a folder that neither datasets' save_to_disk wrote (it has no state.json) nor Energon prepared "
            "(no .nv-meta)"
        )
    ending = path.suffix.lower()
    if ending in (".parquet", ".tar"):
        return ending[1:]
    if path.name.lower().endswith((".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar.zst")):
        raise ChatFileError(f"{path}: a compressed tar has no places to read from: decompress it to a .tar")
    if ending in (".json", ".jsonl", ".ndjson"):
        try:
            with open(path, "rb") as file:
                a_list = file.read(4096).lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"[")
        except OSError as error:
            raise ChatFileError(f"{path}: cannot be read: {error.strerror or error}") from None
        if a_list and ending != ".json":
            raise ChatFileError(f"{path}: is one JSON list: name it .json, or write a record on each line")
        return "list" if a_list else "lines"
    raise ChatFileError(
        f"{path}: of no known kind; give .jsonl, .json, .parquet, .tar or a folder of HuggingFace datasets"
    )


def signature(path: Path) -> list[Any]:
    """What tells whether a file is still the same: path, size and time of all that belongs to it."""
    stats = [(str(file), file.stat()) for file in _belonging(path)]
    return [[name, stat.st_size, stat.st_mtime_ns] for name, stat in stats]


def _belonging(path: Path) -> list[Path]:
    if kind_of(path) == "energon":
        files = [*sorted((energon_folder(path) or (path, ""))[0].glob(f"{chats_tar.META}/*.*")), *_files_of(path)]
    else:
        files = sorted(path.rglob("*")) if path.is_dir() else [path]
    return [file for file in files if file.is_file()]


def tastes(paths: Sequence[Path]) -> str:
    """A hash of the first, a middle and the last block of the files of these, of TASTED at most that lie evenly among
    them: what tells of another file of the same name, size and time, without reading all of it."""
    files = [file for path in paths for file in _belonging(path)]
    digest, count = hashlib.sha256(), min(TASTED, len(files))
    for path in (files[i * len(files) // count] for i in range(count)):
        size = path.stat().st_size
        with open(path, "rb", buffering=0) as file:
            for start in sorted({0, size // 2, max(0, size - TASTE)}):
                file.seek(start)
                digest.update(file.read(TASTE))
    return digest.hexdigest()[:16]


def _files_of(path: Path) -> list[Path]:
    return [piece.file for piece in pieces(path)]


def pieces(path: Path) -> list[Piece]:
    """The pieces of a data file in order. Raises ChatFileError, and ImportError naming what to install."""
    kind = kind_of(path)
    try:
        if kind == "energon":
            tars, fields, excluded = chats_tar.energon(path)
            return [Piece(path, tar, fields=fields, excluded=_of_tar(excluded, tar, path)) for tar in tars]
        if kind == "lines":
            size = path.stat().st_size
            return [Piece(path, path, start, min(start + PIECE, size)) for start in range(0, max(size, 1), PIECE)]
    except TarError as error:
        raise ChatFileError(str(error)) from None
    except OSError as error:
        raise ChatFileError(f"{path}: cannot be read: {error.strerror or error}") from None
    return [Piece(path, path)]


def _of_tar(excluded: set[str], tar: Path, path: Path) -> frozenset[str]:
    """The keys of the samples of a tar that are left out."""
    folder = (energon_folder(path) or (path, ""))[0]
    before = f"{tar.relative_to(folder)}/"
    return frozenset(name.removeprefix(before) for name in excluded if name.startswith(before))


def records(path: Path, media: Path, prompt: str | None = None) -> Iterator[Raw]:
    """The records of a file in order; blank lines are none. `media`: where pictures inside of tables are written;
    `prompt`: what captions in tars answer.

    Raises ChatFileError when it cannot be read, ImportError naming what to install.
    """
    before = 0
    for piece in pieces(path):
        last = 0
        for raw, number in numbered(piece, media, prompt):
            last = number
            if raw is not None:
                yield Raw(raw.path, before + raw.number, raw.line, raw.offset, raw.broken)
        before = before + last if piece.end >= 0 else 0  # lines are counted through a file, samples in each tar


def numbered(piece: Piece, media: Path, prompt: str | None = None) -> Iterator[tuple[Raw | None, int]]:
    """(record, numbers that the piece has given so far) of each record; blank lines have numbers and are none. Numbers
    begin with 1 in each piece. Raises as `records`."""
    kind = kind_of(piece.path)
    try:
        if kind == "lines":
            yield from _lines(piece)
            return
        if kind in ("tar", "energon"):
            yield from _tar(piece, prompt)
            return
        rows = {"list": _list, "parquet": _parquet, "datasets": _datasets}[kind](piece.path)
        for number, row in enumerate(rows, 1):
            line = json.dumps(_without_bytes(row, media), ensure_ascii=False, default=str).encode(
                "utf-8", "surrogatepass"
            )
            yield Raw(piece.path, number, line, -1), number
    except OSError as error:
        raise ChatFileError(f"{piece.file}: cannot be read: {error.strerror or error}") from None


def _lines(piece: Piece) -> Iterator[tuple[Raw | None, int]]:
    number, offset = 0, piece.start
    with open(piece.file, "rb") as file:
        if offset:  # the line in which the piece begins is the piece's before, unless it begins just here
            file.seek(offset - 1)
            offset += len(file.readline()) - 1
        while offset < piece.end and (line := file.readline()):
            number += 1
            begin = offset
            offset += len(line)
            if begin == 0 and line.startswith(MARK):
                line, begin = line[len(MARK) :], len(MARK)
            yield (Raw(piece.path, number, line, begin) if line.strip() else None), number


def _tar(piece: Piece, prompt: str | None) -> Iterator[tuple[Raw | None, int]]:
    number = 0
    for found in chats_tar.samples(piece.file, prompt, piece.fields):
        if found.key in piece.excluded:
            continue
        number += 1
        line = json.dumps(found.record, ensure_ascii=False).encode("utf-8", "surrogatepass")
        # A sample is called by its tar, also where a folder of them was named.
        yield Raw(piece.file, number, line, -1, found.broken), number


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON, whose names have to be different: of two values under one name Python keeps the last.

    Raises ValueError.
    """
    made = dict(pairs)
    if len(made) < len(pairs):
        twice = next(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
        raise ValueError(f"an object names {twice!r} twice")
    return made


def _list(path: Path) -> Iterator[Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8-sig"), object_pairs_hook=unique)
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
    """`value` with each {"bytes": ..., "path": ...} as the path of a file in `media` that holds the bytes, beside what
    else is said of it. Columns without a value are left out."""
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
            more = {key: inner for key, inner in value.items() if key not in ("bytes", "path")}
            return {"path": str(target), **_without_bytes(more, media)} if more else str(target)
        return {key: _without_bytes(inner, media) for key, inner in value.items() if inner is not None}
    if isinstance(value, (list, tuple)):
        return [_without_bytes(inner, media) for inner in value]
    return value
