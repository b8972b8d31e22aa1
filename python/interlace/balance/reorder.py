"""Order of microbatches, to reduce stragglers (DistTrain section 6.2): the paper's order, refined by search."""

from __future__ import annotations

import operator
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from interlace import _core


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
