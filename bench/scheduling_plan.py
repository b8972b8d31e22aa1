"""The planning algorithms and their peers, side by side in one run: milliseconds and objectives.

Rows: pipeline templates (Oobleck), instantiation, batch shares, contiguous partition, orchestration (DistTrain). Peers
solve the same input where they are installed: scipy (milp), cvxpy with Clarabel, OR-tools CP-SAT. Times that papers
print for their own machines are named as such.

    python -m bench.scheduling_plan [--out FILE]
"""

from __future__ import annotations

import argparse
import importlib.metadata
import itertools
import json
import platform
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from bench.printed_oobleck import divide_and_conquer
from interlace import plan

Row = dict[str, Any]


def milliseconds(run: Callable[[], Any], repeats: int = 5) -> float:
    """Median wall time after one run that does not count."""
    run()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times)


def once(run: Callable[[], Any]) -> tuple[float, Any]:
    """Milliseconds of one run, and what it returned: for peers that take long."""
    start = time.perf_counter()
    result = run()
    return 1e3 * (time.perf_counter() - start), result


def row(name: str, ours: float, objective: float, target: float | None = None, **peers: Any) -> Row:
    return {"problem": name, "ms": ours, "objective": objective, "target_ms": target, "peers": peers}


def templates() -> list[Row]:
    """Table 2.3 of the dissertation, and the printed divide and conquer on a size that Python can do."""
    rng = np.random.default_rng(0)
    rows = []
    for nodes, gpus, layers, paper in (
        (8, 8, 96, 109.76),
        (16, 8, 96, 1213.63),
        (24, 1, 96, 1477.54),
        (24, 8, 96, 3297.92),
    ):
        costs = rng.lognormal(0, 0.3, (layers, 1)) / np.arange(1, gpus + 1) ** 0.8
        found = plan.pipeline_template(costs, nodes, gpus)
        taken = milliseconds(lambda c=costs, n=nodes, g=gpus: plan.pipeline_template(c, n, g), 3)
        name = f"template, {nodes} nodes x {gpus} GPUs x {layers} layers"
        rows.append(row(name, taken, found.iteration_time, 1000.0, **{"paper, its machine": {"ms": 1e3 * paper}}))
    costs = rng.lognormal(0, 0.3, (12, 1)) / np.arange(1, 3) ** 0.8
    found = plan.pipeline_template(costs, 3, 2)
    taken = milliseconds(lambda: plan.pipeline_template(costs, 3, 2))
    theirs, value = once(lambda: divide_and_conquer(costs, 3, 2))
    peer = {"divide and conquer as printed (Python)": {"ms": theirs, "objective": value}}
    rows.append(row("template, 3 nodes x 2 GPUs x 12 layers", taken, found.iteration_time, None, **peer))
    return rows


def instantiations() -> list[Row]:
    """Combinations of templates: milp for one time limit (ours probes about 25), the paper's list for 30 nodes."""
    rng = np.random.default_rng(0)
    rows = []
    for nodes, batch in ((30, 256), (1000, 8192)):
        sizes = plan.node_counts(nodes, 2, 3)
        times = 100.0 / sizes**1.05 * rng.uniform(1.0, 1.02, len(sizes))
        found = plan.instantiate(sizes, times, nodes, faults=2, microbatches=batch)
        run = partial(plan.instantiate, sizes, times, nodes, faults=2, microbatches=batch)
        peers: dict[str, Any] = {}
        if nodes == 30:
            taken, best = once(lambda s=sizes, t=times, n=nodes, b=batch: _listed(s, t, n, b))
            peers["every combination listed (eq. 2.5)"] = {"ms": taken, "objective": best}
        peers["scipy milp, one probe at the optimum"] = _milp_probe(sizes, times, nodes, batch, found.time)
        rows.append(row(f"instantiate, {nodes} nodes, batch {batch}", milliseconds(run), found.time, 100.0, **peers))
    return rows


def _listed(sizes: Any, times: Any, nodes: int, batch: int) -> float:
    best = np.inf
    for counts in plan.combinations(sizes.tolist(), nodes, 3):
        each = np.repeat(times, counts)
        best = min(best, float((plan.split_batch(each, batch) * each).max()))
    return best


def _milp_probe(sizes: Any, times: Any, nodes: int, batch: int, limit: float) -> Row:
    from scipy.optimize import Bounds, LinearConstraint, milp

    runs = np.floor(limit * (1 + 1e-12) / times)
    constraints = [LinearConstraint(sizes, nodes, nodes), LinearConstraint(np.ones(len(sizes)), 3, np.inf)]
    kinds = np.ones(len(sizes))
    taken, result = once(
        lambda: milp(
            -runs, constraints=constraints, integrality=kinds, bounds=Bounds(0, np.inf), options={"time_limit": 30.0}
        )
    )
    return {"ms": taken, "microbatches": -result.fun if result.x is not None else None, "needed": batch}


def splits() -> list[Row]:
    """Batch shares: eq. 2.6 and min-max, against scipy's milp for the latter."""
    from scipy.optimize import Bounds, LinearConstraint, milp

    rng = np.random.default_rng(0)
    times, batch = rng.uniform(1.0, 3.0, 24), 512
    counts = plan.split_batch(times, batch)
    n = len(times)
    matrix = np.hstack([np.diag(times), -np.ones((n, 1))])
    whole = LinearConstraint(np.append(np.ones(n), 0.0), batch, batch)
    theirs, result = once(
        lambda: milp(
            np.append(np.zeros(n), 1.0),
            constraints=[LinearConstraint(matrix, -np.inf, 0.0), whole],
            integrality=np.append(np.ones(n), 0),
            bounds=Bounds(np.append(np.ones(n), 0.0), np.inf),
            options={"time_limit": 30.0},
        )
    )
    peers: dict[str, Any] = {"scipy milp": {"ms": theirs, "objective": result.fun}}
    cp_sat = _cp_sat_split(times, batch)
    if cp_sat:
        peers["OR-tools CP-SAT"] = cp_sat
    rows = [
        row(
            "split 512 over 24, min-max",
            milliseconds(lambda: plan.split_batch(times, batch)),
            float((counts * times).max()),
            None,
            **peers,
        )
    ]
    even = plan.split_batch(times, batch, objective="variance") * times
    taken = milliseconds(lambda: plan.split_batch(times, batch, objective="variance"))
    rows.append(row("split 512 over 24, eq. 2.6", taken, float(((even - even.mean()) ** 2).sum())))
    return rows


def _cp_sat_split(times: Any, batch: int) -> Row | None:
    try:
        from ortools.sat.python import cp_model
    except ImportError:
        return None
    units = np.round(times * 1e6).astype(int)
    model = cp_model.CpModel()
    counts = [model.new_int_var(1, batch, f"n{i}") for i in range(len(units))]
    slowest = model.new_int_var(0, int(units.max()) * batch, "t")
    model.add(sum(counts) == batch)
    for count, unit in zip(counts, units, strict=True):
        model.add(count * int(unit) <= slowest)
    model.minimize(slowest)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = 30.0
    solver.parameters.num_workers = 2
    taken, _ = once(lambda: solver.solve(model))
    return {"ms": taken, "objective": solver.objective_value / 1e6}


def partitions() -> list[Row]:
    """10,000 layers into 512 stages, plain, with speeds and with memory; the dynamic program on a smaller row."""
    rng = np.random.default_rng(0)
    costs, speeds, limits = rng.lognormal(size=10_000), rng.uniform(0.5, 2.0, 512), np.linspace(60.0, 90.0, 512)
    rows = []
    for name, keywords in (
        ("", {}),
        (", speeds", {"speeds": speeds}),
        (", memory", {"memory": costs, "memory_limits": limits}),
        (", both", {"speeds": speeds, "memory": costs, "memory_limits": limits}),
    ):
        cuts = plan.partition(costs, 512, **keywords)
        loads = np.add.reduceat(costs, cuts[:-1]) / (speeds if "speeds" in keywords else 1.0)
        taken = milliseconds(lambda k=keywords: plan.partition(costs, 512, **k))
        rows.append(row(f"partition 10,000 into 512{name}", taken, float(loads.max()), 5.0))
    short = costs[:300]
    cuts = plan.partition(short, 24)
    theirs, value = once(lambda: _dynamic_program(short, 24))
    taken = milliseconds(lambda: plan.partition(short, 24))
    peer = {"eq. 3.5 in numpy": {"ms": theirs, "objective": value}}
    rows.append(row("partition 300 into 24", taken, float(np.add.reduceat(short, cuts[:-1]).max()), None, **peer))
    return rows


def _dynamic_program(costs: Any, stages: int) -> float:
    prefix = np.concatenate([[0.0], np.cumsum(costs)])
    best = prefix.copy()
    for _ in range(stages - 1):
        after = np.full_like(best, np.inf)
        for i in range(1, len(prefix)):
            after[i] = np.maximum(best[:i], prefix[i] - prefix[:i]).min()
        best = after
    return float(best[-1])


def orchestrations() -> list[Row]:
    """1,296 GPUs and a batch of 1,920 (DistTrain table 2), with and without memory, layers and VPP."""
    sizes = np.array([1, 2, 4, 8])

    def modules(layers: bool) -> dict[str, plan.ModuleWork]:
        def work(seconds: float, depth: int, weights: float, states: float, kept: float) -> plan.ModuleWork:
            return plan.ModuleWork(list(seconds / sizes**0.9), depth * layers, weights, states, kept)

        return {
            "encoder": work(0.05, 32, 2e9, 8e9, 5e8),
            "language_model": work(2.0, 80, 280e9, 840e9, 30e9),
            "generator": work(0.2, 32, 4e9, 12e9, 2e9),
        }

    rows = []
    for layers, vpp, memory in itertools.product((False, True), (1, 2), (float("inf"), 80e9)):
        given = modules(layers)
        run = partial(plan.orchestrate, given, 1296, 1920, vpp=vpp, gpu_memory=memory)
        peers: dict[str, Any] = {"paper, its machine": {"ms": 922.0}}
        if not layers and vpp == 1 and memory == float("inf"):
            relaxed = _relaxation(given, run())
            if relaxed:
                peers["cvxpy + Clarabel, one of the choices of TP and DP"] = relaxed
        name = f"orchestrate 1,296 GPUs, batch 1,920{', layers' if layers else ''}, vpp {vpp}"
        name += ", 80 GB" if memory < float("inf") else ""
        rows.append(row(name, milliseconds(run), run().iteration_time, 10.0, **peers))
    return rows


def _relaxation(modules: Any, best: plan.Orchestration) -> Row | None:
    """The paper's convex problem for the TP and DP of the optimum: GPUs per module are real numbers."""
    try:
        import cvxpy
    except ImportError:
        return None
    dp = best.specs["language_model"].dp
    warm, widths = [], []
    for name, spec in best.specs.items():
        warm.append(dp / spec.dp * modules[name].forward[int(np.log2(spec.tp))])
        widths.append(spec.tp * spec.dp)
    gpus, slowest = cvxpy.Variable(len(warm), pos=True), cvxpy.Variable(pos=True)
    limits = [
        w * width * cvxpy.inv_pos(gpus[i]) <= slowest for i, (w, width) in enumerate(zip(warm, widths, strict=True))
    ]
    objective = sum(warm) + (1920 / dp - 1) * slowest
    problem = cvxpy.Problem(cvxpy.Minimize(objective), [cvxpy.sum(gpus) <= 1296, gpus >= np.array(widths), *limits])
    taken, value = once(lambda: problem.solve(solver="CLARABEL"))
    pp = np.maximum(1, np.floor(gpus.value / widths))
    rounded = sum(warm) + (1920 / dp - 1) * max(w / p for w, p in zip(warm, pp, strict=True))
    return {"ms": taken, "relaxed": float(value), "objective": float(rounded)}


def measure() -> list[Row]:
    """All rows, for `python -m bench.scheduling` too."""
    return [*templates(), *instantiations(), *splits(), *partitions(), *orchestrations()]


def show(rows: list[Row]) -> None:
    print(f"{'problem':58}{'ms':>10}{'target':>8}{'objective':>13}  peers: ms, times ours (objective)")
    for each in rows:
        target = f"{each['target_ms']:.0f}" if each["target_ms"] else ""
        print(f"{each['problem']:58}{each['ms']:>10.3f}{target:>8}{each['objective']:>13.4f}", end="  ")
        parts = []
        for name, peer in each["peers"].items():
            value = f" ({peer['objective']:.4f})" if peer.get("objective") is not None else ""
            parts.append(f"{name}: {peer['ms']:.4g}, {peer['ms'] / each['ms']:.3g}x{value}")
        print("; ".join(parts))


def versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "machine": platform.machine()}
    for name in ("numpy", "scipy", "ortools", "cvxpy", "clarabel"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", help="write the rows as JSON")
    arguments = parser.parse_args()
    rows = measure()
    show(rows)
    if arguments.out:
        with open(arguments.out, "w", encoding="utf-8") as file:
            json.dump({"versions": versions(), "rows": rows}, file, indent=1)


if __name__ == "__main__":
    main()
