"""Index of the stamps package, read once without decoding and saved as JSON.

A stamp is one file stem, for example ``animals/frog``: its pictures (``.svg``, ``.png``), its captions (``.txt``:
English on the first line, then ``fr.utf8=...``) and its spoken descriptions (``_desc.ogg`` is English,
``_desc_fr.ogg`` French; a few are ``.wav``). In ``tuxpaint-stamps-default`` 2022.06.04 that is 952 stamps, 950 with a
picture (248 SVG, 83 of them also as PNG), 952 captions in up to 78 languages, 7,305 usable clips in 13 languages,
0.16-19.8 s long, 5-48 kHz, 1-2 channels. Special cases handled here: ``_mirror`` pictures (left out: the same
stamp again), ``_desc_da.ogg.ogg``, sound effects without ``_desc`` (left out), clips whose stamp or caption is missing.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from pydantic import TypeAdapter

from interlace._files import write_whole
from interlace.data.builtin.fetch import made_once
from interlace.modalities.audio import clip_info
from interlace.modalities.errors import DecodeError
from interlace.modalities.image import image_size

log = logging.getLogger("interlace.data")
FORMAT = 1  # increase when the meaning of the JSON changes; older indexes are then rebuilt


@dataclass(frozen=True)
class ImageFile:
    """A picture: path relative to the index's root, size in pixels."""

    path: str
    width: float
    height: float


@dataclass(frozen=True)
class Clip:
    """A spoken description: path relative to the index's root, language, sample rate in Hz, samples."""

    path: str
    language: str
    rate: int
    frames: int

    @property
    def seconds(self) -> float:
        return self.frames / self.rate


@dataclass
class Stamp:
    """One stamp. ``images`` in order of preference; ``captions`` and ``clips`` by language ("en", "pt_BR", ...).

    ``group``: stamps that share a file byte for byte (an outlined and a filled letter have one recording) share
    their group, and a split keeps groups together.
    """

    key: str
    images: list[ImageFile] = field(default_factory=list)
    captions: dict[str, str] = field(default_factory=dict)
    clips: dict[str, Clip] = field(default_factory=dict)
    group: str = ""


@dataclass
class StampIndex:
    """All stamps under ``root``. ``failures``: file -> reason (broken). ``skipped``: file -> (reason, language or "")
    for intact files that no sample can use."""

    root: Path
    signature: str
    stamps: list[Stamp]
    failures: dict[str, str] = field(default_factory=dict)
    skipped: dict[str, tuple[str, str]] = field(default_factory=dict)

    def save(self, path: Path) -> None:
        """Writes the JSON atomically."""
        record = {"format": FORMAT} | asdict(self)
        del record["root"]
        write_whole(path, json.dumps(record, ensure_ascii=False, separators=(",", ":")))

    @classmethod
    def load(cls, path: Path, root: Path, signature: str) -> StampIndex | None:
        """The saved index, or None if it is missing, torn, of another format or of other files."""
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
            if record["format"] != FORMAT or record["signature"] != signature:
                return None
            return TypeAdapter(cls).validate_python(record | {"root": root})
        except (OSError, ValueError, KeyError, TypeError):
            return None


def load_index(root: str | Path, cache: str | Path | None = None) -> StampIndex:
    """The index of the stamps folder ``root``, from ``cache`` (default: next to ``root``) or built and saved.

    The saved index is used only for exactly the same files (names, sizes and times), so files damaged later
    are detected. Raises FileNotFoundError when ``root`` is not a folder, ValueError when it has no stamps.
    """
    root = Path(root)
    if not root.is_dir():
        raise FileNotFoundError(f"{root}: no such folder; fetch the stamps first or give the folder that holds them")
    files = sorted(_walk(root))
    signature = hashlib.sha256(repr((FORMAT, files)).encode()).hexdigest()[:16]
    path = (Path(cache) if cache is not None else root.parent) / "index.json"

    def make() -> None:
        log.info("reading the headers of %d files in %s", len(files), root)
        build_index(root, [name for name, _, _ in files], signature).save(path)

    index = made_once(path.with_suffix(".lock"), 600, lambda: StampIndex.load(path, root, signature), make)
    if index is None:
        raise OSError(f"{path}: was written and cannot be read; is the disk full?")
    if not index.stamps:
        fetched = (root.parent / "complete.json").exists()
        remedy = f"; remove {root.parent} and it is fetched again" if fetched else ""
        raise ValueError(
            f"{root}: holds no captioned stamps (.txt files beside .png, .svg or _desc_*.ogg files){remedy}"
        )
    return index


def _walk(folder: Path, prefix: str = "") -> Iterable[tuple[str, int, int]]:
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir():
                yield from _walk(Path(entry.path), f"{prefix}{entry.name}/")
            else:
                stat = entry.stat()
                yield prefix + entry.name, stat.st_size, stat.st_mtime_ns


_CLIP = re.compile(r"(?P<stem>.+)_desc(?:_(?P<language>[a-z]{2,3}(?:_[A-Z]{2})?(?:@\w+)?))?\.(?:ogg|wav)(?:\.ogg)?$")
_CAPTION = re.compile(r"(?P<language>[a-z]{2,3}(?:_[A-Z]{2})?(?:@\w+)?)\.utf8=(?P<text>.*)$")


def build_index(root: Path, files: list[str], signature: str = "") -> StampIndex:
    """Reads every header under ``root`` (a few seconds for the real package). Broken files go to ``failures``."""
    index = StampIndex(root, signature, [])
    stamps: dict[str, Stamp] = {}
    for name in files:
        if name.endswith(".txt"):
            captions = _read_captions(root, name, index)
            if captions:
                stamps[name[:-4]] = Stamp(name[:-4], captions=captions)
    for name in files:
        stem, _, suffix = name.rpartition(".")
        try:
            if suffix in ("png", "svg"):
                if stem in stamps:
                    width, height = image_size(root / name)
                    stamps[stem].images.append(ImageFile(name, width, height))
                elif not (stem.endswith("_mirror") and stem[: -len("_mirror")] in stamps):
                    index.skipped[name] = ("no caption", "")
            elif (match := _CLIP.fullmatch(name)) is not None:
                language = match["language"] or "en"
                stamp = stamps.get(match["stem"])
                if stamp is None or language not in stamp.captions:
                    index.skipped[name] = ("no caption in its language", language)
                elif language not in stamp.clips:
                    frames, rate = clip_info(root / name)
                    stamp.clips[language] = Clip(name, language, rate, frames)
        except (DecodeError, OSError, ValueError) as error:
            index.failures[name] = _reason(error, root / name)
    for stamp in stamps.values():
        stamp.images.sort(key=lambda image: not image.path.endswith(".svg"))  # preferred: renders at any size
    index.stamps = [stamps[key] for key in sorted(stamps)]
    _group(index)
    return index


def _read_captions(root: Path, name: str, index: StampIndex) -> dict[str, str]:
    try:
        lines = (root / name).read_bytes().decode("utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        index.failures[name] = _reason(error, root / name)
        return {}
    captions = {"en": lines[0].strip()} if lines and lines[0].strip() else {}
    for line in lines[1:]:
        match = _CAPTION.fullmatch(line.strip())
        if match is not None and match["text"].strip():
            captions.setdefault(match["language"], match["text"].strip())
    if not captions:
        index.skipped[name] = ("no caption in it", "")
    return captions


def _reason(error: Exception, path: Path) -> str:
    """The error's message without the absolute path, which differs between machines."""
    return str(error).replace(f"{path}: ", "").replace(str(path), path.name) or type(error).__name__


def _group(index: StampIndex) -> None:
    """Joins stamps that share a picture or a recording byte for byte (only files of equal size are compared)."""
    owners: dict[str, Stamp] = {}
    sizes: dict[int, list[str]] = defaultdict(list)
    for stamp in index.stamps:
        for path in [i.path for i in stamp.images] + [c.path for c in stamp.clips.values()]:
            owners[path] = stamp
            sizes[(index.root / path).stat().st_size].append(path)
    members = {stamp.key: {stamp.key} for stamp in index.stamps}
    for paths in sizes.values():
        seen: dict[bytes, str] = {}
        for path in paths if len(paths) > 1 else []:
            digest = hashlib.blake2b((index.root / path).read_bytes(), digest_size=16).digest()
            key = owners[path].key
            joined = members[key] | members[seen.setdefault(digest, key)]
            members |= dict.fromkeys(joined, joined)
    for stamp in index.stamps:
        stamp.group = min(members[stamp.key])


def is_held_out(stamp: Stamp, fraction: float) -> bool:
    """True if a stamp is held out, by a hash of its group: independent of seed, order, language, kind and file
    system."""
    value = int.from_bytes(hashlib.sha256(stamp.group.encode()).digest()[:8], "big")
    return value < fraction * 2**64
