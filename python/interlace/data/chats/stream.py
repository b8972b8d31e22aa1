"""User chats as a stream: records are read in order, without preparing or counting them first.

A shard is a piece of a data file (`records.pieces`): a tar, a whole file, or the JSON lines that begin in it. The
rank that reads a shard parses its records and counts their tokens without pixels. It keeps, cuts or leaves them out by
the same rules as for prepared chats (`store`).
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from interlace.data.builtin.fetch import cache_folder
from interlace.data.chats.dataset import chat_sample
from interlace.data.chats.encoding.tokens import ChatFormat, Encoded
from interlace.data.chats.examine import examine_records
from interlace.data.chats.files import records as chats_files
from interlace.data.chats.files.records import ChatFileError, Raw
from interlace.data.chats.files.shapes import Chat
from interlace.data.chats.files.sources import Rules
from interlace.data.chats.store import refuse
from interlace.data.reading import COUNTING
from interlace.data.streams.base import SampleStream
from interlace.modalities.errors import DecodeError
from interlace.model.sample import Sample

log = logging.getLogger("interlace.data")


class ChatStream(SampleStream):
    """The chats of `files` in file order. cache: folder for pictures extracted from tables.

    Raises ChatFileError for files that cannot be read, and for records that must not be left out (see `Rules`).
    """

    name = "chats"

    def __init__(self, files: Sequence[str | Path], chats: ChatFormat, rules: Rules, cache: str | Path | None = None):
        self.files, self.format, self.rules = chats_files.find(files), chats, replace(rules, decode=False)
        self.media = cache_folder(cache) / "chats" / "media"
        self.pieces = [piece for path in self.files for piece in chats_files.pieces(path)]
        self._fingerprint = ""
        self.lost: dict[str, str] = {}
        """Location -> reason, for each record that this process has read and left out."""
        self.read_items = 0
        """Number of samples whose media this process has read. Undecodable samples are left out, never blank."""

    @property
    def shards(self) -> int:
        return len(self.pieces)

    def fingerprint(self) -> str:
        if not self._fingerprint:  # cached: the state of the data at the start of the run
            files = [chats_files.signature(path) for path in self.files]
            identity = [files, chats_files.tastes(self.files), self.format.signature(), repr(self.rules)]
            self._fingerprint = hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:16]
        return self._fingerprint

    def read(self, shard: int, epoch: int) -> Iterator[Sample]:
        for record in examine_records(self._records(shard), self.format, self.rules):
            if record.broken is not None:
                refuse(record, self.rules)
                self._lose(record.raw.where, f"{record.broken.kind}: {record.broken}")
                continue
            assert record.encoded is not None and record.chat is not None
            yield chat_sample(
                record.encoded, partial(self._load, record.raw.where, record.chat, record.encoded), record.raw.where
            )

    def _records(self, shard: int) -> Iterator[Raw]:
        piece = self.pieces[shard]
        for raw, _ in chats_files.numbered(piece, self.media, self.rules.prompt):
            if raw is not None:  # lines before the piece are not counted
                yield replace(raw, number=0) if piece.end >= 0 else raw

    def _load(self, where: str, chat: Chat, encoded: Encoded) -> list[torch.Tensor]:
        try:
            loaded = self.format.load(chat, encoded)
        except (DecodeError, ValueError, OSError) as error:
            raise DecodeError(f"{where}: {error}") from None
        if [tuple(tensor.shape) for tensor in loaded] != [item.shape for item in encoded.items]:
            raise DecodeError(f"{where}: its media have other sizes than their headers say")
        self.took()
        return loaded

    def took(self) -> None:
        """Counts a sample whose media were read, here or by a worker process."""
        with COUNTING:
            self.read_items += 1

    def left_out(self, sample: Sample, error: DecodeError) -> None:
        if self.rules.on_broken == "error":
            raise ChatFileError(f'{error}; mend it, or set data.on_broken = "skip"')
        self._lose(sample.name, f"media: {error}")

    def _lose(self, where: str, why: str) -> None:
        with COUNTING:
            first = where not in self.lost
            self.lost[where] = why
        if first:
            log.warning("%s is left out: %s", where, why)

    def report(self) -> str:
        """One line about what was left out so far."""
        return f"{self.name}/train, a stream: {len(self.lost):,} records left out so far by this rank"

    def listing(self) -> str:
        """Everything left out so far, one per line."""
        return "".join(f"{where}: {' '.join(why.split())}\n" for where, why in sorted(self.lost.items()))
