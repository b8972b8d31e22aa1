"""Pipeline schedules as data: one ordered list of actions per rank.

- `actions`: Op, Action, their rows of integers and their text form
- `table`: the chunks of a step, and what they read of each other; `graph`: the stages of a layout
- `step`: both as arrays
- `gpipe`, `one_f_one_b`: generators, in C++ (csrc/schedule)
- `schedule`: the lists with what they were made for; `check`: proves that they can run; `memory`: what they hold
- `costs`: how callers state durations and bytes

    links = [("vision", "language_model")]
    graph = StageGraph.build({"vision": [0], "language_model": [1, 2]}, links)
    schedule = one_f_one_b(graph, StepTable.aligned(links, [graph.modules] * 8))
    check(schedule)
"""

from interlace.schedule.actions import Action, Op
from interlace.schedule.check import CheckReport, ScheduleError, check
from interlace.schedule.costs import Durations
from interlace.schedule.gpipe import gpipe
from interlace.schedule.graph import StageGraph
from interlace.schedule.one_f_one_b import one_f_one_b
from interlace.schedule.schedule import Schedule
from interlace.schedule.table import Chunk, Edge, StepTable

__all__ = [
    "Action",
    "CheckReport",
    "Chunk",
    "Durations",
    "Edge",
    "Op",
    "Schedule",
    "ScheduleError",
    "StageGraph",
    "StepTable",
    "check",
    "gpipe",
    "one_f_one_b",
]
