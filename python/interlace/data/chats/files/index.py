"""Index of data files: offsets and sizes of records, and sizes of their media.

The index is independent of any model: records are read, and their media inspected (headers only, or decoded, as the
rules specify). So processes share the work, one piece of a file each (`index_worker`), and every tokenizer or model
uses the same index. Each finished piece is a file of its own: an interrupted build resumes after it. Then all pieces
are joined into columns. These are memory-mapped arrays, so only pages that are read occupy memory.

An index is valid for the size and time of its files. When these change, pieces with unchanged bytes (by checksum) are
kept and only the others are read again: appending to a file costs only the new part. Columns and pieces have
checksums, too: torn ones are made again.

pieces/*.npz  one per piece      COLUMN.bin  a column of all records or all media      copied.jsonl  records that cannot
be read in place      broken.jsonl  [where, kind, reason]      index.json  the rest; written last
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import time
import zipfile
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np

from interlace.data.builtin.fetch import exclusive
from interlace.data.chats.files import records as chats_files
from interlace.data.chats.files.records import ChatFileError, Piece, Raw
from interlace.data.chats.files.sources import Rules, Stamp
from interlace.modalities import all_modalities, names

FORMAT = 2
LARGE = 8 << 20
"""Minimum size of data files, in bytes, for an index on first use."""
KEPT = 16
"""Number of indexes kept in a cache, the most recently used."""
RECORDS: dict[str, np.dtype[Any]] = {
    "file": np.dtype("<i4"),  # index in `paths`
    "number": np.dtype("<i8"),  # line or record number, from 1
    "offset": np.dtype("<i8"),  # of its bytes in the file, or in copied.jsonl
    "size": np.dtype("<i4"),  # of these bytes
    "crc": np.dtype("<u4"),  # of these bytes
    "text": np.dtype("<i4"),  # characters in its turns
    "media": np.dtype("<i4"),  # number of its media; -1: it is broken
    "first": np.dtype("<i8"),  # index of its first medium in the media columns
    "copied": np.dtype("<u1"),  # 0: in the file, 1: in copied.jsonl, 2: unreadable; error text in copied.jsonl
}
"""Columns of records."""
MEDIA: dict[str, np.dtype[Any]] = {
    "kind": np.dtype("<u1"),  # index in `modalities.names`
    "sizes": np.dtype(("<f8", (3,))),  # result of `Modality.probe`, padded with NaN; all NaN: it is broken
    "stamp": np.dtype(("<i8", (2,))),  # of the file at that time (size, time in ns); -1: it was not inspected
}
"""Columns of media."""
SHIFTED = {"number": "numbers", "first": "media", "offset": "copied"}
"""Columns that start at 0 in each piece."""
log = logging.getLogger("interlace.data")


@dataclass
class ChatIndex:
    """An open index. paths: the files of the records; totals: overall counts, for display."""

    folder: Path
    paths: list[str]
    columns: dict[str, np.ndarray]
    totals: dict[str, Any]
    _files: dict[str, IO[bytes]] = field(default_factory=dict, repr=False)

    def __len__(self) -> int:
        return len(self.columns["size"])

    def block(self, start: int, end: int) -> tuple[list[Raw], list[list[tuple[Stamp, tuple[float, ...]]]]]:
        """The records [start, end), and for each what is known of its media. Raises ChatFileError for a record that has
        changed since the index was made."""
        rows = {name: self.columns[name][start:end].tolist() for name in RECORDS}
        raws, known = [], []
        for row in zip(*rows.values(), strict=True):
            one = dict(zip(rows, row, strict=True))
            raws.append(self._raw(one))
            known.append(self._media(one["first"], max(0, one["media"])))
        return raws, known

    def _raw(self, one: dict[str, int]) -> Raw:
        path = Path(self.paths[one["file"]])
        place = self.folder / "copied.jsonl" if one["copied"] else path
        line = os.pread(self.open(str(place)).fileno(), one["size"], one["offset"])
        if zlib.crc32(line) != one["crc"]:
            raise ChatFileError(
                f"{path}:{one['number']}: has changed since it was indexed; start again, it is read anew"
            )
        if one["copied"] == 2:
            return Raw(path, one["number"], b"", -1, line.decode("utf-8"))
        return Raw(path, one["number"], line, -1 if one["copied"] else one["offset"])

    def _media(self, first: int, count: int) -> list[tuple[Stamp, tuple[float, ...]]]:
        every = all_modalities()  # NaN fills the columns
        kinds = self.columns["kind"][first : first + count].tolist()
        sizes = self.columns["sizes"][first : first + count].tolist()
        stamps = self.columns["stamp"][first : first + count].tolist()
        return [
            ((stamp[0], stamp[1]), every[kind].restored([number for number in numbers if number == number]))
            for kind, numbers, stamp in zip(kinds, sizes, stamps, strict=True)
        ]

    def open(self, name: str) -> IO[bytes]:
        """A data file, or copied.jsonl; stays open."""
        found = self._files.get(name)
        if found is None:
            if len(self._files) > 64:  # there may be thousands of tars; they are read one after the other
                self._files.popitem()[1].close()
            found = self._files[name] = open(name, "rb", buffering=0)
        return found


# --- build ------------------------------------------------------------------------------------------------


def of_large(files: Sequence[Path], rules: Rules, media: Path) -> ChatIndex | None:
    """The index of these files, made first if necessary; None for files too small to gain from one.

    `media`: see `records.records`; the index is stored beside it.
    """
    pieces = [piece for path in files for piece in chats_files.pieces(path)]
    if len(pieces) < 2 or sum(piece.size for piece in pieces) < LARGE:
        return None
    return load(files, rules, media)


def load(
    files: Sequence[Path],
    rules: Rules,
    media: Path,
    *,
    processes: int | None = None,
    say: Callable[[str], None] | None = None,
    timeout: float = 86_400.0,
) -> ChatIndex:
    """The index of these files; if missing or incomplete, it is made first by `processes` (default: one per core).

    say: called with progress messages. timeout: seconds to wait for another builder. Raises ChatFileError.
    """
    key = [FORMAT, [str(path) for path in files], rules.media, rules.decode, rules.sizes, rules.prompt]
    folder = media.parent / "index" / hashlib.sha256(json.dumps(key).encode()).hexdigest()[:20]
    found = _open(folder, files)
    if found is None:
        folder.mkdir(parents=True, exist_ok=True)
        with exclusive(folder.with_suffix(".lock"), timeout):
            found = _open(folder, files)
            if found is None:
                _make(folder, files, rules, media, processes, say or log.info)
                found = _open(folder, files)
                _prune(folder.parent)
    if found is None:
        raise ChatFileError(f"{folder}: was written and cannot be used; is the disk full, or do the data files change?")
    return found


def _open(folder: Path, files: Sequence[Path]) -> ChatIndex | None:
    try:
        record = json.loads((folder / "index.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    try:
        if record["format"] != FORMAT or record["files"] != [chats_files.signature(path) for path in files]:
            return None
        columns: dict[str, np.ndarray] = {}
        for name, kind in {**RECORDS, **MEDIA}.items():
            place = folder / f"{name}.bin"
            if _checksum(place) != record["checksums"][name]:
                raise ValueError(f"{name}.bin is damaged")
            count = record["counts"]["media" if name in MEDIA else "records"]
            # An empty file cannot be mapped.
            shape = (count, *kind.shape)
            columns[name] = np.memmap(place, kind.base, "r", shape=shape) if count else np.empty(shape, kind.base)
        if (folder / "copied.jsonl").stat().st_size != record["counts"]["copied"]:
            raise ValueError("copied.jsonl is cut short")
        os.utime(folder)  # marks it as used: pruning sorts by this time
        copied = str(folder / "copied.jsonl")
        found = ChatIndex(folder, record["paths"], columns, record["totals"])
        found.open(copied)
        return found
    except (OSError, ValueError, KeyError, TypeError) as error:
        log.warning("%s: damaged (%s); indexing again", folder, error)
        return None


def _checksum(path: Path) -> list[int]:
    """[bytes, crc32] of a file, read without memory-mapping it."""
    size = crc = 0
    with open(path, "rb", buffering=0) as file:
        while block := file.read(1 << 20):
            size, crc = size + len(block), zlib.crc32(block, crc)
    return [size, crc]


def _make(
    folder: Path,
    files: Sequence[Path],
    rules: Rules,
    media: Path,
    processes: int | None,
    say: Callable[[str], None],
) -> None:
    from interlace.data.chats.files.index_pool import run

    began = time.monotonic()
    (folder / "index.json").unlink(missing_ok=True)
    signatures = [chats_files.signature(path) for path in files]
    todo = [
        (piece, folder / "pieces" / f"{place_of(piece)}.npz") for path in files for piece in chats_files.pieces(path)
    ]
    (folder / "pieces").mkdir(exist_ok=True)
    wanted = {place for _, place in todo}
    for stale in set((folder / "pieces").iterdir()) - wanted:
        stale.unlink(missing_ok=True)
    missing = [(piece, place) for piece, place in todo if not is_current(piece, place)]
    if len(missing) < len(todo):
        say(f"{len(todo) - len(missing)} of {len(todo)} pieces of the index are there already")
    run(missing, rules, media, processes, say)
    if signatures != [chats_files.signature(path) for path in files]:
        raise ChatFileError(
            f"{files[0]}: the data files change while they are indexed; start again when they are whole"
        )
    totals = _join(folder, todo, signatures)
    say(f"indexed {totals['records']:,} records of {len(files)} files in {time.monotonic() - began:.1f} s")


def place_of(piece: Piece) -> str:
    """File name of a piece."""
    said = repr((str(piece.path), str(piece.file), piece.start, piece.fields, sorted(piece.excluded)))
    return hashlib.sha256(said.encode()).hexdigest()[:24]


def is_current(piece: Piece, place: Path) -> bool:
    """True if `place` matches the piece's current data: same size and time of its file, or, for JSON lines, the same
    bytes."""
    try:
        with zipfile.ZipFile(place) as whole:
            if whole.testzip() is not None:  # a zip has a checksum of each array
                return False
        with np.load(place, allow_pickle=False) as made:
            about = json.loads(bytes(made["about"]))
        stat = piece.file.stat()
        if about["format"] != FORMAT or about["end"] != piece.end:
            return False
        if about["stamp"] == [stat.st_size, stat.st_mtime_ns]:
            return True
        if piece.end < 0 or not about["closed"]:  # not lines, or an unfinished last line that may have grown
            return False
        return digest_of(piece.file, piece.start, about["stop"]) == about["digest"]
    except Exception:  # torn in any way
        return False


def digest_of(path: Path, start: int, stop: int) -> str:
    """Checksum of a file's bytes from `start` - 1 to `stop`. The byte before `start` shows if a line ended there."""
    digest = hashlib.blake2b(digest_size=16)
    with open(path, "rb", buffering=0) as file:
        file.seek(max(0, start - 1))
        left = stop - max(0, start - 1)
        while left > 0 and (block := file.read(min(left, 1 << 20))):
            digest.update(block)
            left -= len(block)
    return digest.hexdigest()


def _join(folder: Path, todo: Sequence[tuple[Piece, Path]], signatures: list[Any]) -> dict[str, Any]:
    """Writes the columns of all pieces, in order, and index.json; returns the totals."""
    paths: list[str] = []
    before = {"numbers": 0, "media": 0, "copied": 0}
    counts = {"records": 0, "media": 0, "copied": 0}
    totals: dict[str, Any] = {"records": 0, "broken": 0, "text": 0, **dict.fromkeys(names(), 0)}
    columns = {name: open(folder / f"{name}.bin", "wb") for name in (*RECORDS, *MEDIA)}
    extra = {name: open(folder / name, "wb") for name in ("copied.jsonl", "broken.jsonl")}
    try:
        for _, place in todo:
            with np.load(place, allow_pickle=False) as made:
                about = json.loads(bytes(made["about"]))
                if not paths or paths[-1] != about["path"]:
                    paths.append(about["path"])
                    before["numbers"] = 0
                arrays = {name: made[name] for name in (*RECORDS, *MEDIA) if name != "file"}
                arrays["file"] = np.full(len(arrays["size"]), len(paths) - 1, "<i4")
                for name, of in SHIFTED.items():
                    moved = arrays["copied"] > 0 if name == "offset" else slice(None)
                    arrays[name][moved] += before[of]
                for name, array in arrays.items():
                    columns[name].write(array.tobytes())
                before["copied"] += extra["copied.jsonl"].write(bytes(made["lines"]))
                for line in bytes(made["broken"]).splitlines():
                    number, kind, why = json.loads(line)
                    where = f"{about['path']}:{before['numbers'] + number}"
                    extra["broken.jsonl"].write((json.dumps([where, kind, why]) + "\n").encode())
                before["numbers"] += about["numbers"]
                before["media"] += len(arrays["kind"])
                counts["records"] += len(arrays["size"])
                totals["broken"] += int((arrays["media"] < 0).sum())
                totals["text"] += int(arrays["text"].sum())
                for number, kind in enumerate(names()):
                    totals[kind] += int((arrays["kind"] == number).sum())
    finally:
        for file in (*columns.values(), *extra.values()):
            file.close()
    counts["media"], counts["copied"] = before["media"], before["copied"]
    totals["records"] = counts["records"]
    record = {
        "format": FORMAT,
        "files": signatures,
        "paths": paths,
        "counts": counts,
        "totals": totals,
        "checksums": {name: _checksum(folder / f"{name}.bin") for name in columns},
    }
    temporary = folder / f".index.{os.getpid()}"
    temporary.write_text(json.dumps(record), encoding="utf-8")
    os.replace(temporary, folder / "index.json")
    return totals


def _prune(folder: Path) -> None:
    """Removes the least recently used indexes. Processes that use one have its files open and keep their data."""
    made = sorted((p for p in folder.glob("*/") if (p / "index.json").exists()), key=lambda p: p.stat().st_mtime)
    for old in made[:-KEPT]:
        shutil.rmtree(old, ignore_errors=True)
