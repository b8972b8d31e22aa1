"""Somebody's own chats as a dataset: samples from prepared files (`chats_store`), their media read when asked for.

A sample's media are read together, by whoever first asks for one of them: a processor takes all pictures of a chat at
once. The record and the sizes are compared with what was prepared, so a data file that was written anew and a picture
that has become another's size are noticed; a picture replaced by one of the same size in a run is not.
"""

from __future__ import annotations

import hashlib
import textwrap
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from interlace.data import chats_files
from interlace.data.base import Reading
from interlace.data.chats_store import ChatStore, Rules, prepare
from interlace.data.chats_tokens import ChatFormat, Encoded
from interlace.data.fetch import cache_folder
from interlace.data.media import DecodeError
from interlace.model.sample import IGNORE, Media, Sample


class ChatDataset(Dataset[Sample], Reading):
    """The samples of a store at the places `picks`; the same in every epoch (the loader shuffles)."""

    name = "chats"

    def __init__(self, store: ChatStore, chats: ChatFormat, picks: np.ndarray, split: str) -> None:
        Reading.__init__(self)
        self.store, self.format, self.picks, self.split = store, chats, picks, split
        for where, kind, reason in store.left_out:
            (self.skipped if kind == "too long" else self.failures)[where] = f"{kind}: {reason}"

    def __len__(self) -> int:
        return len(self.picks)

    @property
    def token_lengths(self) -> np.ndarray:
        """int64 [n], tokens of each sample."""
        return self.store.lengths[self.picks]

    def set_epoch(self, epoch: int) -> None:
        """All epochs are alike."""

    def __getitem__(self, index: int) -> Sample:
        return self.sample(index)

    def sample(self, index: int, epoch: int | None = None) -> Sample:
        """Sample `index`; its media are decoded when somebody reads them. Raises IndexError."""
        place = int(self.picks[index])
        encoded = self.store.encoded(place)
        ids = torch.tensor(encoded.ids, dtype=torch.int64)
        labels = torch.where(torch.tensor(encoded.targets), ids, IGNORE)
        media: dict[str, list[Media]] = {}
        where = self.store.where(place)
        # Counted once a sample, however many tiles its pictures have.
        load = partial(self.read_or_blank, where, partial(self._load, place, encoded), partial(_blank, encoded))
        together = _Together(load)
        for number, item in enumerate(encoded.items):
            data = partial(together.item, number)
            media.setdefault(item.encoder, []).append(Media(item.shape, item.tokens, load=data, about=item.about))
        return Sample.from_unshifted(ids, labels, media, where)

    def _load(self, place: int, encoded: Encoded) -> list[torch.Tensor]:
        """The data of a sample's items. Raises DecodeError."""
        try:
            loaded = self.format.load(self.store.chat(place), encoded)
        except DecodeError:
            raise
        except (ValueError, OSError) as error:  # a broken record, or what a processor thinks of a file that has changed
            raise DecodeError(f"{self.store.where(place)}: {error}") from None
        shapes = [tuple(tensor.shape) for tensor in loaded]
        if shapes != [item.shape for item in encoded.items]:
            raise DecodeError(f"{self.store.where(place)}: its media have other sizes than when they were prepared")
        return loaded

    def answer(self, index: int, epoch: int | None = None) -> list[int]:
        """The tokens of a sample that are learnt."""
        encoded = self.store.encoded(int(self.picks[index]))
        return [token for token, learnt in zip(encoded.ids, encoded.targets, strict=True) if learnt]

    def kind(self, index: int) -> str:
        """What a sample is of: "text", or its encoders."""
        return "+".join(sorted({item.encoder for item in self.store.encoded(int(self.picks[index])).items})) or "text"

    def questions(self) -> dict[str, list[Any]]:
        """None that are known to have one right answer."""
        return {}

    def longest(self) -> tuple[int, int]:
        """Tokens of the longest sample, and a bound of the longest prompt."""
        most = int(self.token_lengths.max())
        return most, most

    def fingerprint(self) -> str:
        """A hash of everything that determines the sample sequence: equal on all ranks, or they would drift apart."""
        return hashlib.sha256(repr((self.store.fingerprint, self.split, self.picks.tolist())).encode()).hexdigest()[:16]

    def report(self) -> str:
        """One line on what was left out and what was cut."""
        total = len(self.store) + len(self.store.left_out)
        parts = []
        if self.store.left_out:
            kinds = Counter(kind for _, kind, _ in self.store.left_out).most_common()
            where, _, reason = self.store.left_out[0]
            counted = ", ".join(f"{count:,} {kind}" for kind, count in kinds)
            example = textwrap.shorten(f"{where}: {reason}", 160, placeholder=" ...")
            parts.append(f"{len(self.store.left_out):,} of {total:,} samples left out ({counted}), e.g. {example}")
        if self.store.cut:
            parts.append(f"{len(self.store.cut):,} cut to {self.store.rules.max_tokens:,} tokens")
        parts += [f"{path}: {why}" for path, why in self.failures.items() if "failed after" in why][:1]
        return f"{self.name}/{self.split}: {'; '.join(parts) or 'every sample could be used'}"

    def listing(self) -> str:
        """Every sample that was left out or cut, one a line with file, line and reason."""
        lines = [f"{where}: {kind}: {' '.join(reason.split())}" for where, kind, reason in self.store.left_out]
        lines += [f"{where}: cut to {self.store.rules.max_tokens} tokens" for where in self.store.cut]
        return "".join(f"{line}\n" for line in lines)


class _Together:
    """The items of one sample, which whoever first asks for one loads all at once."""

    def __init__(self, load: Callable[[], list[torch.Tensor]]) -> None:
        self._load, self._lock = load, threading.Lock()
        self._loaded: dict[int, torch.Tensor] = {}

    def item(self, number: int) -> torch.Tensor:
        """The data of an item, handed out once: Media keeps it from there on. Raises DecodeError."""
        with self._lock:
            if number not in self._loaded:
                self._loaded = dict(enumerate(self._load()))
            return self._loaded.pop(number)


def _blank(encoded: Encoded) -> list[torch.Tensor]:
    return [torch.zeros(item.shape) for item in encoded.items]


def load_chats(
    train: Sequence[str | Path],
    validation: Sequence[str | Path],
    chats: ChatFormat,
    rules: Rules,
    *,
    held_out: float = 0.1,
    cache: str | Path | None = None,
) -> tuple[ChatDataset, ChatDataset]:
    """The train and the validation dataset of these files, prepared in `cache` if they are not there yet.

    Without validation files `held_out` of the training records are kept for it, by a hash of each, so equal records
    stay together. Raises ChatFileError and ValueError for files, templates and processors that cannot be used.
    """
    folder = cache_folder(cache)
    if not train:
        raise chats_files.ChatFileError("data.train names no file; give the files to train on")
    found = prepare(chats_files.find(train), chats, rules, folder)
    every = np.arange(len(found))
    if validation:
        other = prepare(chats_files.find(validation), chats, rules, folder)
        picks = np.arange(len(other))
        return ChatDataset(found, chats, every, "train"), ChatDataset(other, chats, picks, "heldout")
    kept = found.hashes < held_out * 2**32
    if kept.all() or not kept.any():
        raise chats_files.ChatFileError(
            f"of {len(found)} samples data.held_out = {held_out:g} keeps {int(kept.sum())} for validation, which "
            "leaves none on one side: give data.validation, more samples or another share"
        )
    return ChatDataset(found, chats, every[~kept], "train"), ChatDataset(found, chats, every[kept], "heldout")
