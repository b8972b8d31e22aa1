"""Folder of chats about the stamps, for use in a config: made once, and again if the settings change.

train.jsonl, validation.jsonl   records; media paths are relative to this folder, so it can be moved
media/                          pictures and clips, no larger than needed
tokenizer/                      byte-level BPE trained on the training texts, with a chat template
README.md                       contents, licence, and what was left out and why
made.json                       source, settings, and a hash of the contents; written last

A folder that was changed after it was written counts as user data: it is used as it is or refused, never overwritten.

Without network or apt the folder has scikit-learn's digits in the same format, and states so, until stamps are
available.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from interlace._cores import usable_cores
from interlace.data.builtin.byte_tokenizer import write_byte_tokenizer
from interlace.data.builtin.fetch import exclusive, find_or_fetch, new_folder
from interlace.data.builtin.stamps import Drawn, Record, Settings, draw, media_of, texts_of
from interlace.data.builtin.stamps_index import load_index
from interlace.data.chats.encoding.bpe import write_tokenizer

FORMAT = 2
MADE, README, TOKENIZER = "made.json", "README.md", "tokenizer"
SPLITS = ("train.jsonl", "validation.jsonl")
STAMPS, DIGITS = "stamps", "digits"
_DIGITS = "scikit-learn's handwritten digits"
CHANGED = (
    "{} was changed by hand, or made by another version of Interlace: remove it, or name another folder; it is not "
    "written over"
)
log = logging.getLogger("interlace.data")


@dataclass(frozen=True)
class Made:
    """Contents of a folder. source: STAMPS or DIGITS; words: one line about it; settings: those it was made with."""

    source: str
    words: str
    settings: Settings


def look(folder: Path) -> Made | None:
    """Contents of the folder; None if it was not made here, or is incomplete."""
    record = _told(folder)
    if record is None:
        return None
    table = record["key"]["settings"]
    if "languages" in table:
        table = table | {"languages": tuple(table["languages"])}
    return Made(record["source"], record["words"], Settings(**table))


def make(
    folder: str | Path,
    settings: Settings | None = None,
    *,
    source: str = STAMPS,
    cache: str | Path | None = None,
    timeout: float = 3600.0,
) -> Made:
    """Writes the folder, unless it exists and was made with the same settings from the same files.

    source: STAMPS, with digits as their substitute, or DIGITS. The package is fetched into `cache`
    (`fetch.find_or_fetch`). timeout: seconds to wait for another process that makes the folder. Raises FileExistsError
    for a folder that has other contents, was changed by hand, or has stamps while digits are asked for, or stamps of
    other settings while stamps are not available; ValueError for settings without records, TimeoutError, OSError.
    """
    folder, settings = Path(folder).expanduser().resolve(), settings or Settings()
    _check_free(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    # The lock file is never removed: otherwise a waiting process and a new one could lock two different files.
    with exclusive(folder.with_name(f".{folder.name}.lock"), timeout):
        _check_free(folder)
        return _make(folder, settings, source, cache)


def _check_free(folder: Path) -> None:
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return
    if not (folder / MADE).exists():
        raise FileExistsError(f"{folder} holds something else: name a new folder, or remove what is in it")
    if _told(folder) is None:
        raise FileExistsError(CHANGED.format(folder))


def _make(folder: Path, settings: Settings, wanted: str, cache: str | Path | None) -> Made:
    from interlace.data.builtin.digits import digit_settings, draw_digits

    root, trouble = (None, "") if wanted == DIGITS else find_or_fetch(cache)
    source = DIGITS if root is None else STAMPS
    index = None if root is None else load_index(root)
    # Digits in place of stamps keep the settings of the stamps, which replace them later.
    used = digit_settings(settings) if wanted == DIGITS else settings.table()
    key = {"format": FORMAT, "settings": used, "signature": "" if index is None else index.signature}
    record = _told(folder)
    key = json.loads(json.dumps(key))
    if record is not None and record["source"] == source and _has(record["key"], key):
        return Made(source, record["words"], settings)
    if record is not None and record["source"] == STAMPS and wanted == DIGITS:
        raise FileExistsError(f"{folder} holds stamps: remove it, or name another folder")
    if record is not None and record["source"] == STAMPS and root is None:  # do not replace stamps by digits
        if record["key"]["settings"] != key["settings"]:
            raise FileExistsError(
                f"{folder} holds stamps made with other settings, and none can be had now ({trouble}): ask for the "
                "same settings, or name a new folder"
            )
        log.info("kept as it is, as stamps cannot be had now: %s", trouble)
        return Made(STAMPS, record["words"], settings)
    if record is not None and record["contents"] != _contents(folder):
        raise FileExistsError(CHANGED.format(folder))
    began = time.monotonic()
    with new_folder(folder) as temporary:
        log.info("writing chats about the %s into %s", source, folder)
        if index is None or root is None:
            drawn = draw_digits(settings, temporary)
        else:
            from interlace.data.builtin.stamps_media import write_media

            drawn = draw(index, settings)
            failed, broken = write_media(root, temporary, drawn.files, settings.side, usable_cores())
            drawn.left_out |= broken
            for records in (drawn.train, drawn.validation):
                records[:] = [each for each in records if not failed.intersection(media_of(each))]
        pieces = _write(temporary, drawn, settings)
        words = _words(drawn, pieces, source, trouble)
        (temporary / README).write_text(_readme(drawn, words, root), encoding="utf-8")
        sizes = {name: (temporary / name).stat().st_size for name in SPLITS}
        made = {"source": source, "words": words, "key": key, "sizes": sizes, "contents": _contents(temporary)}
        (temporary / MADE).write_text(json.dumps(made, indent=1), encoding="utf-8")
    log.info("written in %.0f s", time.monotonic() - began)
    return Made(source, words, settings)


def _has(recorded: Mapping[str, Any], key: Mapping[str, Any]) -> bool:
    """True if all of `key` is recorded. Earlier versions also recorded settings of stamps for digits."""
    settings = {name: recorded["settings"].get(name) for name in key["settings"]}
    return {**recorded, "settings": settings} == key


def _contents(folder: Path) -> str:
    """A hash of the names and sizes of all files in the folder, except made.json."""
    paths = [path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir()]
    sizes = {path.relative_to(folder).as_posix(): path.lstat().st_size for path in paths}
    sizes.pop(MADE, None)
    return hashlib.sha256(json.dumps(sorted(sizes.items())).encode()).hexdigest()


def _told(folder: Path) -> Any:
    """made.json of a complete folder, else None."""
    try:
        record = json.loads((folder / MADE).read_text(encoding="utf-8"))
        whole = all((folder / name).stat().st_size == record["sizes"][name] for name in SPLITS)
        whole &= (folder / TOKENIZER / "tokenizer.json").is_file() and record["key"]["format"] == FORMAT
        return {name: record[name] for name in ("source", "words", "key", "contents")} if whole else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _write(folder: Path, drawn: Drawn, settings: Settings) -> int:
    """Writes the records and the tokenizer; returns the number of its pieces."""
    for name, records in zip(SPLITS, (drawn.train, drawn.validation), strict=True):
        lines = "".join(json.dumps(each, ensure_ascii=False) + "\n" for each in records)
        (folder / name).write_text(lines, encoding="utf-8")
    if settings.byte_encoders is not None:
        return write_byte_tokenizer(folder / TOKENIZER, settings.byte_encoders)
    texts = dict.fromkeys(text for each in drawn.train for text in texts_of(each))
    return write_tokenizer(folder / TOKENIZER, texts, settings.vocabulary)


def _words(drawn: Drawn, pieces: int, source: str, trouble: str) -> str:
    counts = f"{len(drawn.train):,} chats to train on, {len(drawn.validation):,} held out, a vocabulary of {pieces:,}"
    if source == STAMPS:
        return f"stamps: {counts}; {len(drawn.left_out):,} files left out, listed in {README}"
    return f"stamps not available ({trouble}): {_DIGITS} instead: {counts}" if trouble else f"{_DIGITS}: {counts}"


def _counts(records: Sequence[Record]) -> str:
    counts = Counter(each.get("kind") or "+".join(_kinds(each)) or "text" for each in records)
    return ", ".join(f"{count:,} {kind}" for kind, count in counts.most_common())


def _kinds(each: Record) -> list[str]:
    return [part["type"] for part in each["messages"][0]["content"] if part["type"] != "text"]


def _readme(drawn: Drawn, words: str, root: Path | None) -> str:
    """Text of README.md. root: of the stamps; None: digits."""
    title, origin = "handwritten digits", f"Pictures are {_DIGITS}, of sklearn.datasets.load_digits"
    if root is not None:
        title = "pictures and speech"
        origin = f"Pictures, speech and captions are Tux Paint's, GPL-2: {root.parent}/copyright"
    left_out = [f"- {path}: {' '.join(why.split())}" for path, why in sorted(drawn.left_out.items())]
    lines = [
        f"# Chats about {title}",
        "",
        words,
        "",
        f"- {SPLITS[0]}: {_counts(drawn.train)}",
        f"- {SPLITS[1]}: {_counts(drawn.validation)}",
        "",
        origin,
        *(["", "## Left out", "", *left_out] if left_out else []),
    ]
    return "\n".join(lines) + "\n"


__all__ = ["DIGITS", "SPLITS", "STAMPS", "TOKENIZER", "Made", "look", "make"]
