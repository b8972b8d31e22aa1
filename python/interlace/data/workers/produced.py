"""Batches from producers: requested ahead, assembled in order in the trainer.

A thread requests the next `prefetch` batches. When a batch is made, it requests the media items that this process
computes with. The result is a list of samples exactly as from the loader's own thread: same ids, same numbers.
Everything in flight is dropped when the loader closes or loads another position.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotYet
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.data import Dataset

from interlace.data.dataset import SampleDataset
from interlace.data.workers.ahead import LONGEST, AheadThread
from interlace.data.workers.tasks import Bare, Loaded, Made, Task, bare_of, whole
from interlace.model.sample import Media, Sample

SAY_EVERY = 5.0  # seconds of waiting before a message
log = logging.getLogger("interlace.data")


class Producers(Protocol):
    """Interface of producers: `pool.WorkerPool`, `ray_tasks.RayTasks`."""

    restarts: int

    def ask(self, task: Task) -> Future[Any]:
        """Future of the task's answer."""

    def kept(self, task: Task, place: tuple[str, int]) -> Tensor | None:
        """An item that was not sent with the answer; None if it was evicted."""

    def waiting_for(self) -> str:
        """Current task of each producer, for messages."""

    def close(self) -> None:
        """Stops the producers; drops what is in flight."""


@dataclass(frozen=True)
class ReadAhead:
    """Reading ahead of the steps.

    prefetch: batches made ahead by a thread (0: none).
    wanted: the media of a batch that this process will read. The thread loads these; others are loaded when their data
        is first accessed. None: all. Called in the thread.
    producers: starts the producers for a loader, when the first batch is requested. None: the thread prepares the data.
    pinned: producers decode into pinned memory, for a GPU.
    held_out: another dataset whose samples the producers can serve too (`HeldOut`).

    Of a stream, `producers` and `held_out` alone are used.
    """

    prefetch: int = 2
    wanted: Callable[[list[Any]], Iterable[Media]] | None = None
    producers: Callable[[Any], Producers] | None = None
    pinned: bool = False
    held_out: SampleDataset | None = None


class Ahead(AheadThread):
    """The batches from (epoch, position) on, with `options.prefetch` of them requested ahead from `producers`."""

    def __init__(
        self, producers: Producers, dataset: Dataset[Sample], place: tuple[int, int], options: ReadAhead
    ) -> None:
        self.producers, self.dataset, self.wanted, self.pinned = producers, dataset, options.wanted, options.pinned
        self.depth = max(0, options.prefetch - 1)  # besides the one in the queue
        super().__init__(1, *place)

    def _run(self, epoch: int, position: int) -> None:
        asked: deque[_Batch] = deque()
        try:
            for batch in self._in_turn(asked, epoch, position):
                self._put(batch.loaded())
        except Stopped:
            pass
        except BaseException as error:  # passed to the consumer, not swallowed
            self._put(error)
        finally:
            for batch in asked:  # no longer needed
                batch.drop()

    def _in_turn(self, asked: deque[_Batch], epoch: int, position: int) -> Iterator[_Batch]:
        """The batches in order, with `depth` more in `asked`. An error comes after the batches before it."""
        making, place = self.producers.ask(Task("make", epoch, position)), (epoch, position)
        try:
            while not self._stopping.is_set():
                made = self._wait(making, f"batch {place[1]} of epoch {place[0]}")
                batch, place = _Batch(self, place[0], made), made.next
                making = self.producers.ask(Task("make", *place))  # made while the items of this batch are decoded
                asked.append(batch.ask(batch.every if self.wanted is None else self.wanted(batch.samples)))
                if len(asked) > self.depth:
                    yield asked.popleft()
        except Stopped:
            return
        except Exception:
            while asked:
                yield asked.popleft()
            raise

    def _wait(self, future: Future[Any], what: str) -> Any:
        return answered(future, what, self.producers, self._stopping.is_set)


def answered(
    future: Future[Any], what: str, producers: Producers, stopping: Callable[[], bool], longest: float = LONGEST
) -> Any:
    """Waits for an answer and logs what it waits for. Raises TimeoutError after `longest` seconds, the error of the
    answer, and Stopped."""
    began, next_log = time.monotonic(), SAY_EVERY
    while not stopping():
        try:
            return future.result(timeout=0.5)
        except NotYet:
            if future.done():  # the TimeoutError was raised by the dataset
                raise
        waited = time.monotonic() - began
        if waited > longest:
            raise TimeoutError(f"waited {waited:.0f} s for {what}: {producers.waiting_for()}")
        if waited > next_log:
            log.warning("waiting for %s for %.0f s: %s", what, waited, producers.waiting_for())
            next_log *= 2
    raise Stopped


class Stopped(Exception):
    """The loader was closed during a wait."""


class HeldOut:
    """Samples (`indices`) of the held-out `dataset`. `producers` have a copy of it and decode items when they are
    requested or first accessed."""

    def __init__(self, producers: Producers, dataset: SampleDataset, indices: Sequence[int]) -> None:
        self.producers, self.dataset, self.pinned = producers, dataset, False
        made = Made([bare_of(index, dataset.sample(index, 0)) for index in indices])
        self._batch = _Batch(self, 0, made, held_out=True)
        self.samples: list[Any] = self._batch.samples

    def ask(self, items: Iterable[Media]) -> None:
        """Starts decoding those of `items` that are not in memory; does not wait."""
        self._batch.ask(item for item in items if not item.loaded)

    def _wait(self, future: Future[Any], what: str) -> Any:
        return answered(future, what, self.producers, lambda: False)


class _Batch:
    """A batch whose samples are made. Its requested media items are in flight."""

    def __init__(self, ahead: Ahead | HeldOut, epoch: int, made: Made, *, held_out: bool = False) -> None:
        self.ahead, self.epoch, self.made, self.held_out = ahead, epoch, made, held_out
        self._answers: dict[int, tuple[Task, Future[Any]]] = {}  # index in the batch -> the task in flight
        self._taken: dict[tuple[int, str, int], Tensor] = {}
        self._lock = threading.Lock()
        samples: list[Any] = [whole(bare, self._load_of(at, bare)) for at, bare in enumerate(made.samples)]
        self._of = {
            id(item): (at, modality, number)
            for at, sample in enumerate(samples)
            for modality, items in sample.media.items()
            for number, item in enumerate(items)
        }
        left = iter(samples)
        self.samples = samples if made.rows is None else [[next(left) for _ in range(count)] for count in made.rows]
        self.every = [i for s in samples for items in s.media.values() for i in items]
        self.items: list[Media] = []

    def ask(self, items: Iterable[Media]) -> _Batch:
        """Requests these items, except those of samples with a request in flight."""
        self.items = list(items)
        places: dict[int, list[tuple[str, int]]] = {}
        for at, modality, number in dict.fromkeys(self._of[id(item)] for item in self.items):
            places.setdefault(at, []).append((modality, number))
        with self._lock:
            for at, asked in places.items():
                if at not in self._answers:
                    task = self._task(self.made.samples[at], *asked)
                    self._answers[at] = (task, self.ahead.producers.ask(task))
        return self

    def _task(self, bare: Bare, *items: tuple[str, int]) -> Task:
        return Task("load", self.epoch, bare.at, items, held_out=self.held_out)

    def loaded(self) -> list[Any]:
        """The samples, once all requested items have arrived."""
        for item in self.items:
            item.data  # noqa: B018 (loads it)
        return self.samples

    def drop(self) -> None:
        """Cancels the tasks that have not started."""
        for _, answer in self._answers.values():
            answer.cancel()

    def _load_of(self, at: int, bare: Bare) -> Callable[[str, int], Tensor]:
        def load(modality: str, number: int) -> Tensor:
            with self._lock:
                place = (at, modality, number)
                if place not in self._taken:
                    task, answer = self._answers.get(at, (None, None))
                    if task is None or answer is None or (modality, number) not in task.items:  # not requested
                        task = self._task(bare, (modality, number))
                        answer = self.ahead.producers.ask(task)
                    self._take(at, bare, task, answer)
                return self._taken.pop(place)

        return load

    def _take(self, at: int, bare: Bare, task: Task, answer: Future[Any]) -> None:
        """Stores the items of an answer for `load`."""
        loaded = self._found(bare, task, answer)
        items = self._items(task, loaded)
        if any(item is None for item in items):
            # Evicted before it was read. It would be evicted again while memory is short, so it is sent directly.
            task = replace(task, sent=True)
            loaded = self._found(bare, task, self.ahead.producers.ask(task))
            items = self._items(task, loaded)
        if loaded.broken:
            self._broken(at, bare, task, loaded.broken)
        for place, item in zip(task.items, items):  # a broken sample has none
            assert item is not None  # they were sent
            self._taken[(at, *place)] = item.pin_memory() if self.ahead.pinned else item
        if self._answers.get(at, (None, None))[1] is answer:  # not a newer request in flight
            del self._answers[at]  # frees the items: held-out samples persist, and their items would be in memory twice

    def _found(self, bare: Bare, task: Task, answer: Future[Any]) -> Loaded:
        loaded: Loaded = self.ahead._wait(answer, f"{task} ({bare.name})")
        if hasattr(self.ahead.dataset, "took"):
            self.ahead.dataset.took(loaded.read, loaded.lost)
        return loaded

    def _items(self, task: Task, loaded: Loaded) -> list[Tensor | None]:
        return [
            self.ahead.producers.kept(task, place) if raw is None else raw.tensor()
            for place, raw in zip(task.items, loaded.items)  # a broken sample has none
        ]

    def _broken(self, at: int, bare: Bare, task: Task, why: str) -> None:
        """Substitutes blank media for an undecodable sample. Raises DecodeError when there are too many."""
        if not hasattr(self.ahead.dataset, "lost"):
            raise RuntimeError(f"{bare.name or task}: {why}")
        self.ahead.dataset.lost(bare.name, why)
        for modality, number in task.items:
            self._taken[(at, modality, number)] = torch.zeros(bare.media[modality][number].shape)
