"""1F1B over chunks: memory bounded by the distance to the sink, not by the number of chunks.

Modules need not have equally many chunks, nor equally many replicas: an encoder chunk may feed several chunks of the
language model, and the reverse. Where they go side by side the result is the classical one: with d the stages that
follow a stage on other lanes (Cornstarch section 4.1 counts the same),

    F_0 .. F_{d-1}, then F_{d+j} B_j for j = 0, 1, ..., until the forwards run out, then the last backwards.

How it is made, and why it cannot deadlock: csrc/schedule/order.h.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from interlace import _core
from interlace.schedule.actions import Op
from interlace.schedule.costs import Durations, duration_of
from interlace.schedule.graph import StageGraph
from interlace.schedule.schedule import Schedule
from interlace.schedule.step import StepArrays, step_arrays
from interlace.schedule.table import StepTable


def one_f_one_b(
    graph: StageGraph,
    table: StepTable,
    *,
    reduce_grad: bool = True,
    backward: bool = True,
    durations: Durations | None = None,
) -> Schedule:
    """The 1F1B schedule of one step.

    reduce_grad: sum gradients over the ranks that share weights. backward: False for evaluation, forwards only.
    durations: seconds of FORWARD and BACKWARD, as in `simulate`. Given, lanes take what is ready by these costs
        wherever that finishes earlier than with a backward of two forwards (transfers left out).

    Raises ValueError for a table that does not fit the graph.
    """
    step = step_arrays(graph, table)
    seconds = np.zeros(0) if durations is None else _seconds(graph, table, step, backward, durations)
    rows, first = _core.schedule_lists(*step, False, backward, backward and reduce_grad, seconds)
    return Schedule("1f1b", graph, table, rows, first, backward, reduce_grad)


def _seconds(
    graph: StageGraph, table: StepTable, step: StepArrays, backward: bool, durations: Durations
) -> NDArray[np.float64]:
    """float64 [2 * jobs]: of the FORWARD and the BACKWARD of each job in turn, 0 where there is none."""
    look_up = duration_of(durations)
    nodes, chunks, runs = _core.schedule_jobs(*step, backward)
    seconds = np.zeros(2 * len(nodes))
    stages = step.graph.node_stage[nodes].tolist()
    for job, (stage, chunk, back) in enumerate(zip(stages, chunks.tolist(), runs.tolist(), strict=True)):
        module = table.chunks[chunk].module
        seconds[2 * job] = look_up(Op.FORWARD, module, stage, chunk)
        if back:
            seconds[2 * job + 1] = look_up(Op.BACKWARD, module, stage, chunk)
    return seconds
