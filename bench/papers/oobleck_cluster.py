"""A cluster that loses and gains nodes under Oobleck, Varuna and Bamboo: what a second of it is spent on.

Speeds come from the planner and the event simulator: pipelines are cut by `plan.pipeline_template`, chosen by
`plan.instantiate`, repaired by `plan.reconfigure`, given microbatches by `plan.split_batch`, and timed as a 1F1B
schedule. Varuna's grid (every pipeline equally deep, what is left over idle) is timed likewise. Between two events of
the cluster a system completes whole iterations only; what it loses at an event is what its kind of recovery loses.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from interlace import plan
from interlace.schedule import Op, StageGraph, StepTable, one_f_one_b
from interlace.schedule.actions import OP, OPS
from interlace.simulate import simulate_arrays

NODES = 30  # one GPU each (2.7.1)
FAULTS = 1  # assumed; any pipeline but one may be lost
NODE_BYTES = 40e9  # 2.7.1
TRAINED_BYTES = 16  # per parameter in fp32: weight, gradient and Adam's two moments
SAVED_BYTES = 12  # the same without the gradient
LINK = 25e9  # bytes per second, 200 Gbps (2.7.1)
EVERY = 10  # iterations between Varuna's checkpoints (2.7.1)
REGROUP = 1.0  # seconds to notice a loss and to form communicators anew; assumed


@dataclass(frozen=True)
class Model:
    """Table 2.1. layers: table 2.3's caption."""

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
        """Fewest nodes whose memory holds what is trained; activations are recomputed."""
        return int(-(-TRAINED_BYTES * self.parameters // NODE_BYTES))

    @property
    def saved_bytes(self) -> float:
        return SAVED_BYTES * self.parameters


@dataclass(frozen=True)
class Constants:
    """What was fitted, for one model: see `oobleck_failures.fit`.

    layer: seconds of one layer, forward and backward of a microbatch. save, load: bytes per second of checkpoints.
    start: seconds to start the framework anew. bamboo: iterations per second of Bamboo on all nodes, 0 where it does
    not run. bamboo_loss: seconds that a failure costs it.
    """

    layer: float
    save: float
    load: float
    start: float
    bamboo: float = 0.0
    bamboo_loss: float = 0.0


@functools.cache
def pipeline_seconds(layers: int, stages: int, microbatches: int) -> float:
    """Makespan of 1F1B over equal layers on `stages` nodes, in seconds of a layer; the backward recomputes: 3/4."""
    boundaries = np.asarray(template(layers, stages).boundaries)
    depth = np.diff(boundaries)
    graph = StageGraph.build({"m": list(range(stages))})
    schedule = one_f_one_b(graph, StepTable.aligned((), [graph.modules] * microbatches), reduce_grad=False)
    share = np.array([{Op.FORWARD: 0.25, Op.BACKWARD: 0.75}.get(op, 0.0) for op in OPS])
    rank = np.repeat(np.arange(stages), np.diff(schedule.first))
    return simulate_arrays(schedule, share[schedule.rows[:, OP]] * depth[rank]).makespan


@functools.cache
def template(layers: int, nodes: int) -> plan.PipelineTemplate:
    """The pipeline of `nodes` nodes of one GPU over equal layers."""
    return plan.pipeline_template(np.ones((layers, 1)), nodes, 1)


def sizes(model: Model) -> list[int]:
    """Nodes per pipeline template; a stage has a layer at least."""
    counts = plan.node_counts(NODES, FAULTS, model.least_nodes)
    return [int(n) for n in counts if n <= model.layers]


@functools.cache
def chosen(model: Model, nodes: int) -> tuple[int, ...]:
    """Nodes of each pipeline that Oobleck begins with on so many nodes."""
    own = sizes(model)
    times = [_per_microbatch(model.layers, n) for n in own]
    found = plan.instantiate(own, times, nodes, faults=FAULTS, microbatches=model.microbatches)
    return tuple(int(n) for n in np.repeat(own, found.counts))


def _per_microbatch(layers: int, nodes: int) -> float:
    made = template(layers, nodes)
    return made.iteration_time / (4 * (len(made.boundaries) - 1))


@functools.cache
def oobleck_iteration(model: Model, pipelines: tuple[int, ...]) -> float:
    """Seconds (of a layer) of an iteration of unequal pipelines: that of the slowest."""
    times = [_per_microbatch(model.layers, n) for n in pipelines]
    shares = plan.split_batch(times, model.microbatches)
    alike = {(n, int(share)) for n, share in zip(pipelines, shares)}
    return max(pipeline_seconds(model.layers, n, share) for n, share in alike)


@functools.cache
def grid(model: Model, nodes: int) -> tuple[float, int]:
    """(seconds of an iteration, nodes used) of the fastest grid of equally deep pipelines."""
    found = []
    for depth in range(model.least_nodes, min(nodes, model.layers) + 1):
        wide = nodes // depth
        share = -(-model.microbatches // wide)
        found.append((pipeline_seconds(model.layers, depth, share), wide * depth))
    return min(found)


@dataclass
class Spent:
    """Where the seconds of a run went, and the samples that counted."""

    effective: float = 0.0  # iterations that count
    fallback: float = 0.0  # iterations, or parts of them, that were lost
    saving: float = 0.0
    restarting: float = 0.0  # starting and loading, or regrouping and copying
    samples: float = 0.0

    @property
    def total(self) -> float:
        return self.effective + self.fallback + self.saving + self.restarting

    @property
    def throughput(self) -> float:
        return self.samples / self.total if self.total else 0.0


@dataclass(frozen=True)
class Event:
    """seconds since the event before; nodes from now on; grace: seconds of warning (0: none, -1: nodes were added)."""

    seconds: float
    nodes: int
    grace: float = 0.0


def failures(every: float, seed: int) -> list[Event]:
    """Failures one by one at random, until less than half of the nodes are left (2.7.2)."""
    rng = np.random.default_rng(seed)
    return [Event(float(rng.exponential(every)), nodes - 1) for nodes in range(NODES, NODES // 2 - 1, -1)]


def spot_trace(every: float, grace: float, hours: float, seed: int) -> list[Event]:
    """Preemptions and additions, each at random and equally often, between half and all of the nodes.

    every: seconds between preemptions, as printed (2.7.3): no more is known of the traces. Events that would leave the
    range of nodes are dropped, and the time goes on: preemptions come less often than that, by 7 %.
    """
    rng = np.random.default_rng(seed)
    left, nodes = hours * 3600, NODES
    found: list[Event] = []
    waited = 0.0
    while True:
        step = float(rng.exponential(every / 2))
        if step >= left:
            found.append(Event(left + waited, nodes, -1))
            return found
        left -= step
        waited += step
        change = int(rng.choice((-1, 1)))
        if not NODES // 2 <= nodes + change <= NODES:
            continue
        nodes += change
        found.append(Event(waited, nodes, grace if change < 0 else -1))
        waited = 0.0


def oobleck(model: Model, own: Constants, events: Sequence[Event], seed: int) -> Spent:
    """Runs on with what is left: an unfinished iteration is lost, layers that a node lacks are copied."""
    rng = np.random.default_rng(seed)
    spent = Spent()
    pipelines = _numbered(chosen(model, NODES))
    recovery = 0.0
    for event in events:
        iteration = own.layer * oobleck_iteration(model, tuple(sorted(map(len, pipelines))))
        _run(spent, event, iteration, model.batch, recovery, 1, 0.0)
        if event.grace < 0:
            total = sum(map(len, pipelines))
            after = _numbered(chosen(model, event.nodes)) if event.nodes != total else pipelines
        else:
            gone = rng.choice([node for nodes in pipelines for node in nodes])
            repaired = plan.reconfigure(pipelines, [gone], sizes(model), faults=FAULTS)
            after = [list(each.nodes) for each in repaired]
        recovery = REGROUP + _copying(model, pipelines, after)
        pipelines = after
    return spent


def _numbered(counts: Sequence[int]) -> list[list[int]]:
    edges = np.cumsum([0, *counts]).tolist()
    return [list(range(a, b)) for a, b in itertools.pairwise(edges)]


def _copying(model: Model, before: list[list[int]], after: list[list[int]]) -> float:
    """Seconds until the node that lacks most layers has them."""
    had = {node: layers for nodes in before for node, layers in _layers(model, nodes)}
    lacks = [len(layers - had.get(node, set())) for nodes in after for node, layers in _layers(model, nodes)]
    return max(lacks, default=0) * model.saved_bytes / model.layers / LINK


def _layers(model: Model, nodes: Sequence[int]) -> list[tuple[int, set[int]]]:
    cuts = template(model.layers, len(nodes)).boundaries
    return [(node, set(range(int(a), int(b)))) for node, a, b in zip(nodes, cuts, cuts[1:])]


def varuna(model: Model, own: Constants, events: Sequence[Event], *, saving: bool = True) -> Spent:
    """Goes back to the last checkpoint and starts anew; saving: False for checkpoints that are free (table 2.4)."""
    spent = Spent()
    save = model.saved_bytes / own.save if saving else 0.0
    restart = own.start + model.saved_bytes / own.load
    nodes, recovery = NODES, 0.0
    for event in events:
        iteration = own.layer * grid(model, nodes)[0]
        # With a warning that is long enough the last iteration is saved, not the last tenth.
        in_time = event.grace < 0 or (event.grace > 0 and save <= event.grace)
        _run(spent, event, iteration, model.batch, recovery, EVERY if saving else 2, save, saves_at_end=in_time)
        nodes, recovery = event.nodes, restart
    return spent


def bamboo(model: Model, own: Constants, events: Sequence[Event]) -> Spent:
    """Computes everything twice, so that it goes on after a failure; its speed is a constant that was fitted."""
    spent = Spent()
    nodes, recovery = NODES, 0.0
    for event in events:
        run = max(0.0, event.seconds - recovery)
        spent.restarting += event.seconds - run
        spent.effective += run
        spent.samples += run * own.bamboo * model.batch * nodes / NODES
        nodes, recovery = event.nodes, own.bamboo_loss
    return spent


def _run(
    spent: Spent,
    event: Event,
    iteration: float,
    batch: int,
    recovery: float,
    every: int,
    save: float,
    saves_at_end: bool = False,
) -> None:
    """Books the seconds up to an event: recovery, then rounds of `every` iterations and a save, of which whole ones
    count; with saves_at_end whole iterations do."""
    recovering = min(recovery, event.seconds)
    left = event.seconds - recovering
    rounds = int(left // (every * iteration + save))
    rest = left - rounds * (every * iteration + save)
    done = rounds * every
    saved = rounds * save
    if saves_at_end and rest > save:
        more = min(every, int((rest - save) // iteration))
        done += more
        saved += save if more else 0.0
    spent.restarting += recovering
    spent.saving += saved
    spent.effective += done * iteration
    spent.fallback += left - done * iteration - saved
    spent.samples += done * batch
