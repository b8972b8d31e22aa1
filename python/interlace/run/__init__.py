"""Runs steps on real ranks: `parallelize(mllm, layout)` returns this process's share of a model.

- `placing`, `parallel_model`: the public interface. `process`: the ranks of this process. `graph`, `lanes`: stages of a
  layout, and lanes of several ranks.
- `comparison`: fingerprints that ranks compare before a step.
- `tables/`: step tables from lengths. `execute/`: the executor and its state.
"""

from interlace.run.errors import PipelineError
from interlace.run.execute.result import StepResult
from interlace.run.graph import stage_durations, stage_graph
from interlace.run.parallel_model import ParallelModel
from interlace.run.placing import parallelize
from interlace.run.tables.table import Lengths, nominal_table, step_table

__all__ = [
    "Lengths",
    "ParallelModel",
    "PipelineError",
    "StepResult",
    "nominal_table",
    "parallelize",
    "stage_durations",
    "stage_graph",
    "step_table",
]
