"""One record as a file has it -> a chat, by the rules of its source; and what tells whether its media have changed."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from interlace.data import chats_files
from interlace.data.chats_files import Raw
from interlace.data.chats_shapes import BrokenSampleError, Chat, parse
from interlace.data.opened import size_of

HALF = re.compile(r"\\u[dD][89a-fA-F][0-9a-fA-F]{2}")
"""How JSON writes one half of a character; two of them beside each other are a whole one."""


@dataclass(frozen=True)
class Rules:
    """What happens to records that are no samples as they are.

    media: folder that relative paths of media start at; None: that of the data file. max_tokens: most tokens of a
    sample. decode: whether every media file is decoded, or only its header read. sizes: whether sizes that records
    state are taken for those of the files, which are then not looked at. prompt: what captions answer (`chats_tar`).
    """

    media: str | None = None
    max_tokens: int | None = None
    on_too_long: Literal["cut", "skip", "error"] = "skip"
    on_broken: Literal["skip", "error"] = "skip"
    decode: bool = True
    sizes: Literal["files", "records"] = "files"
    prompt: str | None = None


Stamp = tuple[int, int] | None
"""(size, time of the last change in ns) of a file; None: there is none that could be looked at."""


def stamp(path: str) -> Stamp:
    """What tells whether a medium is still the same; of a member of a tar, whether the tar is."""
    try:
        found = size_of(path)
    except (OSError, ValueError):
        return None
    return found.st_size, found.st_mtime_ns


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
