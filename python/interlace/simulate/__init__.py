"""Simulator: executes a schedule on given costs, and visualizes the result.

- `events`: start and finish of each action, from the costs of actions and transfers. `arrays`: compiled simulator on
  integer rows, for searches over thousands of schedules.
- `timeline`: these times, simulated or measured (makespan, bubble, busy, memory). `trace`: Chrome/Perfetto trace.
- `groups`, `sampled_trace`: steps of thousands of ranks, by group of ranks, with a trace of bounded size.
- `elastic_job`, `failure_trace`, `recovery`: costs of node failures and joins.
- `pictures/`: pictures and pages of all of these.

    timeline = simulate(schedule, {Op.FORWARD: 1.0, Op.BACKWARD: 2.0})
    timeline.write_trace("step.json")
    timeline.plot("step.png")
"""

from interlace.simulate.arrays import Simulated, simulate_arrays
from interlace.simulate.events import simulate
from interlace.simulate.pictures.layouts import plot_layout
from interlace.simulate.pictures.loads import plot_loads
from interlace.simulate.timeline import Record, Timeline

__all__ = [
    "Record",
    "Simulated",
    "Timeline",
    "plot_layout",
    "plot_loads",
    "simulate",
    "simulate_arrays",
]
