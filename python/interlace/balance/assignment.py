"""Assignment of weighted items to bins, and how good any assignment could be.

| method         | order kept | weights used | heaviest bin                              | time                        |
|----------------|------------|--------------|-------------------------------------------|-----------------------------|
| lpt            | no         | yes          | never above lpt_greedy's                  | O(n log n) + local search   |
| even           | no         | yes          | never above lpt's; all loads near a mean  | lpt + up to some ms         |
| lpt_greedy     | no         | yes          | <= 4/3 - 1/(3 bins) optimum (no capacity) | O(n log n)                  |
| multifit       | no         | yes          | <= 13/11 optimum (no capacity) and        | O(n log n), up to 40 probes |
|                |            |              | never above lpt_greedy's                  |                             |
| karmarkar_karp | no         | yes          | best known heuristic at few items per bin | O(n bins log bins)          |
| exact          | no         | yes          | optimal where `assign_exact` says proven  | exponential; a node budget  |
| contiguous     | yes        | yes          | optimal among those that keep the order   | O(n + bins log n) probes    |
| ring           | yes        | no           | equal counts                              | O(n)                        |
| zigzag         | no         | no           | balanced for causal attention, else none  | O(n)                        |
| random         | no         | no           | equal counts                              | O(n)                        |
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from interlace import _core

EXACT_STEPS = 160_000_000
"""Nodes times bins that the exact method looks at by default: about half a second."""
EXACT_SECONDS = 60.0
"""After so long it gives up where more nodes were asked for."""


def _exact(weights: NDArray[np.generic], bins: int, capacity: int | None) -> NDArray[np.int32]:
    return assign_exact(weights, bins, capacity=capacity).bins


METHODS: dict[str, Callable[[NDArray[np.generic], int, int | None], NDArray[np.int32]]] = {
    "lpt": _core.assign_lpt,
    "even": _core.assign_even,
    "lpt_greedy": _core.assign_lpt_greedy,
    "multifit": _core.assign_multifit,
    "karmarkar_karp": _core.assign_karmarkar_karp,
    "exact": _exact,
    "contiguous": _core.assign_contiguous,
    "ring": _core.assign_ring,
    "zigzag": _core.assign_zigzag,
    "random": lambda weights, bins, capacity: _core.assign_random(weights, bins, capacity, 0),
}


@dataclass(frozen=True)
class ExactAssignment:
    """What `assign_exact` found."""

    bins: NDArray[np.int32]  # [n], the bin of each item
    makespan: float  # weight of the heaviest bin
    bound: float  # no assignment is lighter than this; equals makespan where proven
    proven: bool  # makespan is the optimum


def assign(
    weights: ArrayLike, bins: int, *, method: str = "lpt", capacity: int | None = None, seed: int = 0
) -> NDArray[np.int32]:
    """Gives each item a bin so that the heaviest bin is light. Deterministic: ties go to the lower index.

    Args:
        weights: real numbers [n], finite and not negative, in any unit. Whole numbers above 2^53 are rounded.
        bins: number of bins; more than items leaves some empty.
        method: "lpt" deals items by falling weight, each to the lightest bin with room ("lpt_greedy": the token
            distribution of Cornstarch, dissertation 3.3.2.1, and the sample distribution of OrchMLLM, its Algorithm 1),
            then moves and exchanges items between the heaviest and the lightest bins while that helps; so it is never
            worse than "lpt_greedy". "even" goes on from there until all loads, not only the heaviest, lie close to each
            other: any two bins exchange up to three items each way while that helps (`least_spread` says how close
            loads can come; the time is bounded by a count of steps). "multifit" bisects for the least limit that first
            fit by falling weight keeps. "karmarkar_karp" merges the partial solutions of largest spread (differencing);
            with a capacity below n its counts differ by at most one. "exact" is `assign_exact` with its default budget.
            "contiguous" keeps the
            order of the items and cuts it where the heaviest bin is lightest. The others are blind to the weights, with
            counts that differ by at most one: "ring" cuts contiguous runs; "zigzag" cuts 2 * bins chunks of equal
            counts, of which bin r takes chunks r and 2 * bins - 1 - r, the usual layout for causal context parallelism;
            "random" deals a random permutation (Cornstarch 2025-03, section 5.3).
        capacity: most items a bin may take (None: any number). `n // bins` gives equal counts where bins divides n,
            e.g. context-parallel ranks with equally many tokens.
        seed: for method "random", 0 .. 2^64 - 1; the same seed gives the same answer on every platform.

    Returns:
        int32 [n], the bin of each item.

    Raises:
        ValueError: weights are empty, not one-dimensional, not real, or the named one is NaN, infinite or negative; an
            unknown method; the items do not fit bins * capacity; a seed out of range or for another method.
    """
    if method not in METHODS:
        raise ValueError(f"unknown method {method!r}: use one of {', '.join(map(repr, METHODS))}")
    seed = operator.index(seed)
    if method == "random":
        if not 0 <= seed < 2**64:
            raise ValueError(f"seed must lie between 0 and 2^64 - 1, got {seed}")
        return _core.assign_random(as_numpy(weights), bounded_index(bins, "bins"), _optional_index(capacity), seed)
    if seed:
        raise ValueError(f"seed is for method 'random', not {method!r}: leave it out")
    return METHODS[method](as_numpy(weights), bounded_index(bins, "bins"), _optional_index(capacity))


def assign_exact(
    weights: ArrayLike,
    bins: int,
    *,
    capacity: int | None = None,
    nodes: int | None = None,
    seconds: float = EXACT_SECONDS,
) -> ExactAssignment:
    """The assignment whose heaviest bin is as light as any can be, or the best one found with a bound on the optimum.

    Starts from the best of "lpt", "multifit" and "karmarkar_karp", stops at once if that reaches `lower_bound`, and
    otherwise runs branch and bound over the items by falling weight until the tree is done or `nodes` nodes (0 or more)
    were looked at: a count and no time, so that every rank gets the same answer. O(bins) per node. Up to some 30 items
    the tree is usually done; with many items per bin the bound is usually reached at once; between the two lies the
    hard range, where the gap between makespan and bound is what is known. Exact for whole numbers whose sum is below
    2^53, otherwise up to rounding of the sums. Other arguments and errors as in `assign`.

    Args:
        nodes: by default as many as take about half a second, `EXACT_STEPS` / bins.
        seconds: how long the tree may take (math.inf: as long as it does).

    Raises:
        TimeoutError: the tree took longer; the message says how many nodes that were, and what they found. No answer
            is returned then, since it would differ from machine to machine.
    """
    values, bins = as_numpy(weights), bounded_index(bins, "bins")
    if nodes is None:
        nodes = max(1, EXACT_STEPS // max(1, min(bins, values.size)))
    found = _core.assign_exact(values, bins, _optional_index(capacity), bounded_index(nodes, "nodes"), float(seconds))
    return ExactAssignment(*found)


def lower_bound(weights: ArrayLike, bins: int, *, capacity: int | None = None) -> float:
    """A weight that the heaviest bin reaches under every assignment, in the unit of the weights, O(n log n).

    The largest of: total / bins (rounded up where all weights are whole numbers); the largest item; the two smallest of
    the bins + 1 largest items, since some bin holds two of those, and so on for three of the 2 bins + 1 largest; with a
    capacity also the lightest items that must join these, since no bin can hold fewer than n - capacity * (bins - 1).
    Up to rounding of the sums. An assignment that reaches it is optimal. Arguments and errors as in `assign`.
    """
    return _core.lower_bound(as_numpy(weights), bounded_index(bins, "bins"), _optional_index(capacity))


def least_spread(weights: ArrayLike, bins: int) -> float:
    """The standard deviation of the bins' loads that no assignment gets below, in the unit of the weights, O(n log n).

    An item that weighs more than an equal share has a bin whose load it sets; the others at best share what is left
    evenly, among whom the next item may be too large again. Sums of squares are convex, so nothing is more even. 0
    where no item weighs more than an equal share, though whole items may not add up to one then.

    Args:
        weights: real numbers [n], finite and not negative, in any unit; at least one.
        bins: number of bins.

    Raises:
        ValueError: as `assign`.
    """
    _core.lower_bound(as_numpy(weights), bounded_index(bins, "bins"), None)  # which refuses what is no weight
    falling = np.sort(as_numpy(weights).astype(np.float64))[::-1]
    loads = np.zeros(bins)
    left, alone = float(falling.sum()), 0
    while alone < min(bins - 1, len(falling)) and falling[alone] * (bins - alone) > left:
        loads[alone] = falling[alone]
        left -= float(falling[alone])
        alone += 1
    loads[alone:] = max(left, 0.0) / (bins - alone)
    return float(loads.std()) if alone else 0.0


def as_numpy(values: ArrayLike) -> NDArray[Any]:
    """numpy's view of an array, a list or a torch tensor on any device (torch itself is not imported)."""
    if hasattr(values, "detach"):
        values = values.detach().cpu()
    try:
        return np.asarray(values)
    except (TypeError, OverflowError, ValueError) as error:
        raise ValueError(f"not an array of numbers: {error}") from error


def bounded_index(value: int, name: str) -> int:
    """A whole number that the extension can hold."""
    index = operator.index(value)
    if abs(index) >= 2**63:
        raise ValueError(f"{name} is out of range: {index}")
    return index


def _optional_index(value: int | None) -> int | None:
    return None if value is None else bounded_index(value, "capacity")
