"""Microbatch scheduling beside its peers: matching, subset sums, deferral, reordering, the event simulator.

Each row is one problem, solved by Interlace and by every peer that is installed (SciPy, OR-tools CP-SAT, the Python
code of the same algorithm). Times are the best of several runs in one process, ours and the peers' in turn; `value` is
what was minimised, so that a fast but worse answer shows.

    python -m bench.scheduling_microbatch [--repeats 7] [--quick] [--out FILE]
"""

from __future__ import annotations

import argparse
import importlib.metadata
import itertools
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from interlace import _core, balance
from interlace.schedule import Op, StageGraph, one_f_one_b
from interlace.simulate import ActionArrays, simulate, simulate_arrays
from interlace.simulate.reference import simulate_in_python

Solver = Callable[[], float]
"""Solves the row's problem once and returns the value reached."""


def matching_rows(quick: bool) -> Iterator[dict[str, Any]]:
    """Entrain's bottleneck matching, dissertation 4.5.2: the largest cost of any row, and its time."""
    rng = np.random.default_rng(0)
    for size in (32, 128, 256):
        loads = np.sort(rng.lognormal(5.0, 0.5, 2 * size))
        deferral = np.maximum(np.add.outer(loads[size:], loads[:size]) / 2, loads[:size]) + rng.random((size, size))
        for name, cost, alone in (
            ("uniform", rng.random((size, size)), np.full(size, np.inf)),
            ("deferral", deferral, loads[size:]),
            ("integers", rng.integers(0, 1000, (size, size)).astype(float), np.full(size, np.inf)),
        ):
            solvers: dict[str, Solver] = {
                "interlace": lambda cost=cost, alone=alone: balance.bottleneck_match(cost, alone)[0],
                "scipy maximum_bipartite_matching + bisection": lambda cost=cost, alone=alone: scipy_bottleneck(
                    cost, alone
                ),
                "scipy linear_sum_assignment (minimises the sum)": lambda cost=cost, alone=alone: scipy_sum(
                    cost, alone
                ),
            }
            yield {"problem": f"bottleneck matching {size} x {size}, {name}", "target_ms": 2.0, "solvers": solvers}


def scipy_bottleneck(cost: np.ndarray, alone: np.ndarray) -> float:
    """The least threshold by bisection over the sorted values, each probe a maximum matching."""
    from scipy.sparse import csr_matrix
    from scipy.sparse.csgraph import maximum_bipartite_matching

    values = np.unique(np.concatenate([cost.ravel(), alone[np.isfinite(alone)]]))
    low, high = 0, len(values) - 1
    while low < high:
        middle = (low + high) // 2
        rows = alone > values[middle]
        graph = csr_matrix(cost[rows] <= values[middle])
        fits = not rows.any() or bool((maximum_bipartite_matching(graph, perm_type="column") >= 0).all())
        low, high = (low, middle) if fits else (middle + 1, high)
    return float(values[low])


def scipy_sum(cost: np.ndarray, alone: np.ndarray) -> float:
    """What minimising the sum of min(cost, alone) gives as a maximum."""
    from scipy.optimize import linear_sum_assignment

    capped = np.minimum(cost, alone[:, None])
    return float(capped[linear_sum_assignment(capped)].max())


def deferral_rows(quick: bool) -> Iterator[dict[str, Any]]:
    """K = 128 microbatches of 64 samples: the matrix of equation 4.3 and the matching; then all of algorithm 4."""
    rng = np.random.default_rng(0)
    count, each = 128, 64
    for name, llm in (
        ("lognormal", rng.lognormal(6.0, 0.8, count * each)),
        ("tokens", rng.integers(1, 4000, count * each).astype(float)),
    ):
        microbatches = [llm[i::count] for i in range(count)]
        loads = np.array([own.sum() for own in microbatches])
        order = np.argsort(-loads, kind="stable")
        over = [microbatches[i] for i in order[: count // 2]]
        under, alone = loads[order[count // 2 :]], loads[order[: count // 2]]
        solvers: dict[str, Solver] = {
            "interlace": lambda over=over, under=under, alone=alone: balance.bottleneck_match(
                _core.deferral_costs(over, under), alone
            )[0]
        }
        if not quick:
            solvers["numpy, one table per pair as printed"] = lambda over=over, under=under, alone=alone: (
                scipy_bottleneck(printed_deferral(over, under), alone)
            )
        yield {"problem": f"deferral K = {count} x {each}, {name}", "target_ms": 10.0, "solvers": solvers}
        encoder = rng.lognormal(5.0, 1.0, count * each)
        plan = balance.assign_microbatches(encoder, llm, count)
        before = np.bincount(plan.encoder_of, weights=llm).max()
        yield {
            "problem": f"assign_microbatches K = {count}, {count * each} samples, {name}",
            "target_ms": 10.0,
            "solvers": {
                "interlace": lambda encoder=encoder, llm=llm: (
                    balance.assign_microbatches(encoder, llm, count).llm_bottleneck
                )
            },
            "bound": plan.llm_bound,
            "notes": {
                "LLM over bound without deferral": before / plan.llm_bound - 1,
                "LLM over bound": plan.llm_bottleneck / plan.llm_bound - 1,
                "encoder over bound": plan.encoder_bottleneck / plan.encoder_bound - 1,
                "deferred samples": len(plan.deferred),
            },
        }


def printed_deferral(over: list[np.ndarray], under: np.ndarray) -> np.ndarray:
    """Equation 4.3 with a dynamic program per pair (algorithm 4, lines 9-11), costs in 1/16384 of a microbatch."""
    cost = np.empty((len(over), len(under)))
    for i, own in enumerate(over):
        load = own.sum()
        unit = 1.0 if (own == np.floor(own)).all() else load / 2**14
        counts = np.rint(own / unit).astype(np.int64)
        for j, other in enumerate(under):
            delta = max(0.0, load - other) / 2
            reachable = np.zeros(int(2 * delta / unit) + 2, bool)
            reachable[0] = True
            for item in counts[counts < len(reachable)]:
                reachable[item:] |= reachable[: len(reachable) - item].copy()
            sums = np.flatnonzero(reachable) * unit
            moved = sums[np.abs(sums - delta).argmin()]
            cost[i, j] = max(load - moved, other + moved)
    return cost


def subset_rows(quick: bool) -> Iterator[dict[str, Any]]:
    """One subset sum: the distance left to half the total."""
    rng = np.random.default_rng(0)
    for items, largest in ((64, 4000), (500, 4000), (64, 100_000)):
        weights = rng.integers(1, largest, items)
        target = int(weights.sum()) // 2
        solvers: dict[str, Solver] = {
            "interlace": lambda weights=weights, target=target: float(
                abs(weights[balance.subset_sum(weights, target)].sum() - target)
            )
        }
        if _installed("ortools"):
            solvers["OR-tools CP-SAT"] = lambda weights=weights, target=target: cp_sat_subset(weights, target)
        solvers["scipy milp (HiGHS)"] = lambda weights=weights, target=target: milp_subset(weights, target)
        yield {"problem": f"subset sum of {items} weights up to {largest}", "solvers": solvers}


def cp_sat_subset(weights: np.ndarray, target: int) -> float:
    from ortools.sat.python import cp_model

    model = cp_model.CpModel()
    taken = [model.new_bool_var("") for _ in weights]
    distance = model.new_int_var(0, int(weights.sum()), "")
    total = sum(int(w) * x for w, x in zip(weights, taken))
    model.add(distance >= total - target)
    model.add(distance >= target - total)
    model.minimize(distance)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.max_time_in_seconds = 20.0
    solver.solve(model)
    return float(solver.objective_value)


def milp_subset(weights: np.ndarray, target: int) -> float:
    from scipy.optimize import Bounds, LinearConstraint, milp

    n = len(weights)
    rows = np.vstack([np.append(weights, -1.0), np.append(-weights, -1.0)])
    result = milp(
        np.append(np.zeros(n), 1.0),
        constraints=LinearConstraint(rows, ub=[target, -target]),
        integrality=np.append(np.ones(n), 0),
        bounds=Bounds(0, np.append(np.ones(n), np.inf)),
        options={"time_limit": 20.0},
    )
    return float(result.fun) if result.x is not None else float("inf")


def reorder_rows(quick: bool) -> Iterator[dict[str, Any]]:
    """DistTrain 6.2: seconds of a step whose encoder stage varies. All values from the event simulator."""
    rng = np.random.default_rng(0)
    for count, ranks, chunks in ((7, 4, 1), (16, 4, 1), (64, 8, 1), (64, 8, 2)):
        forward = rng.uniform(0.95, 1.05, (count, ranks * chunks))
        forward[:, 0] *= rng.lognormal(0.0, 0.6, count)
        backward = 2 * forward

        def run(evaluations: int, forward: Any = forward, backward: Any = backward, ranks: int = ranks) -> float:
            return balance.reorder_microbatches(forward, backward, ranks=ranks, evaluations=evaluations).seconds

        def value(order: np.ndarray, forward: Any = forward, backward: Any = backward, ranks: int = ranks) -> float:
            return float(_core.pipeline_makespan(forward, backward, ranks, 0.0, order))

        solvers: dict[str, Solver] = {
            "interlace": lambda run=run: run(6000),
            "algorithm 3 as printed": lambda run=run: run(0),
            "given order": lambda value=value, count=count: value(np.arange(count)),
        }
        if count <= 7:
            solvers["best of all permutations"] = lambda value=value, count=count: min(
                value(np.array(order)) for order in itertools.permutations(range(count))
            )
        found = balance.reorder_microbatches(forward, backward, ranks=ranks)
        yield {
            "problem": f"reorder {count} microbatches, {ranks} ranks x {chunks}",
            "solvers": solvers,
            "bound": found.bound,
            "notes": {"over bound": found.gap, "orders tried": found.evaluations},
        }


def sample_rows(quick: bool) -> Iterator[dict[str, Any]]:
    """DistTrain 6.1: the heaviest data-parallel group."""
    cost = np.random.default_rng(0).lognormal(5.8, 1.0, 64 * 16)

    def heaviest(as_printed: bool) -> float:
        group_of = balance.reorder_samples(cost, 64, as_printed=as_printed).group_of
        return float(np.bincount(group_of, weights=cost).max())

    solvers: dict[str, Solver] = {
        "interlace": lambda: heaviest(False),
        "algorithm 2 as printed": lambda: heaviest(True),
    }
    yield {
        "problem": "reorder 1,024 samples to 64 groups",
        "solvers": solvers,
        "bound": balance.lower_bound(cost, 64, capacity=16),
    }


def simulator_rows(quick: bool) -> Iterator[dict[str, Any]]:
    """Events of 1F1B on 64 ranks: the step's length."""
    graph = StageGraph.build({"m": list(range(64))})
    schedule = one_f_one_b(graph, graph.everything(528), reduce_grad=False)
    arrays = ActionArrays.of_schedule(schedule)
    durations = {Op.FORWARD: 1.0, Op.BACKWARD: 2.0}
    price = np.array([durations.get(op, 0.0) for op in Op])
    seconds = price[arrays.op]
    n = len(arrays)
    solvers: dict[str, Solver] = {
        "interlace": lambda: simulate_arrays(arrays, seconds).makespan,
        "interlace, from Action objects": lambda: simulate(schedule, durations).makespan,
        "Python": lambda: simulate_in_python(schedule, durations).makespan,
    }
    yield {"problem": f"simulate {n:,} actions", "target_ms": 1e-3 * n, "solvers": solvers}


ROWS = (matching_rows, deferral_rows, subset_rows, reorder_rows, sample_rows, simulator_rows)


def measure(row: dict[str, Any], repeats: int) -> dict[str, Any]:
    """Times all solvers of a row in turn, so that they share the machine's moods."""
    solvers: dict[str, Solver] = row["solvers"]
    best, values = dict.fromkeys(solvers, float("inf")), {}
    for repeat in range(repeats):
        for name, solve in solvers.items():
            if repeat and name != "interlace" and best[name] > 0.5:
                continue  # a peer that takes so long is not measured better by asking again
            start = time.perf_counter()
            values[name] = solve()
            best[name] = min(best[name], time.perf_counter() - start)
    own = best["interlace"]
    result: dict[str, Any] = {
        "problem": row["problem"],
        "milliseconds": {name: seconds * 1e3 for name, seconds in best.items()},
        "value": values,
        "times_faster": {name: seconds / own for name, seconds in best.items() if name != "interlace"},
    }
    for key in ("target_ms", "bound", "notes"):
        if key in row:
            result[key] = row[key]
    return result


def run(*, repeats: int = 7, quick: bool = False) -> list[dict[str, Any]]:
    """All rows of this file, measured; prints the table as it goes."""
    results = []
    for rows in ROWS:
        for row in rows(quick):
            result = measure(row, repeats)
            results.append(result)
            print(f"\n{result['problem']}" + (f"   target {row['target_ms']:g} ms" if "target_ms" in row else ""))
            for name, milliseconds in result["milliseconds"].items():
                ratio = f"{result['times_faster'][name]:9.1f} x" if name in result["times_faster"] else " " * 11
                over = f"   {result['value'][name] / row['bound'] - 1:+8.2%} of the bound" if row.get("bound") else ""
                print(f"  {name:52} {milliseconds:12.3f} ms {ratio}   value {result['value'][name]:.6g}{over}")
            for name, note in row.get("notes", {}).items():
                print(f"    {name}: {note:.4g}")
    return results


def _installed(package: str) -> bool:
    try:
        importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Run the benchmark, print the table, write the JSON where --out says; returns the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7, help="runs of each solver; the best counts")
    parser.add_argument("--quick", action="store_true", help="leave out the slowest peers")
    parser.add_argument("--out", type=Path, help="where to write the JSON (default: nowhere)")
    options = parser.parse_args(argv)
    report = {
        "benchmark": "scheduling_microbatch",
        "command": " ".join(["python -m bench.scheduling_microbatch", *(sys.argv[1:] if argv is None else argv)]),
        "machine": {"cpu": _cpu(), "cores": os.cpu_count()},
        "versions": {
            "python": platform.python_version(),
            **{name: importlib.metadata.version(name) for name in ("numpy", "scipy", "ortools") if _installed(name)},
        },
        "rows": run(repeats=options.repeats, quick=options.quick),
    }
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(report, indent=1) + "\n")
    return report


def _cpu() -> str:
    with open("/proc/cpuinfo") as lines:
        names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def test_scheduling_microbatch(benchmark: Any) -> None:
    """The same under pytest-benchmark, shorter."""
    report = benchmark.pedantic(lambda: main(["--quick", "--repeats", "2"]), rounds=1)
    for row in report["rows"]:
        benchmark.extra_info[row["problem"]] = row["milliseconds"]["interlace"]


if __name__ == "__main__":
    main()
