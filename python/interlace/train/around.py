"""Times what a step has beside its lists: `interlace.plan.around.Around`, in a second or two for small samples.

The table, the comparison of the ranks and what is counted of a batch are timed on a batch of the run's own data.
Reading and decoding are timed as seconds of the processor, so that a disk that is slow now has no part in it: as the
thread of the rank does both, and where [data] has workers as these do it, and as the thread takes it from them. Where a
GPU computes, its host reads beside it, and that is left out.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from interlace.plan.around import NOTHING_AROUND, Around
from interlace.train.launch import launcher
from interlace.train.metrics import computed_tokens
from interlace.train.preparing import workers_of
from interlace.train.schema import Config

SAMPLES = 48  # at most, that are read for it
SECONDS = 1.0  # after which no more samples are decoded
_TURNS = 5


def measure_around(config: Config, model: Any, data: Any, kind: str) -> Callable[[int, int], Around]:
    """Of a config's model on devices of a `kind`. data: the training set.

    Returns what says it of so many ranks of a node with so many threads each: on these depends how many workers there
    are, and whether they have cores of their own.
    """
    count = min(SAMPLES, len(data))
    if not count:
        return lambda local_ranks, threads: NOTHING_AROUND
    begin = time.thread_time()
    samples = [data.sample((2 * i + 1) * len(data) // (2 * count), 0) for i in range(count)]
    read = (time.thread_time() - begin) / count
    table, rest, error = _batch_seconds(config, model, samples[: config.train.batch_size])
    if kind != "cpu":
        return lambda local_ranks, threads: Around(table + rest, error=error)
    handed: _Handed | None = None
    if workers_of(config, 1) or config.data.workers == "ray":  # more ranks have as many workers each, or fewer
        handed = _handed(config, model, data, count)
    decode = _decoding(model, samples)

    def around(local_ranks: int, threads: int) -> Around:
        workers = workers_of(config, local_ranks)
        # Of each batch the thread that reads makes the table, too: it says which items this rank decodes.
        if handed is None or not (workers or config.data.workers == "ray"):
            return Around(table + rest, read + table, decode, error)
        part = beside(workers, local_ranks, threads)
        seconds = {name: handed.took[name] + part * handed.decode[name] for name in handed.decode}
        return Around(table + rest, handed.took_bare + part * handed.read + table, seconds, error)

    return around


def beside(workers: int, local_ranks: int, threads: int) -> float:
    """The part of what so many workers of each rank compute by which the ranks compute longer: none where all have
    cores of their own; else both share the cores of the rank, which are busy with one or the other.

    Workers of Ray may be on other nodes, and count for nothing.
    """
    cores = launcher.default_threads(1)
    if local_ranks * (threads + workers) <= cores:
        return 0.0
    return 1.0 / max(1.0, cores / local_ranks)


@dataclass(frozen=True)
class _Handed:
    """Seconds of the processor where another process prepares the data, per sample. read, took_bare: there and here, of
    all but media; decode, took: encoder -> the same of its items."""

    read: float
    took_bare: float
    decode: Mapping[str, float]
    took: Mapping[str, float]


def _handed(config: Config, model: Any, data: Any, count: int) -> _Handed | None:
    """By what a worker and the thread that waits for it do with a batch of so many samples, here one after the other.
    Nothing is kept for another epoch, which would spare decoding. None: for data that no worker can be given."""
    from interlace.data.loader import Loader
    from interlace.data.producing import Producing, Task, whole

    try:  # a copy, as a worker has it: it counts what cannot be read for itself
        loader = pickle.loads(pickle.dumps(Loader(data, count, seed=config.run.seed, prefetch=0)))
    except Exception:  # whatever a class of somebody's own raises; the run says so when it starts workers
        return None
    there = Producing(loader)
    clock = time.thread_time
    begin = clock()
    sent = pickle.dumps(there.answer(Task("make", 0, 0)))
    made = clock()
    samples = [whole(bare, None) for bare in pickle.loads(sent).samples]
    took = clock() - made
    decode, taken = {}, {}
    for name in model.encoders:
        spent, here, done = 0.0, 0.0, 0
        for index, sample in zip(loader.indices(0, 0), samples, strict=True):
            items = tuple((name, number) for number in range(len(sample.media.get(name, ()))))
            if not items:
                continue
            started = clock()
            answer = pickle.dumps(there.answer(Task("load", 0, index, items)))
            there_until = clock()
            for raw in pickle.loads(answer).items:
                raw.tensor()
            spent, here, done = spent + there_until - started, here + clock() - there_until, done + 1
            if spent > SECONDS:
                break
        if done:
            decode[name], taken[name] = spent / done, here / done
    return _Handed((made - begin) / count, took / count, decode, taken)


def _decoding(model: Any, samples: Sequence[Any]) -> dict[str, float]:
    """Encoder -> seconds of the processor that decode one sample's items, on average."""
    found = {}
    for name in model.encoders:
        begin, count = time.thread_time(), 0
        for sample in samples:
            items = sample.media.get(name, ())
            if not items:
                continue
            for item in items:
                item.data  # noqa: B018 (loads it)
            count += 1
            if time.thread_time() - begin > SECONDS:
                break
        if count:
            found[name] = (time.thread_time() - begin) / count
    return found


def _batch_seconds(config: Config, model: Any, samples: Sequence[Any]) -> tuple[float, float, float]:
    """Seconds of each sample for a step's table, and for all else that is made of a batch; and by what part the middle
    turn is slower than the fastest."""
    from interlace.layout import Layout, ParallelSpec
    from interlace.run import comparison
    from interlace.run.batch import GlobalBatch
    from interlace.run.deals import Deals
    from interlace.train.flops import Meter

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
        meter.add(batch.samples, table, 1.0)
        computed_tokens(batch.samples, model.encoders)
        tables.append(made - begin)
        rests.append(time.perf_counter() - made)
    both = sorted(sum(turn) for turn in zip(tables, rests, strict=True))
    count = len(samples)
    return min(tables) / count, min(rests) / count, both[len(both) // 2] / both[0] - 1
