"""Decodes what a reader of a stream hands out: in the thread that asks, or ahead of it in worker processes.

Samples come in the reader's order and with the same bits whoever decodes them. A worker gets what loads the media of a
sample (`producing.packed`) and answers with their numbers; text stays with the reader. A sample is asked for once, and
again only where a worker is lost (workers.py); one whose media cannot be decoded is left out when its turn comes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from interlace.data.media import DecodeError
from interlace.data.produced import Producers, answered
from interlace.data.producing import Loaded, Task, packed
from interlace.data.stream import Reader, SampleStream
from interlace.model.sample import Media, Sample


class WorkersNeedPickle(ValueError):
    """What loads the media of a sample cannot be sent to worker processes."""


class DecodedReader:
    """The samples of `reader`, decoded.

    producers: who decodes; None: whoever asks. ahead: samples that they decode beside the next one. stopping: whether
    nobody waits any more. timeout: seconds that one sample may take.
    """

    def __init__(
        self,
        reader: Reader,
        stream: SampleStream,
        producers: Producers | None,
        *,
        ahead: int,
        stopping: Callable[[], bool],
        timeout: float,
    ) -> None:
        self.reader, self.stream, self.producers, self.ahead = reader, stream, producers, ahead
        self.stopping, self.timeout = stopping, timeout
        self._asked: deque[Future[Any] | None] = deque()  # of the first of the reader's coming samples

    def next(self) -> Sample | None:
        """The next sample of this epoch with its media in memory; None at its end.

        Raises Stopped, TimeoutError where nothing is answered, and what the stream or a decoder raises but DecodeError.
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
        """Takes back what no worker has begun with."""
        for answer in self._asked:
            if answer is not None:
                answer.cancel()

    def _asked_for(self) -> Future[Any] | None:
        """The answer for the coming sample, after it and those behind it have been asked for."""
        for sample in self.reader.coming(self.ahead + 1)[len(self._asked) :]:
            self._asked.append(self._ask(sample))
        return self._asked.popleft() if self._asked else None

    def _ask(self, sample: Sample) -> Future[Any] | None:
        loads = [item.load for item in _items(sample) if item.load is not None]
        if not loads:
            return None
        try:
            sent = packed(self.stream, loads)
        except Exception as error:  # whatever a class of somebody's own raises
            raise WorkersNeedPickle(
                f"what loads the media of {sample.name} cannot be sent to worker processes "
                f"({type(error).__name__}: {error}): make it a function or an object that pickle takes, or decode "
                "without workers"
            ) from None
        assert self.producers is not None
        return self.producers.ask(Task("decode", loads=sent, name=sample.name))

    def _take(self, sample: Sample, found: Loaded) -> None:
        """Puts what a worker has decoded in its place. Raises DecodeError for a sample that costs one after another."""
        if found.broken:
            raise DecodeError(f"{sample.name}: {found.broken}")
        self.stream.took()
        arrived = iter(found.items)
        for items in sample.media.values():
            for number, item in enumerate(items):
                if item.load is not None:
                    raw = next(arrived)
                    assert raw is not None  # nothing is kept for others: a stream's items are asked for once
                    items[number] = Media(item.shape, item.tokens, raw.tensor(), about=item.about)


def _items(sample: Sample) -> list[Media]:
    return [item for items in sample.media.values() for item in items]
