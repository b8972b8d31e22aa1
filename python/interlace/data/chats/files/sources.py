"""Reads the JSON of one record and parses it to a chat; change detection for its media."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from interlace.data.chats.files import records as chats_files
from interlace.data.chats.files.records import Raw
from interlace.data.chats.files.shapes import Chat, parse
from interlace.modalities.errors import BrokenSampleError
from interlace.modalities.files import size_of

HALF = re.compile(r"\\u[dD][89a-fA-F][0-9a-fA-F]{2}")
"""JSON escape of a surrogate; two in sequence form one character."""


@dataclass(frozen=True)
class Rules:
    """Handling of media and of unusable records.

    media: folder at which relative paths of media start; None: that of the data file. max_tokens: maximum tokens of a
    sample. decode: True: every media file is decoded; False: only its header is read. sizes: "records":
    sizes stated in records are trusted, and these files are not inspected. prompt: question for captions (`tar`).
    """

    media: str | None = None
    max_tokens: int | None = None
    on_too_long: Literal["cut", "skip", "error"] = "skip"
    on_broken: Literal["skip", "error"] = "skip"
    decode: bool = True
    sizes: Literal["files", "records"] = "files"
    prompt: str | None = None


Stamp = tuple[int, int] | None
"""(size, modification time in ns) of a file; None: the file does not exist or is inaccessible."""


def stamp(path: str) -> Stamp:
    """State of a media file for change detection; for a member of a tar, that of the tar."""
    try:
        size = size_of(path)
    except (OSError, ValueError):
        return None
    return size.st_size, size.st_mtime_ns


def prune(folders: Iterable[Path], kept: int) -> None:
    """Removes all but the `kept` most recently used of these folders. Processes that have files of a folder open keep
    their data."""
    for old in sorted(folders, key=lambda folder: folder.stat().st_mtime)[:-kept]:
        shutil.rmtree(old, ignore_errors=True)


def chat_of(raw: Raw, rules: Rules) -> Chat:
    """The chat of a record. Raises BrokenSampleError."""
    if raw.broken:
        raise BrokenSampleError("tar", raw.broken)
    try:
        text = raw.line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise BrokenSampleError("encoding", f"no text in UTF-8 ({error.reason} at byte {error.start})") from None
    try:
        record = json.loads(text, object_pairs_hook=chats_files.unique)
    except (ValueError, RecursionError) as error:
        raise BrokenSampleError("json", f"no JSON: {error}") from None
    half = HALF.search(text)
    if half is not None:
        try:
            json.dumps(record, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise BrokenSampleError("encoding", f"{half[0]} is half a character, without its other half") from None
    return parse(record, Path(rules.media).expanduser().absolute() if rules.media else raw.path.parent)
