"""Chats prepared once: checked, measured and tokenised into a folder of the cache, then read sample by sample.

Preparing goes through the files in order. Each record is parsed, its files are looked at (and by default decoded), its
tokens are counted without pixels, and it is kept, cut or left out, as configured; so what a run trains on is known by
file and line before the first step, on every rank, and lengths are known for packing. Kept are ids, targets and items'
shapes; texts and media stay where they are. A folder is keyed by the data files (path, size, time) and what the tokens
depend on, built under a lock and moved into place whole. It is used as long as every medium that the files name is as
it was (size and time, or missing), and the encoders still make as many tokens of each shape; else it is built anew.

ids.bin  int32, all samples side by side      targets.bin  uint8, 1 = to be learnt
items.jsonl  a line per sample: where its record is, its items      places.npz  where each sample begins in these
records.jsonl  records of files that are not read in place      media.jsonl  [path, size and time, or null: missing]
left_out.jsonl  [where, kind, reason]      store.json  the rest; written last
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
import time
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import IO, Any, Literal

import numpy as np

from interlace.data import chats_files
from interlace.data.chats_files import ChatFileError, Raw
from interlace.data.chats_media import look_at
from interlace.data.chats_shapes import BrokenSampleError, Chat, parse
from interlace.data.chats_tokens import ChatFormat, Encoded, Item
from interlace.data.fetch import exclusive

FORMAT = 2
KEPT_STORES = 8
HALF = re.compile(r"\\u[dD][89a-fA-F][0-9a-fA-F]{2}")
"""How JSON writes one half of a character; two of them beside each other are a whole one."""
READ = ("ids.bin", "targets.bin", "items.jsonl", "records.jsonl")
BLOCK = 256  # records whose files are looked at together, by several threads
SAY_EVERY = 30.0  # seconds
log = logging.getLogger("interlace.data")


@dataclass(frozen=True)
class Rules:
    """What happens to records that are no samples as they are.

    media: folder that relative paths of media start at; None: that of the data file. max_tokens: most tokens of a
    sample. decode: whether every media file is decoded, or only its header read.
    """

    media: str | None = None
    max_tokens: int | None = None
    on_too_long: Literal["cut", "skip", "error"] = "skip"
    on_broken: Literal["skip", "error"] = "skip"
    decode: bool = True


Stamp = tuple[int, int] | None
"""(size, time of the last change in ns) of a file; None: there is none that could be looked at."""


def stamp(path: str) -> Stamp:
    """What tells whether a medium is still the same."""
    try:
        found = os.stat(path)
    except (OSError, ValueError):
        return None
    return found.st_size, found.st_mtime_ns


@dataclass(frozen=True)
class Examined:
    """What became of one record: its chat and tokens, or why it is left out.

    length: before it was cut. media: path -> what its files were when they were looked at (`stamp`).
    """

    raw: Raw
    chat: Chat | None = None
    encoded: Encoded | None = None
    broken: BrokenSampleError | None = None
    length: int = 0
    media: Mapping[str, Stamp] = field(default_factory=dict)

    @property
    def was_cut(self) -> bool:
        return self.encoded is not None and len(self.encoded.ids) < self.length


def chat_of(raw: Raw, rules: Rules) -> Chat:
    """The chat of a record. Raises BrokenSampleError."""
    try:
        text = raw.line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise BrokenSampleError("encoding", f"no text in UTF-8 ({error.reason} at byte {error.start})") from None
    try:
        record = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BrokenSampleError("json", f"no JSON: {error}") from None
    half = HALF.search(text)
    if half is not None:
        try:
            json.dumps(record, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise BrokenSampleError("encoding", f"{half[0]} is half a character, without its other half") from None
    return parse(record, Path(rules.media).expanduser().absolute() if rules.media else raw.path.parent)


def examine(files: Sequence[Path], chats: ChatFormat | None, rules: Rules, media: Path) -> Iterator[Examined]:
    """What becomes of each record of `files`; without `chats` they stay without tokens.

    `media`: see `chats_files.records`. Raises ChatFileError, and ImportError naming what to install.
    """
    workers = max(2, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    with ThreadPoolExecutor(workers, "interlace-look") as pool:
        for path in files:
            found = chats_files.records(path, media)
            while block := list(islice(found, BLOCK)):
                yield from _examine_block(block, chats, rules, pool)


def _examine_block(
    block: list[Raw], chats: ChatFormat | None, rules: Rules, pool: ThreadPoolExecutor
) -> Iterator[Examined]:
    read: list[Chat | BrokenSampleError] = []
    for raw in block:
        try:
            read.append(chat_of(raw, rules))
        except BrokenSampleError as error:
            read.append(error)
    files = list(dict.fromkeys((p.kind, p.path) for chat in read if isinstance(chat, Chat) for p in chat.media))

    def look(file: tuple[str, str]) -> tuple[Stamp, Any]:
        was = stamp(file[1])  # before it is read: what changes meanwhile has changed
        try:
            if chats is not None:
                chats.encoders_of(file[0])
            return was, look_at(*file, decode=rules.decode)
        except BrokenSampleError as error:
            return was, error

    looked = dict(zip(files, pool.map(look, files), strict=True))
    for raw, chat in zip(block, read, strict=True):
        if isinstance(chat, BrokenSampleError):
            yield Examined(raw, broken=chat)
            continue
        theirs = [looked[part.kind, part.path][1] for part in chat.media]
        media = {part.path: looked[part.kind, part.path][0] for part in chat.media}
        bad = next((size for size in theirs if isinstance(size, BrokenSampleError)), None)
        if bad is not None:
            yield Examined(raw, chat, broken=bad, media=media)
            continue
        if chats is None:
            yield Examined(raw, chat, media=media)
            continue
        try:
            encoded = chats.encode(chat, theirs)
        except BrokenSampleError as error:
            yield Examined(raw, chat, broken=error, media=media)
        except ValueError as error:  # of the processor or template, which is wrong for all
            raise ChatFileError(f"{raw.where}: {error}") from None
        else:
            yield replace(_fitted(raw, chat, encoded, rules), media=media)


def _fitted(raw: Raw, chat: Chat, encoded: Encoded, rules: Rules) -> Examined:
    """The record within the limit on its length."""
    length, most = len(encoded.ids), rules.max_tokens
    if most is None or length <= most:
        return Examined(raw, chat, encoded, length=length)
    if rules.on_too_long == "cut":
        shorter = shortened(encoded, most)
        if shorter is not None:
            return Examined(raw, chat, shorter, length=length)
        why = f"has {length} tokens, and none to learn among the first {most}"
    else:
        why = f"has {length} tokens, more than data.max_tokens = {most}"
    return Examined(raw, chat, encoded, BrokenSampleError("too long", why), length)


def shortened(encoded: Encoded, most: int) -> Encoded | None:
    """The beginning of a sample: at most `most` tokens, no part of a media item, the last one to be learnt.

    What follows the last target is read by nobody. None when no target is left.
    """
    end = most
    for item in encoded.items:
        if item.start + item.tokens > end:  # a picture of several items goes with all of them
            first = next(one for one in encoded.items if one.medium == item.medium)
            end = min(end, first.before)
            break
    learnt = [place for place in range(min(end, len(encoded.ids))) if encoded.targets[place]]
    # The first token is no target of anything before it.
    if not learnt or learnt[-1] == 0:
        return None
    end = learnt[-1] + 1
    items = [item for item in encoded.items if item.start < end]
    return Encoded(encoded.ids[:end], encoded.targets[:end], items)


# --- the folder -------------------------------------------------------------------------------------------


@dataclass
class ChatStore:
    """Prepared chats, in a folder.

    starts: int64 [n + 1] of ids; lines: int64 [n + 1] of items.jsonl; hashes: uint32 [n], crc32 of the records.
    left_out: (file:line, kind, reason); cut: file:line of what was cut.
    """

    folder: Path
    rules: Rules
    starts: np.ndarray
    lines: np.ndarray
    hashes: np.ndarray
    left_out: list[tuple[str, str, str]]
    cut: list[str]
    fingerprint: str
    _files: dict[str, IO[bytes]] = field(default_factory=dict, repr=False)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_files": {}}  # open files stay with the process

    def __len__(self) -> int:
        return len(self.starts) - 1

    @property
    def lengths(self) -> np.ndarray:
        """int64 [n], tokens of each sample."""
        return np.diff(self.starts)

    def encoded(self, index: int) -> Encoded:
        """The tokens and items of a sample."""
        start, count = int(self.starts[index]), int(self.starts[index + 1] - self.starts[index])
        ids = np.frombuffer(self._read("ids.bin", 4 * start, 4 * count), np.int32)
        targets = np.frombuffer(self._read("targets.bin", start, count), np.uint8)
        items = [
            Item(**{**item, "shape": tuple(item["shape"]), "about": _numbers(item["about"])})
            for item in self.line(index)["items"]
        ]
        return Encoded(ids.tolist(), (targets != 0).tolist(), items)

    def line(self, index: int) -> dict[str, Any]:
        """What is kept of a sample beside its tokens: file, number, offset, size, items."""
        start, end = int(self.lines[index]), int(self.lines[index + 1])
        found: dict[str, Any] = json.loads(self._read("items.jsonl", start, end - start))
        return found

    def chat(self, index: int) -> Chat:
        """The chat of a sample, read again from its file. Raises BrokenSampleError, OSError when that has changed."""
        line = self.line(index)
        place = "records.jsonl" if line["copied"] else line["file"]
        data = self._read(place, line["offset"], line["size"])
        if zlib.crc32(data) != int(self.hashes[index]):
            raise OSError(f"{self.where(index)}: is another record than the one that was prepared; start the run anew")
        return chat_of(Raw(Path(line["file"]), line["number"], data, line["offset"]), self.rules)

    def where(self, index: int) -> str:
        """file:line of a sample."""
        line = self.line(index)
        return f"{line['file']}:{line['number']}"

    def open(self, name: str) -> IO[bytes]:
        """A file of the folder, or one given by its whole path, which stays open: what replaces it changes nothing."""
        file = self._files.get(name)
        if file is None:  # threads may open it at once: all take the first one's
            file = self._files.setdefault(name, open(self.folder / name, "rb", buffering=0))
        return file

    def _read(self, name: str, offset: int, size: int) -> bytes:
        data = os.pread(self.open(name).fileno(), size, offset)
        if len(data) != size:
            raise OSError(f"{self.folder / name}: is shorter than when it was prepared; start the run anew")
        return data


def _numbers(about: dict[str, Any]) -> dict[str, tuple[float, ...]]:
    return {key: tuple(values) for key, values in about.items()}


def prepare(
    files: Sequence[Path], chats: ChatFormat, rules: Rules, cache: Path, *, timeout: float = 86_400.0
) -> ChatStore:
    """The store of these files, built first if it is not in `cache`. timeout: seconds to wait for who builds it.

    Raises ChatFileError for files that cannot be read or have no sample, ValueError for a processor or template that
    does not fit, BrokenSampleError's reason as ChatFileError where the rules say "error".
    """
    said = [FORMAT, [chats_files.signature(path) for path in files], chats.signature(), repr(rules)]
    folder = cache / "chats" / hashlib.sha256(json.dumps(said).encode()).hexdigest()[:20]
    store = _load(folder, rules, chats)
    if store is None:
        (cache / "chats").mkdir(parents=True, exist_ok=True)
        with exclusive(folder.with_suffix(".lock"), timeout):
            store = _load(folder, rules, chats)
            if store is None:
                _build(folder, files, chats, rules)
                store = _load(folder, rules, chats)
                _prune(folder.parent)
        if store is None:
            raise ChatFileError(
                f"{folder}: was written and cannot be used; is the disk full, or does somebody change the media?"
            )
    if not len(store):
        raise ChatFileError(f"{_named(files)}: no sample is left{_most_common(store)}")
    return store


def _named(files: Sequence[Path]) -> str:
    return ", ".join(str(path) for path in files[:3]) + (f" and {len(files) - 3} more" if len(files) > 3 else "")


def _most_common(store: ChatStore) -> str:
    if not store.left_out:
        return ": the files are empty"
    where, _, reason = store.left_out[0]
    return f" of {len(store.left_out)}; the first, {where}: {reason}"


def _load(folder: Path, rules: Rules, chats: ChatFormat) -> ChatStore | None:
    try:
        record = json.loads((folder / "store.json").read_text(encoding="utf-8"))
        with np.load(folder / "places.npz") as places:
            arrays = {name: places[name] for name in ("starts", "lines", "hashes")}
        left_out = [tuple(json.loads(line)) for line in (folder / "left_out.jsonl").read_text("utf-8").splitlines()]
        whole = (folder / "ids.bin").stat().st_size == 4 * int(arrays["starts"][-1])
        whole &= (folder / "targets.bin").stat().st_size == int(arrays["starts"][-1])
        whole &= (folder / "items.jsonl").stat().st_size == int(arrays["lines"][-1])
        if not whole:
            raise ValueError("cut short")
        changed = _changed(folder, record["counts"], chats)
        if changed:
            log.info("%s; preparing the data anew", changed)
            return None
        os.utime(folder)  # used now: pruning goes by this time
        store = ChatStore(
            folder, rules, **arrays, left_out=left_out, cut=record["cut"], fingerprint=record["fingerprint"]
        )
        for name in READ:
            store.open(name)
        return store
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError):
        log.warning("%s: damaged; preparing it again", folder)
        return None


def _changed(folder: Path, counts: Sequence[Any], chats: ChatFormat) -> str:
    """What is no longer as it was when the folder was written; empty: nothing."""
    with open(folder / "media.jsonl", encoding="utf-8") as media:
        for line in media:
            path, was = json.loads(line)
            now = stamp(path)
            if (None if now is None else list(now)) != was:
                return f"{path[:200]} has changed since it was looked at"
    return chats.other_count(counts)


def _build(folder: Path, files: Sequence[Path], chats: ChatFormat, rules: Rules) -> None:
    for stale in folder.parent.glob(f".tmp-{folder.name}-*"):  # of a killed process: the lock says none is at work
        shutil.rmtree(stale, ignore_errors=True)
    temporary = folder.with_name(f".tmp-{folder.name}-{os.getpid()}")
    temporary.mkdir(parents=True)
    try:
        _write(temporary, examine(files, chats, rules, folder.parent / "media"), rules, chats)
        shutil.rmtree(folder, ignore_errors=True)
        temporary.rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _write(folder: Path, found: Iterator[Examined], rules: Rules, chats: ChatFormat) -> None:
    began = said = time.monotonic()
    starts, lines = [0], [0]
    hashes: list[int] = []
    media: dict[str, Stamp] = {}
    cut: list[str] = []
    left_out: list[tuple[str, str, str]] = []
    digest = hashlib.sha256()
    copied = 0
    with open(folder / READ[0], "wb") as ids, open(folder / READ[1], "wb") as targets:
        with open(folder / READ[2], "wb") as items, open(folder / READ[3], "wb") as records:
            for one in found:
                media |= one.media
                if time.monotonic() - said > SAY_EVERY:
                    said = time.monotonic()
                    log.info("prepared %d samples, left out %d", len(hashes), len(left_out))
                if one.broken is not None or one.encoded is None:
                    assert one.broken is not None
                    _refuse(one, rules)
                    left_out.append((one.raw.where, one.broken.kind, str(one.broken)))
                    continue
                if one.was_cut:
                    cut.append(one.raw.where)
                raw, encoded = one.raw, one.encoded
                data = [np.array(encoded.ids, np.int32).tobytes(), np.array(encoded.targets, np.uint8).tobytes()]
                shapes = [vars(item) for item in encoded.items]
                line = {
                    "file": str(raw.path),
                    "number": raw.number,
                    "copied": raw.offset < 0,
                    "offset": copied if raw.offset < 0 else raw.offset,
                    "size": len(raw.line),
                    "items": shapes,
                }
                if raw.offset < 0:
                    copied += records.write(raw.line)
                ids.write(data[0])
                targets.write(data[1])
                lines.append(lines[-1] + items.write((json.dumps(line) + "\n").encode()))
                starts.append(starts[-1] + len(encoded.ids))
                hashes.append(zlib.crc32(raw.line))
                for piece in (*data, repr(shapes).encode()):
                    digest.update(piece)
    np.savez(
        folder / "places.npz",
        starts=np.array(starts, np.int64),
        lines=np.array(lines, np.int64),
        hashes=np.array(hashes, np.uint32),
    )
    text = "".join(json.dumps(entry) + "\n" for entry in left_out)
    (folder / "left_out.jsonl").write_text(text, encoding="utf-8")
    text = "".join(json.dumps(entry) + "\n" for entry in media.items())
    (folder / "media.jsonl").write_text(text, encoding="utf-8")
    record = {"cut": cut, "fingerprint": digest.hexdigest()[:16], "counts": chats.counts()}
    (folder / "store.json").write_text(json.dumps(record), encoding="utf-8")
    kinds = Counter(kind for _, kind, _ in left_out)
    log.info(
        "prepared %d chats in %.1f s, %d cut, %d left out%s",
        len(hashes),
        time.monotonic() - began,
        len(cut),
        len(left_out),
        "".join(f", {kind}: {count}" for kind, count in kinds.most_common()),
    )


def _refuse(one: Examined, rules: Rules) -> None:
    """Raises ChatFileError for a record that may not be left out."""
    assert one.broken is not None
    long = one.broken.kind == "too long"
    if (rules.on_too_long if long else rules.on_broken) == "error":
        key = 'on_too_long = "cut" or "skip"' if long else 'on_broken = "skip"'
        raise ChatFileError(f"{one.raw.where}: {one.broken}; mend it, or set data.{key}")


def _prune(folder: Path) -> None:
    """Removes the stores used longest ago. A process that uses one has its files open, so it keeps their data."""
    stores = sorted((p for p in folder.glob("*/") if (p / "store.json").exists()), key=lambda p: p.stat().st_mtime)
    for store in stores[:-KEPT_STORES]:
        shutil.rmtree(store, ignore_errors=True)
