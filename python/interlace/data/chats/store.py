"""Store of prepared chats: checked, measured and tokenised into a cache folder, then read sample by sample.

Preparation goes through the files in order. Each record is parsed and its media files are inspected (by default
decoded). Its tokens are counted without pixels. Then it is kept, cut or left out, as configured. So the training
samples are known by file and line before the first step, on every rank, and lengths are known for packing. The store
has ids, targets and item shapes; texts and media stay in their files.

A folder is keyed by the data files (path, size, time) and by everything that the tokens depend on. It is built under
a lock and renamed into place. It is valid as long as every media file is unchanged (size and time, or missing), and the
encoders still make the same number of tokens for each shape. Otherwise it is built again.

samples.bin  one ROW per sample      ids.bin  int32, all samples concatenated      targets.bin  uint8, 1 = has a loss
items.jsonl  one line per sample: location of its record, its items      records.jsonl  records of files that are not
read in place      media.jsonl  [path, size and time, or null: missing]      store.json  the rest; written last

These are plain files, not Arrow's: importing pyarrow costs each rank and each worker 0.17 s and 39 MiB, and samples are
read no faster.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np

from interlace.data.builtin.fetch import made_once, new_folder
from interlace.data.chats.encoding.tokens import ChatFormat, Encoded, Item
from interlace.data.chats.examine import Examined, examine
from interlace.data.chats.files import records as chats_files
from interlace.data.chats.files.index import WAIT
from interlace.data.chats.files.records import ChatFileError, Raw
from interlace.data.chats.files.shapes import Chat
from interlace.data.chats.files.sources import Rules, Stamp, chat_of, prune, stamp

FORMAT = 7
KEPT_STORES = 8
ROW = np.dtype(
    [
        ("start", "<i8"),  # offset of its first token in ids.bin and targets.bin, in tokens
        ("tokens", "<i4"),
        ("line", "<i8"),  # offset in items.jsonl, in bytes
        ("size", "<i4"),  # of that line
        ("hash", "<u4"),  # crc32 of its record
        ("cut", "?"),  # True if it was cut
    ]
)
READ = ("ids.bin", "targets.bin", "items.jsonl", "records.jsonl")
SAY_EVERY = 30.0  # seconds between progress messages
RECENT = 10_000  # media remembered, so that each is recorded once
log = logging.getLogger("interlace.data")


# --- the folder -------------------------------------------------------------------------------------------


@dataclass
class ChatStore:
    """Prepared chats in a folder.

    rows: one ROW per sample, memory-mapped, so only pages that are read occupy memory. left_out: (file:line, kind,
    reason).
    """

    folder: Path
    rules: Rules
    rows: np.ndarray
    left_out: list[tuple[str, str, str]]
    fingerprint: str
    _files: dict[str, IO[bytes]] = field(default_factory=dict, repr=False)

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_files": {}, "rows": None}  # open and mapped files are not pickled

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        try:
            now = json.loads((self.folder / "store.json").read_text(encoding="utf-8"))["fingerprint"]
            self.rows = _rows(self.folder)
        except OSError as error:
            raise ChatFileError(f"{self.folder}: is no longer there ({error.strerror}); start the run anew") from None
        if now != self.fingerprint:
            raise ChatFileError(f"{self.folder}: other chats were prepared there meanwhile; start the run anew")

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def lengths(self) -> np.ndarray:
        """int64 [n], tokens of each sample."""
        return self.rows["tokens"].astype(np.int64)

    @property
    def hashes(self) -> np.ndarray:
        """uint32 [n], crc32 of each record."""
        return self.rows["hash"]

    @property
    def cut(self) -> np.ndarray:
        """int64, indices of the samples that were cut."""
        return np.flatnonzero(self.rows["cut"])

    def encoded(self, index: int) -> Encoded:
        """The tokens and items of a sample."""
        start, count = int(self.rows["start"][index]), int(self.rows["tokens"][index])
        ids = np.frombuffer(self._read("ids.bin", 4 * start, 4 * count), np.int32)
        targets = np.frombuffer(self._read("targets.bin", start, count), np.bool_)
        items = [
            Item(**{**item, "shape": tuple(item["shape"]), "about": {k: tuple(v) for k, v in item["about"].items()}})
            for item in self.line(index)["items"]
        ]
        return Encoded(ids.tolist(), targets.tolist(), items)

    def line(self, index: int) -> dict[str, Any]:
        """Metadata of a sample: file, number, offset, size, items, kind."""
        row = self.rows[index]
        line: dict[str, Any] = json.loads(self._read("items.jsonl", int(row["line"]), int(row["size"])))
        return line

    def chat(self, index: int) -> Chat:
        """The chat of a sample, read again from its file. Raises BrokenSampleError, OSError when the file has
        changed."""
        line = self.line(index)
        place = "records.jsonl" if line["copied"] else line["file"]
        data = self._read(place, line["offset"], line["size"])
        if zlib.crc32(data) != int(self.rows["hash"][index]):
            raise OSError(f"{self.where(index)}: is another record than the one that was prepared; start the run anew")
        return chat_of(Raw(Path(line["file"]), line["number"], data, line["offset"]), self.rules)

    def where(self, index: int) -> str:
        """file:line of a sample."""
        line = self.line(index)
        return f"{line['file']}:{line['number']}"

    def open(self, name: str) -> IO[bytes]:
        """A file of the folder, or one given by its full path. It stays open, so replacing it on disk has no effect."""
        file = self._files.get(name)
        if file is None:  # threads may open it at once: all use the first one's
            file = self._files.setdefault(name, open(self.folder / name, "rb", buffering=0))
        return file

    def _read(self, name: str, offset: int, size: int) -> bytes:
        data = os.pread(self.open(name).fileno(), size, offset)
        if len(data) != size:
            raise OSError(f"{self.folder / name}: is shorter than when it was prepared; start the run anew")
        return data


def prepare(files: Sequence[Path], chats: ChatFormat, rules: Rules, cache: Path) -> ChatStore:
    """The store of these files, built first if it is not in `cache`.

    Raises ChatFileError for files that cannot be read or have no sample, ValueError for a processor or template that
    does not fit. Raises ChatFileError with the reason of a BrokenSampleError if the rules say "error".
    """
    identity = [FORMAT, [chats_files.signature(path) for path in files], chats.signature(), repr(rules)]
    folder = cache / "chats" / hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:20]

    def make() -> None:
        with new_folder(folder) as temporary:
            _write(temporary, examine(files, chats, rules, folder.parent / "media"), rules, chats)
        prune((place.parent for place in folder.parent.glob("*/store.json")), KEPT_STORES)

    store = made_once(folder.with_suffix(".lock"), WAIT, lambda: _load(folder, rules, chats), make)
    if store is None:
        raise ChatFileError(
            f"{folder}: was written and cannot be used; is the disk full, or does somebody change the media?"
        )
    if not len(store):
        named = ", ".join(map(str, files[:3])) + (f" and {len(files) - 3} more" if len(files) > 3 else "")
        if not store.left_out:
            raise ChatFileError(f"{named}: no sample is left: the files are empty")
        where, _, reason = store.left_out[0]
        raise ChatFileError(f"{named}: no sample is left of {len(store.left_out)}; the first, {where}: {reason}")
    return store


def _load(folder: Path, rules: Rules, chats: ChatFormat) -> ChatStore | None:
    try:
        record = json.loads((folder / "store.json").read_text(encoding="utf-8"))
        rows = _rows(folder)
        sizes = {name: (folder / name).stat().st_size for name in READ}
        if zlib.crc32(rows.view(np.uint8).data) != record["checksum"] or sizes != record["sizes"]:
            raise ValueError("torn")
        changed = _changed(folder, record["counts"], chats)
        if changed:
            log.info("%s; preparing the data anew", changed)
            return None
        os.utime(folder)  # marks it as used: pruning sorts by this time
        store = ChatStore(folder, rules, rows, [tuple(each) for each in record["left_out"]], record["fingerprint"])
        for name in READ:
            store.open(name)
        return store
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError):
        log.warning("%s: damaged; preparing it again", folder)
        return None


def _rows(folder: Path) -> np.ndarray:
    path = folder / "samples.bin"
    return np.memmap(path, ROW, "r") if path.stat().st_size else np.empty(0, ROW)  # an empty file cannot be mapped


def _changed(folder: Path, counts: Sequence[Any], chats: ChatFormat) -> str:
    """Description of what has changed since the folder was written; empty: nothing."""
    with open(folder / "media.jsonl", encoding="utf-8") as media:
        for line in media:
            path, was = json.loads(line)
            now = stamp(path)
            if (None if now is None else list(now)) != was:
                return f"{path[:200]} has changed since it was looked at"
    return chats.other_count(counts)


def _write(folder: Path, examined: Iterator[Examined], rules: Rules, chats: ChatFormat) -> None:
    began = logged = time.monotonic()
    left_out: list[tuple[str, str, str]] = []
    digest = hashlib.sha256()
    count = cut = checksum = 0
    with ExitStack() as stack:
        names = (*READ, "samples.bin", "media.jsonl")
        files = {name: stack.enter_context(open(folder / name, "wb")) for name in names}
        ids, targets, items, records = (files[name] for name in READ)
        written: dict[str, Stamp] = {}  # media written last; neighbouring records often share them
        for one in examined:
            if len(written) > RECENT:
                written.clear()
            for path, was in one.media.items():
                if path not in written or written[path] != was:
                    written[path] = was
                    files["media.jsonl"].write((json.dumps((path, was)) + "\n").encode())
            if time.monotonic() - logged > SAY_EVERY:
                logged = time.monotonic()
                log.info("prepared %d samples, left out %d", count, len(left_out))
            if one.broken is not None or one.encoded is None:
                assert one.broken is not None
                refuse(one, rules)
                left_out.append((one.raw.where, one.broken.kind, str(one.broken)))
                continue
            raw, encoded = one.raw, one.encoded
            shapes = [vars(item) for item in encoded.items]
            line = {
                "file": str(raw.path),
                "number": raw.number,
                "copied": raw.offset < 0,
                "offset": records.tell() if raw.offset < 0 else raw.offset,
                "size": len(raw.line),
                "items": shapes,
                "kind": one.chat.kind if one.chat is not None else "",
            }
            if raw.offset < 0:
                records.write(raw.line)
            start, place = targets.tell(), items.tell()
            size = items.write((json.dumps(line) + "\n").encode())
            row = np.array((start, len(encoded.ids), place, size, zlib.crc32(raw.line), one.was_cut), ROW).tobytes()
            files["samples.bin"].write(row)
            checksum, count, cut = zlib.crc32(row, checksum), count + 1, cut + one.was_cut
            data = np.array(encoded.ids, np.int32).tobytes(), np.array(encoded.targets, np.bool_).tobytes()
            ids.write(data[0])
            targets.write(data[1])
            for piece in (*data, repr(shapes).encode()):
                digest.update(piece)
        sizes = {name: files[name].tell() for name in READ}
    record = {
        "fingerprint": digest.hexdigest()[:16],
        "counts": chats.counts(),
        "checksum": checksum,
        "sizes": sizes,
        "left_out": left_out,
    }
    (folder / "store.json").write_text(json.dumps(record), encoding="utf-8")
    kinds = Counter(kind for _, kind, _ in left_out)
    log.info(
        "prepared %d chats in %.1f s, %d cut, %d left out%s",
        count,
        time.monotonic() - began,
        cut,
        len(left_out),
        "".join(f", {kind}: {number}" for kind, number in kinds.most_common()),
    )


def refuse(one: Examined, rules: Rules) -> None:
    """Raises ChatFileError for a record that must not be left out."""
    assert one.broken is not None
    long = one.broken.kind == "too long"
    if (rules.on_too_long if long else rules.on_broken) == "error":
        key = 'on_too_long = "cut" or "skip"' if long else 'on_broken = "skip"'
        raise ChatFileError(f"{one.raw.where}: {one.broken}; mend it, or set data.{key}")
