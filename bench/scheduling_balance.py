"""Who computes what, measured: the balance part of the scheduling benchmark, peers side by side in one run.

Every row names a problem and a solver, the median and the best wall time of one call (input checks and copies
included), and the gap of its answer to a bound that no answer can beat.
Peers that are not installed are left out of the table:
prtpy (greedy and Karmarkar-Karp in Python), OR-tools CP-SAT and scipy's HiGHS (exact, with a time limit), and scipy's
linear_sum_assignment (which minimises the sum where node-wise placement minimises the bottleneck).

    python -m bench.scheduling_balance [--repeats 15] [--limit 10] [--out bench/results/scheduling_balance.json]

On a busy machine, `chrt -f 50 python -m bench.scheduling_balance` measures as if it were alone.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from interlace import balance

Row = dict[str, Any]


def timed(call: Callable[[], Any], repeats: int) -> tuple[Any, dict[str, float]]:
    """The answer and the milliseconds that it took; long calls are repeated less."""
    seconds: list[float] = []
    answer = None
    while len(seconds) < repeats and (len(seconds) < 2 or sum(seconds) < 3):
        start = time.perf_counter()
        answer = call()
        seconds.append(time.perf_counter() - start)
    return answer, {"median_ms": statistics.median(seconds) * 1e3, "best_ms": min(seconds) * 1e3, "runs": len(seconds)}


def optional(name: str) -> Any:
    """A peer, or None where it is missing or does not import."""
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


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
    """Tokens of mixed multimodal samples, cut at a context of 8,192 so that no single one decides the heaviest rank."""
    return np.minimum(np.round(np.random.default_rng(0).lognormal(5.8, 1.0, count)), 8192)


def assignment_row(
    problem: str,
    solver: str,
    weights: np.ndarray,
    bins: int,
    capacity: int | None,
    repeats: int,
    call: Callable[[], np.ndarray],
) -> Row:
    bin_of, times = timed(call, repeats)
    row: Row = {"problem": problem, "solver": solver, **times}
    if bin_of is not None:
        row["gap"] = (
            np.bincount(bin_of, weights, bins).max() / balance.lower_bound(weights, bins, capacity=capacity) - 1
        )
        row["equal_counts"] = bool(np.ptp(np.bincount(bin_of, minlength=bins)) == 0)
    return row


def distribute(weights: np.ndarray, ranks: int) -> np.ndarray:
    return balance.distribute_tokens(weights, ranks).rank_of_block[0]


def prtpy_assign(prtpy: Any, name: str, weights: np.ndarray, bins: int) -> np.ndarray:
    items = {i: int(weight) for i, weight in enumerate(weights)}
    parts = prtpy.partition(algorithm=getattr(prtpy.partitioning, name), numbins=bins, items=items)
    bin_of = np.empty(len(weights), int)
    for number, part in enumerate(parts):
        bin_of[list(part)] = number
    return bin_of


def assignments(repeats: int) -> list[Row]:
    """`assign` and prtpy on token blocks and on sequences."""
    rows = []
    prtpy = optional("prtpy")
    cases: list[tuple[str, np.ndarray, int, bool]] = [
        *((f"{kind} {n} blocks, {r} ranks", token_rows(kind, n), r, True) for kind in ("causal", "embedded", "packed")
          for n, r in ((512, 8), (2048, 16), (8192, 16))),
        ("153,600 sequences, 2,560 ranks", sequence_lengths(153_600), 2560, False),
        ("153,600 sequences, 2,560 ranks, 60 each", sequence_lengths(153_600), 2560, True),
    ]  # fmt: skip
    for problem, weights, bins, equal in cases:
        capacity = len(weights) // bins if equal else None
        methods = ["lpt_greedy", "lpt", "multifit"] + (["karmarkar_karp"] if bins < 100 else [])
        for method in methods:
            call = partial(balance.assign, weights, bins, method=method, capacity=capacity)
            rows.append(assignment_row(problem, f"interlace {method}", weights, bins, capacity, repeats, call))
        if equal and bins < 100:
            call = partial(distribute, weights, bins)
            rows.append(assignment_row(problem, "distribute_tokens", weights, bins, capacity, repeats, call))
        if prtpy is not None and len(weights) <= 8192:
            for name in ("greedy", "kk"):
                call = partial(prtpy_assign, prtpy, name, weights, bins)
                rows.append(assignment_row(problem, f"prtpy {name}", weights, bins, None, min(repeats, 3), call))
    return rows


def exact(limit: float) -> list[Row]:
    """`assign_exact`, CP-SAT and HiGHS on instances where the optimum is hard to prove."""
    rows = []
    cp_model = optional("ortools.sat.python.cp_model")
    optimize = optional("scipy.optimize")
    for n, bins in ((16, 4), (24, 6), (64, 8), (128, 8)):
        weights = np.random.default_rng(n).integers(1, 1000, n)
        problem = f"exact: {n} items, {bins} bins"
        solvers: dict[str, Callable[[], tuple[float, float]]] = {
            "interlace assign_exact": partial(solve_interlace, weights, bins)
        }
        if cp_model is not None:
            solvers["CP-SAT"] = partial(solve_cp_sat, cp_model, weights, bins, limit)
        if optimize is not None and n <= 24:
            solvers["scipy milp"] = partial(solve_milp, optimize, weights, bins, limit)
        for solver, solve in solvers.items():
            (value, bound), times = timed(solve, 1)
            rows.append(
                {
                    "problem": problem,
                    "solver": solver,
                    **times,
                    "value": value,
                    "bound": bound,
                    "gap": value / bound - 1,
                }
            )
    return rows


def solve_interlace(weights: np.ndarray, bins: int) -> tuple[float, float]:
    found = balance.assign_exact(weights, bins)
    return found.makespan, found.bound


def solve_cp_sat(cp_model: Any, weights: np.ndarray, bins: int, limit: float) -> tuple[float, float]:
    model = cp_model.CpModel()
    inside = [[model.new_bool_var("") for _ in range(bins)] for _ in weights]
    heaviest = model.new_int_var(0, int(weights.sum()), "")
    for choices in inside:
        model.add_exactly_one(choices)
    for b in range(bins):
        model.add(sum(int(w) * choices[b] for w, choices in zip(weights, inside)) <= heaviest)
    model.minimize(heaviest)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = limit
    solver.parameters.num_workers = 2
    solver.solve(model)
    return solver.objective_value, solver.best_objective_bound


def solve_milp(optimize: Any, weights: np.ndarray, bins: int, limit: float) -> tuple[float, float]:
    n = len(weights)
    each = np.hstack([np.kron(np.eye(n), np.ones(bins)), np.zeros((n, 1))])
    load = np.hstack([np.kron(weights[None], np.eye(bins)), -np.ones((bins, 1))])
    solved = optimize.milp(
        np.eye(n * bins + 1)[-1],
        constraints=[optimize.LinearConstraint(each, 1, 1), optimize.LinearConstraint(load, -np.inf, 0)],
        integrality=np.ones(n * bins + 1),
        bounds=optimize.Bounds(0, np.append(np.ones(n * bins), np.inf)),
        options={"time_limit": limit},
    )
    return solved.fun, solved.mip_dual_bound


def post_balancing(repeats: int) -> list[Row]:
    """Every batching mode of `post_balance` at OrchMLLM's scale."""
    lengths = sequence_lengths(153_600)
    modes: dict[str, dict[str, Any]] = {
        "packed": {},
        "packed, quadratic": {"quadratic": 1e-4},
        "padded": {"batching": "padded"},
        "convolution": {"quadratic": 1e-4, "convolution": True},
    }
    rows = []
    for name, how in modes.items():
        _, times = timed(lambda how=how: balance.post_balance(lengths, 2560, **how), repeats)
        rows.append({"problem": f"post_balance {name}: 153,600 sequences, 2,560 ranks", "solver": "interlace", **times})
    return rows


def assign_sum(optimize: Any, volume: np.ndarray, per_node: int) -> np.ndarray:
    """The largest sum kept within nodes: every node offers per_node places of equal worth."""
    d = len(volume)
    kept = volume.reshape(d // per_node, per_node, d).sum(axis=1)
    return np.argsort(optimize.linear_sum_assignment(np.repeat(kept, per_node, axis=0), maximize=True)[1])


def placement(repeats: int) -> list[Row]:
    """Node-wise placement of the batches that post-balancing 60 samples per rank gives."""
    rows = []
    optimize = optional("scipy.optimize")
    per_node = 8
    for d in (64, 256, 2560):
        lengths = sequence_lengths(60 * d)
        source = np.random.default_rng(1).permutation(np.repeat(np.arange(d), 60))
        destination = balance.post_balance(lengths, d)
        volume = balance.rearrangement_volume(source, destination, lengths, d)
        problem = f"node-wise: {d} ranks, {per_node} per node"
        ranks, times = timed(lambda v=volume: balance.nodewise_placement(v, per_node), repeats)
        bound = balance.nodewise_bound(volume, per_node)
        before = balance.internode_volume(volume, np.arange(d), per_node).max()

        answers = [("interlace", ranks, times)]
        if optimize is not None:
            ranks, times = timed(partial(assign_sum, optimize, volume, per_node), min(repeats, 3))
            answers.append(("scipy linear_sum_assignment (sum)", ranks, times))
        for solver, ranks, times in answers:
            reached = balance.internode_volume(volume, ranks, per_node).max()
            gap, saved = reached / bound - 1, 1 - reached / before
            rows.append({"problem": problem, "solver": solver, **times, "value": reached, "gap": gap, "saved": saved})
        _, times = timed(lambda s=source, t=destination, d=d: balance.all_to_all_plan(s, t, d), repeats)
        rows.append({"problem": f"all-to-all plan: {len(source)} samples, {d} ranks", "solver": "interlace", **times})
    return rows


def run(repeats: int = 15, limit: float = 10.0) -> list[Row]:
    """All rows of this part."""
    return [*assignments(repeats), *exact(limit), *post_balancing(repeats), *placement(repeats)]


def machine() -> dict[str, Any]:
    versions = {}
    for name in ("numpy", "scipy", "prtpy", "ortools"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    return {"machine": platform.machine(), "cpus": os.cpu_count(), "python": platform.python_version(), **versions}


def table(rows: list[Row]) -> str:
    lines = [f"{'problem':58} {'solver':34} {'median ms':>10} {'best ms':>10} {'gap':>9}"]
    for row in rows:
        gap = f"{row['gap']:9.4%}" if "gap" in row else ""
        lines.append(
            f"{row['problem']:58} {row['solver']:34} {row['median_ms']:10.3f} {row['best_ms']:10.3f} {gap:>9}"
            + ("  equal counts" if row.get("equal_counts") else "")
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=15, help="most calls per row (the median is reported)")
    parser.add_argument("--limit", type=float, default=10.0, help="seconds that an exact peer may take per instance")
    parser.add_argument("--out", type=Path, help="write the rows to this JSON file")
    args = parser.parse_args()
    rows = run(args.repeats, args.limit)
    print(table(rows))
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        result = {"command": " ".join(sys.argv), "machine": machine(), "rows": rows}
        args.out.write_text(json.dumps(result, indent=1, default=float) + "\n")


if __name__ == "__main__":
    main()
