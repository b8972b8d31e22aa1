"""Runs steps on real ranks: `parallelize(mllm, layout)` gives this process's share of a model.

table.py (what: lengths -> StepTable) · dispatch.py (which replica takes which sample) · assign.py (which microbatch) ·
work.py (what samples cost) · ahead.py (tables of steps to come) ·
graph.py (layout and model -> stage graph) · executor.py (one rank's list) ·
step.py (what it works on) · deferred.py (gradients that wait for BACKWARD_WEIGHT) ·
gradients.py (sums over ranks) · ranks.py (a rank's stages) · lanes.py (how lanes of several ranks are cut) ·
deals.py (how chunks are dealt among context-parallel ranks) ·
weights.py (weights that are not the model's own Parameters) · threads.py (ranks of one process) ·
comparison.py (what ranks must be given alike) · needs.py, exchange.py (streams: which rank needs what, and its way
there) · batch.py, result.py (what a step takes and says) · device.py (GPUs) ·
profiling.py, measured_links.py (what layers and links take) ·
sizes.py, predict.py, predictor.py (how long a step takes) ·
traced.py (what forwards keep, for the memory of a rank) · flops.py (what a step computes) · placing.py,
parallel_model.py (the public face).
"""

from interlace.run.errors import PipelineError
from interlace.run.graph import stage_durations, stage_graph
from interlace.run.parallel_model import ParallelModel
from interlace.run.placing import parallelize
from interlace.run.result import StepResult
from interlace.run.table import Lengths, nominal_table, step_table

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
