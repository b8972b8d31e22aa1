"""Chat files to single records, each with its location for later access.

JSON lines are read in place: a record is an offset into the user's file. Formats without such offsets (JSON lists,
parquet, folders of HuggingFace `datasets`, tars) are copied once to JSON lines. Pictures inside tables are extracted
to files; those inside tars stay there. Large files are read in pieces, which processes may share (`index`).

To add a format: `kind_of` names it, `numbered` calls its reader, which yields one dict per record.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from interlace._files import draft_of
from interlace.data.chats.files import tar as chats_tar
from interlace.data.chats.files.keys import unique
from interlace.data.chats.files.tar import ChatFileError, Fields, braces, energon_folder

PIECE = 2 << 20  # bytes of JSON lines that are read at once: some 5,000 records
TASTE, TASTED = 4096, 256  # bytes per block and number of files read by `tastes`: three blocks of each file
MARK = b"\xef\xbb\xbf"  # byte order mark, as written by editors on Windows


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Turns the errors of reading a file into ChatFileErrors with its name."""
    try:
        yield
    except OSError as error:
        raise ChatFileError(f"{path}: cannot be read: {error.strerror or error}") from None


@dataclass(frozen=True)
class Raw:
    """A record as in its file. number: of the line or record, from 1 (0: not counted); offset: of the line in the
    file, -1: none. broken: why it cannot be read at all."""

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
    """Part of a data file that is read at once.

    path: as given by the user; file: the file on disk; start, end: byte range of JSON lines; a line belongs to the
    piece in which it begins. For other files end is -1, and the file is one piece. fields, excluded: see
    `tar.energon`.
    """

    path: Path
    file: Path
    start: int = 0
    end: int = -1
    fields: Fields | None = None
    excluded: frozenset[str] = frozenset()

    @property
    def size(self) -> int:
        """Number of bytes read."""
        return self.file.stat().st_size if self.end < 0 else self.end - self.start


def find(names: Sequence[str | Path]) -> list[Path]:
    """The files and folders as absolute paths, with `{000..015}` expanded. Raises ChatFileError for one that does not
    exist or has an unknown format."""
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
    """The absolute paths of a name with braces (`tar.braces`). The name of an existing file is not expanded."""
    path = Path(name).expanduser().absolute()
    return [path] if path.exists() else [Path(each) for each in braces(str(path))]


def kind_of(path: Path) -> str:
    """ "lines", "list", "parquet", "datasets", "tar" or "energon". Raises ChatFileError for anything else."""
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
        with _reading(path), open(path, "rb") as file:
            a_list = file.read(4096).lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"[")
        if a_list and ending != ".json":
            raise ChatFileError(f"{path}: is one JSON list: name it .json, or write a record on each line")
        return "list" if a_list else "lines"
    raise ChatFileError(
        f"{path}: of no known kind; give .jsonl, .json, .parquet, .tar or a folder of HuggingFace datasets"
    )


def signature(path: Path) -> list[Any]:
    """State of a data file for change detection: path, size and time of all files that belong to it."""
    stats = [(str(file), file.stat()) for file in _belonging(path)]
    return [[name, stat.st_size, stat.st_mtime_ns] for name, stat in stats]


def _belonging(path: Path) -> list[Path]:
    if kind_of(path) == "energon":
        files = [
            *sorted((energon_folder(path) or (path, ""))[0].glob(f"{chats_tar.META}/*.*")),
            *(piece.file for piece in pieces(path)),
        ]
    else:
        files = sorted(path.rglob("*")) if path.is_dir() else [path]
    return [file for file in files if file.is_file()]


def tastes(paths: Sequence[Path]) -> str:
    """Hash of the first, middle and last block of up to TASTED files, evenly chosen among those of `paths`. Detects a
    different file of the same name, size and time without reading all of it."""
    files = [file for path in paths for file in _belonging(path)]
    digest, count = hashlib.sha256(), min(TASTED, len(files))
    for path in (files[i * len(files) // count] for i in range(count)):
        size = path.stat().st_size
        with open(path, "rb", buffering=0) as file:
            for start in sorted({0, size // 2, max(0, size - TASTE)}):
                file.seek(start)
                digest.update(file.read(TASTE))
    return digest.hexdigest()[:16]


def pieces(path: Path) -> list[Piece]:
    """The pieces of a data file in order. Raises ChatFileError, and ImportError with the package to install."""
    kind = kind_of(path)
    with _reading(path):
        if kind == "energon":
            tars, fields = chats_tar.energon(path)
            return [Piece(path, tar, fields=fields, excluded=excluded) for tar, excluded in tars]
        if kind == "lines":
            size = path.stat().st_size
            return [Piece(path, path, start, min(start + PIECE, size)) for start in range(0, max(size, 1), PIECE)]
    return [Piece(path, path)]


def records(path: Path, media: Path, prompt: str | None = None) -> Iterator[Raw]:
    """The records of a file in order, without blank lines. `media`: folder for pictures extracted from tables;
    `prompt`: question for captions in tars.

    Raises ChatFileError when it cannot be read, ImportError with the package to install.
    """
    before = 0
    for piece in pieces(path):
        last = 0
        for raw, number in numbered(piece, media, prompt):
            last = number
            if raw is not None:
                yield Raw(raw.path, before + raw.number, raw.line, raw.offset, raw.broken)
        before = before + last if piece.end >= 0 else 0  # lines are numbered through a file, samples within each tar


def numbered(piece: Piece, media: Path, prompt: str | None = None) -> Iterator[tuple[Raw | None, int]]:
    """(record, count so far) for each record of the piece. Blank lines are counted, but have None as record. Numbers
    begin with 1 in each piece. Raises the same errors as `records`."""
    kind = kind_of(piece.path)
    with _reading(piece.file):
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


def _lines(piece: Piece) -> Iterator[tuple[Raw | None, int]]:
    number, offset = 0, piece.start
    with open(piece.file, "rb") as file:
        if offset:  # the line that contains `start` belongs to the previous piece, unless it begins there
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
    for sample in chats_tar.samples(piece.file, prompt, piece.fields):
        if sample.key in piece.excluded:
            continue
        number += 1
        line = json.dumps(sample.record, ensure_ascii=False).encode("utf-8", "surrogatepass")
        # The sample is named after its tar, even if the user gave a folder of tars.
        yield Raw(piece.file, number, line, -1, sample.broken), number


def _list(path: Path) -> Iterator[Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8-sig"), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise ChatFileError(f"{path}: no JSON ({error}); with a record on each line it is read line by line") from None
    yield from content


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
        table = datasets.load_from_disk(str(path)).with_format("arrow")  # pictures stay encoded bytes
    except (ValueError, KeyError, FileNotFoundError) as error:
        raise ChatFileError(f"{path}: datasets cannot load it: {error}") from None
    for batch in table.iter(batch_size=64):
        yield from batch.to_pylist()


def _without_bytes(value: Any, media: Path) -> Any:
    """`value` with each {"bytes": ..., "path": ...} replaced by the path of a file in `media` with these bytes; its
    other keys are kept. Columns without a value are left out."""
    if isinstance(value, dict):
        data = value.get("bytes")
        if isinstance(data, bytes):
            name = hashlib.sha256(data).hexdigest()[:32] + Path(str(value.get("path") or "")).suffix
            target = media / name
            if not target.exists():
                media.mkdir(parents=True, exist_ok=True)
                with draft_of(target) as draft:
                    draft.write_bytes(data)
            more = {key: inner for key, inner in value.items() if key not in ("bytes", "path")}
            return {"path": str(target), **_without_bytes(more, media)} if more else str(target)
        return {key: _without_bytes(inner, media) for key, inner in value.items() if inner is not None}
    if isinstance(value, (list, tuple)):
        return [_without_bytes(inner, media) for inner in value]
    return value
