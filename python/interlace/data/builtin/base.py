"""Base of the built-in datasets: from a recipe (files, answer) to lengths, layout and sample.

A dataset describes each sample by ``recipe(index, epoch)``, from headers alone. Everything else follows from the
recipe, so ``lengths`` always agree with the decoded data. A sample's media are decoded on first access. So all ranks
agree on the sequence, and each decodes only the media that it needs.
"""

from __future__ import annotations

import hashlib
import logging
import textwrap
import threading
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch

from interlace.data.builtin.byte_tokenizer import ByteTokenizer
from interlace.data.dataset import SampleDataset
from interlace.modalities import encoder_of
from interlace.modalities.audio import AudioSpec
from interlace.modalities.errors import DecodeError
from interlace.modalities.image import ImageSpec
from interlace.model.sample import IGNORE, Media, Sample

MOST_BLANK = 8  # items read as blank
MOST_BLANK_SHARE = 0.01  # share of items read as blank; beyond both limits the data count as lost, not damaged
_COUNTING = threading.Lock()  # media are decoded by the prefetch thread and by compute threads
Loaded = TypeVar("Loaded")
log = logging.getLogger("interlace.data")


@dataclass(frozen=True)
class MediaRef:
    """One media item of a recipe: name of its encoder (``modality``), its location (``source``: a path or a
    key) and its shape after decoding."""

    modality: str
    source: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Recipe:
    """A sample before decoding: ``text`` is part of the prompt, ``answer`` has the loss."""

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
    """Mixin that records unusable files of a dataset, and items that became unreadable."""

    def __init__(self) -> None:
        self.failures: dict[str, str] = {}
        """File -> reason, for unreadable files. Such files are left out of every sample."""
        self.skipped: dict[str, str] = {}
        """File -> reason, for intact files that are left out (too long, too elongated, ...)."""
        self.read_items = 0
        """Number of items that this process has read for samples."""
        self.blank_items = 0
        """Number of these that became unreadable and were replaced by blanks."""
        self.noted: list[tuple[str, str]] | None = None
        """List of lost items (source, why), kept by a producer for the trainer to count; None in the trainer."""

    def read_or_blank(self, source: str, load: Callable[[], Loaded], blank: Callable[[], Loaded]) -> Loaded:
        """Result of `load`, or `blank` if the file fails. Files were verified before the run. A later failure (a disk
        fault, a deleted file) must not change the sample sequence, because other ranks do not see it. It is logged and
        counted.

        Raises DecodeError when that happens too often: the model would learn answers to blank media.
        """
        with _COUNTING:
            self.read_items += 1
        try:
            return load()
        except (DecodeError, OSError) as error:
            self.lost(source, str(error))
            return blank()

    def lost(self, source: str, why: str) -> None:
        """Counts one item that became unreadable. Raises DecodeError when there are too many."""
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
        """Counts the items that a producer has read for this process, and those of them that are blank (source, why).

        Raises DecodeError like `read_or_blank`."""
        with _COUNTING:
            self.read_items += read
        for source, why in lost:
            self.lost(source, why)


class MultimodalDataset(SampleDataset, Reading):
    """Base class of the built-in datasets: yields uncollated samples, deterministic per (seed, epoch, index).

    ``tokens``: encoder -> function from an item's shape to its LLM tokens (ModalityModule.tokens); its keys are the
    encoders of the model. ``specs``: encoder -> preprocessing of its files, which determines its modality. A picture is
    one item for each vision encoder, in order. Raises ValueError for an encoder without a spec or a placeholder.
    """

    unit = "byte"

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
        """Kind of file ("pictures", "clips", "captions") -> number of files, including broken ones."""
        self._token_counts: dict[tuple[str, tuple[int, ...]], int] = {}

    def encoders(self, modality: str) -> list[str]:
        """The model's encoders for files of "vision" or "audio"."""
        return [name for name in self.tokens if encoder_of(self.specs[name]) == modality]

    def __getstate__(self) -> dict[str, Any]:
        # Other processes get the token counts of the shapes so far, not the encoders' weights.
        counts: dict[str, dict[tuple[int, ...], int]] = {name: {} for name in self.tokens}
        for (name, shape), count in self._token_counts.items():
            counts[name][shape] = count
        return {**self.__dict__, "tokens": {name: said.__getitem__ for name, said in counts.items()}}

    # Defined by subclasses -------------------------------------------------------------------------------

    @abstractmethod
    def __len__(self) -> int:
        """Number of samples per epoch."""

    @abstractmethod
    def recipe(self, index: int, epoch: int | None = None) -> Recipe:
        """Recipe of sample ``index`` of ``epoch`` (default: the current one), without decoding. Raises IndexError."""

    @abstractmethod
    def read(self, item: MediaRef) -> np.ndarray:
        """The decoded item, compact (uint8 or float16). Raises DecodeError."""

    # Derived ---------------------------------------------------------------------------------------------

    def kind(self, index: int) -> str:
        """The kind of a sample of epoch 0."""
        return self.recipe(index, 0).kind

    def set_epoch(self, epoch: int) -> None:
        """Sets the default epoch of ``[i]`` and ``lengths(i)``."""
        self.epoch = int(epoch)

    def count_tokens(self, modality: str, shape: tuple[int, ...]) -> int:
        """Number of LLM tokens of an item, from ``tokens[modality]``. Raises ValueError if it is below 1."""
        key = (modality, shape)
        if key not in self._token_counts:
            count = int(self.tokens[modality](shape))
            if count < 1:
                raise ValueError(f"tokens[{modality!r}]({shape}) gave {count}; every item must become at least 1 token")
            self._token_counts[key] = count
        return self._token_counts[key]

    def layout(self, index: int, epoch: int | None = None) -> list[tuple[str, int]]:
        """The sample's runs in order, [(modality or "text", tokens), ...], without decoding; one run per media item."""
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

    def extremes(self) -> Iterable[Recipe]:
        """Recipes that include the longest sample and the longest prompt of any epoch."""
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

    def sample(self, index: int, epoch: int | None = None) -> Sample:
        """Sample ``index`` of ``epoch`` (default: the current one); its media are decoded on first access."""
        return self.sample_of(self.recipe(index, epoch))

    def asked(self, question: Recipe, shown: Recipe | None = None) -> Sample:
        """The sample of a question; the media of the question `shown` replace its own."""
        return self.sample_of(question if shown is None else replace(question, media=shown.media))

    def sample_of(self, recipe: Recipe) -> Sample:
        """The sample of a recipe."""
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
        return self.read_or_blank(item.source, lambda: spec.tensor(self.read(item)), lambda: torch.zeros(item.shape))

    def fingerprint(self) -> str:
        """A hash of everything that determines the sample sequence. It must be equal on all ranks."""
        parts = [self.name, self.split, self.seed, len(self), self.tokenizer.vocab_size, sorted(self.tokens)]
        picks = [self.recipe(i, 0) for i in range(0, len(self), max(1, len(self) // 64))]
        return hashlib.sha256(repr((parts, self.specs, picks)).encode()).hexdigest()[:16]

    def report(self) -> str:
        """One line about files left out: the number that cannot be decoded, with an example, and counts of the
        skipped."""
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
        """Every file that was left out, one per line with its reason, broken ones first."""
        lines = [f"cannot be decoded: {path}: {' '.join(why.split())}" for path, why in sorted(self.failures.items())]
        lines += [f"skipped: {path}: {why}" for path, why in sorted(self.skipped.items())]
        return "".join(f"{line}\n" for line in lines)


def kind_of_file(path: str) -> str:
    """Kind of content by a file's name, in the plural."""
    ending = path.rpartition(".")[2].lower()
    return {"png": "pictures", "svg": "pictures", "ogg": "clips", "wav": "clips", "txt": "captions"}.get(
        ending, "files"
    )
