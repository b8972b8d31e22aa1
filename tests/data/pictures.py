"""A dataset whose decoding can be counted, slowed down and made to fail, in any process."""

from __future__ import annotations

import os
import signal
import time
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch.utils.data import Dataset

from interlace.data.reading import Reading
from interlace.modalities.errors import DecodeError
from interlace.model.sample import Media, Sample


class Pictures(Dataset[Sample], Reading):
    """Sample i has i % 3 images and one sound; the values of both follow from (index, epoch, place) alone.

    folder: for each decoded item, a line is added to `decoded` there. seconds: duration of each decoding. deadly: index
    -> number of processes that die of it. broken: indices that cannot be read.
    """

    def __init__(
        self,
        size: int,
        folder: Path,
        *,
        seconds: float = 0.0,
        deadly: dict[int, int] | None = None,
        broken: tuple[int, ...] = (),
        varies: bool = False,
        side: int = 8,
    ) -> None:
        Reading.__init__(self)
        self.size, self.folder, self.seconds, self.varies, self.side = size, Path(folder), seconds, varies, side
        self.deadly, self.broken = deadly or {}, broken

    def __len__(self) -> int:
        return self.size

    @property
    def token_lengths(self) -> torch.Tensor:
        return torch.tensor([self._length(index) for index in range(self.size)]).numpy()

    def _length(self, index: int) -> int:
        return 6 + 7 * index % 5

    def fingerprint(self) -> str:
        return f"pictures {self.size} {self.side}"

    def sample(self, index: int, epoch: int) -> Sample:
        ids = (torch.arange(self._length(index)) * 31 + 1009 * index + 7 * epoch) % 997
        made: dict[str, list[Media]] = {"vision": [], "audio": []}
        for number in range(index % 3):
            made["vision"].append(self._media((3, self.side, self.side + number), index, epoch, "vision", number))
        made["audio"].append(self._media((4, 5 + index % 2), index, epoch, "audio", 0))
        return Sample(ids, (ids * 3 + 1) % 997, made, f"pictures:{index}")

    def _media(self, shape: tuple[int, ...], index: int, epoch: int, modality: str, number: int) -> Media:
        load = partial(self._read, shape, index, epoch, modality, number)
        blank = partial(torch.zeros, shape)
        return Media(shape, 1, load=partial(self.read_or_blank, f"pictures:{index}", load, blank))

    def _read(self, shape: tuple[int, ...], index: int, epoch: int, modality: str, number: int) -> torch.Tensor:
        with open(self.folder / "decoded", "a") as file:
            file.write(f"{index} {epoch} {modality} {number} {os.getpid()}\n")
        time.sleep(self.seconds)
        if index in self.deadly:
            note = self.folder / f"died of {index}"
            died = len(note.read_text()) if note.exists() else 0
            if died < self.deadly[index]:
                note.write_text("x" * (died + 1))
                os.kill(os.getpid(), signal.SIGKILL)
        if index in self.broken:
            raise DecodeError(f"pictures:{index}: the disk is gone")
        seed = 1000 * index + 10 * number + (100_003 * epoch if self.varies else 0) + (modality == "audio")
        return torch.randn(shape, generator=torch.Generator().manual_seed(seed))

    def decoded(self) -> list[tuple[str, ...]]:
        """(index, epoch, modality, number, process) of all decoded items."""
        file = self.folder / "decoded"
        return [tuple(line.split()) for line in file.read_text().splitlines()] if file.exists() else []


class Killer:
    """Kills workers of a pool, each at most once."""

    def __init__(self, pool: Any, draw: Random) -> None:
        self.pool, self.draw, self.killed = pool, draw, set[int]()

    def kill(self) -> None:
        """Kills a running worker; waits until one runs."""
        deadline = time.monotonic() + 60
        while not (left := [pid for pid in self.pool.pids() if pid not in self.killed]):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        pid = self.draw.choice(left)
        self.killed.add(pid)
        os.kill(pid, signal.SIGKILL)

    def wait(self) -> None:
        """Waits until the pool has noticed all kills."""
        deadline = time.monotonic() + 60
        while self.pool.restarts < len(self.killed):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert self.pool.restarts == len(self.killed)
