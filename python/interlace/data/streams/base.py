"""Streams: data that can only be read in order, and the reader of one share of a stream.

A stream consists of shards. Their number is the same on every rank, and each shard yields its samples in a fixed order.
In an epoch the shards are permuted by (seed, epoch) and dealt to the readers in turn, so each shard has one reader.
A reader shuffles with a buffer: the next sample is drawn from the `buffer` samples in it.

A position in a stream is plain data:
- the shards still to be read, and the start in each;
- the samples in the buffer, and those drawn but not handed out yet (by shard and number);
- the number of draws in this epoch.

With the same number of readers a run resumes with exactly the same samples. With another number, the rest of the epoch
is dealt again, shard by shard; no sample is read twice or skipped.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import numpy as np

from interlace.modalities.errors import DecodeError
from interlace.model.sample import Sample

END = -1
"""Instead of a sample's number: all of a shard has been read, apart from samples still in a buffer."""

PLACE = frozenset(("epoch", "drawn", "todo", "buffer", "coming"))
"""Keys of a reader's state: see `Reader.state`."""

log = logging.getLogger("interlace.data")

Unit = list[Any]
"""[epoch, shard, first sample to read, numbers of earlier samples to read again]."""


class SampleStream(ABC):
    """Samples without random access. Every rank makes the same stream.

    `shards` is at least 1 and the same in every run. Media may be lazy: the reader or worker processes decode them, and
    samples with undecodable media are left out. Workers have a copy of the stream, so `pickle` must support the stream
    and the functions that load its media.
    """

    name = "stream"

    @property
    @abstractmethod
    def shards(self) -> int:
        """Number of shards."""

    @abstractmethod
    def read(self, shard: int, epoch: int) -> Iterator[Sample]:
        """The samples of a shard in order; the same on every read in this epoch."""

    @abstractmethod
    def fingerprint(self) -> str:
        """A hash of everything that determines the samples: equal on all ranks, and in a resumed run."""

    def left_out(self, sample: Sample, error: DecodeError) -> None:
        """Called for a sample whose media cannot be decoded. May raise the error; by default it is logged."""
        log.warning("%s is left out: %s", sample.name, error)

    def took(self) -> None:  # noqa: B027 (optional hook)
        """Called when a worker process has decoded the media of a sample for this process."""


class IterableStream(SampleStream):
    """A stream from any Python iterables of samples. `sources` are functions; each returns the iterable of one shard.

    name: identifies the data. A run resumes only with a stream of the same name and number of shards.
    """

    def __init__(self, sources: Sequence[Callable[[], Iterable[Sample]]], name: str = "iterables") -> None:
        if not sources:
            raise ValueError("a stream needs at least one source")
        self.sources, self.name = list(sources), name

    @property
    def shards(self) -> int:
        return len(self.sources)

    def read(self, shard: int, epoch: int) -> Iterator[Sample]:
        return iter(self.sources[shard]())

    def fingerprint(self) -> str:
        return f"{self.name}, {self.shards} shards"


def dealt(shards: int, epoch: int, seed: int, reader: int, readers: int) -> list[Unit]:
    """The shards of an epoch for `reader` (of `readers`), in order."""
    order = np.random.default_rng([seed, 6, epoch]).permutation(shards)
    return [[epoch, shard, 0, []] for shard in order[reader::readers].tolist()]


_Entry = tuple[int, int, int, Sample]
"""Epoch, shard, number and the sample."""


class Reader:
    """Reads one share of a stream. reader: index, of `readers`. buffer: size of the shuffle buffer; 0: in the order of
    the shards."""

    def __init__(self, stream: SampleStream, reader: int, readers: int, *, seed: int = 0, buffer: int = 0) -> None:
        if not 0 <= reader < readers:
            raise ValueError(f"reader is {reader}: it must lie between 0 and {readers - 1}")
        if buffer < 0:
            raise ValueError(f"buffer is {buffer}: it must not be negative")
        self.stream, self.reader, self.readers, self.seed, self.size = stream, reader, readers, seed, buffer
        self.epoch = 0
        self._drawn = 0
        self._todo = dealt(stream.shards, 0, seed, reader, readers)
        self._open: Iterator[tuple[int, Sample]] | None = None  # iterator of the first unit
        self._buffer: list[_Entry] = []
        self._coming: deque[_Entry] = deque()  # drawn, not handed out yet

    def next(self) -> Sample | None:
        """The next sample of this epoch; None at its end."""
        item = self._coming.popleft() if self._coming else self._draw()
        return None if item is None else item[3]

    def coming(self, count: int) -> list[Sample]:
        """The next `count` samples of `next`, without taking them; fewer at the end of this epoch."""
        while len(self._coming) < count and (item := self._draw()) is not None:
            self._coming.append(item)
        return [entry[3] for entry in islice(self._coming, count)]

    def _draw(self) -> _Entry | None:
        while len(self._buffer) <= self.size and (item := self._following()) is not None:
            self._buffer.append(item)
        if not self._buffer:
            return None
        at = 0
        if self.size:
            draw = np.random.default_rng([self.seed, 7, self.epoch, self.reader, self._drawn])
            at = int(draw.integers(len(self._buffer)))
        self._drawn += 1
        # Its place is filled by the last entry, so that nothing is shifted.
        self._buffer[at], self._buffer[-1] = self._buffer[-1], self._buffer[at]
        return self._buffer.pop()

    def advance(self) -> None:
        """Begins the next epoch. Called at the end of the current one."""
        self.epoch += 1
        self._drawn, self._open = 0, None
        self._todo = dealt(self.stream.shards, self.epoch, self.seed, self.reader, self.readers)

    def _following(self) -> _Entry | None:
        """The next sample in the order of the shards, with its epoch, shard and number."""
        while self._todo:
            epoch, shard, start, kept = self._todo[0]
            if self._open is None:
                self._open = _numbered(self.stream.read(shard, epoch), start, set(kept))
            item = next(self._open, None)
            if item is not None:
                number, sample = item
                if number >= start >= 0:
                    self._todo[0] = [epoch, shard, number + 1, []]
                else:
                    self._todo[0] = [epoch, shard, start, [each for each in kept if each > number]]
                return epoch, shard, number, sample
            self._todo.pop(0)
            self._open = None
        return None

    def state(self) -> dict[str, Any]:
        """The current position in the stream, as plain data."""
        return {
            "epoch": self.epoch,
            "drawn": self._drawn,
            "todo": [[*unit[:3], list(unit[3])] for unit in self._todo],
            "buffer": [list(entry[:3]) for entry in self._buffer],
            "coming": [list(entry[:3]) for entry in self._coming],
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Resumes from `state` of the same reader index and number of readers. Raises ValueError if the stream no
        longer has the samples of the buffer."""
        self.epoch, self._drawn, self._open = state["epoch"], state["drawn"], None
        self._todo = [[*unit[:3], list(unit[3])] for unit in state["todo"]]
        entries = [(epoch, shard, number) for epoch, shard, number in [*state["buffer"], *state["coming"]]]
        wanted: dict[tuple[int, int], set[int]] = {}
        for epoch, shard, number in entries:
            wanted.setdefault((epoch, shard), set()).add(number)
        samples = {
            (epoch, shard, number): sample
            for (epoch, shard), numbers in wanted.items()
            for number, sample in _numbered(self.stream.read(shard, epoch), END, numbers)
        }
        if lost := [entry for entry in entries if entry not in samples]:
            _, shard, number = lost[0]
            raise ValueError(
                f"shard {shard} of {self.stream.name} no longer has its sample {number}, which the saved run had read: "
                "the data have changed; bring them back, or start anew"
            )
        read = [(*entry, samples[entry]) for entry in entries]
        count = len(state["buffer"])
        self._buffer, self._coming = read[:count], deque(read[count:])


def _numbered(samples: Iterator[Sample], start: int, kept: set[int]) -> Iterator[tuple[int, Sample]]:
    """The samples from number `start` on (END: none), and those whose number is in `kept`."""
    last = max(kept, default=-1)
    for number, sample in enumerate(samples):
        if (start != END and number >= start) or number in kept:
            yield number, sample
        if start == END and number >= last:
            return


def dealt_anew(
    states: Sequence[Mapping[str, Any]], stream: SampleStream, seed: int, readers: int
) -> list[dict[str, Any]]:
    """Positions for `readers` readers, from the `states` of a different number of readers.

    The rest of the epoch is dealt in turn, by shards; if some readers had begun the next epoch, both are. Samples of a
    shard that were in a buffer go with the rest of the shard. Every sample not handed out yet is handed out once.
    """
    epoch = max(state["epoch"] for state in states)
    units: dict[tuple[int, int], tuple[int, set[int]]] = {}
    for number, state in enumerate(states):
        todo = list(state["todo"])
        for later in range(state["epoch"] + 1, epoch + 1):
            todo += dealt(stream.shards, later, seed, number, len(states))
        for each, shard, start, kept in todo:
            units[each, shard] = start, set(kept)
        for each, shard, sample in [*state["buffer"], *state["coming"]]:
            start, kept = units.get((each, shard), (END, set()))
            units[each, shard] = start, kept | {sample}
    order = sorted(units)
    return [
        {
            "epoch": epoch,
            "drawn": 0,
            "todo": [[*key, units[key][0], sorted(units[key][1])] for key in order[reader::readers]],
            "buffer": [],
            "coming": [],
        }
        for reader in range(readers)
    ]
