"""Random inputs of balance.assign, the best assignment by enumeration, and items of bins."""

import itertools
import math

import numpy as np
from hypothesis import strategies as st


def makespan(weights, bin_of, bins):
    return max(math.fsum(w for w, b in zip(weights, bin_of) if b == bin_) for bin_ in range(bins))


def best_assignment(weights, bins, capacity=None):
    """Smallest maximum bin load over all assignments that respect the capacity."""
    capacity = capacity or len(weights)
    every = np.array(list(itertools.product(range(bins), repeat=len(weights))))
    members = every[:, :, None] == np.arange(bins)  # [assignments, items, bins]
    loads = (members * np.asarray(weights, dtype=np.float64)[:, None]).sum(1).max(1)
    return loads[members.sum(1).max(1) <= capacity].min()


whole = st.integers(0, 30)


fractions = st.floats(0, 1e6, allow_subnormal=False)


# The length is drawn first, so that long lists are as likely as short ones.
weight_lists = st.integers(1, 8).flatmap(
    lambda n: st.lists(whole, min_size=n, max_size=n) | st.lists(fractions, min_size=n, max_size=n)
)


@st.composite
def capped(draw):
    weights, bins = draw(weight_lists), draw(st.integers(1, 3))
    return weights, bins, draw(st.integers(math.ceil(len(weights) / bins), len(weights)))


def items_of(bin_of, bins):
    """Per bin, its items, rising."""
    order = np.argsort(bin_of, kind="stable")
    return np.split(order, np.cumsum(np.bincount(bin_of, minlength=bins))[:-1])
