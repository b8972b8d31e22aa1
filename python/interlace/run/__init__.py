"""Executes schedules on real ranks: `parallelize(mllm, plan)` gives this process's share of a model.

channel.py (in-process channel, errors) · distributed.py (between processes) · executor.py (one rank's action list) ·
gradients.py (parameters on several ranks) · graph.py (plan -> stage graph) · parallel_model.py (the public face).
"""

from interlace.run.channel import PipelineError
from interlace.run.graph import stage_durations, stage_graph
from interlace.run.parallel_model import ParallelModel, StepResult, parallelize

__all__ = ["ParallelModel", "PipelineError", "StepResult", "parallelize", "stage_durations", "stage_graph"]
