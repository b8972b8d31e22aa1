"""Fault-tolerant pipelines: template sizes, cuts, combinations and batch shares (dissertation chapter 2, Oobleck).

- `node_counts`: sizes of the pipeline templates, in nodes
- `pipeline_template`: cuts the model for one size
- `instantiate`: picks the combination of templates that uses all nodes best
- `split_batch`: shares the batch among unequal pipelines
- `interlace.plan.reconfiguration`: repairs the pipelines after failures

All algorithms here are exact; those of the paper are not always. See each function.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from interlace import _core


def node_counts(nodes: int, faults: int, min_nodes: int) -> NDArray[np.int32]:
    """Nodes per pipeline template (dissertation 2.4.1.1): min_nodes, min_nodes + 1, ..., nodes - faults * min_nodes.

    Every number of nodes from (faults + 1) * min_nodes to `nodes` is then a sum of at least faults + 1 sizes: all
    pipelines have the smallest size except one, which has the remaining nodes. The cover therefore holds without the
    condition p > n_0 - 1 of theorem 1, which is stronger than needed. (Eq. A.2 as printed lacks a factor n_0 on its
    first term.)

    Args:
        nodes: nodes at the start, N.
        faults: simultaneous failures to survive, f >= 0; f + 1 replicas of the model are kept.
        min_nodes: fewest nodes whose memory holds the model, n_0 >= 1.

    Returns:
        int32 [p], ascending and consecutive.

    Raises:
        ValueError: an argument is out of range, or N < (f + 1) n_0.
    """
    nodes, faults, min_nodes = operator.index(nodes), operator.index(faults), operator.index(min_nodes)
    if faults < 0 or min_nodes < 1:
        raise ValueError(f"faults must be at least 0 and min_nodes at least 1, got {faults} and {min_nodes}")
    if nodes < (faults + 1) * min_nodes:
        raise ValueError(
            f"{nodes} nodes cannot hold {faults + 1} pipelines of {min_nodes} nodes: "
            f"use at least {(faults + 1) * min_nodes} nodes, or fewer faults"
        )
    return np.arange(min_nodes, nodes - faults * min_nodes + 1, dtype=np.int32)


@dataclass(frozen=True)
class PipelineTemplate:
    """Partitioning of a pipeline of `nodes` nodes.

    boundaries: int32 [stages + 1]; stage s has layers boundaries[s] .. boundaries[s + 1] - 1.
    gpus: int32 [stages], GPUs of each stage, all in one node; nodes are filled in order.
    iteration_time: T1 + T2 + T3, in the unit of the costs.
    """

    nodes: int
    boundaries: NDArray[np.int32]
    gpus: NDArray[np.int32]
    iteration_time: float


def pipeline_template(
    costs: ArrayLike,
    nodes: int,
    gpus_per_node: int,
    *,
    widths: Sequence[int] | None = None,
    microbatches_per_stage: int = 4,
) -> PipelineTemplate:
    """The fastest pipeline over all GPUs of `nodes` nodes (dissertation 2.4.1.2), exact.

    Minimises the paper's T1 + T2 + T3 over the number of stages S, the cuts between layers and the GPUs of each stage.
    With t_k = forward + backward of stage k and k* (from 0) the first slowest stage, that is

        sum_k t_k  +  (N_b - S + k* - 1) t_k*  +  sum_{k >= k*} t_k,        N_b = microbatches_per_stage * S.

    The paper's divide and conquer (up to 3,298 s) can miss the optimum, since it solves sub-problems with an objective
    that depends on their own k* and S'. This function bisects over t_k* with a shortest path over (layer, GPU) as lower
    bound. It makes about 50 passes of O(layers * GPUs * widths): seconds for 1,600 layers on 2,000 GPUs.

    Args:
        costs: non-negative real numbers [layers, widths]: forward + backward of one layer for one microbatch on
            widths[j] GPUs of a node.
        nodes: nodes of the pipeline, at most the number of layers.
        gpus_per_node: GPUs of each node. All are used; no stage spans two nodes.
        widths: tensor-parallel degrees that a stage may have, distinct (default 1, 2, ... for each column of costs).
        microbatches_per_stage: the paper's 4.

    Returns:
        PipelineTemplate; deterministic among several optima.

    Raises:
        ValueError: bad costs or widths, fewer layers than nodes, widths that cannot fill a node, or a product of
            layers, GPUs and widths above 2^28.
    """
    table = np.asarray(costs)
    degrees = np.arange(1, table.shape[1] + 1) if widths is None and table.ndim == 2 else np.asarray(widths or [1])
    boundaries, gpus, time = _core.pipeline_template(
        table, degrees, operator.index(nodes), operator.index(gpus_per_node), operator.index(microbatches_per_stage)
    )
    return PipelineTemplate(operator.index(nodes), boundaries, gpus, time)


@dataclass(frozen=True)
class Instantiation:
    """Pipelines to run, and their shares of the batch.

    counts: int32 [p], pipelines made from each template.
    microbatches: int64 [sum(counts)], per pipeline; pipelines in the order of their templates.
    time: time of the slowest pipeline, N_b,i * T_i, in the unit of `times`.
    """

    counts: NDArray[np.int32]
    microbatches: NDArray[np.int64]
    time: float


def instantiate(
    node_counts: ArrayLike, times: ArrayLike, nodes: int, *, faults: int, microbatches: int
) -> Instantiation:
    """The combination of templates with the best throughput (dissertation 2.4.2), exact.

    All nodes are used, there are at least faults + 1 pipelines, and every pipeline has a microbatch. The time of the
    slowest pipeline is the least over all combinations and all splits of the batch.

    The paper lists the combinations (their number is exponential) and solves a nonlinear integer program for each. This
    function searches over the time, with 15 to 40 probes. A probe is an unbounded knapsack over nodes, O(nodes *
    templates), without templates that smaller ones replace. If that gives more pipelines than microbatches, the probe
    is a power in the (max, +) algebra, O(nodes^2 log microbatches).

    Args:
        node_counts: distinct integers [p], nodes per template.
        times: positive numbers [p], time per microbatch of a template's pipeline (the paper's T_i).
        nodes: nodes to use, all of them; at most 16,384.
        faults: failures to survive, f.
        microbatches: microbatches of the global batch, B / b.

    Raises:
        ValueError: bad input (the message names the index), or no combination is feasible.
    """
    counts, split, time = _core.instantiate(
        np.asarray(node_counts),
        np.asarray(times),
        operator.index(nodes),
        operator.index(faults) + 1,
        operator.index(microbatches),
    )
    return Instantiation(counts, split, time)


def split_batch(
    times: ArrayLike, microbatches: int, *, objective: Literal["min_max", "variance"] = "min_max"
) -> NDArray[np.int64]:
    """Microbatches per pipeline, at least one each (dissertation 2.4.2.2 and 2.5.2), exact for both objectives.

    "min_max" minimizes the time of the slowest pipeline, which determines the iteration time, then that of the second
    slowest, and so on. "variance" is eq. 2.6: it minimizes the sum of squared differences from the pipelines' mean
    time, for which the paper uses a nonlinear integer solver. It can prefer even pipelines to a faster slowest one.

    Args:
        times: positive numbers [n], time per microbatch of each pipeline.
        microbatches: number of microbatches to distribute, at least n.
        objective: "min_max", O(n log n), or "variance", O(n) per exchange near the optimum (about n^2 of them).

    Returns:
        int64 [n] with sum `microbatches`. Ties go to the lower index.

    Raises:
        ValueError: bad times, an unknown objective, or fewer microbatches than pipelines (the message names the least
            batch that can be split).
    """
    if objective not in ("min_max", "variance"):
        raise ValueError(f"unknown objective {objective!r}: use 'min_max' or 'variance'")
    return _core.split_batch(np.asarray(times), operator.index(microbatches), objective == "variance")
