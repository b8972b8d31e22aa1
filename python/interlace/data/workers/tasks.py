"""Tasks of producers and their answers, the same for worker processes and for Ray tasks.

A producer has a copy of the loader, with its dataset, order and packing. It makes batches (token ids, labels and media
metadata) and decodes items of single samples. The trainer sends only the position in the sequence and the items it
computes with. A task depends on nothing but its own numbers. So a task of a lost producer can be sent to another one,
with the same result bit for bit.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from interlace.data.workers.decode_cache import DTYPES, Decoded
from interlace.model.sample import Media, Sample

if TYPE_CHECKING:
    from interlace.data.dataset import SampleDataset
    from interlace.data.streams.base import SampleStream

DEATHS = 3  # producers that one sample may kill before it is marked broken


@dataclass(frozen=True)
class Task:
    """One task.

    make: the batch at position `at` of `epoch`. load: the `items` (modality, number) of sample `at`, from the held-out
    samples if `held_out` is set. decode: runs the pickled `loads` (`packed`) of the stream sample called `name`.
    sent: items are sent with the answer even if they are in the node's cache.
    """

    kind: Literal["make", "load", "decode"]
    epoch: int = 0
    at: int = 0
    items: tuple[tuple[str, int], ...] = ()
    loads: bytes = field(default=b"", repr=False)
    name: str = ""
    held_out: bool = False
    sent: bool = False

    def __str__(self) -> str:
        if self.kind == "decode":
            return self.name or "a sample"
        if self.held_out:
            return f"held-out sample {self.at}"
        return f"{'batch' if self.kind == 'make' else 'sample'} {self.at} of epoch {self.epoch}"


class Bare(NamedTuple):
    """A sample without its media's data. at: its index in the dataset; ids, labels: int64."""

    at: int
    ids: np.ndarray
    labels: np.ndarray
    media: dict[str, list[Media]]
    name: str


@dataclass(frozen=True)
class Made:
    """A batch. rows: number of samples in each row, for packed samples. next: epoch and position of the batch after
    it."""

    samples: list[Bare]
    rows: list[int] | None = None
    next: tuple[int, int] = (0, 0)


class Raw(NamedTuple):
    """An item in transit to another process. kind: its index in `decode_cache.DTYPES`."""

    kind: int
    shape: tuple[int, ...]
    data: Any  # bytes, or an array of uint8

    @classmethod
    def of(cls, item: Tensor) -> Raw:
        """A copy of the item's numbers. Raises TypeError for an unsupported dtype."""
        if item.dtype not in DTYPES:
            raise TypeError(f"media data is {item.dtype}; scale and normalise it to a floating dtype first")
        flat = item.detach().contiguous().reshape(-1).view(torch.uint8)
        return cls(DTYPES.index(item.dtype), tuple(item.shape), flat.numpy())

    def tensor(self) -> Tensor:
        """The item, in its own memory."""
        return torch.frombuffer(bytearray(self.data), dtype=DTYPES[self.kind]).view(self.shape)


@dataclass
class Loaded:
    """Items in the order of their task; None: the item is in the node's cache.

    read: number of items read for it; lost: the unreadable ones among them, which are blank, as (source, why).
    busy: another process decodes this sample; ask again. broken: reason why it is undecodable.
    """

    items: list[Raw | None] = field(default_factory=list)
    read: int = 0
    lost: list[tuple[str, str]] = field(default_factory=list)
    busy: bool = False
    broken: str = ""


_THE_STREAM = "the stream"


def packed(stream: SampleStream, loads: Sequence[Callable[[], Tensor]]) -> bytes:
    """The pickled loading functions of a stream sample's items, for a worker process, which has a copy of the stream.
    Raises the errors of `pickle`."""

    class Pickler(pickle.Pickler):
        def persistent_id(self, obj: Any) -> str | None:
            return _THE_STREAM if obj is stream else None

    file = io.BytesIO()
    Pickler(file).dump(list(loads))
    return file.getvalue()


def unpacked(stream: SampleStream, data: bytes) -> list[Callable[[], Tensor]]:
    """Inverse of `packed`, with this process's copy of the stream. Trusts the process that started this one."""

    class Unpickler(pickle.Unpickler):
        def persistent_load(self, pid: str) -> SampleStream:
            return stream

    loaders: list[Callable[[], Tensor]] = Unpickler(io.BytesIO(data)).load()
    return loaders


@dataclass(frozen=True)
class OfStream:
    """The workers' loader for streams: a copy of the stream as `dataset`, and the held-out samples."""

    dataset: SampleStream
    held_out: SampleDataset | None = None

    def fingerprint(self) -> str:
        """Fingerprint of the stream."""
        return str(self.dataset.fingerprint())


def sample_key(dataset: object, task: Task) -> tuple[object, ...]:
    """Cache key of a sample's items; without the epoch if samples do not vary by epoch."""
    if task.held_out:
        return ("held out", task.at)
    return (task.at, task.epoch) if getattr(dataset, "varies", True) else (task.at,)


class Producing:
    """Answers tasks from a copy of the trainer's loader. decoded: the node's cache of items, if it is used."""

    def __init__(self, loader: Any, decoded: Decoded | None = None) -> None:
        self.loader, self.dataset, self.decoded = loader, loader.dataset, decoded
        self.held_out = loader.held_out

    def answer(self, task: Task) -> Made | Loaded:
        """Answer of a task."""
        if task.kind == "decode":
            loads = unpacked(self.dataset, task.loads)
            return Loaded([Raw.of(load()) for load in loads], read=len(loads))
        return self.make(task) if task.kind == "make" else self.load(task)

    def make(self, task: Task) -> Made:
        """The batch of a task, identical to one of the loader's own thread."""
        batch, indices = self.loader._make(task.epoch, task.at), self.loader.indices(task.epoch, task.at)
        rows = [len(row) for row in batch] if batch and isinstance(batch[0], list) else None
        flat = batch if rows is None else [sample for row in batch for sample in row]
        samples = [bare_of(index, sample) for index, sample in zip(indices, flat, strict=True)]
        return Made(samples, rows, self.loader.following(task.epoch, task.at))

    def load(self, task: Task) -> Loaded:
        """The items of a sample, decoded unless they are cached."""
        if self.decoded is None:
            return self._decode(task, ())
        key = sample_key(self.dataset, task)
        keys = [(*key, *item) for item in task.items]
        if (kept := self._kept(task, keys)) is not None:
            return kept
        with self.decoded.claimed(key) as mine:
            if not mine:
                return Loaded(busy=True)
            if (kept := self._kept(task, keys)) is not None:
                return kept
            if (why := self.decoded.broken(key)) is not None:
                return Loaded(broken=why)
            return self._decode(task, key)

    def _kept(self, task: Task, keys: list[tuple[object, ...]]) -> Loaded | None:
        """The answer if all items are cached, else None."""
        assert self.decoded is not None
        if not task.sent:
            return Loaded([None] * len(keys)) if all(map(self.decoded.has, keys)) else None
        items = [item for key in keys if (item := self.decoded.get(key)) is not None]
        return Loaded([Raw.of(item) for item in items]) if len(items) == len(keys) else None

    def _decode(self, task: Task, key: tuple[object, ...]) -> Loaded:
        dataset: Any = self.held_out if task.held_out else self.dataset
        counts = hasattr(dataset, "noted")
        before = 0
        if counts:
            before, dataset.noted = dataset.read_items, []
        sample = dataset.sample(task.at, 0) if task.held_out else self.loader.sample(task.at, task.epoch)
        items = [_data(sample, task, *item) for item in task.items]
        done = Loaded(read=dataset.read_items - before if counts else len(items))
        if counts:
            done.lost = dataset.noted
        keep = None if done.lost else self.decoded  # blanks are not cached
        for place, item in zip(task.items, items, strict=True):
            kept = keep is not None and keep.put((*key, *place), item)
            done.items.append(None if kept and not task.sent else Raw.of(item))
        if keep is not None and getattr(dataset, "loads_together", False):
            for modality, number, item in _others(sample, task):  # decoded as well, for other ranks
                keep.put((*key, modality, number), item)
        return done


def bare_of(index: int, sample: Sample) -> Bare:
    """A sample without its media's data, for transfer to the process that adds them."""
    media = {modality: [item.without_data() for item in items] for modality, items in sample.media.items()}
    return Bare(index, sample.input_ids.numpy(), sample.labels.numpy(), media, sample.name)


def _data(sample: Sample, task: Task, modality: str, number: int) -> Tensor:
    data = sample.media[modality][number].data
    if data is None:
        raise ValueError(f"{task}: item {number} of {modality!r} has no data and nothing to load them with")
    return data


def _others(sample: Sample, task: Task) -> Iterator[tuple[str, int, Tensor]]:
    asked = set(task.items)
    for modality, items in sample.media.items():
        for number, item in enumerate(items):
            if (modality, number) not in asked and (data := item.data) is not None:
                yield modality, number, data


def whole(bare: Bare, load: Callable[[str, int], Tensor] | None) -> Sample:
    """Sample whose items' data come from `load(modality, number)`; None: without data."""
    media = {
        modality: [
            Media(each.shape, each.tokens, load=load and partial(load, modality, number), about=each.about)
            for number, each in enumerate(items)
        ]
        for modality, items in bare.media.items()
    }
    # Copied: arrays in Ray's store are read-only.
    return Sample(torch.from_numpy(bare.ids.copy()), torch.from_numpy(bare.labels.copy()), media, bare.name)
