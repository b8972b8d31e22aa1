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
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from interlace._files import draft_of
from interlace.data.chats.files import records as chats_files
from interlace.data.chats.files.index import FORMAT, MEDIA, RECORDS, digest_of
from interlace.data.chats.files.records import Piece
from interlace.data.chats.files.sources import Rules, chat_of, stamp
from interlace.modalities import named, names
from interlace.modalities.errors import BrokenSampleError

UNSEEN = (-1, -1)  # state of a file that was not inspected or is not there
ALIVE = 2.0  # seconds between two heartbeats


def index_piece(piece: Piece, place: Path, rules: Rules, media: Path, alive: Callable[[], None]) -> dict[str, int]:
    """Indexes a piece into `place`; returns its totals.

    Raises ChatFileError, and ImportError with the package to install.
    """
    stat = piece.file.stat()  # taken before the read, so that a change during the read is detected
    rows: list[tuple[int, ...]] = []  # columns in the order of RECORDS
    media_rows: list[tuple[int, tuple[float, ...], tuple[int, int]]] = []  # columns in the order of MEDIA
    lines: list[bytes] = []
    broken: list[tuple[int, str, str]] = []
    copied = numbers = characters = 0
    stop = piece.start
    closed = True

    @cache  # one picture may belong to several questions
    def look(kind: str, path: str) -> tuple[tuple[float, ...], tuple[int, int]]:
        """Size and state of a file. A broken one has no size; its error is reported when its sample is prepared."""
        before = stamp(path) or UNSEEN
        try:
            return named(kind).probe(path, decode=rules.decode), before
        except BrokenSampleError:
            return (), before

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
                trusted = part.stated and rules.sizes == "records"
                size, when = (part.stated, UNSEEN) if trusted else look(part.kind, part.path)
                padded = (*size, *[float("nan")] * (3 - len(size)))
                media_rows.append((names().index(part.kind), padded, when))
            count = len(chat.media)
            characters += sum(len(part.text) for turn in chat.turns for part in turn.parts)
        except BrokenSampleError as error:
            broken.append((raw.number, error.kind, str(error)))
        rows.append((raw.number, offset, len(line), zlib.crc32(line), count, bool(raw.broken)))
    kinds = Counter(names()[kind] for kind, _, _ in media_rows)
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
    for column, (name, kind) in enumerate(MEDIA.items()):
        arrays[name] = np.array([row[column] for row in media_rows], kind.base).reshape(-1, *kind.shape)
    arrays["lines"] = np.frombuffer(b"".join(lines), np.uint8)
    arrays["about"] = np.frombuffer(json.dumps(about).encode(), np.uint8)
    with draft_of(place) as draft, open(draft, "wb") as file:
        np.savez(file, **arrays)  # type: ignore[arg-type]
    return totals


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
