"""Workers: processes and Ray tasks that decode media and encode samples ahead of the step.

- `tasks`: tasks and answers. `pool`, `process`: worker processes. `ray_tasks`: the same on Ray.
- `decode_cache`: decoded items shared by the ranks of a node. `produced`: batches in the trainer. `ahead`: its thread.
"""
