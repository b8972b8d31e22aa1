"""Observers of the trainer: metrics, validation, checkpoints and profiles after each step.

- `base`: the protocol. `measurements`: metrics of a step, traces. `log`: lines of metrics. `validation`: held-out loss.
- `saving`: checkpoints and their times. `profiler`: torch.profiler.
"""
