"""Schedule search: the fastest order found within a memory limit, and a lower bound for any order."""

from __future__ import annotations

from typing import TYPE_CHECKING

from interlace import _core
from interlace.schedule.costs import Durations
from interlace.schedule.generate import Options, make
from interlace.schedule.graph import StageGraph
from interlace.schedule.schedule import Schedule
from interlace.schedule.step import jobs_of, step_arrays, step_seconds
from interlace.schedule.table import StepTable

if TYPE_CHECKING:
    from typing_extensions import Unpack


def automatic(graph: StageGraph, table: StepTable, **options: Unpack[Options]) -> Schedule:
    """The fastest of all named schedules and of greedy list schedules with split backwards, within the limits.

    The greedy scheduler picks a ready action whenever a rank is idle: an input half, else a forward that fits in
    memory, else a weight half (or the last two in reverse order). It is repeated for several priorities, warm-up depths
    and durations, and finally with priorities by urgency in the best order so far. The result is never slower than a
    named schedule at the same limits (without transfers). The default limit of every rank is the peak of the fullest
    rank under textbook 1F1B, counted in forwards unless activation_bytes are given.

    Options and errors: `interlace.schedule.generate`. durations has entries for FORWARD, BACKWARD, BACKWARD_INPUT and
    BACKWARD_WEIGHT. `lower_bound` bounds the distance from the optimum.
    """
    return make("auto", graph, table, **options)


def lower_bound(graph: StageGraph, table: StepTable, durations: Durations, *, backward: bool = True) -> float:
    """Lower bound on the seconds of any schedule of the step, with unlimited memory and free transfers.

    The maximum of two kinds of paths. For each chunk: its chain of dependencies. For each rank: the least wait before
    its first action can start, plus all of its work, plus the shortest path from its last action to the end. A backward
    counts as the shorter of the whole and its halves. durations: as in `automatic`. O(jobs).
    """
    step = step_arrays(graph, table)
    seconds = step_seconds(jobs_of(step, backward), graph.modules, durations, whole=True, halves=True)
    return _core.schedule_bound(*step, backward, seconds)
