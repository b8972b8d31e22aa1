"""Order of samples, to reduce stragglers (DistTrain section 6.1): the algorithm as printed, and by falling cost.

`interlace train` assigns samples by `balance.post_balance` in its place (OrchMLLM).
"""

from __future__ import annotations

import operator
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from interlace import _core
from interlace.balance import assign


@dataclass(frozen=True, eq=False)
class SampleOrder:
    """Samples in order, cut into groups.

    order: int32 [n], the samples group by group; within a group they keep their order.
    offsets: int64 [groups + 1]; group g takes order[offsets[g]:offsets[g + 1]].
    group_of: int32 [n].
    """

    order: NDArray[np.int32]
    offsets: NDArray[np.int64]
    group_of: NDArray[np.int32]


def reorder_samples(
    cost: ArrayLike, groups: int, *, equal_counts: bool = True, as_printed: bool = False
) -> SampleOrder:
    """Assigns the samples of a global batch to data-parallel groups to keep the slowest group fast (algorithm 2).

    The printed algorithm takes samples by rising cost, but the 4/3 bound that the paper states for it holds for falling
    cost (Graham 1969). Here samples are taken by falling cost, unless the printed order is better. The paper also
    concatenates the groups without their lengths, though a data-parallel rank cuts the result into equal parts. With
    equal_counts these parts are the groups. O(n log n).

    Args:
        cost: real numbers [n], finite and not negative, in any unit.
        groups: data-parallel size.
        equal_counts: every group takes at most ceil(n / groups) samples. False: any number.
        as_printed: the paper's order, for comparison.

    Raises:
        ValueError: cost is empty or the named one is NaN, infinite or negative; groups is out of range.
    """
    costs, groups = np.asarray(cost), operator.index(groups)
    n = costs.size
    capacity = -(-n // groups) if equal_counts and groups > 0 else n
    printed = _core.assign_ascending(costs, groups, capacity)
    group_of = printed
    if not as_printed:
        falling = assign(costs, groups, capacity=capacity)
        if _heaviest(costs, falling, groups) <= _heaviest(costs, printed, groups):
            group_of = falling
    offsets = np.zeros(groups + 1, np.int64)
    np.cumsum(np.bincount(group_of, minlength=groups), out=offsets[1:])
    return SampleOrder(np.argsort(group_of, kind="stable").astype(np.int32), offsets, group_of)


def _heaviest(cost: NDArray[np.generic], group_of: NDArray[np.int32], groups: int) -> float:
    return float(np.bincount(group_of, weights=cost, minlength=groups).max())
