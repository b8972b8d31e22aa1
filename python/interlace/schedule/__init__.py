"""Pipeline schedules as data: one ordered list of actions per rank.

- `actions`: Op, Action and their text form
- `graph`: stages, the edges between them, the ranks they run on; `work`: what one microbatch demands of it
- `gpipe`, `one_f_one_b`: generators; `order`: orders work in time where there is no closed form
- `communication`: puts SEND and RECV between the compute actions
- `schedule`: the lists with what they were made for; `check`: proves that they can run; `memory`: what they hold
- `costs`: how callers state durations

    graph = StageGraph.build({"vision": [0], "language_model": [1, 2]}, [("vision", "language_model")])
    schedule = one_f_one_b(graph, graph.everything(8))
    check(schedule)
"""

from interlace.schedule.actions import Action, Op
from interlace.schedule.check import CheckReport, ScheduleError, check
from interlace.schedule.costs import Durations
from interlace.schedule.gpipe import gpipe
from interlace.schedule.graph import Stage, StageGraph
from interlace.schedule.one_f_one_b import one_f_one_b
from interlace.schedule.schedule import Schedule

__all__ = [
    "Action",
    "CheckReport",
    "Durations",
    "Op",
    "Schedule",
    "ScheduleError",
    "Stage",
    "StageGraph",
    "check",
    "gpipe",
    "one_f_one_b",
]
