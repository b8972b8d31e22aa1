"""The fastest order that a search finds within a memory limit, and a bound on what any order can reach."""

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
    """The fastest of all named schedules and of greedy plays with split backwards that keep within the limits.

    A play takes, whenever a rank is idle, what is ready: an input half, else a forward that fits the memory, else a
    weight half (or these two in the other order). It is repeated for several priorities, depths of the warm-up and
    durations, and at last by what is urgent in the best order so far. So the result is never slower than a named
    schedule at the same limits (transfers left out). Without limits no rank may hold more than the fullest one does
    under textbook 1F1B, in forwards unless activation_bytes are given.

    Options and errors: `interlace.schedule.generate`; durations are of FORWARD, BACKWARD, BACKWARD_INPUT and
    BACKWARD_WEIGHT. How far from the best: `lower_bound`.
    """
    return make("auto", graph, table, **options)


def lower_bound(graph: StageGraph, table: StepTable, durations: Durations, *, backward: bool = True) -> float:
    """Seconds that every schedule of the step takes at least, whatever memory it has, with free transfers.

    The longest of: all dependencies of a chunk in a row; and for every rank the least wait before anything it runs can
    start, all of its work, and the shortest way from its last action to the end. A backward counts as the shorter of
    the whole and its halves. durations: as in `automatic`. O(jobs).
    """
    step = step_arrays(graph, table)
    seconds = step_seconds(jobs_of(step, backward), graph.modules, durations, whole=True, halves=True)
    return _core.schedule_bound(*step, backward, seconds)
