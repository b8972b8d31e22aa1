"""Cuts a sequence of layers into pipeline stages."""

from __future__ import annotations

import operator

import numpy as np
from numpy.typing import ArrayLike, NDArray

from interlace import _core


def partition(
    costs: ArrayLike,
    stages: int,
    *,
    memory: ArrayLike | None = None,
    memory_limits: ArrayLike | None = None,
    speeds: ArrayLike | None = None,
) -> NDArray[np.int32]:
    """Cuts layers into contiguous non-empty stages to minimise the cost of the costliest stage.

    Exact (the optimum of dissertation 3.4.1, eq. 3.5). Instead of the paper's O(n^2 stages) table it searches for the
    smallest limit that a greedy pass can keep: about 60 passes of O(stages log n). Of several optimal cuts it returns
    an even one. It is also exact with limits and speeds; layers too large for some stage by themselves cost time.

    Args:
        costs: real numbers [n], finite and not negative: time of one forward and one backward per layer, as
            `frozen_costs` gives it (dissertation 3.3.1). A stage costs the sum of its layers.
        stages: number of stages, 1 .. n.
        memory: real numbers [n], not negative: memory of a layer on its stage (weights, gradients, optimizer state).
            Needs `memory_limits`.
        memory_limits: real numbers [stages], or one for all: most memory of a stage's layers together. For a stage
            with k microbatches in flight, count only activations, with the limit (memory - weights) / k, or use limits
            that grow towards the last stage.
        speeds: positive real numbers [stages]; stage s takes (sum of its costs) / speeds[s]. Default 1 each.

    Returns:
        int32 [stages + 1], boundaries 0 = b[0] < ... < b[stages] = n; stage s is layers b[s] .. b[s + 1] - 1.

    Raises:
        ValueError: more stages than layers, no stage, bad arrays (the message names the first value), or limits that
            every cut exceeds.
    """
    if (memory is None) != (memory_limits is None):
        raise ValueError("memory and memory_limits belong together: give both or neither")
    if memory is not None or speeds is not None:
        values = np.asarray(costs)
        if operator.index(stages) < 1:
            raise ValueError(f"stages must be at least 1, got {stages}")
        limits = np.zeros(stages) if memory_limits is None else np.asarray(memory_limits)
        rates = np.ones(stages) if speeds is None else np.asarray(speeds)
        if rates.shape != (stages,):
            raise ValueError(f"speeds must have shape ({stages},), got {rates.shape}")
        return _core.limited_partition(
            values,
            np.zeros(values.shape) if memory is None else np.asarray(memory),
            np.full(stages, limits) if limits.ndim == 0 else limits,
            rates,
        )
    return _core.partition(np.asarray(costs), operator.index(stages))
