"""Recovery costs: three fault-tolerance systems, replayed over a trace of node failures and joins.

`Oobleck` continues with unequal pipelines (dissertation 2.5). `Checkpoints` restarts from the last checkpoint, like
Varuna. `Redundant` computes every stage twice, like Bamboo. Between two changes of the cluster a system completes whole
iterations; the loss at a change depends on its kind of recovery. Every second is booked once.
"""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Hashable, Iterable, Sequence
from dataclasses import astuple, dataclass, fields
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from interlace.plan.reconfiguration import regroup
from interlace.simulate.elastic_job import Job
from interlace.simulate.failure_trace import Change, at_once

Floats = NDArray[np.float64]
Pipelines = list[list[Hashable]]


@dataclass
class Spent:
    """Seconds of a run by use, and the samples that counted."""

    effective: float = 0.0  # iterations that count
    redundant: float = 0.0  # additional time of these for computing stages twice
    fallback: float = 0.0  # iterations, or parts of them, that were lost or are repeated
    saving: float = 0.0
    restarting: float = 0.0  # starting and loading, or regrouping and copying
    waiting: float = 0.0  # with too few nodes
    samples: float = 0.0

    @property
    def total(self) -> float:
        return float(sum(getattr(self, kind) for kind in KINDS))

    @property
    def throughput(self) -> float:
        return self.samples / self.total if self.total else 0.0

    @classmethod
    def sum(cls, runs: Iterable[Spent]) -> Spent:
        """Sum of seconds and samples of several runs."""
        return cls(*map(sum, zip(*map(astuple, runs))))


KINDS = tuple(field.name for field in fields(Spent) if field.name != "samples")


@dataclass(frozen=True)
class Rates:
    """Speeds of the cluster.

    unit: seconds per unit of the job's costs. network: bytes per second into a node. save, load: bytes per second
    of the checkpoint storage, for all nodes together. start: seconds to restart all processes. regroup: seconds to
    detect a loss and to form new communicators. every: iterations between checkpoints.
    """

    unit: float = 1.0
    network: float = 25e9
    save: float = 1e9
    load: float = 1e9
    start: float = 10.0
    regroup: float = 1.0
    every: int = 10


@dataclass(frozen=True)
class Pace:
    """Speed of a system between two changes.

    iteration: seconds. every, save: every so many iterations a save of `save` seconds follows; they count once it has
    finished. redundant: share of an iteration spent on computing stages twice. whole: whether an interrupted iteration
    is lost; otherwise its completed part counts.
    """

    iteration: float
    every: int = 1
    save: float = 0.0
    redundant: float = 0.0
    whole: bool = True


@dataclass(frozen=True)
class Stretch:
    """Period from one change to the next.

    pipelines: nodes of each pipeline. nodes: all computing nodes. spent: use of the seconds, in this order:
    `restarting` and `waiting`, then `again` (repeated iterations that were lost with a layer), then iterations and
    saves that count, then lost work.
    """

    start: float
    stop: float
    pipelines: tuple[tuple[Hashable, ...], ...]
    spent: Spent
    again: float = 0.0

    @property
    def nodes(self) -> tuple[Hashable, ...]:
        return tuple(itertools.chain.from_iterable(self.pipelines))


def book(
    seconds: float, pace: Pace | None, batch: float, *, recovery: float = 0.0, redo: int = 0, saves_at_end: bool = False
) -> tuple[Spent, int]:
    """(use of `seconds`, completed iterations): recovery, then rounds of iterations and a save.

    pace: None if there are too few nodes. redo: repeated iterations, which count no samples. saves_at_end: whether the
    change is announced early enough for a save before it.
    """
    spent = Spent(restarting=min(recovery, seconds))
    remaining = seconds - spent.restarting
    if pace is None:
        spent.waiting = remaining
        return spent, 0
    if not pace.whole:
        spent.samples = remaining / pace.iteration * batch
        spent.effective, spent.redundant = remaining * (1 - pace.redundant), remaining * pace.redundant
        return spent, 0
    round_seconds = pace.every * pace.iteration + pace.save
    rounds = int(remaining // round_seconds)
    partial = remaining - rounds * round_seconds
    completed, spent.saving = rounds * pace.every, rounds * pace.save
    if saves_at_end and partial > pace.save:
        extra = min(pace.every, int((partial - pace.save) // pace.iteration))
        completed += extra
        spent.saving += pace.save if extra else 0.0
    counted = max(completed - redo, 0)
    spent.effective = counted * pace.iteration * (1 - pace.redundant)
    spent.redundant = counted * pace.iteration * pace.redundant
    spent.fallback = remaining - counted * pace.iteration - spent.saving
    spent.samples = counted * batch
    return spent, completed


class System(Protocol):
    """A fault-tolerance system. pipelines: computing nodes; empty if there are too few."""

    pipelines: Pipelines

    def run(self, seconds: float, notice: float = 0.0) -> tuple[Spent, float]:
        """Runs for `seconds` until the next change; returns (use of the seconds, seconds of repeated iterations).

        notice: seconds of advance notice of the change (inf: planned).
        """

    def change(self, failed: Collection[Hashable], joined: Sequence[Hashable]) -> None:
        """Applies a change: nodes `failed` are lost and nodes `joined` join."""


class _InMemory(ABC):
    """Base of systems that keep their state in the nodes' memory.

    A checkpoint is written every `every` iterations, in parallel to training, and read only if a layer is lost.
    """

    def __init__(self, job: Job, rates: Rates, nodes: Sequence[Hashable]) -> None:
        self.job, self.rates = job, rates
        self.alive = list(nodes)
        self.pipelines = self._new_pipelines()
        self.layers_held = self._layers_of(self.pipelines)  # layers in memory of live nodes
        self._next_layers = self.layers_held  # layers after the recovery
        self._recovery, self._since_checkpoint, self._repeated = 0.0, 0, 0

    @abstractmethod
    def _new_pipelines(self) -> Pipelines:
        """The fastest pipelines of the live nodes; empty if there are too few."""

    @abstractmethod
    def pace(self) -> Pace:
        """Speed of the current pipelines."""

    def run(self, seconds: float, notice: float = 0.0) -> tuple[Spent, float]:
        pace = self.pace() if self.pipelines else None
        if pace and seconds >= self._recovery:  # else the recovery did not finish
            self.layers_held = self._next_layers
        spent, completed = book(seconds, pace, self.job.batch, recovery=self._recovery, redo=self._repeated)
        repeated = min(self._repeated, completed)
        self._repeated -= repeated
        self._recovery = max(self._recovery - seconds, 0.0)
        self._since_checkpoint = (self._since_checkpoint + completed) % self.rates.every
        return spent, repeated * pace.iteration if pace else 0.0

    def _assign_layers(self, pipelines: Pipelines, from_checkpoint: bool = False) -> None:
        """Gives nodes the layers of their new pipelines. from_checkpoint: always restart from the checkpoint."""
        needed = self._layers_of(pipelines)
        from_checkpoint = from_checkpoint or len(set().union(*self.layers_held.values())) < self.job.layers
        if from_checkpoint:
            self.layers_held = {}
        if pipelines and from_checkpoint:
            self._recovery = self.rates.start + self.job.state.loaded / self.rates.load
            self._repeated, self._since_checkpoint = self._repeated + self._since_checkpoint, 0
        elif pipelines:
            copied, held = self.job.state.copied, self.layers_held
            missing = (sum(copied[layer] for layer in layers - held.get(n, set())) for n, layers in needed.items())
            self._recovery = self.rates.regroup + float(max(missing, default=0.0)) / self.rates.network
        else:  # survivors keep their layers and wait
            self._recovery = 0.0
        self._next_layers = needed
        self.pipelines = pipelines

    def _layers_of(self, pipelines: Pipelines) -> dict[Hashable, set[int]]:
        return {
            node: set(layers)
            for nodes in pipelines
            for node, layers in zip(nodes, self.job.layers_of_nodes(len(nodes)), strict=True)
        }

    def _update_nodes(self, failed: Collection[Hashable], joined: Sequence[Hashable]) -> None:
        self.alive = [node for node in self.alive if node not in failed] + list(joined)
        self.layers_held = {node: layers for node, layers in self.layers_held.items() if node not in failed}


class Oobleck(_InMemory):
    """Continues with the remaining nodes: the iteration in progress is lost, and missing layers are copied.

    Pipelines are repaired, and joining nodes added, by `plan.regroup`, as in a real run. With fewer than
    (faults + 1) * least_nodes nodes it waits, and selects new pipelines when there are enough again. If no node has a
    layer, it restarts from the checkpoint.
    """

    def pace(self) -> Pace:
        return Pace(self.rates.unit * self.job.iteration([len(nodes) for nodes in self.pipelines]))

    def change(self, failed: Collection[Hashable], joined: Sequence[Hashable]) -> None:
        self._update_nodes(failed, joined)
        if not self.pipelines:
            self._assign_layers(self._new_pipelines())
            return
        job = self.job
        limits = {"faults": job.cluster.faults, "max_pipelines": job.microbatches}
        new = regroup(self.pipelines, failed, self.alive, job.sizes, **limits)
        self._assign_layers([list(nodes) for nodes in new or ()])

    def _new_pipelines(self) -> Pipelines:
        count = len(self.alive)
        return _split_nodes(self.alive, self.job.best_pipelines(count)) if count >= self.job.min_nodes else []


class Redundant(_InMemory):
    """A grid in which each stage also computes the forward of the next one.

    A lost node costs one iteration and the copy of layers that nodes lack in the new grid. Simultaneous failure of two
    neighbours costs a restart from the checkpoint.
    """

    def _new_pipelines(self) -> Pipelines:
        return _grid(self.job, self.alive, redundant=True)

    def pace(self) -> Pace:
        grid = self.job.grid(len(self.alive), redundant=True)
        return Pace(self.rates.unit * grid.seconds, redundant=grid.redundant)

    def change(self, failed: Collection[Hashable], joined: Sequence[Hashable]) -> None:
        neighbours_lost = any(
            a in failed and b in failed for nodes in self.pipelines for a, b in zip(nodes, nodes[1:] + nodes[:1])
        )
        self._update_nodes(failed, joined)
        self._assign_layers(self._new_pipelines(), from_checkpoint=neighbours_lost)

    def _layers_of(self, pipelines: Pipelines) -> dict[Hashable, set[int]]:
        needed = super()._layers_of(pipelines)
        return {a: needed[a] | needed[b] for nodes in pipelines for a, b in zip(nodes, nodes[1:] + nodes[:1])}


class Checkpoints:
    """The fastest grid on the present nodes. Each change restarts it from the last checkpoint.

    Saves every `rates.every` iterations, with training paused. It also saves before a change that is announced early
    enough.
    """

    def __init__(self, job: Job, rates: Rates, nodes: Sequence[Hashable]) -> None:
        self.job, self.rates = job, rates
        self.alive = list(nodes)
        self.pipelines = _grid(job, self.alive)
        self._recovery = 0.0

    def run(self, seconds: float, notice: float = 0.0) -> tuple[Spent, float]:
        save = self.job.state.saved / self.rates.save
        pace = None
        if self.pipelines:
            pace = Pace(self.rates.unit * self.job.grid(len(self.alive)).seconds, self.rates.every, save)
        in_time = notice > 0 and save <= notice
        spent, _ = book(seconds, pace, self.job.batch, recovery=self._recovery, saves_at_end=in_time)
        self._recovery = max(self._recovery - seconds, 0.0)
        return spent, 0.0

    def change(self, failed: Collection[Hashable], joined: Sequence[Hashable]) -> None:
        self.alive = [node for node in self.alive if node not in failed] + list(joined)
        self.pipelines = _grid(self.job, self.alive)
        self._recovery = self.rates.start + self.job.state.loaded / self.rates.load if self.pipelines else 0.0


def _grid(job: Job, nodes: Sequence[Hashable], *, redundant: bool = False) -> Pipelines:
    """Nodes of each pipeline of the fastest grid (see `Job.grid`); empty if there are too few."""
    min_depth, max_depth = job.grid_depths(len(nodes), redundant=redundant)
    if min_depth > max_depth:
        return []
    grid = job.grid(len(nodes), redundant=redundant)
    return _split_nodes(nodes, [grid.depth] * grid.pipelines)


def _split_nodes(nodes: Sequence[Hashable], counts: Sequence[int]) -> Pipelines:
    """Assigns nodes in order, `counts` nodes per pipeline; the rest are idle."""
    edges = np.cumsum([0, *counts]).tolist()
    return [list(nodes[a:b]) for a, b in itertools.pairwise(edges)]


def replay(system: System, changes: Iterable[Change], until: float) -> list[Stretch]:
    """Runs a system from second 0 to `until`, change by change; see `failure_trace.at_once`."""
    stretches: list[Stretch] = []

    def run_until(stop: float, notice: float) -> None:
        start = stretches[-1].stop if stretches else 0.0
        if stop > start:
            nodes = tuple(map(tuple, system.pipelines))
            stretches.append(Stretch(start, stop, nodes, *system.run(stop - start, notice)))

    for group in at_once(changes):
        time = group[0].time
        if time >= until:
            break
        failures = [change for change in group if change.event == "fail"]
        run_until(time, min((change.warning for change in failures), default=math.inf))
        system.change({change.node for change in failures}, [change.node for change in group if change.event == "join"])
    run_until(until, math.inf)
    return stretches


def samples_over_time(stretches: Iterable[Stretch]) -> tuple[Floats, Floats]:
    """(seconds, samples that count until then), both [n], ascending. Samples are linear between these points."""
    times, totals = [0.0], [0.0]
    for stretch in stretches:
        spent = stretch.spent
        begin = stretch.start + spent.restarting + spent.waiting + stretch.again
        counted = spent.effective + spent.redundant + spent.saving
        for time, samples in ((begin, 0.0), (begin + counted, spent.samples), (stretch.stop, 0.0)):
            times.append(min(max(time, times[-1]), stretch.stop))
            totals.append(totals[-1] + samples)
    return np.array(times), np.array(totals)


def throughput_over_time(stretches: Sequence[Stretch], edges: Floats) -> Floats:
    """Samples per second in each window between two of `edges` [n + 1], float64 [n]."""
    times, totals = samples_over_time(stretches)
    return np.diff(np.interp(edges, times, totals)) / np.diff(edges)
