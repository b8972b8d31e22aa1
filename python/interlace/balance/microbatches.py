"""Samples to microbatches, balanced for encoder and language model at once (Entrain, dissertation chapter 4).

Encoder and LLM costs of a sample vary independently, so no single assignment balances both. Encoder microbatches are
balanced first; then overloaded LLM microbatches defer samples to the next microbatch.

- `subset_sum`: the subset whose sum is nearest to a target; exact for whole numbers
- `bottleneck_match`: pairs (or singles) with the lowest possible maximum cost; exact
- `assign_replicas`: samples to data-parallel replicas (section 4.3); a heuristic with equal counts
- `assign_microbatches`: samples of a replica to microbatches (section 4.5, algorithm 4); the encoder within 2 - 1/K of
  its optimum, the deferral optimal among all pairings and all choices of samples
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike, NDArray

from interlace import _core


def subset_sum(weights: ArrayLike, target: float, *, resolution: float | None = None) -> NDArray[np.int32]:
    """The items whose weights have the sum nearest to target; of two equally near sums the smaller one.

    Uses a table with one bit per possible sum, O(n min(total, 2 target, 2 (total - target)) / 64) steps (section
    4.5.2). Exact for whole numbers whose total, divided by their greatest common divisor, is at most 2^26 (and n times
    that at most 2^36). Other weights are first rounded to multiples of a unit, so the result can be off by up to n
    units. Then single items are moved in or out while that brings the sum nearer.

    Args:
        weights: real numbers [n], finite and not negative, in any unit; at least one.
        target: the sum wanted, in the same unit; finite and not negative.
        resolution: the unit to round to, at least total / 2^26. None: exact for whole numbers, else total / 2^16.

    Returns:
        int32 [m], rising indices of the chosen items; items of weight 0 are left out.

    Raises:
        ValueError: the named weight, the target or the resolution is out of range.
    """
    return _core.subset_sum(np.asarray(weights), float(target), None if resolution is None else float(resolution))


def bottleneck_match(cost: ArrayLike, alone: ArrayLike) -> tuple[float, NDArray[np.int32]]:
    """Pairs rows with columns, one to one, to minimise the cost of the costliest row; rows may stay alone.

    Row i costs cost[i, j] with column j and alone[i] without one. Entrain's BOTTLENECKMATCH (section 4.5.2): rows are
    overloaded microbatches and columns underloaded ones, so the graph is bipartite. Exact: a binary search over the
    costs, in which each probe is a Hopcroft-Karp matching over bitsets that starts from the matching of the last
    infeasible probe. O(log(mk) (mk + p mk / 64)) for [m, k] costs and p phases, at most about sqrt(m).

    Args:
        cost: real numbers [m, k]; infinity forbids a pair. k may be 0.
        alone: real numbers [m]; infinity forbids being alone.

    Returns:
        (threshold, partner): the smallest possible maximum cost of a row, and int32 [m], the column of each row or -1
        for rows that stay below the threshold alone (they are not matched).

    Raises:
        ValueError: shapes disagree, the named entry is NaN or minus infinity, or infinite entries leave no matching.
    """
    return _core.bottleneck_match(np.asarray(cost), np.asarray(alone))


def assign_replicas(
    encoder_cost: ArrayLike, llm_cost: ArrayLike, replicas: int, *, equal_counts: bool = True, as_printed: bool = False
) -> NDArray[np.int32]:
    """The data-parallel replica of each sample (section 4.3), O(n log n) and a bounded search.

    Samples are taken by falling encoder cost; each goes to the replica with the least LLM cost so far. Ties go to the
    lower index. Then, beyond the paper, replicas exchange samples, one for one, to bring the encoder and LLM costs of
    all replicas closer to their means. The sum of the squared relative distances of both costs from their means is
    never above that of the printed method. (With equal counts the last samples have no choice of replica left.)

    Args:
        encoder_cost, llm_cost: real numbers [n], finite and not negative, in any units.
        replicas: number of replicas.
        equal_counts: each replica takes n // replicas samples, n % replicas of them one more, as the paper's
            minibatches of B / DP samples. False: any number.
        as_printed: without the exchanges, for comparison.

    Returns:
        int32 [n].

    Raises:
        ValueError: costs are empty, of different length, or the named one is NaN, infinite or negative.
    """
    return _core.assign_replicas(
        np.asarray(encoder_cost), np.asarray(llm_cost), operator.index(replicas), bool(equal_counts), bool(as_printed)
    )


@dataclass(frozen=True, eq=False)
class MicrobatchPlan:
    """Assignment of samples to encoder and LLM microbatches; microbatches are in the order of execution.

    encoder_of, llm_of: int32 [n], the microbatch of each sample, 0 .. microbatches - 1. llm_of is encoder_of, or
        encoder_of + 1 for deferred samples.
    encoder_loads, llm_loads: float64 [microbatches], in the units of the costs.
    llm_bottleneck: the largest LLM load. It is the minimum over pairwise deferrals between the heavier and the lighter
        half of these encoder microbatches: no other pairing or choice of samples is lower. Proven for whole costs (as
        in `subset_sum`); else up to the rounding of costs to 1/16384 of their microbatch.
    llm_bound, encoder_bound: lower bounds for every assignment to equally many microbatches, with or without deferral.
    """

    microbatches: int
    encoder_of: NDArray[np.int32]
    llm_of: NDArray[np.int32]
    encoder_loads: NDArray[np.float64]
    llm_loads: NDArray[np.float64]
    llm_bottleneck: float
    llm_bound: float
    encoder_bound: float

    @cached_property
    def deferred(self) -> dict[int, int]:
        """Deferred sample -> the LLM microbatch that consumes it, by rising sample."""
        return {int(i): int(self.llm_of[i]) for i in np.flatnonzero(self.llm_of != self.encoder_of)}


def assign_microbatches(
    encoder_cost: ArrayLike, llm_cost: ArrayLike, microbatches: int, *, shrink: bool = True, as_printed: bool = False
) -> MicrobatchPlan:
    """Hierarchical microbatch assignment with pairwise deferral (algorithm 4) of one replica's samples.

    1. K_eff = min(microbatches, floor(sum / max of encoder costs)), so that one large sample does not dominate.
    2. The half of the samples with the larger LLM costs comes first, each half by falling encoder cost. Each sample
       goes to the lightest encoder microbatch, so every microbatch has light samples to defer. Then, beyond the paper,
       samples are moved and exchanged: first to make the heaviest encoder microbatch lighter, then to bring LLM loads
       closer to each other while no encoder microbatch gets heavier than that one.
    3. For each pair of a heavier (by LLM cost) and a lighter microbatch, the subset to defer: `subset_sum` with half
       the difference as target; one table per heavier microbatch serves all its partners.
    4. `bottleneck_match` over these pairs; each heavier microbatch is executed right before its partner.

    Cases that the paper does not define, or where it fails: samples without encoder cost go to the microbatch with the
    least LLM cost (the paper puts all of them on one); ties of encoder loads are broken by LLM load; with an odd count
    the middle microbatch belongs to the heavier half, and may stay alone.

    Neither bottleneck is above the printed algorithm's, and no other deferral of these encoder microbatches is better.
    O(n log n) for steps 1 and 2 and a bounded search; step 3 takes O(n load / 64) per heavier microbatch with loads in
    units (see `subset_sum`), step 4 as `bottleneck_match`.

    Args:
        encoder_cost: real numbers [n], finite and not negative, in any unit; 0 for a sample without media. Several
            encoders count as one: add their costs (section 4.5).
        llm_cost: real numbers [n], in any unit. Whole numbers make deferral exact.
        microbatches: their maximum number; also at most one per sample.
        shrink: apply step 1. False keeps the number, for instance if the encoder's cost is negligible.
        as_printed: without the exchanges of step 2, for comparison.

    Raises:
        ValueError: costs are empty, of different length, or the named one is NaN, infinite or negative; more than
            16,384 microbatches, whose pairs would fill the memory.
    """
    encoder, llm = np.asarray(encoder_cost), np.asarray(llm_cost)
    result = _core.assign_microbatches(encoder, llm, operator.index(microbatches), bool(shrink), bool(as_printed))
    count = result["count"]
    return MicrobatchPlan(
        count,
        result["encoder_of"],
        result["llm_of"],
        result["encoder_loads"],
        result["llm_loads"],
        float(result["llm_loads"].max()),
        _core.lower_bound(llm, count, None),
        _core.lower_bound(encoder, count, None),
    )
