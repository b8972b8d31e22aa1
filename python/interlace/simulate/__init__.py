"""Plays a schedule against costs, and shows the outcome.

- `events`: when each action of a schedule starts and finishes, given what actions and transfers cost
- `arrays`: the same on integer rows, for searches over thousands of schedules; compiled
- `reference`: the same in Python, the oracle of both
- `timeline`: those times, simulated or measured, and what follows from them (makespan, bubble, busy, memory)
- `trace`: the timeline as a Chrome/Perfetto trace; `picture`: as a PNG
- `groups`, `overview`, `sampled_trace`: a step of thousands of ranks, group by group: page, picture, bounded trace
- `loads`, `templates`: who computes what, as PNGs: `plot_loads`, `plot_deferral`, `plot_templates`
- `elastic_job`, `failure_trace`, `recovery`, `recovery_picture`: what nodes that fail and come cost
- `layouts`: which rank has what, and what it holds: `plot_layout`

    timeline = simulate(schedule, {Op.FORWARD: 1.0, Op.BACKWARD: 2.0})
    timeline.write_trace("step.json")
    timeline.plot("step.png")
"""

from interlace.simulate.arrays import Simulated, memory_and_scratch, simulate_arrays
from interlace.simulate.events import simulate
from interlace.simulate.layouts import plot_layout
from interlace.simulate.loads import plot_deferral, plot_loads
from interlace.simulate.templates import plot_templates
from interlace.simulate.timeline import Record, Timeline

__all__ = [
    "Record",
    "Simulated",
    "Timeline",
    "memory_and_scratch",
    "plot_deferral",
    "plot_layout",
    "plot_loads",
    "plot_templates",
    "simulate",
    "simulate_arrays",
]
