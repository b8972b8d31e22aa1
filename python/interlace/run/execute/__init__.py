"""Executor: walks a rank's list of actions.

- `executor`: runs one list. `step`: its inputs and state. `result`: its result. `threads`: ranks of one process.
- `ranks`: stages of a rank. `weights`: weights other than the model's own Parameters. `sharding`, `layers`: sharding.
- `gradients`: sums over ranks. `deferred`: deferred weight gradients. `exchange`: items of streams. `device`: GPUs.
"""
