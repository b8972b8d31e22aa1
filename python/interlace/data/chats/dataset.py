"""User chats as a dataset: samples from prepared files (`store`), with media read on access.

A sample's media are read together at the first access to one of them: a processor takes all pictures of a chat at once.
The record and the media sizes are compared with those prepared. So a rewritten data file or a picture of a different
size is detected. A picture replaced during a run by one of the same size is not.
"""

from __future__ import annotations

import hashlib
import logging
import textwrap
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from interlace.data.builtin.fetch import cache_folder
from interlace.data.chats.encoding.tokens import ChatFormat, Encoded
from interlace.data.chats.files import records as chats_files
from interlace.data.chats.files.shapes import Chat, Part
from interlace.data.chats.files.sources import Rules
from interlace.data.chats.store import ChatStore, prepare
from interlace.data.dataset import Question, SampleDataset
from interlace.data.reading import Reading
from interlace.modalities.errors import BrokenSampleError, DecodeError
from interlace.model.sample import IGNORE, Media, Sample

SEEN = (
    "{:,} of {:,} records for validation are among those for training: a loss on them says nothing of new ones; name "
    "other files, or none, so that data.held_out keeps some"
)
log = logging.getLogger("interlace.data")


class ChatDataset(SampleDataset, Reading):
    """The samples of a store at the ascending indices `picks`; the same in every epoch (the loader shuffles)."""

    name = "chats"
    varies = False
    loads_together = True

    def __init__(self, store: ChatStore, chats: ChatFormat, picks: np.ndarray, split: str) -> None:
        Reading.__init__(self)
        self.store, self.format, self.picks, self.split = store, chats, picks, split
        self.failures |= {where: f"{kind}: {reason}" for where, kind, reason in store.left_out if kind != "too long"}
        self.reading: Reading = self
        """Counters of this dataset, or those of its mixture."""

    def __getstate__(self) -> dict[str, Any]:
        picked = np.zeros(len(self.store), bool)  # pickled as bits: 125 kB for a million samples, not 8 MB
        picked[self.picks] = True
        return {**self.__dict__, "picks": np.packbits(picked)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.picks = np.flatnonzero(np.unpackbits(self.picks, count=len(self.store)))

    def __len__(self) -> int:
        return len(self.picks)

    @property
    def token_lengths(self) -> np.ndarray:
        """int64 [n], tokens of each sample."""
        return self.store.lengths[self.picks]

    def lengths(self, index: int, epoch: int | None = None) -> dict[str, list[int]]:
        """Tokens of sample `index` per modality without decoding, e.g. {"text": [17], "vision": [30, 30]}: one entry
        per item of an encoder, in order, and one for all text. Raises IndexError."""
        place = int(self.picks[index])
        lengths: dict[str, list[int]] = {"text": [int(self.store.rows["tokens"][place])]}
        for item in self.store.line(place)["items"]:
            lengths.setdefault(item["encoder"], []).append(int(item["tokens"]))
            lengths["text"][0] -= int(item["tokens"])
        return lengths

    def media(self, index: int) -> list[Part]:
        """The media of a sample in the order of its text."""
        return self.store.chat(int(self.picks[index])).media

    def sample(self, index: int, epoch: int | None = None) -> Sample:
        """Sample `index`; its media are decoded on first access. Raises IndexError."""
        place = int(self.picks[index])
        encoded = self.store.encoded(place)
        return self._sample(place, encoded, lambda: self.store.chat(place))

    def _sample(self, place: int, encoded: Encoded, chat: Callable[[], Chat]) -> Sample:
        where = self.store.where(place)
        # Counts one read per sample, however many tiles its pictures have.
        load = partial(
            self.reading.read_or_blank, where, partial(self._load, place, encoded, chat), partial(_blank, encoded)
        )
        return chat_sample(encoded, load, where)

    def _load(self, place: int, encoded: Encoded, chat: Callable[[], Chat]) -> list[torch.Tensor]:
        """The data of a sample's items. Raises DecodeError."""
        try:
            loaded = self.format.load(chat(), encoded)
        except DecodeError:
            raise
        except (ValueError, OSError) as error:  # a broken record, or a processor's error on a changed file
            raise DecodeError(f"{self.store.where(place)}: {error}") from None
        shapes = [tuple(tensor.shape) for tensor in loaded]
        if shapes != [item.shape for item in encoded.items]:
            raise DecodeError(f"{self.store.where(place)}: its media have other sizes than when they were prepared")
        return loaded

    def prompt(self, index: int) -> tuple[Sample, Chat]:
        """The turns of a sample before its first answer, followed by the template's generation prompt. Raises
        BrokenSampleError, and DecodeError when its media are read."""
        place = int(self.picks[index])
        prompt = self.store.chat(place).prompt()
        sizes = [self.format.look(part.kind, part.path, decode=False) for part in prompt.media]
        chat, encoded = self.format.encode_prompt(prompt, sizes)
        return chat_sample(encoded, partial(self.format.load, chat, encoded), self.store.where(place)), prompt

    def answer(self, index: int, epoch: int | None = None) -> list[int]:
        """The tokens of a sample that have a loss."""
        encoded = self.store.encoded(int(self.picks[index]))
        return [token for token, learnt in zip(encoded.ids, encoded.targets, strict=True) if learnt]

    def kind(self, index: int) -> str:
        """Kind of a sample: the kind in its record, else "text" or its encoders."""
        line = self.store.line(int(self.picks[index]))
        return line["kind"] or "+".join(sorted({item["encoder"] for item in line["items"]})) or "text"

    def questions(self) -> dict[str, list[Question]]:
        """Kind -> the samples whose records name that kind: those with one right answer."""
        questions: dict[str, list[Question]] = {}
        for index, place in enumerate(self.picks.tolist()):
            kind = self.store.line(place)["kind"]
            if kind:
                takes = tuple(part.kind for part in self.store.chat(place).media)
                questions.setdefault(kind, []).append(Question(index, self._first_answer(place), takes))
        return questions

    def _first_answer(self, place: int) -> str:
        encoded = self.store.encoded(place)
        start = encoded.targets.index(True)
        end = (encoded.targets[start:] + [False]).index(False) + start
        return self.format.decode(encoded.ids[start:end])

    def asked(
        self, question: Question, shown: Question | None = None, *, media: Sequence[Part] | None = None
    ) -> Sample:
        """The sample of a question; the media of the question `shown`, or `media`, replace its own.

        Raises BrokenSampleError when these do not fit, or make it too long."""
        if media is None:
            if shown is None:
                return self.sample(question.index)
            media = self.media(shown.index)
        place = int(self.picks[question.index])
        others = iter(media)
        own = self.store.chat(place)
        turns = [
            replace(turn, parts=tuple(part if part.kind == "text" else next(others) for part in turn.parts))
            for turn in own.turns
        ]
        chat = replace(own, turns=tuple(turns))
        encoded = self.format.encode(
            chat, [self.format.look(part.kind, part.path, decode=False) for part in chat.media]
        )
        most = self.store.rules.max_tokens
        if most is not None and len(encoded.ids) > most:
            raise BrokenSampleError("too long", f"{len(encoded.ids):,} tokens with other media, at most {most:,} fit")
        return self._sample(place, encoded, lambda: chat)

    def fingerprint(self) -> str:
        """A hash of everything that determines the sample sequence. It must be equal on all ranks."""
        digest = hashlib.sha256(repr((self.store.fingerprint, self.split, len(self.picks))).encode())
        digest.update(np.ascontiguousarray(self.picks, np.int64).data)  # as raw bytes: there may be a million
        return digest.hexdigest()[:16]

    def report(self) -> str:
        """One line about samples left out or cut."""
        total = len(self.store) + len(self.store.left_out)
        parts = []
        if self.store.left_out:
            kinds = Counter(kind for _, kind, _ in self.store.left_out).most_common()
            where, _, reason = self.store.left_out[0]
            counted = ", ".join(f"{count:,} {kind}" for kind, count in kinds)
            example = textwrap.shorten(f"{where}: {reason}", 160, placeholder=" ...")
            parts.append(f"{len(self.store.left_out):,} of {total:,} samples left out ({counted}), e.g. {example}")
        if len(self.store.cut):
            parts.append(f"{len(self.store.cut):,} cut to {self.store.rules.max_tokens:,} tokens")
        parts += self.lost_lately()
        return f"{self.name}/{self.split}: {'; '.join(parts) or 'every sample could be used'}"

    def listing(self) -> str:
        """Every sample that was left out or cut, one per line with file, line and reason."""
        lines = [f"{where}: {kind}: {' '.join(reason.split())}" for where, kind, reason in self.store.left_out]
        cut = (self.store.where(place) for place in self.store.cut.tolist())
        lines += [f"{where}: cut to {self.store.rules.max_tokens} tokens" for where in cut]
        return "".join(f"{line}\n" for line in lines)


class _Together:
    """The items of one sample; the first access to one loads them all."""

    def __init__(self, load: Callable[[], list[torch.Tensor]]) -> None:
        self._load, self._lock = load, threading.Lock()
        self._loaded: dict[int, torch.Tensor] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return _Together, (self._load,)  # the other process loads for itself

    def item(self, number: int) -> torch.Tensor:
        """The data of an item, returned once: Media holds it from then on. Raises DecodeError."""
        with self._lock:
            if number not in self._loaded:
                self._loaded = dict(enumerate(self._load()))
            return self._loaded.pop(number)


def chat_sample(encoded: Encoded, load: Callable[[], list[torch.Tensor]], where: str) -> Sample:
    """The sample of a chat's tokens. load: reads the data of all items, on first access to one."""
    ids = torch.tensor(encoded.ids, dtype=torch.int64)
    labels = torch.where(torch.tensor(encoded.targets), ids, IGNORE)
    media: dict[str, list[Media]] = {}
    together = _Together(load)
    for number, item in enumerate(encoded.items):
        data = partial(together.item, number)
        media.setdefault(item.encoder, []).append(Media(item.shape, item.tokens, load=data, about=item.about))
    return Sample.from_unshifted(ids, labels, media, where)


def _blank(encoded: Encoded) -> list[torch.Tensor]:
    return [torch.zeros(item.shape) for item in encoded.items]


def whole_chats(
    files: Sequence[str | Path], chats: ChatFormat, rules: Rules, *, cache: str | Path | None = None
) -> ChatDataset:
    """All chats of these files, for measurements; errors as in `load_chats`."""
    store = prepare(chats_files.find(files), chats, rules, cache_folder(cache))
    return ChatDataset(store, chats, np.arange(len(store)), "heldout")


def load_chats(
    train: Sequence[str | Path],
    validation: Sequence[str | Path],
    chats: ChatFormat,
    rules: Rules,
    *,
    held_out: float = 0.1,
    limit: int | None = None,
    cache: str | Path | None = None,
) -> tuple[ChatDataset, ChatDataset]:
    """The train and the validation dataset of these files, prepared in `cache` unless they are there already.

    Without validation files, the fraction `held_out` of the training records is used for validation. Records are chosen
    by a hash of each. Equal records stay together; different records about the same picture may not. limit: maximum
    number of training records, also chosen by that hash: the same ones each time, and a subset of those of a higher
    limit. Raises ChatFileError and ValueError for unusable files, templates and processors.
    """
    folder = cache_folder(cache)
    if not train:
        raise chats_files.ChatFileError("data.train names no file; give the files to train on")
    store = prepare(chats_files.find(train), chats, rules, folder)
    if validation:
        other = prepare(chats_files.find(validation), chats, rules, folder)
        picks = np.arange(len(other))
        twice = int(np.isin(other.hashes, store.hashes).sum())
        if 100 * twice > len(other):  # a few are chance: a hash has 32 bits
            log.warning("%s", SEEN.format(twice, len(other)))
        return (
            ChatDataset(store, chats, train_picks(store.hashes, 0.0, limit), "train"),
            ChatDataset(other, chats, picks, "heldout"),
        )
    kept = store.hashes < held_out * 2**32
    if kept.all() or not kept.any():
        raise chats_files.ChatFileError(
            f"of {len(store)} samples data.held_out = {held_out:g} keeps {int(kept.sum())} for validation, which "
            "leaves none on one side: give data.validation, more samples or another share"
        )
    picks = train_picks(store.hashes, held_out, limit)
    return ChatDataset(store, chats, picks, "train"), ChatDataset(store, chats, np.flatnonzero(kept), "heldout")


def train_picks(hashes: np.ndarray, held_out: float, limit: int | None) -> np.ndarray:
    """int64: indices of the records to train on, by their hashes; see `load_chats`."""
    picks = np.flatnonzero(hashes >= held_out * 2**32)
    if limit is None or limit >= len(picks):
        return picks
    # Those with the smallest mixed hashes, in their order. Mixed: validation has taken the smallest hashes already, and
    # files may have been split by hash.
    mixed = (hashes[picks].astype(np.uint64) * np.uint64(0x9E3779B1)) & np.uint64(0xFFFFFFFF)
    return np.sort(picks[np.argsort(mixed, kind="stable")[:limit]])
