"""Throughput of training on the remaining nodes: unequal pipelines, a grid of equal ones, redundant computation.

Pipelines are cut by `plan.pipeline_template`, selected by `plan.instantiate`, given microbatches by `plan.split_batch`
and simulated as 1F1B by the event simulator. A stage is one rank, or one lane of tp * cp ranks. Communication and the
optimizer are assumed to take no time.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from interlace.plan.oobleck import PipelineTemplate, instantiate, node_counts, pipeline_template, split_batch
from interlace.schedule import Op, StageGraph, StepTable, one_f_one_b
from interlace.schedule.actions import OP, OPS
from interlace.simulate.arrays import simulate_arrays

_PER_STAGE = 4  # microbatches per stage in the times of `pipeline_template`


class Grid(NamedTuple):
    """Pipelines of equal depth. seconds: of an iteration, in the unit of the costs. redundant: share of the iteration
    spent on computing stages twice."""

    seconds: float
    pipelines: int
    depth: int
    redundant: float = 0.0

    @property
    def nodes(self) -> int:
        return self.pipelines * self.depth


@dataclass(frozen=True)
class Cluster:
    """Nodes of a job, and the failures that it survives.

    nodes: initial number of nodes. faults: simultaneous failures to survive. There are always at least faults + 1
    pipelines, each of at least `least_nodes` nodes, whose memory holds the model.
    """

    nodes: int
    stages_per_node: int = 1
    faults: int = 1
    least_nodes: int = 1


@dataclass(frozen=True, eq=False)
class StateBytes:
    """Bytes moved in a recovery. copied: float64 [layers], sent to a node that lacks a layer. saved: written for a
    checkpoint. loaded: read at a restart."""

    copied: NDArray[np.float64]
    saved: float
    loaded: float


class Job:
    """A training job with its possible pipelines. Results are cached.

    forward, backward: float64 [layers], of a microbatch on the ranks of one stage, in any unit. batch: samples of an
    iteration. sizes: nodes per pipeline template.
    """

    def __init__(
        self,
        forward: ArrayLike,
        backward: ArrayLike,
        *,
        batch: int,
        microbatches: int,
        cluster: Cluster,
        state: StateBytes,
    ) -> None:
        """Raises ValueError for too few nodes, and for fewer layers or microbatches than the pipelines need."""
        self.forward, self.backward = np.asarray(forward, np.float64), np.asarray(backward, np.float64)
        self.batch, self.microbatches, self.cluster, self.state = batch, microbatches, cluster, state
        self.layers, least, per_node = len(self.forward), cluster.least_nodes, cluster.stages_per_node
        if len(self.backward) != self.layers or len(state.copied) != self.layers:
            raise ValueError("forward, backward and copied have different numbers of layers")
        if least * per_node > self.layers:
            raise ValueError(f"{least} nodes of {per_node} stages need more than the model's {self.layers} layers")
        if microbatches <= cluster.faults:
            raise ValueError(
                f"{microbatches} microbatches are too few for {cluster.faults + 1} pipelines: use at least one for each"
            )
        counts = node_counts(cluster.nodes, cluster.faults, least)
        self.sizes = [int(n) for n in counts if n * per_node <= self.layers]
        self.template, self.pipeline_seconds = cache(self._template), cache(self._pipeline_seconds)
        self.best_pipelines, self.grid = cache(self._best_pipelines), cache(self._grid)

    @property
    def min_nodes(self) -> int:
        """Fewest nodes for faults + 1 pipelines."""
        return (self.cluster.faults + 1) * self.cluster.least_nodes

    def _template(self, nodes: int) -> PipelineTemplate:
        """The fastest pipeline of `nodes` nodes."""
        costs = (self.forward + self.backward)[:, None]
        return pipeline_template(costs, nodes, self.cluster.stages_per_node, widths=[1])

    def layers_of_nodes(self, nodes: int) -> list[range]:
        """Layers of each node of a pipeline of `nodes` nodes."""
        cuts = self.template(nodes).boundaries[:: self.cluster.stages_per_node].tolist()
        return [range(start, stop) for start, stop in itertools.pairwise(cuts)]

    def _pipeline_seconds(self, nodes: int, microbatches: int, *, redundant: bool = False) -> float:
        """Makespan of 1F1B.

        redundant: each stage also computes the forward of the next stage, the last one that of the first (dissertation
        2.2.2). This work adds to the stage's own; none of it is hidden in bubbles.
        """
        start = self.template(nodes).boundaries[:-1]
        forward, backward = np.add.reduceat(self.forward, start), np.add.reduceat(self.backward, start)
        if redundant and len(start) > 1:
            forward = forward + np.roll(forward, -1)
        graph = StageGraph.build({"m": list(range(len(start)))})
        table = StepTable.aligned((), [graph.modules] * microbatches)
        schedule = one_f_one_b(graph, table, reduce_grad=False)
        rank = np.repeat(np.arange(len(start)), np.diff(schedule.first))
        none = np.zeros(len(start))
        seconds = np.array([{Op.FORWARD: forward, Op.BACKWARD: backward}.get(op, none) for op in OPS])
        return simulate_arrays(schedule, seconds[schedule.rows[:, OP], rank]).makespan

    def _best_pipelines(self, nodes: int) -> tuple[int, ...]:
        """Nodes of each pipeline of the best combination. It uses all nodes unless layers or microbatches are too few.

        nodes: at least `min_nodes`.
        """
        times = [self._per_microbatch(size) for size in self.sizes]
        smallest, largest = self.sizes[0], self.sizes[-1]
        # Sizes are consecutive, so k pipelines have k * smallest to k * largest nodes.
        counts = range(self.cluster.faults + 1, self.microbatches + 1)
        used = max(min(nodes, k * largest) for k in counts if k * smallest <= nodes)
        best = instantiate(self.sizes, times, used, faults=self.cluster.faults, microbatches=self.microbatches)
        return tuple(int(n) for n in np.repeat(self.sizes, best.counts))

    def iteration(self, sizes: Sequence[int]) -> float:
        """Makespan of the slowest of the pipelines of `sizes` nodes, which share the batch by speed."""
        ordered = sorted(sizes)
        shares = split_batch([self._per_microbatch(size) for size in ordered], self.microbatches)
        distinct = {(size, int(share)) for size, share in zip(ordered, shares, strict=True)}
        return max(self.pipeline_seconds(size, share) for size, share in distinct)

    def _grid(self, nodes: int, *, redundant: bool = False) -> Grid:
        """The fastest grid on at most `nodes` nodes. Raises ValueError for too few nodes.

        redundant: the grid computes and holds every stage twice, so a pipeline needs twice the nodes for its memory.
        """
        min_depth, max_depth = self.grid_depths(nodes, redundant=redundant)
        grids = []
        for depth in range(min_depth, max_depth + 1):
            pipelines = min(nodes // depth, self.microbatches)
            seconds = self.pipeline_seconds(depth, -(-self.microbatches // pipelines), redundant=redundant)
            grids.append(Grid(seconds, pipelines, depth))
        if not grids:
            raise ValueError(f"{nodes} nodes cannot hold the model: a pipeline needs at least {min_depth}")
        best = min(grids, key=lambda grid: (grid.seconds, grid.nodes))
        if not redundant:
            return best
        plain_seconds = self.pipeline_seconds(best.depth, -(-self.microbatches // best.pipelines))
        return best._replace(redundant=1.0 - plain_seconds / best.seconds)

    def grid_depths(self, nodes: int, *, redundant: bool = False) -> tuple[int, int]:
        """Least and most nodes per pipeline of a grid on `nodes` nodes. No grid is possible if least exceeds most."""
        min_depth = self.cluster.least_nodes * (2 if redundant else 1)
        return min_depth, min(nodes, self.layers // self.cluster.stages_per_node)

    def _per_microbatch(self, nodes: int) -> float:
        template = self.template(nodes)
        return template.iteration_time / (_PER_STAGE * (len(template.boundaries) - 1))
