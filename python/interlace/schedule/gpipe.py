"""GPipe: all forwards, then all backwards.

Simplest and fastest to start, but every chunk is held at once: memory grows with their number. Backwards run in the
order of the forwards, so that gradients add up in the same order as under 1F1B.
"""

from __future__ import annotations

import numpy as np

from interlace import _core
from interlace.schedule.graph import StageGraph
from interlace.schedule.schedule import Schedule
from interlace.schedule.step import step_arrays
from interlace.schedule.table import StepTable


def gpipe(graph: StageGraph, table: StepTable, *, reduce_grad: bool = True, backward: bool = True) -> Schedule:
    """The GPipe schedule of one step.

    reduce_grad: sum gradients over the ranks that share weights. backward: False for evaluation, forwards only.

    Raises ValueError for a table that does not fit the graph.
    """
    rows, first = _core.schedule_lists(
        *step_arrays(graph, table), True, backward, backward and reduce_grad, np.zeros(0)
    )
    return Schedule("gpipe", graph, table, rows, first, backward, reduce_grad)
