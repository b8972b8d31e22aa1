"""Timing of step work outside the schedule (`HostOverhead`); takes a second or two for small samples.

The step table, the comparison of the ranks and the counting of a batch are timed on a batch of the run's own data.
Reading and decoding are measured in CPU seconds, so that a temporarily slow disk does not distort them. Both are timed
as work of the rank's own thread. If [data] has workers, the work of a worker and the hand-over to the rank's thread are
timed as well. On a GPU, the host reads while the GPU computes; reading is then left out.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from interlace.costs.host_overhead import NO_HOST_OVERHEAD, HostOverhead
from interlace.train.config.sections import Config
from interlace.train.data.producers import workers_of
from interlace.train.launch import launcher
from interlace.train.report.metrics import computed_tokens

if TYPE_CHECKING:
    from interlace.data import SampleDataset
    from interlace.model import MultimodalModel, Sample

SAMPLES = 48  # maximum number of samples to read
SECONDS = 1.0  # no more samples are decoded after this time
_TURNS = 5


def measure_overhead(
    config: Config, model: MultimodalModel, data: SampleDataset, kind: str
) -> Callable[[int, int], HostOverhead]:
    """Measures the outside-schedule time of a config's model on devices of a `kind`. data: the training set.

    Returns a function of (ranks per node, threads per rank). Both determine the number of workers and whether workers
    have cores of their own.
    """
    count = min(SAMPLES, len(data))
    if not count:
        return lambda local_ranks, threads: NO_HOST_OVERHEAD
    begin = time.thread_time()
    samples = [data.sample((2 * i + 1) * len(data) // (2 * count), 0) for i in range(count)]
    read = (time.thread_time() - begin) / count
    table, rest, error = _batch_seconds(config, model, samples[: config.train.batch_size])
    if kind != "cpu":
        return lambda local_ranks, threads: HostOverhead(table + rest, error=error)
    worker_times: _WorkerTimes | None = None
    if workers_of(config, 1) or config.data.workers == "ray":  # with more ranks, each has as many workers or fewer
        worker_times = _worker_times(config, model, data, count)
    decode = _decoding(model, samples)

    def around(local_ranks: int, threads: int) -> HostOverhead:
        workers = workers_of(config, local_ranks)
        # The reading thread also makes the table of each batch: the table determines the items that this rank decodes.
        if worker_times is None or not (workers or config.data.workers == "ray"):
            return HostOverhead(table + rest, read + table, decode, error)
        part = beside(workers, local_ranks, threads)
        seconds = {name: worker_times.took[name] + part * worker_times.decode[name] for name in worker_times.decode}
        return HostOverhead(table + rest, worker_times.took_bare + part * worker_times.read + table, seconds, error)

    return around


def beside(workers: int, local_ranks: int, threads: int) -> float:
    """Share of the workers' compute time that slows down their rank: 0 if all have cores of their own.

    Otherwise workers and rank share the cores of the rank, which run one or the other. Ray workers may be on other
    nodes and are not counted.
    """
    cores = launcher.default_threads(1)
    if local_ranks * (threads + workers) <= cores:
        return 0.0
    return 1.0 / max(1.0, cores / local_ranks)


@dataclass(frozen=True)
class _WorkerTimes:
    """CPU seconds per sample if another process prepares the data.

    read, took_bare: time in that process and in this one, for everything except media.
    decode, took: encoder -> the same for its items.
    """

    read: float
    took_bare: float
    decode: Mapping[str, float]
    took: Mapping[str, float]


def _worker_times(config: Config, model: MultimodalModel, data: SampleDataset, count: int) -> _WorkerTimes | None:
    """Times the work of a worker and of the thread that waits for it, for a batch of `count` samples, one after the
    other.

    Nothing is cached for another epoch, because a cache would skip decoding. Returns None for data that cannot be sent
    to workers.
    """
    from interlace.data.loader import Loader
    from interlace.data.workers.tasks import Producing, Task, whole

    try:  # copied, as for a worker: the copy counts unreadable items separately
        loader = pickle.loads(pickle.dumps(Loader(data, count, seed=config.run.seed)))
    except Exception:  # user classes may raise anything; the run reports it when it starts workers
        return None
    producer = Producing(loader)
    clock = time.thread_time
    begin = clock()
    sent = pickle.dumps(producer.answer(Task("make", 0, 0)))
    answered = clock()
    samples = [whole(bare, None) for bare in pickle.loads(sent).samples]
    took = clock() - answered
    decode, receive = {}, {}
    for name in model.encoders:
        spent, receiving, done = 0.0, 0.0, 0
        for index, sample in zip(loader.indices(0, 0), samples, strict=True):
            items = tuple((name, number) for number in range(len(sample.media.get(name, ()))))
            if not items:
                continue
            started = clock()
            answer = pickle.dumps(producer.answer(Task("load", 0, index, items)))
            there_until = clock()
            for raw in pickle.loads(answer).items:
                raw.tensor()
            spent, receiving, done = spent + there_until - started, receiving + clock() - there_until, done + 1
            if spent > SECONDS:
                break
        if done:
            decode[name], receive[name] = spent / done, receiving / done
    return _WorkerTimes((answered - begin) / count, took / count, decode, receive)


def _decoding(model: MultimodalModel, samples: Sequence[Sample]) -> dict[str, float]:
    """Encoder -> CPU seconds to decode one sample's items, on average."""
    seconds = {}
    for name in model.encoders:
        begin, count = time.thread_time(), 0
        for items in filter(None, (sample.media.get(name) for sample in samples)):
            for item in items:
                item.data  # noqa: B018 (loads it)
            count += 1
            if time.thread_time() - begin > SECONDS:
                break
        if count:
            seconds[name] = (time.thread_time() - begin) / count
    return seconds


def _batch_seconds(config: Config, model: MultimodalModel, samples: Sequence[Sample]) -> tuple[float, float, float]:
    """Seconds per sample for a step's table and for the rest of the work on a batch; and relative spread of the turns.

    The spread is the slowdown of the median turn relative to the fastest.
    """
    from interlace.layout import Layout, ParallelSpec
    from interlace.run import comparison
    from interlace.run.tables.batch import GlobalBatch
    from interlace.run.tables.deals import Deals
    from interlace.train.report.flops import Meter

    layout = Layout.from_specs(model, {name: ParallelSpec() for name in model.modules_order()}, ranks=1)
    meter = Meter(model, [0.0], recompute=config.train.recompute)
    tables, rests = [], []
    for _ in range(_TURNS):
        begin = time.perf_counter()
        batch = GlobalBatch.of(samples, 1)
        table = batch.table(layout)
        made = time.perf_counter()
        Deals(model, layout, table, batch.samples, config.parallel.context_order).routes(torch.device("cpu"))
        comparison.number(table.digest, comparison.of_samples(batch.lists()).text)
        meter.add(samples, table, 1.0)
        computed_tokens(batch.samples, dict(model.encoders.items()))
        tables.append(made - begin)
        rests.append(time.perf_counter() - made)
    both = sorted(sum(turn) for turn in zip(tables, rests, strict=True))
    count = len(samples)
    return min(tables) / count, min(rests) / count, both[len(both) // 2] / both[0] - 1
