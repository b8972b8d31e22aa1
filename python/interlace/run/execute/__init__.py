"""Executor: walks a rank's list of actions.

- `executor`: runs one list. `messages`: between lanes. `collectives`: of weights. `step`: inputs and state of a step.
  `result`: its result.
- `ranks`: stages of a rank. `weights`: weights other than the model's own Parameters. `sharding`, `layers`: sharding.
- `gradients`: sums over ranks. `deferred`: deferred weight gradients. `exchange`: items of streams. `device`: GPUs.
"""
