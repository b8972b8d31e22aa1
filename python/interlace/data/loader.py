"""Batches of uncollated samples: seeded shuffling, background prefetch, exact resumption.

- The order of an epoch is a permutation drawn from (seed, epoch), or the mixture's own order. Batch ``b`` is its
  ``b``-th slice. Every rank gets the whole batch with ids, labels and shapes; media are decoded only on the ranks that
  read them. So all ranks agree without communication.
- ``state_dict`` records the batches *handed out*, not those already prefetched. A loader that loads it continues with
  the next batch, on any layout.
- The prefetch thread is enough while decoding is fast (0.2 to 0.4 ms per sample). Otherwise `producers` prepare the
  data in other processes (workers/pool.py, workers/ray_tasks.py). They serve batches and items (workers/produced.py),
  bit for bit the same.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from torch.utils.data import Dataset

from interlace.data.workers.ahead import AheadThread
from interlace.data.workers.produced import Ahead, Producers, ReadAhead
from interlace.model.sample import Media, Sample

log = logging.getLogger("interlace.data")


class Loader:
    """Endless iterator over lists of ``batch_size`` samples.

    dataset: map-style. ``sample(index, epoch)`` is used if the dataset has it, else plain indexing. An optional
        ``order(seed, epoch)`` defines the draws of an epoch; their number must be the same in every epoch.
    drop_last: leave out the samples at the end of an epoch that do not fill a batch. By default they are a smaller one.
    Raises ValueError for sizes that do not fit.
    """

    def __init__(
        self,
        dataset: Dataset[Sample],
        batch_size: int,
        *,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
        ahead: ReadAhead = ReadAhead(),  # noqa: B008 (frozen)
    ) -> None:
        self.size = len(dataset)  # type: ignore[arg-type]
        if batch_size < 1:
            raise ValueError(f"batch_size is {batch_size}: a batch needs at least one sample")
        if self.size < 1:
            raise ValueError("the dataset has no samples")
        if drop_last and self.size < batch_size:
            raise ValueError(
                f"the dataset has {self.size} samples, one batch needs {batch_size}; make batch_size smaller, or leave "
                "out drop_last"
            )
        self.dataset, self.batch_size, self.seed, self.shuffle = dataset, batch_size, seed, shuffle
        self.drop_last, self.ahead, self.held_out = drop_last, ahead, ahead.held_out
        self.producers: Producers | None = None
        self.epoch = 0
        self.position = 0
        self.batches_per_epoch = self.size // batch_size if drop_last else -(-self.size // batch_size)
        self._orders: dict[int, np.ndarray] = {}
        self._worker: AheadThread | None = None
        self._closed = False
        self._failures_told = len(getattr(dataset, "failures", ()))  # already reported by the creator of the dataset

    def order(self, epoch: int) -> np.ndarray:
        """Dataset indices in the order of ``epoch``."""
        drawn = self._orders.get(epoch)
        if drawn is None:
            if not self.shuffle:
                drawn = np.arange(self.size)
            elif hasattr(self.dataset, "order"):
                drawn = self.dataset.order(self.seed, epoch)
            else:
                drawn = np.random.default_rng([self.seed, 4, epoch]).permutation(self.size)
            # The prefetch thread may be in the next epoch already. Both threads call this method, so the dict is
            # replaced, never modified: the other thread may be reading it.
            kept = {other: order for other, order in self._orders.items() if abs(other - epoch) < 2}
            self._orders = {**kept, epoch: drawn}
        return drawn

    def indices(self, epoch: int, position: int) -> list[int]:
        """Dataset indices of the batch at ``position`` (0 .. batches - 1) of ``epoch``."""
        return self.order(epoch)[position * self.batch_size : (position + 1) * self.batch_size].tolist()

    def drawn(self, epoch: int, position: int) -> int:
        """Number of samples of the order of ``epoch`` drawn by the end of the batch at ``position``."""
        return min((position + 1) * self.batch_size, self.size)

    def left_out(self, epoch: int) -> int:
        """Number of samples of the order of ``epoch`` that are in none of its batches."""
        return self.size - self.drawn(epoch, self.batches(epoch) - 1)

    def batches(self, epoch: int) -> int:
        """Number of batches of ``epoch``."""
        return self.batches_per_epoch

    def __getstate__(self) -> dict[str, object]:
        # Pickled for producers, which make batches of the same sequence and prefetch nothing themselves.
        own: dict[str, object] = {
            "ahead": ReadAhead(prefetch=0),
            "producers": None,
            "_worker": None,
            "_orders": {},
            "_closed": False,
        }
        return self.__dict__ | own

    def sample(self, index: int, epoch: int) -> Sample:
        """Sample `index` of the dataset, as it is in `epoch`."""
        sample = getattr(self.dataset, "sample", None)
        loaded: Sample = self.dataset[index] if sample is None else sample(index, epoch)
        return loaded

    def _make(self, epoch: int, position: int) -> list[Sample]:
        return [self.sample(index, epoch) for index in self.indices(epoch, position)]

    def _load(self, samples: list[Sample]) -> list[Sample]:
        """Decodes the media that this process will read; returns `samples`."""
        for item in (self.ahead.wanted or self._all_media)(samples):
            item.data  # noqa: B018 (loads it)
        return samples

    def _all_media(self, samples: list[Sample]) -> Iterable[Media]:
        return (item for sample in samples for items in sample.media.values() for item in items)

    def __iter__(self) -> Iterator[list[Sample]]:
        return self

    def __next__(self) -> list[Sample]:
        """The next batch. Raises RuntimeError after ``close``, and any error of the dataset."""
        if self._closed:
            raise RuntimeError("this loader is closed; make a new one and load its state_dict")
        if self.ahead.prefetch > 0 or self.ahead.producers is not None:
            if self._worker is None:
                self.begin()
                place = self.epoch, self.position
                if self.producers is None:
                    self._worker = _Prefetcher(self.ahead.prefetch, self, *place)
                else:
                    self._worker = Ahead(self.producers, self.dataset, place, self.ahead)
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

    def begin(self) -> None:
        """Starts the producers before the first batch is requested; this takes seconds."""
        if self.ahead.producers is not None and self.producers is None:
            self.producers = self.ahead.producers(self)

    def following(self, epoch: int, position: int) -> tuple[int, int]:
        """(epoch, position) after the given one."""
        return (epoch, position + 1) if position + 1 < self.batches(epoch) else (epoch + 1, 0)

    def state_dict(self) -> dict[str, Any]:
        """Position of the next batch and the settings: plain numbers, the same on every rank."""
        return {
            "epoch": self.epoch,
            "position": self.position,
            "seed": self.seed,
            "batch_size": self.batch_size,
            "shuffle": self.shuffle,
            "drop_last": self.drop_last,
            "dataset_size": self.size,
            "fingerprint": self.fingerprint(),
        }

    def fingerprint(self) -> str:
        """The dataset's own fingerprint of everything its samples depend on; "" without one."""
        return str(self.dataset.fingerprint()) if hasattr(self.dataset, "fingerprint") else ""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues where ``state`` was taken. Raises ValueError when it belongs to other data or another order."""
        mine, state = self.state_dict(), {"drop_last": True} | state  # the default is for old states
        if set(state) != set(mine) or not all(type(state[key]) is type(mine[key]) for key in mine):
            raise ValueError(f"the saved loader state is damaged: it has {sorted(state)}, not {sorted(mine)}")
        for key in mine:
            if key not in ("epoch", "position") and state[key] != mine[key]:
                way = f"data.drop_last = {str(state[key]).lower()}" if key == "drop_last" else "the same data settings"
                raise ValueError(
                    f"the saved loader state has {key} = {state[key]!r}, this run {mine[key]!r}: the order of samples "
                    f"would differ; resume with {way}, or start anew"
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
        """Stops the prefetch thread and the producers, and waits for them. Safe to call twice."""
        self._stop()
        if self.producers is not None:
            self.producers.close()
        self._closed = True

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Prefetcher(AheadThread):
    """Thread that makes the batches itself. loader, epoch, position: the start."""

    def _run(self, loader: Loader, epoch: int, position: int) -> None:
        try:
            while not self._stopping.is_set():
                self._put(loader._load(loader._make(epoch, position)))
                epoch, position = loader.following(epoch, position)
        except BaseException as error:  # handed over to the reader, not swallowed
            self._put(error)
