"""Stable batch: number of samples from which the GPU allocation no longer changes.

Reference: dissertation 4.4.2, algorithm 2.
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from interlace.balance.assignment import require


def bernoulli_trials(alpha: float = 0.05, error: float = 0.05) -> int:
    """Number of trials without failure that bounds the failure rate by `error` with confidence 1 - alpha (eq. C.5).

    It is 59 at 5 %.
    """
    if not (0 < alpha < 1 and 0 < error < 1):
        raise ValueError(f"alpha and error must lie between 0 and 1, got {alpha} and {error}")
    return math.ceil(math.log(alpha) / math.log1p(-error))


def proportional_allocation(gpus: int, workloads: ArrayLike, *, unit: int = 1) -> NDArray[np.int64]:
    """GPUs per module in proportion to its workload, rounded to the nearest integers that sum to `gpus`.

    Uses the largest remainder method in units of `unit` GPUs (such as TP * CP), with at least one unit per module; ties
    go to the lower index. A proportion of 1.27 : 1 on 16 GPUs gives 9 : 7.

    Args:
        workloads: non-negative numbers [..., modules], not all 0.

    Returns:
        int64 of that shape.

    Raises:
        ValueError: bad workloads, or `gpus` is not a multiple of `unit` with one unit per module.
    """
    weights = np.asarray(workloads, dtype=np.float64)
    gpus, unit = operator.index(gpus), operator.index(unit)
    if weights.ndim < 1 or not weights.shape[-1]:
        raise ValueError("workloads is empty: give at least one module")
    if not np.isfinite(weights).all() or (weights < 0).any() or not (weights.sum(axis=-1) > 0).all():
        raise ValueError("workloads must be finite, not negative and not all 0")
    modules = weights.shape[-1]
    if unit < 1 or gpus % unit or gpus // unit < modules:
        raise ValueError(
            f"gpus is {gpus}: it must be a multiple of unit = {unit}, with a unit for each of {modules} modules"
        )
    total = gpus // unit
    exact = total * weights / weights.sum(axis=-1, keepdims=True)
    counts = np.maximum(1, np.floor(exact)).astype(np.int64)
    rows, shares = counts.reshape(-1, modules), exact.reshape(-1, modules)
    for row, share in zip(rows, shares, strict=True):
        while row.sum() < total:
            row[int(np.argmax(share - row))] += 1
        while row.sum() > total:  # units for small modules come from the modules with the largest excess
            row[int(np.argmax(np.where(row > 1, row - share, -np.inf)))] -= 1
    return np.asarray(counts * unit, dtype=np.int64)


@dataclass(frozen=True)
class StableBatch:
    """Stable profiling batch. size: samples. allocation: int64 [modules], resulting GPUs per replica. trials: k."""

    size: int
    allocation: NDArray[np.int64]
    trials: int


def stable_batch_size(
    workloads: ArrayLike,
    gpus: int,
    *,
    alpha: float = 0.05,
    error: float = 0.05,
    initial: int = 1,
    largest: int = 1 << 16,
    unit: int = 1,
    seed: int = 0,
) -> StableBatch:
    """The first of initial, 2 initial, 4 initial, ... samples whose GPU allocation is stable (algorithm 2).

    At each size a reference batch and k = `bernoulli_trials(alpha, error)` more are drawn, independently and with
    replacement. All must give the same `proportional_allocation`. Then, with confidence 1 - alpha, a fresh batch of
    that size gives a different allocation with probability at most `error`, and larger batches do no worse (appendix
    C.2). The draws depend only on `seed`. O(k * size * modules) per size.

    Args:
        workloads: non-negative numbers [samples, modules]: seconds of each sample in each module
            (`CostModel.seconds`).
        gpus: GPUs of one replica, N / DP.
        largest: largest size; beyond it the search fails.
        unit: as in `proportional_allocation`.

    Raises:
        ValueError: bad input, or no size up to `largest` is stable: the mean is so close to a rounding boundary that
            either allocation is suitable.
    """
    table = np.asarray(workloads, dtype=np.float64)
    if table.ndim != 2 or not table.size:
        raise ValueError(f"workloads must have shape (samples, modules), got {table.shape}")
    require("workloads", table, np.isfinite(table) & (table >= 0), "values must be finite and >= 0")
    if initial < 1:
        raise ValueError(f"initial must be at least 1, got {initial}")
    trials = bernoulli_trials(alpha, error)
    rng = np.random.Generator(np.random.PCG64(seed))
    size = operator.index(initial)
    while size <= largest:
        totals = (table[rng.integers(0, len(table), size)].sum(axis=0) for _ in range(trials + 1))
        # A batch without any work has no proportions.
        allocations = (
            proportional_allocation(gpus, total if total.sum() > 0 else np.ones_like(total), unit=unit)
            for total in totals
        )
        reference = next(allocations)
        if all((allocation == reference).all() for allocation in allocations):  # draws no more after a difference
            return StableBatch(size, reference, trials)
        size *= 2
    raise ValueError(
        f"no batch of up to {largest} samples gives a stable allocation of {gpus} GPUs: the mean workload is on the "
        "boundary between two. Use either of them, or change the number of GPUs"
    )
