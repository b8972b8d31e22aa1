"""Rearrangement of drawn samples over data-parallel ranks, and its network traffic (OrchMLLM sections 5-6).

Each phase (an encoder, the language model) rearranges the step's samples in its own way. `post_balance` assigns samples
to batches. `nodewise_placement` assigns batches to ranks with little traffic between nodes. `all_to_all_plan`
gives the splits of the exchange.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from interlace import _core
from interlace.balance.assignment import as_numpy, bounded_index, require

# Packed batches of at most this many samples go through branch and bound, which takes at most some milliseconds.
EXACT_SAMPLES = 24
EXACT_NODES = 20_000


def post_balance(
    lengths: ArrayLike,
    ranks: int,
    *,
    batching: str = "packed",
    quadratic: float = 0.0,
    convolution: bool = False,
    items: ArrayLike | None = None,
) -> NDArray[np.int32]:
    """Assigns the samples of one step to data-parallel ranks to keep the costliest batch cheap.

    With b members of lengths l in a batch and lambda = `quadratic`, a batch costs

    | batching | convolution | cost                               | OrchMLLM   | method                          |
    |----------|-------------|------------------------------------|------------|---------------------------------|
    | packed   | False       | sum(l) + lambda * sum(l^2)         | Algs. 1, 4 | LPT on this cost, then exchanges |
    | packed   | True        | sum(l) + lambda * b * max(l)^2     | Alg. 5     | best of five, then exchanges     |
    | padded   | False       | b * max(l) + lambda * b * max(l)^2 | Alg. 2     | optimal                          |

    and the result is never costlier than that of the printed algorithm (Algorithm 4 at tolerance 0 or unlimited; in
    between its comparison is not transitive). Up to 24 packed samples also go through a short branch and bound. Errors
    in the paper: Algorithm 2 takes its upper bound from the shortest sequence and returns the last probe, feasible or
    not; Algorithm 5 opens one batch too many.

    Args:
        lengths: tokens of each sample [n], finite and not negative.
        ranks: data-parallel ranks; with fewer samples than ranks, some get none.
        batching: "packed" (no padding) or "padded" (to the longest of the batch).
        quadratic: cost of attention, per token squared, over the linear cost per token (beta / alpha in the paper).
        convolution: packed batches whose attention is computed padded, as in a ConvTransformer.
        items: whole numbers [n], 1 or more: number of equal sequences in a sample, which do not attend to each other;
            attention then costs lambda * l^2 / items. Only for packed batches (default: 1 each).

    Returns:
        int32 [n], the rank of each sample. O(n log n), and local search for packed batches.

    Raises:
        ValueError: as `assign` for lengths and ranks; unknown batching; quadratic negative, not finite or so large that
            costs overflow; convolution with padded batches, items with either.
    """
    values, attention = _sample_costs(lengths, batching, quadratic, convolution, items)
    ranks = bounded_index(ranks, "ranks")
    if convolution:
        return _core.post_balance_convolution(values, attention, ranks)
    if batching == "padded":
        return _core.post_balance_padded(values, attention, ranks)
    balanced = _core.post_balance_packed(values, attention, ranks)
    if 1 < ranks < len(values) <= EXACT_SAMPLES:
        costs = values + attention
        exact, makespan, _, _ = _core.assign_exact(costs, ranks, None, EXACT_NODES, np.inf)
        if makespan < np.bincount(balanced, costs).max():
            return exact
    return balanced


def batch_costs(
    lengths: ArrayLike,
    batch_of: ArrayLike,
    batches: int,
    *,
    batching: str = "packed",
    quadratic: float = 0.0,
    convolution: bool = False,
    items: ArrayLike | None = None,
) -> NDArray[np.float64]:
    """float64 [batches], cost of each batch by the table of `post_balance`; other arguments as there.

    batch_of: whole numbers [n] in 0 .. batches - 1. Raises ValueError as `post_balance`, and for a `batch_of` or
    `batches` out of range.
    """
    values, attention = _sample_costs(lengths, batching, quadratic, convolution, items)
    count = _checked_count(batches, "batches")
    batch = _checked_ranks(batch_of, "batch_of", count)
    if batch.shape != values.shape:
        raise ValueError(f"batch_of has shape {batch.shape}, but there are {len(values)} lengths")
    if batching == "packed" and not convolution:
        return np.bincount(batch, values + attention, count).astype(np.float64, copy=False)
    members = np.bincount(batch, minlength=count)
    longest, widest = np.zeros(count), np.zeros(count)
    np.maximum.at(longest, batch, values)
    np.maximum.at(widest, batch, attention)
    linear = np.bincount(batch, values, count) if convolution else members * longest
    return np.asarray(linear + members * widest, np.float64)


def _sample_costs(
    lengths: ArrayLike, batching: str, quadratic: float, convolution: bool, items: ArrayLike | None
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Costs of each sample: linear in its length, and of attention. Raises ValueError as `post_balance`."""
    if batching not in ("packed", "padded"):
        raise ValueError(f"unknown batching {batching!r}: use 'packed' or 'padded'")
    if not (np.isfinite(quadratic) and quadratic >= 0):
        raise ValueError(f"quadratic must be finite and not negative, got {quadratic}")
    if convolution and batching == "padded":
        raise ValueError("convolution is for packed batches, not for batching = 'padded': leave it out")
    if items is not None and (convolution or batching == "padded"):
        raise ValueError(
            "items is for packed batches without convolution: leave it out, and give the length of every item"
        )
    array = as_numpy(lengths)
    if array.dtype.kind not in "fiu" or array.ndim != 1 or not np.isfinite(array).all() or (array < 0).any():
        _core.lower_bound(array, 1, None)  # raises, with the offending index
    with np.errstate(over="ignore"):
        values = array.astype(np.float64)
        attention = quadratic * (values * values) if quadratic else np.zeros_like(values)
        if not np.isfinite(attention.sum() * len(values)):
            raise ValueError("quadratic times a squared length overflows: use a larger unit")
    if items is not None:
        count = as_numpy(items)
        if count.shape != values.shape or count.dtype.kind not in "iu" or (count.size and count.min() < 1):
            raise ValueError(f"items must be whole numbers [{len(values)}] from 1 up")
        attention = attention / count
    return values, attention


def rearrangement_volume(
    source: ArrayLike, destination: ArrayLike, sizes: ArrayLike, ranks: int
) -> NDArray[np.float64]:
    """float64 [ranks, ranks]: entry [i, j] is the total size of items that rank i holds and batch j takes.

    Args:
        source, destination: whole numbers [n] in 0 .. ranks - 1.
        sizes: real numbers [n], finite and not negative (tokens, bytes).
    """
    ranks = _checked_count(ranks, "ranks")
    sources, destinations = _checked_ranks(source, "source", ranks), _checked_ranks(destination, "destination", ranks)
    size = as_numpy(sizes).astype(np.float64)
    if not (sources.shape == destinations.shape == size.shape):
        raise ValueError(
            f"source, destination and sizes differ in shape: {sources.shape}, {destinations.shape}, {size.shape}"
        )
    require("sizes", size, np.isfinite(size) & (size >= 0), "it must be finite and not negative")
    volume = np.bincount(sources * ranks + destinations, size, ranks * ranks)
    return volume.astype(np.float64, copy=False).reshape(ranks, ranks)


def nodewise_placement(volume: ArrayLike, ranks_per_node: int) -> NDArray[np.int32]:
    """Assigns new batches to ranks, to minimise the most that a rank sends to other nodes (Algorithm 3).

    Args:
        volume: real numbers [d, d], finite and not negative: entry [i, j] is the size that rank i holds of batch j
            (`rearrangement_volume`). float64, float32, int64 and int32 in C order are read without a copy.
        ranks_per_node: ranks i with equal i // ranks_per_node share a node; divides d.

    Returns:
        int32 [d], a permutation: the rank of batch j. ``placement[post_balance(...)]`` is the rank of each sample.

    A heuristic: greedy assignment, then a tabu search of bounded work over exchanges of two batches. It is never worse
    than batch j on rank j. A min-cost flow instead of the greedy assignment gave another bottleneck on 4 of 63 volumes
    (lower on 3, all below d = 2560) and took several times as long. Compare with `nodewise_bound`: at d = 2560 with 8
    ranks per node most placements of rearranged batches are proven optimal, and all are within 2 %. One pass over the
    matrix, O(entries log entries), and the search.

    Raises:
        ValueError: volume is not square or the named entry is NaN, infinite or negative; ranks_per_node does not
            divide d.
    """
    return _core.nodewise_placement(as_numpy(volume), bounded_index(ranks_per_node, "ranks_per_node"))


def nodewise_placement_of_items(
    source: ArrayLike, destination: ArrayLike, sizes: ArrayLike, ranks: int, ranks_per_node: int
) -> NDArray[np.int32]:
    """``nodewise_placement(rearrangement_volume(source, destination, sizes, ranks), ranks_per_node)`` without building
    the matrix. For 2,560 ranks the matrix has 52 MB, and with 24 samples per rank it is nearly empty.

    Arguments and errors as in these two. O(n + ranks + entries log entries), and the search.
    """
    sources, destinations = as_numpy(source), as_numpy(destination)
    return _core.nodewise_placement_of_items(
        _as_integers(sources),
        _as_integers(destinations),
        as_numpy(sizes).astype(np.float64),
        _checked_count(ranks, "ranks"),
        bounded_index(ranks_per_node, "ranks_per_node"),
    )


def nodewise_bound(volume: ArrayLike, ranks_per_node: int, *, iterations: int = 1000) -> float:
    """Lower bound on the bottleneck of `nodewise_placement`, in the unit of volume.

    The largest of three bounds. First: the traffic that every instance sends if it keeps the batches that it holds most
    of, and that all nodes but one send of each batch. Second: the Lagrangian dual of Algorithm 3's linear relaxation,
    by subgradient steps. Third: the traffic of the worst nodes in whole batches even if they choose first, by a tree
    search. Valid for any number of iterations (0 or more), which set the number of steps and the size of the trees;
    more iterations make it tighter. Tightest for small nodes: takes seconds for 8 ranks per node, up to about 10
    seconds with 16 or more.
    Arguments and errors as in `nodewise_placement`.
    """
    return _core.nodewise_bound(
        as_numpy(volume), bounded_index(ranks_per_node, "ranks_per_node"), bounded_index(iterations, "iterations")
    )


@dataclass(frozen=True, eq=False)
class AllToAllPlan:
    """Plan of an all-to-all exchange. A rank packs items by destination, then number; received items are ordered by
    source, then number."""

    ranks: int
    source: NDArray[np.int64]  # [n], the rank that holds each item
    destination: NDArray[np.int64]  # [n], the rank that needs it
    sizes: NDArray[np.int64]  # [n], units that each item takes (tokens, rows)
    send_order: NDArray[np.int32]  # [n], items by source rank, in the order in which each rank packs them
    send_offsets: NDArray[np.int64]  # [ranks + 1], start of each rank's part of send_order
    receive_order: NDArray[np.int32]  # [n], items by destination rank, in the order in which they arrive there
    receive_offsets: NDArray[np.int64]  # [ranks + 1]

    def sends(self, rank: int) -> NDArray[np.int32]:
        """The items that a rank packs, in order."""
        return self.send_order[self._part(self.send_offsets, rank)]

    def receives(self, rank: int) -> NDArray[np.int32]:
        """The items that arrive at a rank, in order."""
        return self.receive_order[self._part(self.receive_offsets, rank)]

    def send_splits(self, rank: int) -> NDArray[np.int64]:
        """int64 [ranks]: units that a rank sends to each rank, as in torch.distributed.all_to_all_single."""
        items = self.sends(rank)
        return np.bincount(self.destination[items], self.sizes[items], self.ranks).astype(np.int64)

    def receive_splits(self, rank: int) -> NDArray[np.int64]:
        """int64 [ranks]: units that a rank gets from each rank."""
        items = self.receives(rank)
        return np.bincount(self.source[items], self.sizes[items], self.ranks).astype(np.int64)

    @cached_property
    def moved(self) -> int:
        """Units that change ranks, over all ranks."""
        return int(self.sizes[self.source != self.destination].sum())

    @property
    def between(self) -> NDArray[np.float64]:
        """float64 [ranks, ranks]: units that each rank sends to each other; 0 to itself."""
        away = self.source != self.destination
        return rearrangement_volume(self.source[away], self.destination[away], self.sizes[away], self.ranks)

    def _part(self, offsets: NDArray[np.int64], rank: int) -> slice:
        rank = operator.index(rank)
        if not 0 <= rank < self.ranks:
            raise ValueError(f"rank must lie between 0 and {self.ranks - 1}, got {rank}")
        return slice(int(offsets[rank]), int(offsets[rank + 1]))


def all_to_all_plan(
    source: ArrayLike, destination: ArrayLike, ranks: int, *, sizes: ArrayLike | None = None
) -> AllToAllPlan:
    """The exchange that moves every item from the rank that holds it to the rank that needs it (OrchMLLM 5.2.1).

    Args:
        source, destination: whole numbers [n] in 0 .. ranks - 1.
        ranks: number of ranks in the exchange.
        sizes: units of each item, whole numbers [n] that are not negative, at most 2^53 in total (default: 1 each).

    Returns:
        AllToAllPlan; the splits of all ranks agree: r expects from s exactly the units that s sends to r. O(n + ranks).

    Raises:
        ValueError: shapes differ, the named value is out of range.
    """
    source_array, destination_array = as_numpy(source), as_numpy(destination)
    ranks = _checked_count(ranks, "ranks")
    send_order, receive_order = _core.exchange_orders(
        _as_integers(source_array), _as_integers(destination_array), ranks
    )
    n = len(send_order)
    size = np.ones(n, np.int64) if sizes is None else as_numpy(sizes)
    if size.shape != (n,) or size.dtype.kind not in "iu":
        if n or size.size:
            raise ValueError(f"sizes must be whole numbers [{n}], got {size.dtype} {list(size.shape)}")
        size = np.zeros(0, np.int64)
    wrong = np.flatnonzero((size < 0) | (size > 2**53))
    if wrong.size or size.sum(dtype=np.float64) > 2**53:
        index = int(wrong[0]) if wrong.size else int(np.argmax(size))
        raise ValueError(f"sizes[{index}] is {size[index]}: sizes must not be negative and sum to at most 2^53")
    sources, destinations = source_array.astype(np.int64), destination_array.astype(np.int64)
    return AllToAllPlan(
        ranks=ranks,
        source=sources,
        destination=destinations,
        sizes=size.astype(np.int64),
        send_order=send_order,
        send_offsets=_offsets(sources, ranks),
        receive_order=receive_order,
        receive_offsets=_offsets(destinations, ranks),
    )


def _offsets(rank: NDArray[np.int64], ranks: int) -> NDArray[np.int64]:
    return np.concatenate([[0], np.cumsum(np.bincount(rank, minlength=ranks))]).astype(np.int64)


def _checked_count(value: int, name: str) -> int:
    value = operator.index(value)
    if not 1 <= value <= 2**24:
        raise ValueError(f"{name} must lie between 1 and 2^24, got {value}")
    return value


def _as_integers(values: NDArray[np.generic]) -> NDArray[np.generic]:
    return values.astype(np.int64) if values.size == 0 else values


def _checked_ranks(values: ArrayLike, name: str, ranks: int) -> NDArray[np.int64]:
    array = _whole_numbers(values, name)
    require(name, array, (array >= 0) & (array < ranks), f"it must lie between 0 and {ranks - 1}")
    return array.astype(np.int64)


def _whole_numbers(values: ArrayLike, name: str) -> NDArray[Any]:
    array = as_numpy(values)
    if array.ndim != 1 or (array.dtype.kind not in "iu" and array.size):
        raise ValueError(f"{name} must be whole numbers [n], got {array.dtype} {list(array.shape)}")
    return array
