"""Batches of uncollated samples: seeded shuffling, background prefetch, exact resumption.

- The order of an epoch is a permutation drawn from (seed, epoch); batch ``b`` is its ``b``-th slice. Every rank gets
  the whole batch, ids, labels and shapes; media are decoded only where they are read. So all agree without talking.
- ``state_dict`` says what has been *handed out*, not what the prefetch thread has already made; a loader that loads
  it continues with the very next batch, on any layout.
- The thread is enough while decoding is a read from the cache (0.2 to 0.4 ms per sample); it stops with ``close``.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import Any

import numpy as np
from torch.utils.data import Dataset

from interlace.model.sample import Media, Sample

log = logging.getLogger("interlace.data")


class Loader:
    """Endless iterator over lists of ``batch_size`` samples.

    dataset: map-style; one with ``sample(index, epoch)`` gets the epoch, others are indexed.
    The last, incomplete batch of an epoch is dropped. prefetch: batches made ahead by a thread (0: none).
    wanted: the media of a batch that this process will read; the thread loads these, others wait until somebody asks
        for their data. None: all. Called in the thread.
    Raises ValueError for sizes that do not fit.
    """

    def __init__(
        self,
        dataset: Dataset[Sample],
        batch_size: int,
        *,
        seed: int = 0,
        shuffle: bool = True,
        prefetch: int = 2,
        wanted: Callable[[list[Sample]], Iterable[Media]] | None = None,
    ) -> None:
        size = len(dataset)  # type: ignore[arg-type]
        if batch_size < 1:
            raise ValueError(f"batch_size is {batch_size}: a batch needs at least one sample")
        if size < batch_size:
            raise ValueError(f"the dataset has {size} samples, one batch needs {batch_size}; make batch_size smaller")
        self.dataset, self.batch_size, self.seed, self.shuffle = dataset, batch_size, seed, shuffle
        self.prefetch, self.wanted = prefetch, wanted
        self.epoch = 0
        self.position = 0
        self.batches_per_epoch = size // batch_size
        self._order: tuple[int, np.ndarray] | None = None
        self._worker: _Prefetcher | None = None
        self._closed = False
        self._failures_told = len(getattr(dataset, "failures", ()))  # those are told by who made the dataset

    def order(self, epoch: int) -> np.ndarray:
        """Dataset indices in the order of ``epoch``."""
        order = self._order
        if order is None or order[0] != epoch:
            size = len(self.dataset)  # type: ignore[arg-type]
            drawn = np.random.default_rng([self.seed, 4, epoch]).permutation(size) if self.shuffle else np.arange(size)
            order = self._order = (epoch, drawn)
        return order[1]

    def indices(self, epoch: int, position: int) -> list[int]:
        """Dataset indices of the batch at ``position`` (0 .. batches - 1) of ``epoch``."""
        return self.order(epoch)[position * self.batch_size : (position + 1) * self.batch_size].tolist()

    def batches(self, epoch: int) -> int:
        """Batches of ``epoch``."""
        return self.batches_per_epoch

    def _make(self, epoch: int, position: int) -> list[Sample]:
        sample = getattr(self.dataset, "sample", None)
        indices = self.indices(epoch, position)
        return [sample(i, epoch) for i in indices] if sample is not None else [self.dataset[i] for i in indices]

    def _load(self, samples: list[Sample]) -> list[Sample]:
        """`samples`, with the media decoded that this process will read."""
        for item in self.wanted(samples) if self.wanted is not None else self._all_media(samples):
            item.data  # noqa: B018 (loads it)
        return samples

    def _all_media(self, samples: list[Sample]) -> Iterable[Media]:
        return (item for sample in samples for items in sample.media.values() for item in items)

    def __iter__(self) -> Iterator[list[Sample]]:
        return self

    def __next__(self) -> list[Sample]:
        """The next batch. Raises RuntimeError after ``close``, and whatever the dataset raised."""
        if self._closed:
            raise RuntimeError("this loader is closed; make a new one and load its state_dict")
        if self.prefetch > 0:
            if self._worker is None:
                self._worker = _Prefetcher(self, self.epoch, self.position, self.prefetch)
            try:
                samples = self._worker.get()
            except BaseException:
                self._stop()
                raise
        else:
            samples = self._make(self.epoch, self.position)
        self.epoch, self.position = self.following(self.epoch, self.position)
        if self.position == 0 and hasattr(self.dataset, "report"):
            new = list(getattr(self.dataset, "failures", ()))[self._failures_told :]
            self._failures_told += len(new)
            if new:
                log.warning("end of epoch %d: %d files more cannot be read, e.g. %s", self.epoch - 1, len(new), new[0])
            else:
                log.info("end of epoch %d: %s", self.epoch - 1, self.dataset.report())
        return samples

    def following(self, epoch: int, position: int) -> tuple[int, int]:
        """(epoch, position) after the given one."""
        return (epoch, position + 1) if position + 1 < self.batches(epoch) else (epoch + 1, 0)

    def state_dict(self) -> dict[str, Any]:
        """Where the next batch comes from: plain numbers, the same on every rank."""
        return {
            "epoch": self.epoch,
            "position": self.position,
            "seed": self.seed,
            "batch_size": self.batch_size,
            "shuffle": self.shuffle,
            "dataset_size": len(self.dataset),  # type: ignore[arg-type]
            "fingerprint": self._fingerprint(),
        }

    def _fingerprint(self) -> str:
        return self.dataset.fingerprint() if hasattr(self.dataset, "fingerprint") else ""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues where ``state`` was taken. Raises ValueError when it belongs to other data or another order."""
        mine = self.state_dict()
        if set(state) != set(mine) or not all(type(state[key]) is type(mine[key]) for key in mine):
            raise ValueError(f"the saved loader state is damaged: it has {sorted(state)}, not {sorted(mine)}")
        for key in mine:
            if key not in ("epoch", "position") and state[key] != mine[key]:
                raise ValueError(
                    f"the saved loader state has {key} = {state[key]!r}, this run {mine[key]!r}: the order of samples "
                    f"would differ; resume with the same data settings, or start anew"
                )
        if state["epoch"] < 0 or not 0 <= state["position"] < self.batches(state["epoch"]):
            raise ValueError(
                f"the saved loader state is at batch {state['position']} of epoch {state['epoch']}; an epoch has "
                f"batches 0 to {self.batches(max(state['epoch'], 0)) - 1}"
            )
        self._stop()
        self.epoch, self.position = state["epoch"], state["position"]

    def _stop(self) -> None:
        if self._worker is not None:
            self._worker.close()
            self._worker = None

    def close(self) -> None:
        """Stops the prefetch thread and waits for it. Safe to call twice."""
        self._stop()
        self._closed = True

    def __enter__(self) -> Loader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Prefetcher:
    """A thread that makes batches in order into a bounded queue; its exception is raised by ``get``."""

    def __init__(self, loader: Loader, epoch: int, position: int, depth: int) -> None:
        self._queue: queue.Queue[list[Sample] | BaseException] = queue.Queue(maxsize=depth)
        self._stopping = threading.Event()
        self._thread = threading.Thread(
            target=self._run, args=(loader, epoch, position), name="interlace-prefetch", daemon=True
        )
        self._thread.start()

    def _run(self, loader: Loader, epoch: int, position: int) -> None:
        try:
            while not self._stopping.is_set():
                self._put(loader._load(loader._make(epoch, position)))
                epoch, position = loader.following(epoch, position)
        except BaseException as error:  # handed over, not swallowed
            self._put(error)

    def _put(self, item: list[Sample] | BaseException) -> None:
        while not self._stopping.is_set():
            try:
                self._queue.put(item, timeout=0.1)
                return
            except queue.Full:
                continue

    def get(self) -> list[Sample]:
        item = self._queue.get()
        if isinstance(item, BaseException):
            raise item
        return item

    def close(self) -> None:
        self._stopping.set()
        self._thread.join()
