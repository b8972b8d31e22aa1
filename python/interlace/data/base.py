"""What every dataset here shares: from a recipe (which files, which answer) to lengths, layout and sample.

A dataset says by ``recipe(index, epoch)`` what sample it is, from headers alone; everything else follows, so
``lengths`` cannot drift from the decoded truth. A sample's media are decoded by whoever first asks for their data, so
ranks agree on a sequence of which each decodes only what it runs.
"""

from __future__ import annotations

import hashlib
import logging
import textwrap
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from torch.utils.data import Dataset

from interlace.data.media import AudioSpec, DecodeError, ImageSpec, modality_of, to_tensor
from interlace.data.tokenizer import ByteTokenizer
from interlace.model.sample import IGNORE, Media, Sample

MOST_BLANK = 8  # items read as blank, and
MOST_BLANK_SHARE = 0.01  # the share of all items read, beyond both of which the data are lost rather than damaged
_COUNTING = threading.Lock()  # media are decoded by the thread that reads ahead and by those that compute
Loaded = TypeVar("Loaded")
log = logging.getLogger("interlace.data")


@dataclass(frozen=True)
class MediaRef:
    """One media item of a recipe: which encoder reads it (``modality``, its name), where it is (``source``: a path or a
    key) and the shape it decodes to."""

    modality: str
    source: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Recipe:
    """A sample before decoding: ``text`` is part of the prompt, ``answer`` is what the loss is taken on."""

    kind: str
    media: tuple[MediaRef, ...]
    language: str
    answer: str
    text: str = ""

    @property
    def takes(self) -> tuple[str, ...]:
        """The encoders of its media in order."""
        return tuple(item.modality for item in self.media)


class Reading:
    """What a dataset could not use, and items that can no longer be read."""

    def __init__(self) -> None:
        self.failures: dict[str, str] = {}
        """File -> why it could not be read. Such files are left out of every sample."""
        self.skipped: dict[str, str] = {}
        """File -> why it is left out although it is not broken (too long, too elongated, ...)."""
        self.read_items = 0
        """Items that this process has read for samples."""
        self.blank_items = 0
        """How many of these could no longer be read, so that the sample has a blank instead."""
        self.noted: list[tuple[str, str]] | None = None
        """Where a producer notes what it lost (source, why), for the trainer to count; None: this is the trainer."""

    def read_or_blank(self, source: str, load: Callable[[], Loaded], blank: Callable[[], Loaded]) -> Loaded:
        """What `load` makes of `source`. Files were verified before; one that fails all the same (a disk fault, a
        deleted file) must not change the sequence, which other ranks cannot see: it is reported, counted and read as
        `blank`.

        Raises DecodeError when that happens too often: samples would teach answers to nothing.
        """
        with _COUNTING:
            self.read_items += 1
        try:
            return load()
        except (DecodeError, OSError) as error:
            self.lost(source, str(error))
            return blank()

    def lost(self, source: str, why: str) -> None:
        """Counts one item that could no longer be read. Raises DecodeError when these are too many."""
        with _COUNTING:
            self.blank_items += 1
            if self.noted is not None:
                self.noted.append((source, why))
                return
            first = source not in self.failures
            self.failures[source] = f"failed after it was verified: {why}"
            lost, read = self.blank_items, self.read_items
        if first:
            log.error("%s can no longer be read, blank used instead: %s", source, why)
        if lost > max(MOST_BLANK, MOST_BLANK_SHARE * read):
            raise DecodeError(
                f"{lost} of {read} items that were verified before the run can no longer be read, the last "
                f"{source}: {why}; bring the files back and go on with --resume"
            )

    def took(self, read: int, lost: Iterable[tuple[str, str]]) -> None:
        """Counts what a producer has read for this process, and what of it is blank (source, why).

        Raises DecodeError as `read_or_blank` does."""
        with _COUNTING:
            self.read_items += read
        for source, why in lost:
            self.lost(source, why)


class MultimodalDataset(Dataset[Sample], Reading, ABC):
    """Base of the datasets: map-style, yields uncollated samples, deterministic per (seed, epoch, index).

    ``tokens``: encoder -> function from an item's shape to its LLM tokens (ModalityModule.tokens); its keys are the
    encoders that the model has. ``specs``: encoder -> how its files become tensors, hence whether it sees or hears. A
    picture is an item of every encoder that sees, one after the other. Raises ValueError for an encoder without a spec
    or a placeholder.
    """

    name = "dataset"
    varies = True
    """Whether a sample's media may be others in another epoch."""

    def __init__(
        self,
        *,
        tokens: Mapping[str, Callable[[tuple[int, ...]], int]],
        specs: Mapping[str, ImageSpec | AudioSpec],
        split: str = "train",
        seed: int = 0,
        tokenizer: ByteTokenizer | None = None,
    ) -> None:
        if split not in ("train", "heldout"):
            raise ValueError(f'split must be "train" or "heldout", not {split!r}')
        self.tokenizer = tokenizer or ByteTokenizer()
        for modality in tokens:
            if modality not in specs or modality not in self.tokenizer.placeholders:
                raise ValueError(f"the data has no modality {modality!r}; it has {', '.join(specs)}")
        self.tokens = dict(tokens)
        self.specs = dict(specs)
        self.split = split
        self.seed = seed
        self.epoch = 0
        Reading.__init__(self)
        self.totals: dict[str, int] = {}
        """Kind of file ("pictures", "clips", "captions") -> how many there are, the broken ones included."""
        self._token_counts: dict[tuple[str, tuple[int, ...]], int] = {}

    def encoders(self, modality: str) -> list[str]:
        """The model's encoders of files of "vision" or "audio"."""
        return [name for name in self.tokens if modality_of(self.specs[name]) == modality]

    def __getstate__(self) -> dict[str, Any]:
        # Another process gets what the encoders have said of shapes so far, and not their weights.
        counts: dict[str, dict[tuple[int, ...], int]] = {name: {} for name in self.tokens}
        for (name, shape), count in self._token_counts.items():
            counts[name][shape] = count
        return {**self.__dict__, "tokens": {name: said.__getitem__ for name, said in counts.items()}}

    # What a dataset defines -------------------------------------------------------------------------------

    @abstractmethod
    def __len__(self) -> int:
        """Samples per epoch."""

    @abstractmethod
    def recipe(self, index: int, epoch: int | None = None) -> Recipe:
        """What sample ``index`` of ``epoch`` (default: the current one) is, without decoding. Raises IndexError."""

    @abstractmethod
    def read(self, item: MediaRef) -> np.ndarray:
        """The decoded item, compact (uint8 or float16). Raises DecodeError."""

    # What follows from it ---------------------------------------------------------------------------------

    def kind(self, index: int) -> str:
        """The kind of a sample of epoch 0."""
        return self.recipe(index, 0).kind

    def set_epoch(self, epoch: int) -> None:
        """The epoch that ``[i]`` and ``lengths(i)`` mean when none is given."""
        self.epoch = int(epoch)

    def count_tokens(self, modality: str, shape: tuple[int, ...]) -> int:
        """LLM tokens of an item, from ``tokens[modality]``. Raises ValueError when that gives none."""
        key = (modality, shape)
        if key not in self._token_counts:
            count = int(self.tokens[modality](shape))
            if count < 1:
                raise ValueError(f"tokens[{modality!r}]({shape}) gave {count}; every item must become at least 1 token")
            self._token_counts[key] = count
        return self._token_counts[key]

    def layout(self, index: int, epoch: int | None = None) -> list[tuple[str, int]]:
        """The sample's runs in order, [(modality or "text", tokens), ...], without decoding; one per media item."""
        return self._layout(self.recipe(index, epoch))

    def _layout(self, recipe: Recipe) -> list[tuple[str, int]]:
        media = [(m.modality, self.count_tokens(m.modality, m.shape)) for m in recipe.media]
        prompt = len(self.tokenizer.prompt((), recipe.language, recipe.text))
        after = prompt - 1 + len(self.tokenizer.encode(recipe.answer))
        return [("text", 1), *media, ("text", after)] if media else [("text", 1 + after)]

    def lengths(self, index: int, epoch: int | None = None) -> dict[str, list[int]]:
        """Token lengths per modality without decoding, for example {"text": [1, 42], "vision": [30], "audio": []}.

        Every modality of ``tokens`` is present; all lengths add up to ``len(input_ids)``. The order across
        modalities is in ``layout``.
        """
        result: dict[str, list[int]] = {"text": [], **{modality: [] for modality in self.tokens}}
        for modality, count in self.layout(index, epoch):
            result[modality].append(count)
        return result

    def questions(self) -> dict[str, list[Recipe]]:
        """Kind of sample -> all that can be asked, for kinds with one right answer of a few words: what tells whether a
        model uses the media at all."""
        return {}

    def extremes(self) -> Iterable[Recipe]:
        """Recipes among which are the longest sample and the longest prompt that any epoch can have."""
        return (self.recipe(i, 0) for i in range(len(self)))

    def longest(self) -> tuple[int, int]:
        """Tokens of the longest sample, and of the longest prompt (sample without its answer), in any epoch."""
        sample = prompt = 0
        for recipe in self.extremes():
            tokens = sum(count for _, count in self._layout(recipe))
            sample = max(sample, tokens)
            prompt = max(prompt, tokens - len(self.tokenizer.encode(recipe.answer)))
        return sample, prompt

    def answer(self, index: int, epoch: int | None = None) -> list[int]:
        """The target tokens of a sample, end token included."""
        return [*self.tokenizer.encode(self.recipe(index, epoch).answer), self.tokenizer.EOS]

    def __getitem__(self, index: int) -> Sample:
        return self.sample(index)

    def sample(self, index: int, epoch: int | None = None) -> Sample:
        """Sample ``index`` of ``epoch`` (default: the current one); its media are decoded when somebody reads them."""
        return self.sample_of(self.recipe(index, epoch))

    def asked(self, question: Recipe, shown: Recipe | None = None) -> Sample:
        """The sample of a question, with the media of the question `shown` in the place of its own."""
        return self.sample_of(question if shown is None else replace(question, media=shown.media))

    def sample_of(self, recipe: Recipe) -> Sample:
        """The sample that a recipe describes."""
        media: dict[str, list[Media]] = {}
        runs = []
        for item in recipe.media:
            count = self.count_tokens(item.modality, item.shape)
            media.setdefault(item.modality, []).append(Media(item.shape, count, load=partial(self._data, item)))
            runs.append((item.modality, count))
        prompt = self.tokenizer.prompt(runs, recipe.language, recipe.text)
        tokens = torch.tensor([*prompt, *self.tokenizer.encode(recipe.answer), self.tokenizer.EOS])
        labels = tokens[1:].clone()
        labels[: len(prompt) - 1] = IGNORE
        sources = " + ".join(item.source for item in recipe.media)
        return Sample(tokens[:-1], labels, media, f"{recipe.kind} [{recipe.language}] {sources}")

    def _data(self, item: MediaRef) -> torch.Tensor:
        """The item's input tensor; see `Reading.read_or_blank`."""
        spec = self.specs[item.modality]
        return self.read_or_blank(
            item.source, lambda: to_tensor(self.read(item), spec), lambda: torch.zeros(item.shape)
        )

    def fingerprint(self) -> str:
        """A hash of everything that determines the sample sequence: equal on all ranks, or they would drift apart."""
        parts = [self.name, self.split, self.seed, len(self), self.tokenizer.vocab_size, sorted(self.tokens)]
        picks = [self.recipe(i, 0) for i in range(0, len(self), max(1, len(self) // 64))]
        return hashlib.sha256(repr((parts, self.specs, picks)).encode()).hexdigest()[:16]

    def report(self) -> str:
        """One line on what was left out: how many files cannot be decoded, with an example; counts of the skipped."""
        if not self.failures and not self.skipped:
            return f"{self.name}/{self.split}: every file could be used"
        broken: dict[str, list[str]] = {}
        for path in sorted(self.failures):
            broken.setdefault(kind_of_file(path), []).append(path)
        parts = []
        for kind, paths in broken.items():
            of = f" of {self.totals[kind]:,}" if kind in self.totals else ""
            reason = textwrap.shorten(self.failures[paths[0]], 120, placeholder=" ...")
            parts.append(f"{len(paths):,}{of} {kind} cannot be decoded, e.g. {paths[0]} ({reason})")
        reasons: dict[str, int] = {}
        for reason in self.skipped.values():
            reasons[reason] = reasons.get(reason, 0) + 1
        parts += [f"{n:,} skipped ({reason})" for reason, n in sorted(reasons.items(), key=lambda x: -x[1])]
        return f"{self.name}/{self.split}: {'; '.join(parts)}"

    def listing(self) -> str:
        """Every file that was left out with its reason, one a line, the broken ones first."""
        lines = [f"cannot be decoded: {path}: {' '.join(why.split())}" for path, why in sorted(self.failures.items())]
        lines += [f"skipped: {path}: {why}" for path, why in sorted(self.skipped.items())]
        return "".join(f"{line}\n" for line in lines)


def kind_of_file(path: str) -> str:
    """What the name of a file says that it holds, in the plural."""
    ending = path.rpartition(".")[2].lower()
    return {"png": "pictures", "svg": "pictures", "ogg": "clips", "wav": "clips", "txt": "captions"}.get(
        ending, "files"
    )
