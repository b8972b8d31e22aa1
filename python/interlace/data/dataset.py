"""Datasets with random access: the methods that the trainer calls, and what a class of the user is given."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol

import numpy as np
from torch.utils.data import Dataset

from interlace.modalities.base import Spec
from interlace.model.sample import IGNORE, Sample


class Tokenizer(Protocol):
    """Tokenizer of a run: bytes, or that of the model's folder."""

    vocab_size: int
    EOS: int
    """Token that ends an answer."""
    placeholders: dict[str, int]
    """Encoder -> token that stands for its media in the text; empty for a whole checkpoint."""

    def encode(self, text: str) -> list[int]:
        """Tokens of `text`, without special ones."""

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """Text of `ids`."""


@dataclass(frozen=True)
class DatasetSetup:
    """What a class of the user is made for: model, tokenizer and the keys of [data] that it may read.

    tokenizer: of the run. placeholders: encoder -> token (of some whole checkpoints several) for each position of an
    item. tokens: encoder -> function (shape of an item, about) -> number of positions. specs: encoder -> preprocessing
    of its files, for `load_image` and `load_audio`; empty for a whole checkpoint, whose processor is `processor`.
    max_tokens: most tokens of a sample, or of a row with ``data.pack``; None: no limit.
    seed: ``run.seed``. held_out, train, validation: as in [data], files as absolute paths. cache: folder for files.
    """

    tokenizer: Tokenizer
    placeholders: Mapping[str, int | Sequence[int]]
    tokens: Mapping[str, Callable[..., int]]
    specs: Mapping[str, Spec]
    processor: Any
    max_tokens: int | None
    seed: int
    held_out: float
    train: tuple[str, ...]
    validation: tuple[str, ...]
    cache: Path


@dataclass(frozen=True)
class Question:
    """A sample with a question: its index in the dataset, its first answer, the kinds of its media in order."""

    index: int
    answer: str
    takes: tuple[str, ...]


class SampleDataset(Dataset[Sample], ABC):
    """Samples with random access: one split of the data. Every rank makes the same dataset.

    A class of the user, ``data.dataset = "package.module:Class"``, is made once per split, as
    ``Class("train", setup, **options)`` and ``Class("heldout", setup, **options)``. setup: a `DatasetSetup`. options:
    ``data.options``. It defines `__len__`, `sample` and `fingerprint`. The other methods have defaults.

    Workers have a copy, so `pickle` must support the dataset and the functions that load its media.
    """

    name: str = "dataset"
    """Name in reports."""
    varies: bool = True
    """True if a sample may differ between epochs. False: decoded media are kept for the next epoch."""
    loads_together: ClassVar[bool] = False
    """True if decoding one item of a sample decodes all of them."""
    unit: ClassVar[Literal["token", "byte"]] = "token"
    """Unit of the text, for the names of the baselines."""
    read_items: int = 0
    """Number of items that this process has read for samples, if the dataset counts them."""
    blank_items: int = 0
    """Number of these that became unreadable and were replaced by blanks."""

    @abstractmethod
    def __len__(self) -> int:
        """Number of samples per epoch."""

    @abstractmethod
    def sample(self, index: int, epoch: int | None = None) -> Sample:
        """Sample `index` of `epoch`, with media that are decoded on first access (`Media.load`)."""

    @abstractmethod
    def fingerprint(self) -> str:
        """A hash of everything that determines the samples: equal on all ranks, and in a resumed run."""

    # Defaults --------------------------------------------------------------------------------------------

    def __getitem__(self, index: int) -> Sample:
        return self.sample(index)

    @cached_property
    def token_lengths(self) -> np.ndarray:
        """int64 [n], tokens of each sample, in every epoch. The default makes all samples: override it for large
        data."""
        return np.array([len(self.sample(index, 0)) for index in range(len(self))], np.int64)

    def lengths(self, index: int, epoch: int | None = None) -> dict[str, list[int]]:
        """Tokens of a sample per modality without decoding, e.g. {"text": [17], "vision": [30, 30]}: one entry per item
        of an encoder, in order, and one for all text."""
        sample = self.sample(index, 0 if epoch is None else epoch)
        media = {name: [item.tokens for item in items] for name, items in sample.media.items()}
        return {"text": [len(sample) - sum(map(sum, media.values()))], **media}

    def answer(self, index: int, epoch: int | None = None) -> list[int]:
        """The tokens of a sample that have a loss."""
        labels = self.sample(index, 0 if epoch is None else epoch).labels
        return [int(token) for token in labels[labels != IGNORE]]

    def kind(self, index: int) -> str:
        """Kind of a sample, of which reports show some each. Default: its encoders, or "text"."""
        return "+".join(sorted(name for name, items in self.sample(index, 0).media.items() if items)) or "text"

    def questions(self) -> Mapping[str, Sequence[Any]]:
        """Kind -> its questions, for kinds with one right answer of a few words (`Question`). Their answers are counted
        at the end of a run. Default: none."""
        return {}

    def asked(self, question: Any, shown: Any = None) -> Sample:
        """The sample of a question; the media of the question `shown` replace its own. Raises ValueError if they take
        other numbers of tokens."""
        sample = self.sample(question.index, 0)
        if shown is None:
            return sample
        media = self.sample(shown.index, 0).media
        before, after = ({name: [i.tokens for i in items] for name, items in m.items()} for m in (sample.media, media))
        if before != after:
            raise ValueError(f"the other media take {after} tokens, those of the question {before}")
        return replace(sample, media=media)

    def report(self) -> str:
        """One line about data left out."""
        return f"{self.name}: every sample could be used"

    def listing(self) -> str:
        """What was left out, one line each with the reason."""
        return ""


__all__ = ["DatasetSetup", "Question", "SampleDataset", "Tokenizer"]
