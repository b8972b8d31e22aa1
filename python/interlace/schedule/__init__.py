"""Pipeline schedules as data: one ordered list of actions per rank.

- `actions`: Op, Action, their integer rows and text form
- `table`: chunks of a step, and the data dependencies between them; `graph`: stages of a layout
- `step`: table and graph as arrays
- `gpipe`, `one_f_one_b` (also interleaved), `zero_bubble`, `automatic`: generators, in C++ (csrc/schedule);
  `generate`: their common part; `generators`: all generators by name
- `schedule`: action lists with their graph and table; `check`: proves that they can run; `memory`: their peak memory
- `costs`: formats of durations and bytes

    links = [("vision", "language_model")]
    graph = StageGraph.build({"vision": [0], "language_model": [1, 2]}, links)
    schedule = one_f_one_b(graph, StepTable.aligned(links, [graph.modules] * 8))
    check(schedule)
"""

from interlace.schedule.actions import Action, Op
from interlace.schedule.automatic import automatic, lower_bound
from interlace.schedule.check import CheckReport, ScheduleError, check
from interlace.schedule.generate import Options
from interlace.schedule.generators import GENERATORS, generator_of, splits_backward
from interlace.schedule.gpipe import gpipe
from interlace.schedule.graph import StageGraph
from interlace.schedule.one_f_one_b import interleaved, one_f_one_b
from interlace.schedule.schedule import Schedule, compute_actions
from interlace.schedule.table import Chunk, Edge, StepTable
from interlace.schedule.zero_bubble import zb_h1, zb_h2, zb_v

__all__ = [
    "GENERATORS",
    "Action",
    "CheckReport",
    "Chunk",
    "Edge",
    "Op",
    "Options",
    "Schedule",
    "ScheduleError",
    "StageGraph",
    "StepTable",
    "automatic",
    "check",
    "compute_actions",
    "generator_of",
    "gpipe",
    "interleaved",
    "lower_bound",
    "one_f_one_b",
    "splits_backward",
    "zb_h1",
    "zb_h2",
    "zb_v",
]
