"""Order of samples and of microbatches, to reduce stragglers (DistTrain section 6).

Both functions start from the paper's algorithm, which is also available alone, and are never worse than it.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from interlace import _core
from interlace.balance.assignment import assign


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


@dataclass(frozen=True, eq=False)
class MicrobatchOrder:
    """An order of microbatches and its simulated time.

    order: int32 [l]; the i-th microbatch to run is order[i].
    seconds: simulated time at which the last rank finishes. printed_seconds: the same for the paper's order.
    bound: lower bound for every order (the busiest rank with the cheapest way to it and from it; each microbatch
        alone).
    evaluations: number of simulated orders.
    """

    order: NDArray[np.int32]
    seconds: float
    printed_seconds: float
    bound: float
    evaluations: int

    @property
    def gap(self) -> float:
        """Relative distance of seconds from the bound: 0 proves that the order is optimal."""
        return self.seconds / self.bound - 1.0 if self.bound else 0.0


def reorder_microbatches(
    forward: ArrayLike,
    backward: ArrayLike,
    *,
    ranks: int | None = None,
    transfer: float = 0.0,
    evaluations: int = 6_000,
) -> MicrobatchOrder:
    """Order of microbatches of unequal cost for a 1F1B pipeline (algorithm 3), refined by search.

    The first candidate is the paper's order: the smallest microbatch, then those whose forwards best fill the gaps of
    the first rank, with the ranks - 1 smallest at the end (the printed loop runs ranks - 2 rounds too long; here it
    ends when no microbatch is left). Next are the given, the rising and the falling order. If the evaluations suffice,
    all permutations follow, which makes the result optimal. Otherwise an iterated local search (moves, swaps, a few
    random swaps if none helps) runs from the best order so far, until the bound is reached or the evaluations are used
    up. Each order is timed by the event simulator, so the result is never worse than the paper's. O(l stages) per
    evaluation. Deterministic.

    Args:
        forward, backward: seconds [l, stages] of each microbatch on each stage, finite and not negative.
        ranks: pipeline ranks; stage s runs on rank s % ranks. None: one per stage. Fewer than stages: interleaved 1F1B
            (Megatron-LM, arXiv 2104.04473, section 2.2), which needs l to be a multiple of ranks.
        transfer: seconds of every message between ranks.
        evaluations: most orders to simulate; the default covers all permutations up to l = 7. 0: only the paper's
            order.

    Raises:
        ValueError: shapes disagree, the named entry is NaN, infinite or negative, ranks do not fit, or there are more
            than 2^22 entries.
    """
    costs = np.asarray(forward)
    if ranks is None:
        ranks = costs.shape[-1] if costs.ndim else 1
    order = _core.reorder_microbatches(
        costs, np.asarray(backward), operator.index(ranks), float(transfer), operator.index(evaluations)
    )
    return MicrobatchOrder(**order)
