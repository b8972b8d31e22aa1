"""Data wait of training with slow decoding: by a thread of the trainer, by worker processes or on Ray.

The decoding of each item sleeps (50 ms by default), and so does the step. A machine of two cores can therefore show the
behaviour of many: the pipeline of tasks and items is measured, not arithmetic. The first `steps` are left out, since
they wait for the first batch.

    python -m bench.data_wait --out bench/results/data_wait.json
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset

from bench.measure import command, machine, versions, write_json
from interlace.data import Loader, Media, ReadAhead, Sample
from interlace.data.workers.decode_cache import PREFIX, Place

WARM = 3
"""Steps before the first that counts."""


class Sleeping(Dataset[Sample]):
    """Samples with a picture (3, 64, 64) each, whose decoding sleeps for `seconds`."""

    varies = False

    def __init__(self, size: int, seconds: float) -> None:
        self.size, self.seconds = size, seconds

    def __len__(self) -> int:
        return self.size

    def fingerprint(self) -> str:
        return f"sleeping {self.size}"

    def sample(self, index: int, epoch: int) -> Sample:
        ids = (torch.arange(40) * 31 + index) % 997
        media = Media((3, 64, 64), 16, load=partial(self._read, index))
        return Sample(ids, (ids * 3 + 1) % 997, {"vision": [media]}, f"sample {index}")

    def _read(self, index: int) -> torch.Tensor:
        time.sleep(self.seconds)
        return torch.full((3, 64, 64), float(index))


def measure(
    name: str, producers: Callable[[Any], Any] | None, *, steps: int, batch: int, decode: float, step: float, size: int
) -> dict[str, Any]:
    """Seconds that `steps` steps wait for their batches, and the seconds of the steps."""
    with Loader(Sleeping(size, decode), batch, seed=1, ahead=ReadAhead(4, producers=producers)) as loader:
        loader.begin()
        waits = []
        for _ in range(WARM + steps):
            began = time.perf_counter()
            samples = next(loader)
            waits.append(time.perf_counter() - began)
            assert all(item.loaded for sample in samples for item in sample.media["vision"])
            time.sleep(step)
    waited = sum(waits[WARM:])
    total = waited + steps * step
    return {
        "producers": name,
        "steps": steps,
        "waited_s": waited,
        "wait_share_percent": 100.0 * waited / total,
        "slowest_wait_s": max(waits[WARM:]),
        "items_per_second": steps * batch / total,
    }


def run(batch: int, decode: float, step: float, steps: int, ray_address: str | None = None) -> dict[str, Any]:
    """Every way of decoding, with as many samples as all steps consume: each is decoded once."""
    from interlace.data.workers.pool import WorkerPool

    size = batch * (WARM + steps + 8)
    enough = math.ceil(batch * decode / step * 1.25)  # number of workers: the demand of the step plus a quarter
    given: dict[str, Any] = {"steps": steps, "batch": batch, "decode": decode, "step": step, "size": size}
    rows = [measure("thread", None, **given)]
    with tempfile.TemporaryDirectory() as folder:
        for count in sorted({max(1, enough // 4), max(1, enough // 2), enough}):
            where = Place(Path(folder) / PREFIX, 1 << 28)
            rows.append(measure(f"{count} workers", lambda it, n=count, w=where: WorkerPool(it, n, where=w), **given))
        rows.append(measure(f"{enough} workers, nothing kept", lambda it: WorkerPool(it, enough), **given))
    # The second epoch, with few samples: all of them are decoded.
    with tempfile.TemporaryDirectory() as folder:
        where = Place(Path(folder) / PREFIX, 1 << 28)
        again = given | {"size": batch * WARM}
        rows.append(measure("1 worker, decoded before", lambda it: WorkerPool(it, 1, where=where), **again))
    if ray_address is not None:
        from interlace.data.workers.ray_tasks import RayTasks

        rows.append(measure("ray", lambda it: RayTasks(it, "bench", address=ray_address), **given))
    return {"samples_per_step": batch, "decode_s": decode, "step_s": step, "enough_workers": enough, "rows": rows}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=8, help="samples of a step")
    parser.add_argument("--decode", type=float, default=0.05, help="seconds that a sample's decoding sleeps")
    parser.add_argument("--step", type=float, default=0.1, help="seconds that a step sleeps")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--ray", metavar="ADDRESS", help="a Ray cluster to measure, too")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args(arguments)
    report = run(given.batch, given.decode, given.step, given.steps, given.ray)
    for row in report["rows"]:
        print(f"{row['producers']:28} waits {row['wait_share_percent']:6.2f} %, {row['items_per_second']:7.1f} items/s")
    if given.out is not None:
        about = {"benchmark": "data_wait", "command": command("data_wait", arguments)}
        named = versions("torch", "ray") if given.ray else versions("torch")
        write_json(given.out, {**about, "machine": machine(), "versions": named, **report})
    return 0


if __name__ == "__main__":
    sys.exit(main())
