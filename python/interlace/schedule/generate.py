"""Common part of generators: converts options for csrc/schedule/generator/generate.h, and results to Schedules."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, TypedDict

import numpy as np

from interlace import _core
from interlace.schedule.costs import ActivationBytes, Durations
from interlace.schedule.graph import StageGraph
from interlace.schedule.schedule import Schedule
from interlace.schedule.step import job_bytes, jobs_of, rank_limits, step_arrays, step_seconds
from interlace.schedule.table import StepTable


class Kind(NamedTuple):
    """A generator of the compiled code.

    whole, halves: whether its lists may have whole backwards, and split ones. order: of the virtual stages that it
    needs; "": it needs none.
    """

    number: int
    whole: bool = True
    halves: bool = False
    order: Literal["", "loop", "v"] = ""


# In the order of `Generator` in csrc/schedule/generator/generate.h.
KINDS = {
    "gpipe": Kind(0),
    "1f1b": Kind(1),
    "interleaved": Kind(2, order="loop"),
    "zb_h1": Kind(3, whole=False, halves=True),
    "zb_h2": Kind(4, whole=False, halves=True),
    "zb_v": Kind(5, whole=False, halves=True, order="v"),
    "auto": Kind(6, halves=True),
}


class Options(TypedDict, total=False):
    """Keyword options of every generator.

    reduce_grad: sum gradients over the ranks that share weights (default: True). backward: False for evaluation,
        forwards only. dispatch: every list begins with a DISPATCH (streams; default: False).
    durations: seconds of compute actions, as in `simulate`. With them, lanes pick ready actions by these costs wherever
        that finishes earlier than with nominal costs (without transfers). Nominal costs: a forward 1, a backward 2 or 1
        for each half, divided by the stages of the rank.
    memory_limit: most bytes of activations of a rank, one value or one per rank.
    activation_bytes: bytes that a chunk holds on a stage from its forward to its BACKWARD or BACKWARD_WEIGHT, as in
        `check`. Default: 1 each, so that the limit counts forwards.
    in_flight: most forwards that a stage may hold. It or memory_limit replaces the schedule's own limits: as many
        forwards run ahead as it allows (eager forward; dissertation section 4.4).
    """

    reduce_grad: bool
    backward: bool
    dispatch: bool
    durations: Durations | None
    activation_bytes: ActivationBytes | None
    memory_limit: float | Sequence[float] | None
    in_flight: int | None


def make(
    name: str,
    graph: StageGraph,
    table: StepTable,
    *,
    reduce_grad: bool = True,
    backward: bool = True,
    dispatch: bool = False,
    durations: Durations | None = None,
    activation_bytes: ActivationBytes | None = None,
    memory_limit: float | Sequence[float] | None = None,
    in_flight: int | None = None,
) -> Schedule:
    """Schedule `name`, one of `KINDS`, of one step. Options: see `Options`.

    Raises ValueError for a table that does not fit the graph. Also raises it, with a rank and its bytes, if the lists
    cannot be kept within the limits.
    """
    if in_flight is not None and in_flight < 1:
        raise ValueError(f"in_flight is {in_flight}: it must be at least 1")
    kind, step = KINDS[name], step_arrays(graph, table)
    limits = rank_limits(memory_limit, graph.layout.world)
    seconds = sizes = np.zeros(0)
    if durations is not None or activation_bytes is not None:
        jobs = jobs_of(step, backward)
        if durations is not None:
            seconds = step_seconds(jobs, graph.modules, durations, whole=kind.whole, halves=kind.halves)
        if activation_bytes is not None:
            sizes = job_bytes(graph, table, jobs, activation_bytes)
    rows, first = _core.schedule_lists(
        *step, kind.number, backward, backward and reduce_grad, seconds, sizes, limits, in_flight or 0, dispatch
    )
    return Schedule(name, graph, table, rows, first, backward, reduce_grad, dispatch)
