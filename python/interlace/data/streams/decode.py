"""Decodes the samples of a stream's reader: in the calling thread, or ahead of it in worker processes.

The order and the bits of samples do not depend on where they are decoded. A worker gets the pickled loading functions
of a sample's media (`tasks.packed`) and returns the numbers; text stays with the reader. A sample is requested once, or
again after a lost worker (workers/pool.py). A sample with undecodable media is left out when its turn comes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from interlace.data.streams.base import Reader
from interlace.data.workers.produced import Producers, answered
from interlace.data.workers.tasks import Loaded, Task, packed
from interlace.modalities.errors import DecodeError
from interlace.model.sample import Media, Sample


class WorkersNeedPickle(ValueError):
    """The loading function of a sample's media cannot be pickled for worker processes."""


class DecodedReader:
    """The samples of `reader`, decoded.

    producers: decode the samples; None: the caller does. ahead: samples in flight besides the next one. stopping:
    returns True once the result is not needed. timeout: seconds that one sample may take.
    """

    def __init__(
        self,
        reader: Reader,
        producers: Producers | None,
        *,
        ahead: int,
        stopping: Callable[[], bool],
        timeout: float,
    ) -> None:
        self.reader, self.stream, self.producers, self.ahead = reader, reader.stream, producers, ahead
        self.stopping, self.timeout = stopping, timeout
        self._asked: deque[Future[Any] | None] = deque()  # one entry per upcoming sample of the reader

    def next(self) -> Sample | None:
        """The next sample of this epoch with its media in memory; None at its end.

        Raises Stopped, TimeoutError if no answer comes, and errors of the stream or a decoder except DecodeError.
        """
        while True:
            answer = self._asked_for() if self.producers is not None else None
            sample = self.reader.next()
            if sample is None:
                return None
            try:
                if self.producers is None:
                    for item in _items(sample):
                        item.data  # noqa: B018 (decodes it)
                elif answer is not None:
                    self._take(sample, answered(answer, sample.name, self.producers, self.stopping, self.timeout))
                return sample
            except DecodeError as error:
                self.stream.left_out(sample, error)

    def drop(self) -> None:
        """Cancels the tasks that have not started."""
        for answer in self._asked:
            if answer is not None:
                answer.cancel()

    def _asked_for(self) -> Future[Any] | None:
        """The answer for the next sample, after requesting it and those that follow."""
        for sample in self.reader.coming(self.ahead + 1)[len(self._asked) :]:
            self._asked.append(self._ask(sample))
        return self._asked.popleft() if self._asked else None

    def _ask(self, sample: Sample) -> Future[Any] | None:
        loads = [item.load for item in _items(sample) if item.load is not None]
        if not loads:
            return None
        try:
            sent = packed(self.stream, loads)
        except Exception as error:  # user classes may raise anything
            raise WorkersNeedPickle(
                f"what loads the media of {sample.name} cannot be sent to worker processes "
                f"({type(error).__name__}: {error}): make it a function or an object that pickle takes, or decode "
                "without workers"
            ) from None
        assert self.producers is not None
        return self.producers.ask(Task("decode", loads=sent, name=sample.name))

    def _take(self, sample: Sample, loaded: Loaded) -> None:
        """Stores a worker's items in the sample. Raises DecodeError for a sample that has killed too many workers."""
        if loaded.broken:
            raise DecodeError(f"{sample.name}: {loaded.broken}")
        self.stream.took()
        arrived = iter(loaded.items)
        for items in sample.media.values():
            for number, item in enumerate(items):
                if item.load is not None:
                    raw = next(arrived)
                    assert raw is not None  # never cached: a stream's items are requested once
                    items[number] = Media(item.shape, item.tokens, raw.tensor(), about=item.about)


def _items(sample: Sample) -> list[Media]:
    return [item for items in sample.media.values() for item in items]
