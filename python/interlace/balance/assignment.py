"""Assignment of weighted items to bins, and bounds on the quality of any assignment.

| method         | order kept | weights used | heaviest bin                              | time                        |
|----------------|------------|--------------|-------------------------------------------|-----------------------------|
| lpt            | no         | yes          | never above lpt_greedy's                  | O(n log n) + local search   |
| even           | no         | yes          | never above lpt's; all loads near a mean  | lpt + up to some ms         |
| lpt_greedy     | no         | yes          | <= 4/3 - 1/(3 bins) optimum (no capacity) | O(n log n)                  |
| exact          | no         | yes          | optimal if `assign_exact` returns proven  | exponential; a node budget  |
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
"""Default budget of the exact method, nodes times bins: about half a second."""
EXACT_SECONDS = 60.0
"""Time limit of the exact method with a larger node budget; then it raises TimeoutError."""


def _exact(weights: NDArray[np.generic], bins: int, capacity: int | None) -> NDArray[np.int32]:
    return assign_exact(weights, bins, capacity=capacity).bins


METHODS: dict[str, Callable[[NDArray[np.generic], int, int | None], NDArray[np.int32]]] = {
    "lpt": _core.assign_lpt,
    "even": _core.assign_even,
    "lpt_greedy": _core.assign_lpt_greedy,
    "exact": _exact,
    "contiguous": _core.assign_contiguous,
    "ring": _core.assign_ring,
    "zigzag": _core.assign_zigzag,
    "random": lambda weights, bins, capacity: _core.assign_random(weights, bins, capacity, 0),
}


@dataclass(frozen=True)
class ExactAssignment:
    """Result of `assign_exact`."""

    bins: NDArray[np.int32]  # [n], the bin of each item
    makespan: float  # weight of the heaviest bin
    bound: float  # no assignment is lighter than this; equals makespan where proven
    proven: bool  # makespan is the optimum


def assign(
    weights: ArrayLike, bins: int, *, method: str = "lpt", capacity: int | None = None, seed: int = 0
) -> NDArray[np.int32]:
    """Assigns items to bins to minimise the heaviest bin. Deterministic: ties go to the lower index.

    Args:
        weights: real numbers [n], finite and not negative, in any unit. Whole numbers above 2^53 are rounded.
        bins: number of bins; more than items leaves some empty.
        method: "lpt_greedy" assigns items by falling weight, each to the lightest bin with room (the token distribution
            of Cornstarch, dissertation 3.3.2.1, and the sample distribution of OrchMLLM, its Algorithm 1). "lpt" then
            moves and exchanges items between the heaviest and the lightest bins while that helps, so it is never worse
            than "lpt_greedy". "even" continues until all loads, not only the heaviest, are close to each other: any two
            bins exchange up to three items each way while that helps (the time is bounded by a count of
            steps). "exact" is `assign_exact` with its default budget. "contiguous" keeps the order of the items and
            cuts it to minimise the heaviest bin. The others ignore the weights, with counts that differ by at most one:
            "ring" cuts contiguous runs; "zigzag" cuts 2 * bins chunks of equal counts and gives bin r chunks r and
            2 * bins - 1 - r, the usual layout for causal context parallelism; "random" distributes a random permutation
            (Cornstarch 2025-03, section 5.3).
        capacity: most items a bin may take (None: any number). `n // bins` gives equal counts if bins divides n,
            e.g. context-parallel ranks with equally many tokens.
        seed: for method "random", 0 .. 2^64 - 1; the same seed gives the same result on every platform.

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
        raise ValueError(f"method {method!r} takes no seed: leave it out, or use method 'random'")
    return METHODS[method](as_numpy(weights), bounded_index(bins, "bins"), _optional_index(capacity))


def assign_exact(
    weights: ArrayLike,
    bins: int,
    *,
    capacity: int | None = None,
    nodes: int | None = None,
    seconds: float = EXACT_SECONDS,
) -> ExactAssignment:
    """The assignment with the lightest possible heaviest bin, or the best one found with a bound on the optimum.

    Starts from "lpt" and stops at once if that reaches `lower_bound`. Otherwise it runs branch and bound over the items
    by falling weight, until the tree is exhausted or `nodes` nodes (0 or more) are visited. The budget is a count, not
    a time, so that every rank gets the same result. O(bins) per node. Up to about 30 items the tree is usually
    exhausted; with many items per bin the bound is usually reached at once. In the hard range between the two, the
    result gives the gap between makespan and bound. Exact for whole numbers whose sum is below 2^53, otherwise up to
    rounding of the sums. Other arguments and errors as in `assign`.

    Args:
        nodes: default: `EXACT_STEPS` / bins, about half a second.
        seconds: time limit of the tree search (math.inf: none).

    Raises:
        TimeoutError: the time limit was reached; the message has the number of nodes and the best result so far. No
            assignment is returned, since it would differ between machines.
    """
    values, bins = as_numpy(weights), bounded_index(bins, "bins")
    if nodes is None:
        nodes = max(1, EXACT_STEPS // max(1, min(bins, values.size)))
    result = _core.assign_exact(values, bins, _optional_index(capacity), bounded_index(nodes, "nodes"), float(seconds))
    return ExactAssignment(*result)


def lower_bound(weights: ArrayLike, bins: int, *, capacity: int | None = None) -> float:
    """A weight that the heaviest bin reaches under every assignment, in the unit of the weights, O(n log n).

    The largest of: total / bins (rounded up if all weights are whole numbers); the largest item; the two smallest of
    the bins + 1 largest items, since some bin holds two of those, and so on for three of the 2 bins + 1 largest. With a
    capacity it includes the lightest items that must join these, since no bin can hold fewer than n - capacity *
    (bins - 1). Up to rounding of the sums. An assignment that reaches the bound is optimal. Arguments and errors as in
    `assign`.
    """
    return _core.lower_bound(as_numpy(weights), bounded_index(bins, "bins"), _optional_index(capacity))


def as_numpy(values: ArrayLike) -> NDArray[Any]:
    """numpy's view of an array, a list or a torch tensor on any device (torch itself is not imported)."""
    if hasattr(values, "detach"):
        values = values.detach().cpu()
    try:
        return np.asarray(values)
    except (TypeError, OverflowError, ValueError) as error:
        raise ValueError(f"not an array of numbers: {error}") from error


def require(name: str, values: NDArray[Any], good: NDArray[np.bool_], rule: str) -> None:
    """Raises ValueError with the first value that is not `good`."""
    for wrong in np.argwhere(~good).tolist()[:1]:
        raise ValueError(f"{name}[{', '.join(map(str, wrong))}] is {values[tuple(wrong)]}: {rule}")


def bounded_index(value: int, name: str) -> int:
    """A whole number that fits in int64 of the extension."""
    index = operator.index(value)
    if abs(index) >= 2**63:
        raise ValueError(f"{name} is out of range: {index}")
    return index


def _optional_index(value: int | None) -> int | None:
    return None if value is None else bounded_index(value, "capacity")
