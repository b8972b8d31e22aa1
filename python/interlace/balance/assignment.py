"""Assignment of weighted items to bins, and how good any assignment could be.

| method     | order kept | weights used | heaviest bin                              | time                     |
|------------|------------|--------------|-------------------------------------------|--------------------------|
| lpt        | no         | yes          | <= 4/3 - 1/(3 bins) optimum (no capacity) | O(n log n)               |
| contiguous | yes        | yes          | optimal among those that keep the order   | O(n + bins log n) probes |
| zigzag     | no         | no           | balanced for causal attention, else none  | O(n)                     |
"""

from __future__ import annotations

import operator
from collections.abc import Callable

import numpy as np
from numpy.typing import ArrayLike, NDArray

from interlace import _core

METHODS: dict[str, Callable[[NDArray[np.generic], int, int | None], NDArray[np.int32]]] = {
    "lpt": _core.assign_lpt,
    "contiguous": _core.assign_contiguous,
    "zigzag": _core.assign_zigzag,
}


def assign(weights: ArrayLike, bins: int, *, method: str = "lpt", capacity: int | None = None) -> NDArray[np.int32]:
    """Gives each item a bin so that the heaviest bin is light. Deterministic: ties go to the lower index.

    Args:
        weights: real numbers [n], finite and not negative, in any unit. Whole numbers above 2^53 are rounded.
        bins: number of bins; more than items leaves some empty.
        method: "lpt" deals items by falling weight, each to the lightest bin with room: the token distribution of
            Cornstarch (dissertation 3.3.2.1) and the sample distribution of OrchMLLM (its Algorithm 1). "contiguous"
            keeps the order of the items and cuts it where the heaviest bin is lightest. "zigzag" cuts 2 * bins chunks
            of equal counts, of which bin r takes chunks r and 2 * bins - 1 - r: the usual layout for causal context
            parallelism, blind to the weights; counts differ by at most one.
        capacity: most items a bin may take (None: any number). `n // bins` gives equal counts where bins divides n,
            e.g. context-parallel ranks with equally many tokens.

    Returns:
        int32 [n], the bin of each item.

    Raises:
        ValueError: weights are empty, not one-dimensional, not real, or the named one is NaN, infinite or negative; an
            unknown method; the items do not fit bins * capacity.
    """
    if method not in METHODS:
        raise ValueError(f"unknown method {method!r}: use one of {', '.join(map(repr, METHODS))}")
    return METHODS[method](np.asarray(weights), operator.index(bins), _optional_index(capacity))


def lower_bound(weights: ArrayLike, bins: int, *, capacity: int | None = None) -> float:
    """A weight that the heaviest bin reaches under every assignment, in the unit of the weights, O(n log n).

    The largest of: total / bins (rounded up where all weights are whole numbers); the largest item; the two smallest of
    the bins + 1 largest items, since some bin holds two of those, and so on for three of the 2 bins + 1 largest; with a
    capacity also the lightest items that must join these, since no bin can hold fewer than n - capacity * (bins - 1).
    Up to rounding of the sums. An assignment that reaches it is optimal. Arguments and errors as in `assign`.
    """
    return _core.lower_bound(np.asarray(weights), operator.index(bins), _optional_index(capacity))


def _optional_index(value: int | None) -> int | None:
    return None if value is None else operator.index(value)
