"""Batches that producers make: asked for ahead, put together in the trainer, in order.

A thread asks for the next batches (`prefetch` of them), and when one is made for the items of it that this process
computes with. What arrives is a list of samples as the loader's own thread would have made it: same ids, same numbers.
Whatever is in flight is dropped when the loader closes or is sent to another place.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotYet
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor

from interlace.data.ahead import LONGEST, AheadThread
from interlace.data.producing import Bare, Loaded, Made, Task, bare_of, whole
from interlace.model.sample import Media

SAY_EVERY = 5.0  # seconds of waiting after which it is said what for
log = logging.getLogger("interlace.data")


class Producers(Protocol):
    """Who answers tasks: `workers.WorkerPool`, `ray_tasks.RayTasks`."""

    restarts: int

    def ask(self, task: Task) -> Future[Any]:
        """The answer to a task, in time."""

    def kept(self, task: Task, place: tuple[str, int]) -> Tensor | None:
        """An item that was not sent along with the answer; None: it is not there any more."""

    def waiting_for(self) -> str:
        """Who is at what, for messages."""

    def close(self) -> None:
        """Ends them; drops what is in flight."""


class Ahead(AheadThread):
    """The batches from (epoch, position) on, `depth` of them asked for ahead.

    wanted: the media of a batch that this process computes with; None: all. pinned: items lie in pinned memory.
    """

    def __init__(
        self,
        producers: Producers,
        dataset: Any,
        place: tuple[int, int],
        depth: int,
        wanted: Callable[[list[Any]], Iterable[Media]] | None,
        pinned: bool,
    ) -> None:
        self.producers, self.dataset, self.wanted, self.pinned = producers, dataset, wanted, pinned
        self._batches: dict[int, int] = {}
        self.depth = max(0, depth - 1)  # beside the one that waits to be taken
        super().__init__(1, *place)

    def _run(self, epoch: int, position: int) -> None:
        asked: deque[_Batch | BaseException] = deque()
        try:
            self._ask_ahead(asked, epoch, position)
        finally:
            for batch in asked:  # nobody will take these
                if isinstance(batch, _Batch):
                    batch.drop()

    def _ask_ahead(self, asked: deque[_Batch | BaseException], epoch: int, position: int) -> None:
        making, place = self.producers.ask(Task("make", epoch, position)), (epoch, position)
        while not self._stopping.is_set():
            try:
                made = self._wait(making, f"batch {place[1]} of epoch {place[0]}")
                here, place = place, self._following(*place)
                making = self.producers.ask(Task("make", *place))  # while this one is put together
                batch = _Batch(self, here[0], made)
                asked.append(batch.ask(batch.every if self.wanted is None else self.wanted(batch.samples)))
            except Stopped:
                return
            except BaseException as error:  # handed over in its turn, not swallowed
                asked.append(error)
            while asked and (len(asked) > self.depth or isinstance(asked[-1], BaseException)):
                if not self._hand_over(asked.popleft()):
                    return

    def _hand_over(self, item: _Batch | BaseException) -> bool:
        """Puts a batch where `get` finds it, once its items are there; False: it was the last."""
        try:
            if isinstance(item, BaseException):
                raise item
            self._put(item.loaded())
            return True
        except Stopped:
            return False
        except BaseException as error:
            self._put(error)
            return False

    def _following(self, epoch: int, position: int) -> tuple[int, int]:
        if epoch not in self._batches:
            asked = self.producers.ask(Task("batches", epoch))
            self._batches = {epoch: self._wait(asked, f"the batches of epoch {epoch}")}
        return (epoch, position + 1) if position + 1 < self._batches[epoch] else (epoch + 1, 0)

    def _wait(self, future: Future[Any], what: str) -> Any:
        return answered(future, what, self.producers, self._stopping.is_set)


def answered(
    future: Future[Any], what: str, producers: Producers, stopping: Callable[[], bool], longest: float = LONGEST
) -> Any:
    """An answer; says what it waits for. Raises TimeoutError after `longest` seconds, what the answer raises, and
    Stopped."""
    began, said = time.monotonic(), SAY_EVERY
    while not stopping():
        try:
            return future.result(timeout=0.5)
        except NotYet:
            if future.done():  # a TimeoutError of the dataset's own
                raise
        waited = time.monotonic() - began
        if waited > longest:
            raise TimeoutError(f"waited {waited:.0f} s for {what}: {producers.waiting_for()}")
        if waited > said:
            log.warning("waiting for %s for %.0f s: %s", what, waited, producers.waiting_for())
            said *= 2
    raise Stopped


class Stopped(Exception):
    """The loader was closed while somebody waited."""


class HeldOut:
    """Samples (`indices`) of the held-out `dataset`, of which `producers` have a copy: they decode the items, once
    these are asked for or needed."""

    def __init__(self, producers: Producers, dataset: Any, indices: Sequence[int]) -> None:
        self.producers, self.dataset, self.pinned = producers, dataset, False
        made = Made([bare_of(index, dataset.sample(index, 0)) for index in indices], None)
        self._batch = _Batch(self, 0, made, held_out=True)
        self.samples: list[Any] = self._batch.samples

    def ask(self, items: Iterable[Media]) -> None:
        """Has those of `items` decoded that are not in memory; does not wait for them."""
        self._batch.ask(item for item in items if not item.loaded)

    def _wait(self, future: Future[Any], what: str) -> Any:
        return answered(future, what, self.producers, lambda: False)


class _Batch:
    """A batch that was made, and whose items are on their way once they were asked for."""

    def __init__(self, ahead: Ahead | HeldOut, epoch: int, made: Made, *, held_out: bool = False) -> None:
        self.ahead, self.epoch, self.made, self.held_out = ahead, epoch, made, held_out
        self._answers: dict[int, tuple[Task, Future[Any]]] = {}  # place of a sample in the batch -> what was asked
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
        """Asks for these items, but for those of samples of which some are on their way."""
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
        """The samples, once all that was asked for is there."""
        for item in self.items:
            item.data  # noqa: B018 (loads it)
        return self.samples

    def drop(self) -> None:
        """Takes back what nobody has begun with."""
        for _, answer in self._answers.values():
            answer.cancel()

    def _load_of(self, at: int, bare: Bare) -> Callable[[str, int], Tensor]:
        def load(modality: str, number: int) -> Tensor:
            with self._lock:
                place = (at, modality, number)
                if place not in self._taken:
                    task, answer = self._answers.get(at, (None, None))
                    if task is None or answer is None or (modality, number) not in task.items:  # nobody had asked
                        task = self._task(bare, (modality, number))
                        answer = self.ahead.producers.ask(task)
                    self._take(at, bare, task, answer)
                return self._taken.pop(place)

        return load

    def _take(self, at: int, bare: Bare, task: Task, answer: Future[Any]) -> None:
        """Puts the items of an answer where `load` finds them."""
        found = self._found(bare, task, answer)
        items = self._items(task, found)
        if any(item is None for item in items):
            # It had to make room before anybody came for it, and would so again where room is scarce.
            task = replace(task, sent=True)
            found = self._found(bare, task, self.ahead.producers.ask(task))
            items = self._items(task, found)
        if found.broken:
            self._broken(at, bare, task, found.broken)
        for place, item in zip(task.items, items):  # of a broken sample there are none
            assert item is not None  # they were sent
            self._taken[(at, *place)] = item.pin_memory() if self.ahead.pinned else item
        if self._answers.get(at, (None, None))[1] is answer:  # and not one that is still under way
            del self._answers[at]  # held-out samples stay: their items are not to be in memory twice

    def _found(self, bare: Bare, task: Task, answer: Future[Any]) -> Loaded:
        found: Loaded = self.ahead._wait(answer, f"{task} ({bare.name})")
        if hasattr(self.ahead.dataset, "took"):
            self.ahead.dataset.took(found.read, found.lost)
        return found

    def _items(self, task: Task, found: Loaded) -> list[Tensor | None]:
        return [
            self.ahead.producers.kept(task, place) if raw is None else raw.tensor()
            for place, raw in zip(task.items, found.items)  # of a broken sample there are none
        ]

    def _broken(self, at: int, bare: Bare, task: Task, why: str) -> None:
        """Blanks in the place of a sample that nobody can decode. Raises DecodeError when these are too many."""
        if not hasattr(self.ahead.dataset, "lost"):
            raise RuntimeError(f"{bare.name or task}: {why}")
        self.ahead.dataset.lost(bare.name, why)
        for modality, number in task.items:
            self._taken[(at, modality, number)] = torch.zeros(bare.media[modality][number].shape)
