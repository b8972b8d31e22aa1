"""Load balancing: the balance part of `bench.scheduling`.

Token blocks and sequences to ranks, the exact makespan, post-balancing, node-wise placement, all-to-all plans. Times
include input checks and copies. The bound is `balance.lower_bound` or `nodewise_bound` unless a solver proves more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

from bench import scheduling_peers as peers
from bench.scheduling_rows import Row, Solver, cp_sat, milp
from interlace import balance


def token_rows(kind: str, blocks: int) -> np.ndarray:
    """Attention work per query block of three masks: causal, images embedded in text, packed documents."""
    rng = np.random.default_rng(0)
    causal = np.arange(1, blocks + 1)
    if kind == "causal":
        return causal
    if kind == "embedded":
        return np.where(rng.random(blocks) < 0.3, rng.integers(1, blocks, blocks), causal)
    lengths = rng.integers(blocks // 400 + 1, blocks // 14 + 2, 400)
    return np.concatenate([np.arange(1, length + 1) for length in lengths])[:blocks]


def sequence_lengths(count: int) -> np.ndarray:
    """Tokens of mixed multimodal samples, cut at a context of 8,192 so that no sample alone sets the heaviest rank."""
    return np.minimum(np.round(np.random.default_rng(0).lognormal(5.8, 1.0, count)), 8192)


def heaviest(weights: np.ndarray, bins: int) -> Callable[[np.ndarray], float]:
    return lambda bin_of: float(np.bincount(bin_of, weights, bins).max())


def assignment_row(
    problem: str, weights: np.ndarray, bins: int, equal: bool, target_ms: float | None, quick: bool
) -> Row:
    """`assign`, its other methods, and prtpy's. Karmarkar-Karp there ignores counts, so ours is held to its greedy."""
    capacity = len(weights) // bins if equal else None
    few = bins < 100
    methods = [] if quick else ["lpt_greedy"]
    solvers = [Solver("interlace", partial(balance.assign, weights, bins, capacity=capacity))]
    solvers += [
        Solver(f"interlace, {method}", partial(balance.assign, weights, bins, method=method, capacity=capacity))
        for method in methods
    ]
    if equal and few:
        solvers.append(Solver("interlace, distribute_tokens", partial(_distribute, weights, bins)))
    if bins < 1000:  # with 2,560 ranks prtpy's greedy takes more than a minute
        greedy, kk = (partial(peers.prtpy_assign, name, weights, bins) for name in ("greedy", "kk"))
        solvers.append(Solver("prtpy greedy", greedy, ours="at most", needs="prtpy"))
        if few and not quick:
            solvers.append(Solver("prtpy kk", kk, needs="prtpy"))
    equal_counts = {"equal counts": lambda bin_of: np.ptp(np.bincount(bin_of, minlength=bins)) == 0}
    return Row(
        problem,
        solvers,
        minimised="heaviest rank",
        value=heaviest(weights, bins),
        bound=balance.lower_bound(weights, bins, capacity=capacity),
        target_ms=target_ms,
        target_gap=0.001 if target_ms else None,
        properties=equal_counts if equal else {},
    )


def _distribute(weights: np.ndarray, ranks: int) -> np.ndarray:
    return balance.distribute_tokens(weights, ranks).rank_of_block[0]


def assignments(quick: bool) -> Iterator[Row]:
    """Token blocks to context-parallel ranks, sequences to data-parallel ranks."""
    for kind in ("causal", "embedded", "packed"):
        for blocks, ranks in ((512, 8), (2048, 16), (8192, 16))[2 * quick :]:
            target = 1.0 if blocks == 8192 else None
            problem = f"{blocks:,} token blocks to {ranks} ranks, {kind}"
            yield assignment_row(problem, token_rows(kind, blocks), ranks, True, target, quick)
    if not quick:
        yield assignment_row("15,360 sequences to 256 ranks", sequence_lengths(15_360), 256, False, None, quick)
    lengths = sequence_lengths(153_600)
    yield assignment_row("153,600 sequences to 2,560 ranks", lengths, 2560, False, 15.0, quick)
    yield assignment_row("153,600 sequences to 2,560 ranks, 60 each", lengths, 2560, True, 15.0, quick)


def exact(quick: bool, limit: float) -> Iterator[Row]:
    """`assign_exact`, CP-SAT and HiGHS on instances whose optimum is hard to prove."""
    for n, bins in ((16, 4), (24, 6), (64, 8), (128, 8))[: 1 if quick else None]:
        weights = np.random.default_rng(n).integers(1, 1000, n)
        solvers = [
            Solver(
                "interlace",
                partial(balance.assign_exact, weights, bins),
                lambda found: found.makespan,
                lambda found: found.bound,
            )
        ]
        solvers.append(cp_sat(partial(peers.cp_sat_makespan, weights, bins, limit)))
        if n <= 24:
            solvers.append(milp(partial(peers.milp_makespan, weights, bins, limit)))
        yield Row(f"exact makespan, {n} items in {bins} bins", solvers, minimised="heaviest bin")


def post_balancing(quick: bool) -> Iterator[Row]:
    """Every batching mode of `post_balance` at OrchMLLM's scale, with the cost that OrchMLLM defines."""
    lengths, ranks, quadratic = sequence_lengths(153_600), 2560, 1e-4

    def widest(rank_of: np.ndarray) -> np.ndarray:
        longest = np.zeros(ranks)
        np.maximum.at(longest, rank_of, lengths)
        return longest

    def padded(rank_of: np.ndarray) -> float:
        return float((np.bincount(rank_of, minlength=ranks) * widest(rank_of)).max())

    def convolution(rank_of: np.ndarray) -> float:
        attention = np.bincount(rank_of, minlength=ranks) * widest(rank_of) ** 2
        return float((np.bincount(rank_of, lengths, ranks) + quadratic * attention).max())

    work = lengths + quadratic * lengths**2
    sums = balance.lower_bound(work, ranks)
    modes: tuple[tuple[str, dict[str, Any], Callable[[np.ndarray], float], float | None], ...] = (
        ("packed", {}, heaviest(lengths, ranks), balance.lower_bound(lengths, ranks)),
        ("packed, quadratic", {"quadratic": quadratic}, heaviest(work, ranks), sums),
        ("padded", {"batching": "padded"}, padded, None),
        # Padding a batch to its longest member costs no less than the sum over its members.
        ("convolution", {"quadratic": quadratic, "convolution": True}, convolution, sums),
    )
    for name, how, value, bound in modes[: 1 if quick else None]:
        solvers = [Solver("interlace", partial(balance.post_balance, lengths, ranks, **how))]
        yield Row(
            f"post_balance, {name}, 153,600 sequences to 2,560 ranks", solvers, "costliest batch", value, bound=bound
        )


def internode_volume(volume: np.ndarray, placement: np.ndarray, ranks_per_node: int) -> np.ndarray:
    """float64 [d]: size that each rank sends to other nodes under a placement. Its maximum is the objective of
    OrchMLLM's Algorithm 3. volume [d, d] and ranks_per_node: as in `balance.nodewise_placement`; placement [d]: its
    result."""
    node = np.arange(len(volume)) // ranks_per_node
    return np.where(node[:, None] != node[placement], volume, 0).sum(axis=1, dtype=np.float64)


def placements(quick: bool, limit: float) -> Iterator[Row]:
    """Node-wise placement of the batches from post-balancing 60 samples per rank, and the exchange that it needs.

    OrchMLLM solves the integer program (d^2 / c binaries) in tens of milliseconds on its machine; here HiGHS and CP-SAT
    have `limit` seconds for the smallest size.
    """
    per_node = 8
    for d in (64, 256) if quick else (64, 256, 2560):
        lengths = sequence_lengths(60 * d)
        source = np.random.default_rng(1).permutation(np.repeat(np.arange(d), 60))
        destination = balance.post_balance(lengths, d)
        volume = balance.rearrangement_volume(source, destination, lengths, d)

        def most(ranks: np.ndarray, volume: np.ndarray = volume) -> float:
            return float(internode_volume(volume, ranks, per_node).max())

        total = partial(peers.scipy_nodewise_sum, volume, per_node)
        solvers = [
            Solver("interlace", partial(balance.nodewise_placement, volume, per_node)),
            Solver("scipy linear_sum_assignment (the sum)", total, ours="at most", needs="scipy"),
        ]
        if d == 64 and not quick:  # ours is a heuristic: only bounds that these prove are used
            solvers.append(milp(partial(peers.milp_nodewise, volume, per_node, limit), ours=""))
            solvers.append(cp_sat(partial(peers.cp_sat_nodewise, volume, per_node, limit), ours=""))
        before = most(np.arange(d))
        yield Row(
            f"node-wise placement, {d:,} ranks, {per_node} per node",
            solvers,
            minimised="most that a rank sends to other nodes",
            value=most,
            bound=balance.nodewise_bound(volume, per_node),
            target_ms=50.0,
            target_gap=0.02,
            notes={"without placement": before},
        )
        plan = partial(balance.all_to_all_plan, source, destination, d)
        yield Row(f"all-to-all plan, {len(source):,} samples on {d:,} ranks", [Solver("interlace", plan)])


def rows(quick: bool, limit: float) -> Iterator[Row]:
    """All rows of this part; limit: seconds that an exact peer may take for one instance."""
    yield from assignments(quick)
    yield from exact(quick, limit)
    yield from post_balancing(quick)
    yield from placements(quick, limit)
