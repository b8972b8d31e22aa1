"""Data that can only be read in order: what a stream is, and the reader of a share of it.

A stream is cut into shards, the same number on every rank, each of which gives its samples in one order. In an epoch
the shards are put into an order drawn from (seed, epoch) and dealt to the readers in turn, so each shard is read by one
of them. A reader mixes what it reads through a buffer: the one that comes next is drawn from as many samples.

A place in a stream is plain data: shards that are still to be read and from where, which samples wait in the buffer (by
shard and number) or have been drawn and not yet handed out, and how many were drawn in this epoch. With as many readers
as before a run goes on with the very same samples; with another number all that is left of the epoch is dealt anew,
shard by shard, so that none is read twice or left out.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import numpy as np

from interlace.data.media import DecodeError
from interlace.model.sample import Sample

END = -1
"""In the place of a sample's number: all of a shard has been read, but for what waited in a buffer."""

PLACE = frozenset(("epoch", "drawn", "todo", "buffer", "coming"))
"""What the place of a reader says: see `Reader.state`."""

log = logging.getLogger("interlace.data")

Unit = list[Any]
"""[epoch, shard, number of the first sample to read, numbers of those before it that are to be read too]."""


class SampleStream(ABC):
    """Samples that cannot be asked for by a number. Every rank makes the same one.

    `shards` is at least 1 and the same in every run. Media need not be decoded: the reader does that, or has it done by
    worker processes, and leaves out samples whose media cannot be decoded. Workers have a copy of the stream, so it and
    what loads its media must be such that `pickle` can send them.
    """

    name = "stream"

    @property
    @abstractmethod
    def shards(self) -> int:
        """How many shards there are."""

    @abstractmethod
    def read(self, shard: int, epoch: int) -> Iterator[Sample]:
        """The samples of a shard in order, the same ones whenever it is read in this epoch."""

    @abstractmethod
    def fingerprint(self) -> str:
        """A hash of all that determines what is read: equal on all ranks, and in a run that goes on."""

    def left_out(self, sample: Sample, error: DecodeError) -> None:
        """Told of a sample whose media cannot be decoded. May raise it; by default it is logged."""
        log.warning("%s is left out: %s", sample.name, error)

    def took(self) -> None:  # noqa: B027 (who does not count need not)
        """Told that a worker process has decoded the media of a sample for this one."""


class IterableStream(SampleStream):
    """Any Python iterables of samples as a stream: `sources` are functions that return one each, a shard.

    name: says which data these are: a run goes on with a stream of the same name and as many shards only.
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
    """The shards of an epoch that one of `readers` reads, in order."""
    order = np.random.default_rng([seed, 6, epoch]).permutation(shards)
    return [[epoch, shard, 0, []] for shard in order[reader::readers].tolist()]


_Entry = tuple[int, int, int, Sample]
"""Epoch, shard, number, and the sample itself."""


class Reader:
    """Reads one share of a stream. reader: its number, of `readers`. buffer: samples among which the next is drawn; 0:
    in the order of the shards."""

    def __init__(self, stream: SampleStream, reader: int, readers: int, *, seed: int = 0, buffer: int = 0) -> None:
        if not 0 <= reader < readers:
            raise ValueError(f"reader is {reader}: it must lie between 0 and {readers - 1}")
        if buffer < 0:
            raise ValueError(f"buffer is {buffer}: it must not be negative")
        self.stream, self.reader, self.readers, self.seed, self.size = stream, reader, readers, seed, buffer
        self.epoch = 0
        self._drawn = 0
        self._todo = dealt(stream.shards, 0, seed, reader, readers)
        self._open: Iterator[tuple[int, Sample]] | None = None  # of the first unit
        self._buffer: list[_Entry] = []
        self._coming: deque[_Entry] = deque()  # drawn, and not handed out yet

    def next(self) -> Sample | None:
        """The next sample of this epoch; None at its end."""
        found = self._coming.popleft() if self._coming else self._draw()
        return None if found is None else found[3]

    def coming(self, count: int) -> list[Sample]:
        """The samples that `next` will give, so many of them or all that are left of this epoch."""
        while len(self._coming) < count and (found := self._draw()) is not None:
            self._coming.append(found)
        return [entry[3] for entry in islice(self._coming, count)]

    def _draw(self) -> _Entry | None:
        while len(self._buffer) <= self.size and (found := self._following()) is not None:
            self._buffer.append(found)
        if not self._buffer:
            return None
        at = 0
        if self.size:
            at = int(
                np.random.default_rng([self.seed, 7, self.epoch, self.reader, self._drawn]).integers(len(self._buffer))
            )
        self._drawn += 1
        if self.size:  # in the place of what is taken comes the last: nothing is shifted
            self._buffer[at], self._buffer[-1] = self._buffer[-1], self._buffer[at]
            return self._buffer.pop()
        return self._buffer.pop(0)

    def advance(self) -> None:
        """Begins the next epoch, after the end of this one."""
        self.epoch += 1
        self._drawn, self._open = 0, None
        self._todo = dealt(self.stream.shards, self.epoch, self.seed, self.reader, self.readers)

    def _following(self) -> _Entry | None:
        """The next sample in the order of the shards, with its epoch, shard and number."""
        while self._todo:
            epoch, shard, start, kept = self._todo[0]
            if self._open is None:
                self._open = _numbered(self.stream.read(shard, epoch), start, set(kept))
            found = next(self._open, None)
            if found is not None:
                number, sample = found
                if number >= start >= 0:
                    self._todo[0] = [epoch, shard, number + 1, []]
                else:
                    self._todo[0] = [epoch, shard, start, [each for each in kept if each > number]]
                return epoch, shard, number, sample
            self._todo.pop(0)
            self._open = None
        return None

    def state(self) -> dict[str, Any]:
        """This place in the stream, plain data."""
        return {
            "epoch": self.epoch,
            "drawn": self._drawn,
            "todo": [[*unit[:3], list(unit[3])] for unit in self._todo],
            "buffer": [list(entry[:3]) for entry in self._buffer],
            "coming": [list(entry[:3]) for entry in self._coming],
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Goes on where `state` was taken by the reader of this number, of as many. Raises ValueError where the stream
        no longer has what waited in the buffer."""
        self.epoch, self._drawn, self._open = state["epoch"], state["drawn"], None
        self._todo = [[*unit[:3], list(unit[3])] for unit in state["todo"]]
        wanted: dict[tuple[int, int], list[int]] = {}
        for epoch, shard, number in [*state["buffer"], *state["coming"]]:
            wanted.setdefault((epoch, shard), []).append(number)
        found: dict[tuple[int, int, int], Sample] = {}
        for (epoch, shard), numbers in wanted.items():
            for number, sample in _numbered(self.stream.read(shard, epoch), END, set(numbers)):
                found[epoch, shard, number] = sample
        lost = [entry for entry in map(tuple, [*state["buffer"], *state["coming"]]) if entry not in found]
        if lost:
            epoch, shard, number = lost[0]
            raise ValueError(
                f"shard {shard} of {self.stream.name} no longer has its sample {number}, which the saved run had read: "
                "the data have changed; bring them back, or start anew"
            )
        self._buffer = [(e, s, n, found[e, s, n]) for e, s, n in state["buffer"]]
        self._coming = deque((e, s, n, found[e, s, n]) for e, s, n in state["coming"])


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
    """The places of `readers` readers in the place of those whose `states` these are, of another number.

    What is left of the epoch (of two, where some readers had begun the next) is dealt in turn, by shards: what of a
    shard waited in a buffer goes with its rest. Every sample that none had handed out is handed out once.
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
