"""Cluster that loses and gains nodes under Oobleck, Varuna and Bamboo: how its time is spent.

Recovery and speed come from `interlace.simulate` (`elastic_job`, `recovery`, `failure_trace`), which `interlace
simulate failures` replays for any config. This module has the paper's cluster and models, and events without names.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from interlace.simulate import failure_trace, recovery
from interlace.simulate.elastic_job import Cluster, Job, StateBytes
from interlace.simulate.recovery import Pace, Rates, Spent, book

NODES = 30  # one GPU each (2.7.1)
FAULTS = 1  # assumed; tolerates the loss of all pipelines but one
NODE_BYTES = 40e9  # 2.7.1
TRAINED_BYTES = 16  # per parameter in fp32: weight, gradient and Adam's two moments
SAVED_BYTES = 12  # the same without the gradient
LINK = 25e9  # bytes per second, 200 Gbps (2.7.1)
EVERY = 10  # iterations between Varuna's checkpoints (2.7.1)
REGROUP = 1.0  # seconds to notice a loss and to re-create communicators; assumed


@dataclass(frozen=True)
class Model:
    """A model of table 2.1. layers: table 2.3's caption."""

    name: str
    parameters: float
    layers: int
    batch: int
    microbatch: int

    @property
    def microbatches(self) -> int:
        return self.batch // self.microbatch

    @property
    def least_nodes(self) -> int:
        """Fewest nodes whose memory holds the trained state; activations are recomputed."""
        return int(-(-TRAINED_BYTES * self.parameters // NODE_BYTES))

    @property
    def saved_bytes(self) -> float:
        return SAVED_BYTES * self.parameters


@dataclass(frozen=True)
class Constants:
    """Fitted constants of one model: see `oobleck_failures.fit`.

    layer: seconds of one layer, forward and backward of a microbatch. save, load: bytes per second of checkpoints.
    start: seconds to restart the framework. bamboo: iterations per second of Bamboo on all nodes, 0 if it does not run.
    bamboo_loss: seconds that a failure costs it.
    """

    layer: float
    save: float
    load: float
    start: float
    bamboo: float = 0.0
    bamboo_loss: float = 0.0


@functools.cache
def job(model: Model) -> Job:
    """The model on all nodes. All layers cost the same, 1 each; the backward recomputes: 3/4."""
    ones = np.ones(model.layers)
    return Job(
        *(ones / 4, ones * 3 / 4),
        batch=model.batch,
        microbatches=model.microbatches,
        cluster=Cluster(NODES, faults=FAULTS, least_nodes=model.least_nodes),
        state=StateBytes(ones * model.saved_bytes / model.layers, saved=model.saved_bytes, loaded=model.saved_bytes),
    )


@dataclass(frozen=True)
class Event:
    """seconds since the last event; nodes from now on; grace: seconds of warning (0: none, -1: nodes were added)."""

    seconds: float
    nodes: int
    grace: float = 0.0


def failures(every: float, seed: int) -> list[Event]:
    """Single failures at random times, until less than half of the nodes are left (2.7.2)."""
    rng = np.random.default_rng(seed)
    return [Event(float(rng.exponential(every)), nodes - 1) for nodes in range(NODES, NODES // 2 - 1, -1)]


def spot_trace(every: float, grace: float, hours: float, seed: int) -> list[Event]:
    """Preemptions and additions, at random and equally often, between half and all of the nodes: the resulting number
    of nodes. See `failure_trace.spot_trace`: preemptions are 7 % less frequent than `every`."""
    nodes, before = NODES, 0.0
    result: list[Event] = []
    for change in failure_trace.spot_trace(NODES, every, hours, seed, warning=grace):
        nodes += -1 if change.event == "fail" else 1
        result.append(Event(change.time - before, nodes, grace if change.event == "fail" else -1))
        before = change.time
    return [*result, Event(hours * 3600 - before, nodes, -1)]


def oobleck(model: Model, own: Constants, events: Sequence[Event], seed: int) -> Spent:
    """See `recovery.Oobleck`; any node may fail."""
    rng = np.random.default_rng(seed)
    system = recovery.Oobleck(job(model), _rates(own), range(NODES))
    fresh = itertools.count(NODES)
    spent: list[Spent] = []
    for event in events:
        spent.append(system.run(event.seconds)[0])
        there = [node for nodes in system.pipelines for node in nodes]
        if event.nodes < len(there):
            system.change([there[int(rng.integers(len(there)))]], [])
        elif event.nodes > len(there):
            system.change([], [next(fresh)])
    return Spent.sum(spent)


def varuna(model: Model, own: Constants, events: Sequence[Event], *, saving: bool = True) -> Spent:
    """See `recovery.Checkpoints`; saving: False for checkpoints that are free and more frequent (table 2.4)."""
    rates = _rates(own)
    system = recovery.Checkpoints(job(model), rates if saving else replace(rates, save=math.inf, every=2), range(NODES))
    spent: list[Spent] = []
    for event in events:
        spent.append(system.run(event.seconds, math.inf if event.grace < 0 else event.grace)[0])
        there = system.alive
        system.change(there[event.nodes :], range(len(there), event.nodes))
    return Spent.sum(spent)


def bamboo(model: Model, own: Constants, events: Sequence[Event]) -> Spent:
    """Bamboo computes everything twice and continues after a failure; its speed is a fitted constant."""
    spent: list[Spent] = []
    nodes, recovering = NODES, 0.0
    for event in events:
        pace = Pace(NODES / (own.bamboo * nodes), whole=False)
        spent.append(book(event.seconds, pace, model.batch, recovery=recovering)[0])
        nodes, recovering = event.nodes, own.bamboo_loss
    return Spent.sum(spent)


def _rates(own: Constants) -> Rates:
    return Rates(own.layer, LINK, own.save, own.load, own.start, REGROUP, EVERY)
