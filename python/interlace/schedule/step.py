"""Graph and table of a step as arrays for compiled code."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from interlace import _core
from interlace.schedule.actions import CODES, Op
from interlace.schedule.costs import ActivationBytes, Durations, bytes_held, seconds_of
from interlace.schedule.graph import GraphArrays, Ints, StageGraph
from interlace.schedule.table import StepTable


class StepArrays(NamedTuple):
    """Arrays of a step.

    graph: see `GraphArrays`. chunk_pipeline: int32 [chunks], pipeline of each chunk. links: int32 [m, 2], as in
    StepTable.
    """

    graph: GraphArrays
    chunk_pipeline: Ints
    links: Ints


def step_arrays(graph: StageGraph, table: StepTable) -> StepArrays:
    """Arrays of a step. Raises ValueError for a chunk without a pipeline, and for a read without a graph link."""
    number = graph.pipeline_number
    try:
        pipelines = np.array([number[chunk.module, chunk.replica] for chunk in table.chunks], np.int32)
    except KeyError:
        chunk = next(c for c in table.chunks if (c.module, c.replica) not in number)
        replicas = {module: graph.layout.spec(module).dp for module in graph.modules}
        known = ", ".join(f"{module} has {count}" for module, count in replicas.items())
        raise ValueError(
            f"the step has {chunk}, which no pipeline of the layout runs; replicas of the layout: {known}"
        ) from None
    arrays = graph.arrays
    allowed = np.zeros((len(graph.modules), len(graph.modules)), bool)
    allowed[tuple(arrays.module_links.T)] = True
    modules = arrays.pipeline_module[pipelines[table.links]]
    wrong = ~allowed[modules[:, 0], modules[:, 1]]
    if wrong.any():
        producer, consumer = (table.chunks[i] for i in table.links[wrong.argmax()])
        raise ValueError(
            f"{consumer} reads {producer}: add the link ({producer.module!r}, {consumer.module!r}) to the graph"
        )
    return StepArrays(arrays, pipelines, table.links)


class Jobs(NamedTuple):
    """Jobs of a step; a job is one chunk on one stage.

    work: int32 [jobs, 3], module, stage and chunk. backward, trains: bool [jobs], whether the job has a backward, and
    whether its stage has something to train.
    """

    work: NDArray[np.int32]
    backward: NDArray[np.bool_]
    trains: NDArray[np.bool_]


def jobs_of(step: StepArrays, backward: bool) -> Jobs:
    """Jobs of a step, in order. backward: False for evaluation."""
    nodes, chunks, runs = _core.schedule_jobs(*step, backward)
    graph = step.graph
    work = np.stack([graph.pipeline_module[graph.node_pipeline[nodes]], graph.node_stage[nodes], chunks], axis=1)
    return Jobs(work.astype(np.int32), runs, graph.node_trains[nodes] != 0)


def step_seconds(
    jobs: Jobs, modules: Sequence[str], durations: Durations, *, whole: bool, halves: bool
) -> NDArray[np.float64]:
    """Seconds of FORWARD, BACKWARD, BACKWARD_INPUT and BACKWARD_WEIGHT of each job in order, float64 [4 * jobs].

    Actions that a job does not have are 0. whole, halves: whether backwards may run whole, and split.
    """
    split = jobs.backward & jobs.trains & halves
    runs = np.stack([np.ones_like(split), jobs.backward & (~split | whole), split, split], axis=1)
    work = np.empty((len(split), 4, 4), np.int64)
    work[:, :, 0] = [CODES[op] for op in (Op.FORWARD, Op.BACKWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT)]
    work[:, :, 1:] = jobs.work[:, None]
    seconds = np.zeros(runs.shape)
    seconds[runs] = seconds_of(durations, work[runs], modules)
    return seconds.reshape(-1)


def job_bytes(
    graph: StageGraph, table: StepTable, jobs: Jobs, activation_bytes: ActivationBytes
) -> NDArray[np.float64]:
    """Activation bytes of each job, float64 [jobs].

    Raises ValueError for a key that names no stage of the graph or no chunk of the table.
    """
    stages = {module: len(graph.layout.pipelines(module)[0].stages) for module in graph.modules}
    for key in activation_bytes:
        module, stage, *chunk = key
        if not 0 <= stage < stages.get(module, 0) or not all(0 <= c < len(table.chunks) for c in chunk):
            raise ValueError(
                f"activation_bytes has the key {key}, which is not a (module, stage) or (module, stage, chunk) of the "
                "step"
            )
    chunk_free = not any(len(key) == 3 for key in activation_bytes)
    kinds, kind = np.unique(jobs.work[:, :2] if chunk_free else jobs.work, axis=0, return_inverse=True)
    sizes = [
        bytes_held(activation_bytes, graph.modules[m], stage, *(chunk or [-1])) for m, stage, *chunk in kinds.tolist()
    ]
    return np.asarray(np.array(sizes, np.float64)[kind.reshape(-1)])


def rank_limits(memory_limit: float | Sequence[float] | None, ranks: int) -> NDArray[np.float64]:
    """Memory limit of each rank, float64 [ranks], from one limit or one per rank; empty without a limit.

    Raises ValueError for a wrong number of limits.
    """
    if memory_limit is None:
        return np.zeros(0)
    scalar = isinstance(memory_limit, (int, float))
    limits = np.array([memory_limit] * ranks if scalar else memory_limit, dtype=np.float64)
    if limits.shape != (ranks,):
        raise ValueError(f"memory_limit has {len(limits)} entries, expected one or {ranks} (ranks)")
    return limits
