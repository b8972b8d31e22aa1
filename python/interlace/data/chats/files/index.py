"""Index of data files: offsets and sizes of records, and sizes of their media.

The index is independent of any model: records are read, and their media inspected (headers only, or decoded, as the
rules specify). So processes share the work, one piece of a file each (`index_worker`), and every tokenizer or model
uses the same index. Each finished piece is a file of its own: an interrupted build resumes after it.

A piece is valid for the size and time of its data file. When these change, pieces with unchanged bytes (by checksum)
are kept and only the others are read again: appending to a file costs only the new part. A piece has checksums of its
own, too: a torn one is made again.

pieces/*.npz  one per piece: the columns RECORDS and MEDIA, `lines` (records that cannot be read in place) and `about`
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from interlace.data.builtin.fetch import made_once
from interlace.data.chats.files import records as chats_files
from interlace.data.chats.files.records import ChatFileError, Piece, Raw
from interlace.data.chats.files.sources import Rules, Stamp, prune
from interlace.modalities import all_modalities

FORMAT = 3
LARGE = 8 << 20
"""Minimum size of data files, in bytes, for an index on first use."""
WAIT = 86_400.0
"""Seconds to wait for another builder."""
KEPT = 16
"""Number of indexes kept in a cache, the most recently used."""
RECORDS = {
    "number": "<i8",  # line or record number in the piece, from 1
    "offset": "<i8",  # of its bytes in the file; in `lines` if it is not read in place
    "size": "<i4",  # of these bytes
    "crc": "<u4",  # of these bytes
    "media": "<i4",  # number of its media; -1: it is broken
    "broken": "<u1",  # 1: unreadable; these bytes are the reason
}
"""Columns of records."""
MEDIA: dict[str, np.dtype[Any]] = {
    "kind": np.dtype("<u1"),  # index in `modalities.names`
    "sizes": np.dtype(("<f8", (3,))),  # result of `Modality.probe`, padded with NaN; all NaN: it is broken
    "stamp": np.dtype(("<i8", (2,))),  # of the file at that time (size, time in ns); -1: it was not inspected
}
"""Columns of media, in the order of the records."""
Known = tuple[Stamp, tuple[float, ...]]
"""Index entry of a medium: the stamp of its file at that time, and its size."""
log = logging.getLogger("interlace.data")


@dataclass(frozen=True)
class ChatIndex:
    """An index. pieces: with their files in the folder; about: facts about each of them (`current`)."""

    folder: Path
    pieces: list[tuple[Piece, Path]]
    about: list[dict[str, Any]]

    def __len__(self) -> int:
        return self.totals["records"]

    @property
    def totals(self) -> Counter[str]:
        """Numbers of records, broken records, characters in turns, and media of each kind."""
        return sum((Counter(about["totals"]) for about in self.about), Counter())

    def broken(self) -> Iterator[tuple[str, str, str]]:
        """(where, kind, reason) of each broken record."""
        for piece, _, about, before in self._each():
            for number, kind, why in about["broken"]:
                yield f"{piece.file}:{before + number}", kind, why

    def _each(self) -> Iterator[tuple[Piece, Path, dict[str, Any], int]]:
        """Each piece, and the number of lines or records of its file before it."""
        file, before = None, 0
        for (piece, place), about in zip(self.pieces, self.about, strict=True):
            file, before = piece.file, before if piece.file == file else 0
            yield piece, place, about, before
            before += about["numbers"]

    def blocks(self, size: int) -> Iterator[tuple[list[Raw], list[list[Known]]]]:
        """The records in order, at most `size` at once, and for each what is known of its media. Raises ChatFileError
        for a record that has changed since the index was made."""
        for each in self._each():
            records = _records(*each)
            while block := list(islice(records, size)):
                yield [raw for raw, _ in block], [known for _, known in block]


def _records(piece: Piece, place: Path, about: dict[str, Any], before: int) -> Iterator[tuple[Raw, list[Known]]]:
    with np.load(place, allow_pickle=False) as made:
        rows = zip(*(made[name].tolist() for name in RECORDS), strict=True)
        media = _media(*(made[name].tolist() for name in MEDIA))
        data, start, in_place = bytes(made["lines"]), 0, piece.end >= 0
    if in_place:
        start = piece.start
        with open(piece.file, "rb") as file:
            file.seek(start)
            data = file.read(about["stop"] - start)
    for number, offset, size, crc, count, broken in rows:
        line = data[offset - start : offset - start + size]
        if zlib.crc32(line) != crc:
            raise ChatFileError(
                f"{piece.file}:{before + number}: has changed since it was indexed; start again, it is read anew"
            )
        text, why = (b"", line.decode("utf-8")) if broken else (line, "")
        raw = Raw(piece.file, before + number, text, offset if in_place else -1, why)
        yield raw, list(islice(media, max(0, count)))


def _media(kinds: list[int], sizes: list[list[float]], stamps: list[list[int]]) -> Iterator[Known]:
    every = all_modalities()
    for kind, numbers, (size, when) in zip(kinds, sizes, stamps, strict=True):
        yield (size, when), every[kind].restored([number for number in numbers if number == number])  # without NaN


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
    say: Callable[[str], None] = log.info,
) -> ChatIndex:
    """The index of these files; if missing or incomplete, it is made first by `processes` (default: one per core).

    say: called with progress messages. Raises ChatFileError.
    """
    key = [FORMAT, [str(path) for path in files], rules.media, rules.decode, rules.sizes, rules.prompt]
    folder = media.parent / "index" / hashlib.sha256(json.dumps(key).encode()).hexdigest()[:20]
    pieces = [
        (piece, folder / "pieces" / f"{place_of(piece)}.npz") for path in files for piece in chats_files.pieces(path)
    ]
    began, made = time.monotonic(), False

    def facts() -> list[dict[str, Any]] | None:
        about = [current(*each) for each in pieces]
        return None if None in about else [each for each in about if each is not None]

    def make() -> None:
        from interlace.data.chats.files.index_pool import run

        nonlocal made
        made, signatures = True, [chats_files.signature(path) for path in files]
        (folder / "pieces").mkdir(parents=True, exist_ok=True)
        for stale in set((folder / "pieces").iterdir()) - {place for _, place in pieces}:
            stale.unlink(missing_ok=True)
        missing = [each for each in pieces if current(*each) is None]
        if len(missing) < len(pieces):
            say(f"{len(pieces) - len(missing)} of {len(pieces)} pieces of the index are there already")
        run(missing, rules, media, processes, say)
        if signatures != [chats_files.signature(path) for path in files]:
            raise ChatFileError(
                f"{files[0]}: the data files change while they are indexed; start again when they are whole"
            )
        prune(folder.parent.glob("*/"), KEPT)

    about = made_once(folder.with_suffix(".lock"), WAIT, facts, make)
    if about is None:
        raise ChatFileError(f"{folder}: was written and cannot be used; is the disk full, or do the data files change?")
    os.utime(folder)  # marks it as used: pruning sorts by this time
    index = ChatIndex(folder, pieces, about)
    if made:
        say(f"indexed {len(index):,} records of {len(files)} files in {time.monotonic() - began:.1f} s")
    return index


def place_of(piece: Piece) -> str:
    """File name of a piece."""
    identity = repr((str(piece.path), str(piece.file), piece.start, piece.fields, sorted(piece.excluded)))
    return hashlib.sha256(identity.encode()).hexdigest()[:24]


def current(piece: Piece, place: Path) -> dict[str, Any] | None:
    """Facts about a piece, if `place` matches its current data: same size and time of its file, or, for JSON lines, the
    same bytes. None if it does not."""
    try:
        with zipfile.ZipFile(place) as whole:
            if whole.testzip() is not None:  # a zip has a checksum of each array
                return None
        with np.load(place, allow_pickle=False) as made:
            about: dict[str, Any] = json.loads(bytes(made["about"]))
        stat = piece.file.stat()
        same = about["format"] == FORMAT and about["end"] == piece.end
        if same and about["stamp"] != [stat.st_size, stat.st_mtime_ns]:
            # Only lines can be compared, and an unfinished last line may have grown.
            same = piece.end >= 0 and about["closed"]
            same = same and digest_of(piece.file, piece.start, about["stop"]) == about["digest"]
        return about if same else None
    except Exception:  # torn in any way
        return None


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
