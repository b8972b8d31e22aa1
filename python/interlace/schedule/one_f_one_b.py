"""1F1B over chunks: memory bounded by the distance to the sink, not by the number of chunks.

Modules need not have equally many chunks, nor equally many replicas: an encoder chunk may feed several chunks of the
language model, and the reverse. Where they go side by side the result is the classical one: with d the stages that
follow a stage on other lanes (Cornstarch section 4.1 counts the same),

    F_0 .. F_{d-1}, then F_{d+j} B_j for j = 0, 1, ..., until the forwards run out, then the last backwards.

How it is made, and why it cannot deadlock: csrc/schedule/order.h.
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
    """The 1F1B schedule of one step; options and errors: `interlace.schedule.generate`."""
    return make("1f1b", graph, table, **options)


def interleaved(graph: StageGraph, table: StepTable, **options: Unpack[Options]) -> Schedule:
    """Interleaved 1F1B, for modules of several stages per rank (``ParallelSpec(virtual=2)``; Megatron-LM, arXiv
    2104.04473, section 2.2). Chunks go in groups of as many as there are ranks: a group through the first lap of
    stages, the same group through the next one.

    The bubble shrinks by the number of laps, for more messages and more forwards in flight. Without such a module it is
    1F1B. Options and errors: `interlace.schedule.generate`.
    """
    return make("interleaved", graph, table, **options)
