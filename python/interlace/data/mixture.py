"""Mixture: several sources as one dataset, each with its share of the draws.

A weight is a share of the samples drawn (default), or of their tokens. Weights are relative to each other. Shares of
samples need no model, hold exactly in every epoch, and do not depend on the tokenizer. Shares of tokens describe what
the model reads when sources differ in length.

An epoch of the mixture has as many draws as the sources have samples in total. Each source contributes its share. It
goes through its own samples repeatedly, each pass in a new order, and continues in the next epoch at the same position.
So a source with a large weight is seen several times per epoch, and one with a small weight takes several epochs. No
sample of a source repeats before all others of the source were drawn. Everything follows from (seed, epoch): the
position in the epoch is the only state, on any number of ranks. A single source is a permutation of its samples per
epoch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Literal, TypeVar

import numpy as np
from numpy.typing import ArrayLike

from interlace.data.chats.dataset import ChatDataset
from interlace.data.chats.files.shapes import Chat
from interlace.data.dataset import Question, SampleDataset
from interlace.data.reading import Reading
from interlace.model.sample import Sample

By = Literal["samples", "tokens"]
Found = TypeVar("Found")


@dataclass(frozen=True)
class Part:
    """A source: its name, its samples and its weight."""

    name: str
    data: ChatDataset
    weight: float = 1.0


def share_of(weights: Sequence[float], means: Sequence[Fraction] | None = None) -> list[Fraction]:
    """The exact share of each source in the samples drawn; shares add up to 1. means: mean tokens per sample of each
    source, if weights are shares of tokens. A source with longer samples is then drawn less often."""
    fractions = [Fraction(str(weight)) for weight in weights]
    if means is not None:
        fractions = [weight / mean for weight, mean in zip(fractions, means, strict=True)]
    total = sum(fractions)
    return [weight / total for weight in fractions]


class MixedDataset(SampleDataset, Reading):
    """The samples of several sources, concatenated; `order` mixes them by their weights.

    mixes: False if no shares are drawn from the samples, as in validation; there may then be few samples.
    Raises ValueError when there are too many sources for the number of samples.
    """

    name = "chats"
    varies = ChatDataset.varies
    loads_together = ChatDataset.loads_together

    def __init__(self, parts: Sequence[Part], by: By = "samples", *, mixes: bool = True) -> None:
        if not parts:
            raise ValueError("there is no source")
        Reading.__init__(self)
        self.parts, self.by = list(parts), by
        for part in parts:
            self.failures |= part.data.failures
            part.data.reading = self
        self.starts = np.concatenate([[0], np.cumsum([len(part.data) for part in parts])])
        means = [Fraction(int(part.data.token_lengths.sum()), len(part.data)) for part in parts]
        self.shares = share_of([part.weight for part in parts], means if by == "tokens" else None)
        self._most = max(range(len(parts)), key=lambda place: self.shares[place])
        if mixes and len(self) * self.shares[self._most] < len(parts):
            raise ValueError(f"{len(parts)} sources have {len(self)} samples in all, too few to be mixed: join some")

    # --- the mixture ----------------------------------------------------------------------------------------

    def drawn(self, epoch: int) -> list[int]:
        """Number of samples of each source drawn before `epoch` begins."""
        before = [int(epoch * len(self) * share) for share in self.shares]  # rounded down
        before[self._most] += epoch * len(self) - sum(before)
        return before

    def order(self, seed: int, epoch: int) -> np.ndarray:
        """int64 [draws]: the samples of an epoch in the order of the draws."""
        begin, end = self.drawn(epoch), self.drawn(epoch + 1)
        labels = np.repeat(np.arange(len(self.parts), dtype=np.int16), np.subtract(end, begin))
        if len(self.parts) > 1:
            np.random.default_rng([seed, 6, epoch]).shuffle(labels)
        order = np.empty(len(labels), np.int64)
        for place, (first, last) in enumerate(zip(begin, end, strict=True)):
            order[labels == place] = self.starts[place] + self._through(seed, place, first, last)
        return order

    def _through(self, seed: int, place: int, first: int, last: int) -> np.ndarray:
        """The draws [first, last) of a source, with a new permutation of its samples in each pass."""
        size = len(self.parts[place].data)
        drawn = np.empty(last - first, np.int64)
        at = first
        while at < last:
            times, inside = divmod(at, size)
            count = min(size - inside, last - at)
            whole = np.random.default_rng([seed, 4, times, place]).permutation(size)
            drawn[at - first : at - first + count] = whole[inside : inside + count]
            at += count
        return drawn

    def source_of(self, indices: ArrayLike) -> np.ndarray:
        """int64: the source of each sample."""
        return np.searchsorted(self.starts, np.asarray(indices), side="right") - 1

    # --- as one dataset -------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return int(self.starts[-1])

    def _at(self, index: int) -> tuple[ChatDataset, int]:
        if not -len(self) <= index < len(self):
            raise IndexError(f"there are {len(self)} samples, none {index}")
        place = int(self.source_of(index % len(self)))
        return self.parts[place].data, index % len(self) - int(self.starts[place])

    def sample(self, index: int, epoch: int | None = None) -> Sample:
        """Sample `index` from its source. Raises IndexError."""
        data, own = self._at(index)
        return data.sample(own, epoch)

    def lengths(self, index: int, epoch: int | None = None) -> dict[str, list[int]]:
        """Tokens of sample `index` per modality, without decoding; see `ChatDataset.lengths`."""
        data, own = self._at(index)
        return data.lengths(own, epoch)

    @property
    def token_lengths(self) -> np.ndarray:
        """int64 [n], tokens of each sample."""
        return np.concatenate([part.data.token_lengths for part in self.parts])

    def prompt(self, index: int) -> tuple[Sample, Chat]:
        """Prompt of a sample; see `ChatDataset.prompt`."""
        data, own = self._at(index)
        return data.prompt(own)

    def answer(self, index: int, epoch: int | None = None) -> list[int]:
        """The tokens of a sample that have a loss."""
        data, own = self._at(index)
        return data.answer(own, epoch)

    def kind(self, index: int) -> str:
        """Kind of a sample; see `ChatDataset.kind`."""
        data, own = self._at(index)
        return data.kind(own)

    def questions(self) -> dict[str, list[Question]]:
        """Kind -> the samples whose records name it, over all sources."""
        by_kind: dict[str, list[Question]] = {}
        for start, part in zip(self.starts.tolist(), self.parts, strict=False):
            for kind, questions in part.data.questions().items():
                moved = [replace(each, index=start + each.index) for each in questions]
                by_kind.setdefault(kind, []).extend(moved)
        return by_kind

    def asked(self, question: Question, shown: Question | None = None) -> Sample:
        """The sample of a question. `shown`, of any source, replaces its media by its own."""
        data, own = self._at(question.index)
        media = None
        if shown is not None:
            other, index = self._at(shown.index)
            media = other.media(index)
        return data.asked(replace(question, index=own), media=media)

    def fingerprint(self) -> str:
        """A hash of everything that determines the sample sequence. It must be equal on all ranks."""
        if len(self.parts) == 1:
            return self.parts[0].data.fingerprint()
        identity = (self.by, [(part.name, str(part.weight), part.data.fingerprint()) for part in self.parts])
        return hashlib.sha256(repr(identity).encode()).hexdigest()[:16]

    def report(self) -> str:
        """One line per source about samples left out or cut."""
        named = len(self.parts) > 1
        lines = [f"{part.name}: {part.data.report()}" if named else part.data.report() for part in self.parts]
        return "; ".join([*lines, *self.lost_lately()])

    def listing(self) -> str:
        """Every sample that was left out or cut, one per line with file, line and reason."""
        return "".join(part.data.listing() for part in self.parts)


def by_source(
    data: SampleDataset, indices: Sequence[int], samples: Sequence[Found]
) -> Iterator[tuple[str, list[Found]]]:
    """(source, its entries of `samples`) for each source among the `indices` of a dataset. A dataset that is not a
    mixture yields everything under ""."""
    if not isinstance(data, MixedDataset) or len(data.parts) < 2:
        yield "", list(samples)
        return
    of = data.source_of(indices)
    for place, part in enumerate(data.parts):
        if (of == place).any():
            yield part.name, [one for one, source in zip(samples, of.tolist(), strict=True) if source == place]


__all__ = ["By", "MixedDataset", "Part", "by_source", "share_of"]
