"""Cutting a row of layers into pipeline stages."""

from __future__ import annotations

import operator

import numpy as np
from numpy.typing import ArrayLike, NDArray

from interlace import _core


def partition(costs: ArrayLike, stages: int) -> NDArray[np.int32]:
    """Cuts layers into contiguous stages, none empty, so that the costliest stage is as cheap as possible.

    Exact (the optimum of dissertation 3.4.1, eq. 3.5), by a search over the limits that a greedy pass can meet instead
    of its O(n^2 stages) table: about 60 passes of O(stages log n). Of several optimal cuts the returned one is even.

    Args:
        costs: real numbers [n], finite and not negative: time of one forward and one backward per layer, as
            `frozen_costs` gives it (dissertation 3.3.1). A stage costs the sum of its layers.
        stages: number of stages, 1 .. n.

    Returns:
        int32 [stages + 1], boundaries 0 = b[0] < ... < b[stages] = n; stage s is layers b[s] .. b[s + 1] - 1.

    Raises:
        ValueError: more stages than layers, no stage, or bad costs (the message names the first).
    """
    return _core.partition(np.asarray(costs), operator.index(stages))
