"""Helpers of test_stream_workers.py and of other tests."""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from interlace.data import SampleStream
from interlace.modalities.errors import DecodeError
from interlace.model import Media, Sample
from tests.tiny import random_sample

KINDS = ((1, 1), (0, 0), (2, 0))  # images and clips of the samples in turn


class Recorded(SampleStream):
    """Tiny samples of a model; every decoded item is a line in `folder`.

    deadly: name -> number of processes that die of it. broken: names of samples that cannot be decoded. seconds: of an
    item.
    """

    def __init__(
        self,
        mllm: Any,
        shards: Sequence[int],
        folder: Path,
        *,
        deadly: dict[str, int] | None = None,
        broken: tuple[str, ...] = (),
        seconds: float = 0.0,
    ) -> None:
        generator = torch.Generator().manual_seed(0)
        self.folder, self.deadly, self.broken, self.seconds = folder, deadly or {}, broken, seconds
        self.left: list[str] = []
        self.counted = 0
        self.whole: list[dict[str, Sample]] = []
        kinds = itertools.cycle(KINDS)
        for shard, count in enumerate(shards):
            self.whole.append({})
            for number in range(count):
                images, clips = next(kinds)
                sample = random_sample(mllm, generator, images=images, clips=clips, text=4 + number % 5)
                sample.name = f"{shard}/{number}"
                self.whole[-1][sample.name] = sample

    @property
    def shards(self) -> int:
        return len(self.whole)

    def fingerprint(self) -> str:
        return "recorded"

    def left_out(self, sample: Sample, error: DecodeError) -> None:
        self.left.append(f"{sample.name}: {error}")

    def took(self) -> None:
        self.counted += 1

    def read(self, shard: int, epoch: int) -> Iterator[Sample]:
        for name, sample in self.whole[shard].items():
            media = {
                key: [Media(i.shape, i.tokens, load=partial(self.decode, shard, name, key, k), about=i.about)
                      for k, i in enumerate(items)]
                for key, items in sample.media.items()
            }  # fmt: skip
            yield Sample(sample.input_ids, sample.labels, media, name)

    def decode(self, shard: int, name: str, encoder: str, number: int) -> Tensor:
        with open(self.folder / "decoded", "a") as file:
            file.write(f"{name} {encoder} {number} {os.getpid()}\n")
        time.sleep(self.seconds)
        note = self.folder / f"died of {name.replace('/', ' ')}"
        died = len(note.read_text()) if note.exists() else 0
        if died < self.deadly.get(name, 0):
            note.write_text("x" * (died + 1))
            os.kill(os.getpid(), signal.SIGKILL)
        if name in self.broken:
            raise DecodeError(f"{name}: the disk is gone")
        data = self.whole[shard][name].media[encoder][number].data
        assert data is not None
        return data.clone()

    def lines(self) -> list[list[str]]:
        """(sample, encoder, number, process) of all decoded items."""
        file = self.folder / "decoded"
        return [line.split() for line in file.read_text().splitlines()] if file.exists() else []


def numbers(batch: Any) -> list[Any]:
    """A batch on every rank, in comparable form."""
    return [
        (
            rank, sample.name, len(sample), sample.targets,
            sample.input_ids.tolist() if isinstance(sample, Sample) else None,
            {name: [None if i.data is None else i.data.tolist() for i in of] for name, of in sample.media.items()},
        )
        for rank, samples in batch.given.of_rank.items() for sample in samples
    ]  # fmt: skip
