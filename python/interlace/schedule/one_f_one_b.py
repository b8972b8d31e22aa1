"""1F1B over chunks: memory is bounded by the distance to the last stage, not by the number of chunks.

Modules may differ in the numbers of chunks and replicas: an encoder chunk may feed several chunks of the language
model, and vice versa. With equal numbers the result is classical 1F1B. With d the number of stages that follow a stage
on other lanes (counted as in Cornstarch section 4.1), the order is

    F_0 .. F_{d-1}, then F_{d+j} B_j for j = 0, 1, ..., until the forwards run out, then the last backwards.

Algorithm and proof of deadlock freedom: csrc/schedule/generator/order.h.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from interlace.schedule.generate import Options, make
from interlace.schedule.graph import StageGraph
from interlace.schedule.schedule import Schedule
from interlace.schedule.table import StepTable

if TYPE_CHECKING:
    from typing_extensions import Unpack


def one_f_one_b(graph: StageGraph, table: StepTable, **options: Unpack[Options]) -> Schedule:
    """1F1B schedule of one step. Options and errors: `interlace.schedule.generate`."""
    return make("1f1b", graph, table, **options)


def interleaved(graph: StageGraph, table: StepTable, **options: Unpack[Options]) -> Schedule:
    """Interleaved 1F1B, for modules with several stages per rank (``ParallelSpec(virtual=2)``).

    Reference: Megatron-LM, arXiv 2104.04473, section 2.2. Chunks run in groups, one chunk per rank: a group runs
    through the first lap of stages, then through the next lap. The bubble shrinks by the number of laps, at the cost of
    more messages and more forwards in flight. Without such a module the result is 1F1B.

    Options and errors: `interlace.schedule.generate`.
    """
    return make("interleaved", graph, table, **options)
