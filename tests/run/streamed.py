"""Streams of tiny samples for tests. Every item counts its decodings and the threads that did them."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from interlace.data.streams.base import IterableStream
from interlace.model import Media, Sample
from tests.tiny import random_sample


class Counted:
    """Samples by name, and a record of decoded items."""

    def __init__(self, mllm, shards: Sequence[int], *, seed: int = 0, kinds: Sequence[tuple[int, int]] = ((1, 1),)):
        """shards: samples in each. kinds: (images, clips) of the samples in turn."""
        generator = torch.Generator().manual_seed(seed)
        self.whole: dict[str, Sample] = {}
        self.decoded: Counter[str] = Counter()
        self.threads: dict[str, set[str]] = {}
        self._lock = threading.Lock()
        self.names: list[list[str]] = []
        number = 0
        for shard, count in enumerate(shards):
            self.names.append([])
            for i in range(count):
                images, clips = kinds[number % len(kinds)]
                images, clips = (
                    n if name in mllm.encoders else 0 for n, name in ((images, "vision"), (clips, "audio"))
                )
                sample = random_sample(mllm, generator, images=images, clips=clips, text=4 + number % 5)
                sample.name = f"{shard}/{i}"
                self.whole[sample.name] = sample
                self.names[-1].append(sample.name)
                number += 1
        self.stream = IterableStream([self._source(shard) for shard in range(len(shards))])

    def _source(self, shard: int) -> Callable[[], Iterator[Sample]]:
        return lambda: (self._lazy(self.whole[name]) for name in self.names[shard])

    def _lazy(self, sample: Sample) -> Sample:
        media = {
            name: [
                Media(item.shape, item.tokens, load=self._loader(f"{sample.name} {name} {k}", item), about=item.about)
                for k, item in enumerate(items)
            ]
            for name, items in sample.media.items()
        }
        return Sample(sample.input_ids, sample.labels, media, sample.name)

    def _loader(self, key: str, item: Media) -> Callable[[], Tensor]:
        def load() -> Tensor:
            with self._lock:
                self.decoded[key] += 1
                self.threads.setdefault(key, set()).add(threading.current_thread().name)
            assert item.data is not None
            return item.data.clone()

        return load

    def samples(self, names: Sequence[str]) -> list[Sample]:
        """Complete samples of a batch."""
        return [self.whole[name] for name in names]


def names_of(batch) -> list[str]:
    return [sample.name for sample in batch.given.samples]
