"""Worker process that indexes pieces of data files: pickled orders on stdin, one line of JSON per answer on stdout.

It does not import torch, so it starts in a fraction of a second and takes little memory. A piece's file is written
atomically. See `index_pool`, which starts it, and `index`.
"""

from __future__ import annotations

import importlib
import json
import os
import pickle
import sys
import time
import zlib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from interlace.data.chats.files import records as chats_files
from interlace.data.chats.files.index import FORMAT, MEDIA, RECORDS, digest_of
from interlace.data.chats.files.records import Piece
from interlace.data.chats.files.shapes import Part
from interlace.data.chats.files.sources import Rules, chat_of, stamp
from interlace.modalities import named, names
from interlace.modalities.errors import BrokenSampleError

ALIVE = 2.0  # seconds between two heartbeats


def index_piece(piece: Piece, place: Path, rules: Rules, media: Path, alive: Callable[[], None]) -> dict[str, int]:
    """Indexes a piece into `place`; returns its totals.

    Raises ChatFileError, and ImportError with the package to install.
    """
    stat = piece.file.stat()  # taken before the read, so that a change during the read is detected
    rows: list[tuple[int, ...]] = []  # columns in the order of RECORDS
    media_columns: dict[str, list[Any]] = {name: [] for name in MEDIA}
    lines: list[bytes] = []
    broken: list[tuple[int, str, str]] = []
    looked: dict[tuple[str, str], tuple[tuple[float, ...], tuple[int, int]]] = {}
    copied = numbers = characters = 0
    stop = piece.start
    closed = True
    for raw, number in chats_files.numbered(piece, media, rules.prompt):
        numbers = number
        if raw is None:
            continue
        alive()
        line, offset = raw.broken.encode("utf-8", "replace") or raw.line, raw.offset
        if offset < 0:
            lines.append(line)
            offset, copied = copied, copied + len(line)
        else:
            stop, closed = offset + len(line), line.endswith(b"\n")
        count = -1
        try:
            chat = chat_of(raw, rules)
            for part in chat.media:
                _look(part, rules, looked, media_columns)
            count = len(chat.media)
            characters += sum(len(part.text) for turn in chat.turns for part in turn.parts)
        except BrokenSampleError as error:
            broken.append((raw.number, error.kind, str(error)))
        rows.append((raw.number, offset, len(line), zlib.crc32(line), count, bool(raw.broken)))
    kinds = Counter(names()[kind] for kind in media_columns["kind"])
    totals = {"records": len(rows), "broken": len(broken), "text": characters, **kinds}
    about = {
        "format": FORMAT,
        "end": piece.end,
        "stamp": [stat.st_size, stat.st_mtime_ns],
        "numbers": numbers,
        "stop": stop,
        "closed": closed,
        "digest": "" if piece.end < 0 else digest_of(piece.file, piece.start, stop),
        "broken": broken,
        "totals": totals,
    }
    table = np.array(rows, np.int64).reshape(-1, len(RECORDS))
    arrays = {name: table[:, column].astype(kind) for column, (name, kind) in enumerate(RECORDS.items())}
    arrays |= {name: np.array(media_columns[name], kind.base).reshape(-1, *kind.shape) for name, kind in MEDIA.items()}
    arrays["lines"] = np.frombuffer(b"".join(lines), np.uint8)
    arrays["about"] = np.frombuffer(json.dumps(about).encode(), np.uint8)
    temporary = place.with_name(f".{place.name}.{os.getpid()}")
    with open(temporary, "wb") as file:
        np.savez(file, **arrays)  # type: ignore[arg-type]
    os.replace(temporary, place)
    return totals


def _look(
    part: Part,
    rules: Rules,
    looked: dict[tuple[str, str], tuple[tuple[float, ...], tuple[int, int]]],
    media: dict[str, list[Any]],
) -> None:
    """Adds the size of a medium, as stated in its record or found in its file. A broken medium adds no size; its error
    is reported when its sample is prepared."""
    size: tuple[float, ...] = ()
    when = (-1, -1)
    if part.stated and rules.sizes == "records":
        size = part.stated
    else:
        key = (part.kind, part.path)
        if key not in looked:  # one picture may belong to several questions
            before = stamp(part.path)
            try:
                looked[key] = (named(part.kind).probe(part.path, decode=rules.decode), before or when)
            except BrokenSampleError:
                looked[key] = ((), before or when)
        size, when = looked[key]
    media["kind"].append(names().index(part.kind))
    media["sizes"].append((*size, *[float("nan")] * (3 - len(size))))
    media["stamp"].append(when)


def main() -> int:
    """Processes orders until standard input ends."""
    last_answer = time.monotonic()

    def answer(**message: Any) -> None:
        nonlocal last_answer
        last_answer = time.monotonic()
        print(json.dumps(message), flush=True)

    def alive() -> None:
        if time.monotonic() - last_answer > ALIVE:
            answer(alive=True)

    while True:
        try:
            modules, piece, place, rules, media = pickle.load(sys.stdin.buffer)
        except EOFError:
            return 0
        for module in modules:
            importlib.import_module(module)
        try:
            answer(done=index_piece(piece, place, rules, media, alive))
        except (ValueError, ImportError, OSError) as error:
            answer(error=str(error), missing=isinstance(error, ImportError))


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (BrokenPipeError, KeyboardInterrupt):  # the parent is gone
        os._exit(1)
