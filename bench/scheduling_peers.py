"""Peers of the scheduler: the same problems for prtpy, SciPy, OR-tools, cvxpy and Pyomo.

    pip install -e ".[peers]"        45 s and 1.2 GB; missing peers are left out and listed in the report

- prtpy: greedy and Karmarkar-Karp number partitioning in Python, without capacities.
- SciPy: HiGHS (`milp`), bipartite matching, the assignment problem. OR-tools: CP-SAT with two workers.
- cvxpy with Clarabel: the convex problem of DistTrain 5.2. Pyomo with HiGHS: Oobleck's batch shares as a linear integer
  program. These two run in a separate process: HiGHS's Python package, which both load, cannot be imported beside
  OR-tools in one process (1.15 beside 9.15: an undefined symbol).

Left out: Pyomo's MindtPy with glpk and ipopt, which Oobleck uses for its eq. 2.6. Neither solver's program is on PyPI,
and HiGHS supports no quadratic objective over integers; CP-SAT replaces it. CVXPY with CBC, which OrchMLLM uses for its
Algorithm 3, is represented by the same integer program in HiGHS.
"""

from __future__ import annotations

import atexit
import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from functools import cache
from typing import Any

import numpy as np

from bench.scheduling_rows import Solved


@cache
def _apart() -> ProcessPoolExecutor:
    pool = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))
    atexit.register(pool.shutdown)
    return pool


def apart(function: Callable[..., Any], *arguments: Any) -> Callable[[], Any]:
    """A call of the function in the process that has HiGHS's package, which adds about 0.2 ms to it.

    The function is called once immediately, so that no measurement includes starting the process and importing the
    peer. An exception in that call is ignored: the measured call raises it again, and it is reported there.
    """

    def call() -> Any:
        return _apart().submit(function, *arguments).result()

    with suppress(Exception):
        call()
    return call


# prtpy and SciPy


def prtpy_assign(algorithm: str, weights: np.ndarray, bins: int) -> np.ndarray:
    """The bin of each item by prtpy's "greedy" or "kk"."""
    import prtpy

    items = {i: int(weight) for i, weight in enumerate(weights)}
    parts = prtpy.partition(algorithm=getattr(prtpy.partitioning, algorithm), numbins=bins, items=items)
    bin_of = np.empty(len(weights), int)
    for number, part in enumerate(parts):
        bin_of[list(part)] = number
    return bin_of


def scipy_bottleneck(cost: np.ndarray, alone: np.ndarray) -> float:
    """`bottleneck_match`: the least threshold by bisection over the sorted values, each probe a maximum matching."""
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
    """The maximum that results from minimising the sum of min(cost, alone)."""
    from scipy.optimize import linear_sum_assignment

    capped = np.minimum(cost, alone[:, None])
    return float(capped[linear_sum_assignment(capped)].max())


def scipy_nodewise_sum(volume: np.ndarray, per_node: int) -> np.ndarray:
    """Placement that keeps the largest sum within nodes: every node offers per_node equivalent places."""
    from scipy.optimize import linear_sum_assignment

    d = len(volume)
    kept = volume.reshape(d // per_node, per_node, d).sum(axis=1)
    return np.argsort(linear_sum_assignment(np.repeat(kept, per_node, axis=0), maximize=True)[1])


# Integer programs for HiGHS. The last variable is minimised.


def _milp(constraints: list[tuple[Any, Any, Any]], whole: int, upper: Any, limit: float, lower: Any = 0.0) -> Solved:
    """min z over (x, z) with `whole` integers x; constraints are (matrix over (x, z), least, most)."""
    from scipy.optimize import Bounds, LinearConstraint, milp

    solved = milp(
        np.eye(whole + 1)[-1],
        constraints=[LinearConstraint(*each) for each in constraints],
        integrality=np.append(np.ones(whole), 0),
        bounds=Bounds(np.append(np.broadcast_to(lower, whole), 0.0), np.append(np.broadcast_to(upper, whole), np.inf)),
        options={"time_limit": limit, "mip_rel_gap": 1e-9},
    )
    bound = -np.inf if solved.mip_dual_bound is None else solved.mip_dual_bound
    return Solved(np.inf if solved.x is None else solved.fun, bound)


def milp_makespan(weights: np.ndarray, bins: int, limit: float) -> Solved:
    """`assign_exact`: the heaviest bin."""
    n = len(weights)
    each = np.hstack([np.kron(np.eye(n), np.ones(bins)), np.zeros((n, 1))])
    load = np.hstack([np.kron(weights[None], np.eye(bins)), -np.ones((bins, 1))])
    return _milp([(each, 1, 1), (load, -np.inf, 0)], n * bins, 1.0, limit)


def milp_nodewise(volume: np.ndarray, per_node: int, limit: float) -> Solved:
    """`nodewise_placement`: OrchMLLM's Algorithm 3 as printed, d^2 / c binaries."""
    from scipy import sparse

    d = len(volume)
    nodes = d // per_node
    node_of = np.arange(d) // per_node
    # x[g, j]: batch j goes to node g. Rank i sends what its node does not keep.
    kept = sparse.hstack(
        [sparse.csr_array(np.where((node_of == g)[:, None], -volume, 0.0)) for g in range(nodes)] + [-np.ones((d, 1))]
    )
    none = sparse.csr_array((d, 1))
    batch = sparse.hstack([sparse.kron(np.ones((1, nodes)), sparse.eye_array(d)), none])
    node = sparse.hstack([sparse.kron(sparse.eye_array(nodes), np.ones((1, d))), none[:nodes]])
    constraints = [(kept.tocsr(), -np.inf, -volume.sum(1)), (batch.tocsr(), 1, 1), (node.tocsr(), per_node, per_node)]
    return _milp(constraints, nodes * d, 1.0, limit)


def milp_subset(weights: np.ndarray, target: int, limit: float) -> Solved:
    """`subset_sum`: the distance from the target."""
    rows = np.vstack([np.append(weights, -1.0), np.append(-weights, -1.0)])
    return _milp([(rows, -np.inf, [target, -target])], len(weights), 1.0, limit)


def milp_split(times: np.ndarray, batch: int, limit: float) -> Solved:
    """`split_batch`, min-max: the slowest pipeline."""
    n = len(times)
    slowest = np.hstack([np.diag(times), -np.ones((n, 1))])
    return _milp([(slowest, -np.inf, 0.0), (np.append(np.ones(n), 0.0), batch, batch)], n, np.inf, limit, lower=1.0)


def milp_instantiate(sizes: np.ndarray, times: np.ndarray, nodes: int, pipelines: int, batch: int) -> Solved:
    """`instantiate`: bisection over the slowest pipeline's time; a probe finds how many microbatches fit in it."""
    from scipy.optimize import Bounds, LinearConstraint, milp

    constraints = [LinearConstraint(sizes, nodes, nodes), LinearConstraint(np.ones(len(sizes)), pipelines, np.inf)]

    def fits(time: float) -> bool:
        runs = np.floor(time / times)
        # A pipeline that cannot run one microbatch in this time is excluded.
        most = np.where(runs > 0, np.inf, 0)
        solved = milp(-runs, constraints=constraints, integrality=np.ones(len(sizes)), bounds=Bounds(0, most))
        return solved.x is not None and round(-solved.fun) >= batch

    low, high = 0.0, float(times.max()) * batch
    while high - low > 1e-9 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return Solved(high, low)


# OR-tools CP-SAT


def _cp_sat(model: Any, limit: float, unit: float = 1.0) -> Solved:
    from ortools.sat.python import cp_model

    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = limit
    solver.parameters.num_workers = 2
    status = solver.solve(model)
    result = status in (cp_model.OPTIMAL, cp_model.FEASIBLE)
    return Solved(solver.objective_value * unit if result else np.inf, solver.best_objective_bound * unit)


def cp_sat_makespan(weights: np.ndarray, bins: int, limit: float) -> Solved:
    """`assign_exact`: the heaviest bin."""
    from ortools.sat.python import cp_model

    model = cp_model.CpModel()
    inside = [[model.new_bool_var("") for _ in range(bins)] for _ in weights]
    heaviest = model.new_int_var(0, int(weights.sum()), "")
    for choices in inside:
        model.add_exactly_one(choices)
    for b in range(bins):
        model.add(sum(int(w) * choices[b] for w, choices in zip(weights, inside)) <= heaviest)
    model.minimize(heaviest)
    return _cp_sat(model, limit)


def cp_sat_nodewise(volume: np.ndarray, per_node: int, limit: float) -> Solved:
    """`nodewise_placement`, integer volumes: the rank that sends most to other nodes."""
    from ortools.sat.python import cp_model

    d = len(volume)
    nodes = d // per_node
    model = cp_model.CpModel()
    on = [[model.new_bool_var("") for _ in range(d)] for _ in range(nodes)]
    most = model.new_int_var(0, int(volume.sum(1).max()), "")
    for j in range(d):
        model.add_exactly_one(on[g][j] for g in range(nodes))
    for choices in on:
        model.add(sum(choices) == per_node)
    for i in range(d):
        own = on[i // per_node]
        model.add(sum(int(v) * (1 - own[j]) for j, v in enumerate(volume[i]) if v) <= most)
    model.minimize(most)
    return _cp_sat(model, limit)


def cp_sat_subset(weights: np.ndarray, target: int, limit: float) -> Solved:
    """`subset_sum`: the distance from the target."""
    from ortools.sat.python import cp_model

    model = cp_model.CpModel()
    distance = model.new_int_var(0, int(weights.sum()), "")
    total = sum(int(w) * model.new_bool_var("") for w in weights)
    model.add(distance >= total - target)
    model.add(distance >= target - total)
    model.minimize(distance)
    return _cp_sat(model, limit)


def cp_sat_split(times: np.ndarray, batch: int, limit: float) -> Solved:
    """`split_batch`, min-max, times in integer millionths."""
    from ortools.sat.python import cp_model

    units = np.rint(times * 1e6).astype(int)
    model = cp_model.CpModel()
    slowest = model.new_int_var(0, int(units.max()) * batch, "")
    counts = [model.new_int_var(1, batch, "") for _ in units]
    model.add(sum(counts) == batch)
    for count, unit in zip(counts, units):
        model.add(count * int(unit) <= slowest)
    model.minimize(slowest)
    return _cp_sat(model, limit, 1e-6)


def cp_sat_split_variance(times: np.ndarray, batch: int, limit: float) -> Solved:
    """`split_batch` by eq. 2.6, times in integer thousandths: n times the sum of squares less the square of the sum."""
    from ortools.sat.python import cp_model

    units = np.rint(times * 1e3).astype(int)
    n, longest = len(units), int(units.max()) * batch
    model = cp_model.CpModel()
    counts = [model.new_int_var(1, batch, "") for _ in units]
    model.add(sum(counts) == batch)
    squares = []
    for count, unit in zip(counts, units):
        square = model.new_int_var(0, longest**2, "")
        model.add_multiplication_equality(square, [int(unit) * count, int(unit) * count])
        squares.append(square)
    total, squared = model.new_int_var(0, n * longest, ""), model.new_int_var(0, (n * longest) ** 2, "")
    model.add(total == sum(int(unit) * count for count, unit in zip(counts, units)))
    model.add_multiplication_equality(squared, [total, total])
    model.minimize(n * sum(squares) - squared)
    return _cp_sat(model, limit, 1e-6 / n)


# cvxpy and Pyomo, run in a separate process


def clarabel_orchestration(warm: list[float], widths: list[int], steady: float, gpus: int) -> tuple[float, list[float]]:
    """DistTrain's convex problem for one choice of TP and DP: (relaxed time, GPUs per module as real numbers).

    warm: seconds of a microbatch through each module with one stage; widths: TP x DP; steady: K - 1.
    """
    import cvxpy

    # Shares of the cluster and of the largest possible stage: Clarabel needs variables of similar size.
    share, slowest = cvxpy.Variable(len(warm), pos=True), cvxpy.Variable(pos=True)
    scale = max(warm)
    need = np.array(warm) / scale * np.array(widths) / gpus
    stages = [need[i] * cvxpy.inv_pos(share[i]) <= slowest for i in range(len(warm))]
    limits = [cvxpy.sum(share) <= 1, share >= np.array(widths) / gpus, *stages]
    problem = cvxpy.Problem(cvxpy.Minimize(slowest), limits)
    problem.solve(solver="CLARABEL")
    return float(sum(warm) + steady * scale * problem.value), [float(each) * gpus for each in share.value]


def pyomo_split(times: list[float], batch: int) -> float:
    """`split_batch`, min-max, by Pyomo's appsi interface to HiGHS: the slowest pipeline."""
    import pyomo.environ as pyo

    model = pyo.ConcreteModel()
    model.pipelines = pyo.RangeSet(0, len(times) - 1)
    model.count = pyo.Var(model.pipelines, domain=pyo.PositiveIntegers)
    model.slowest = pyo.Var(domain=pyo.NonNegativeReals)
    model.all = pyo.Constraint(expr=sum(model.count[i] for i in model.pipelines) == batch)
    model.each = pyo.Constraint(model.pipelines, rule=lambda m, i: times[i] * m.count[i] <= m.slowest)
    model.objective = pyo.Objective(expr=model.slowest)
    pyo.SolverFactory("appsi_highs").solve(model)
    return float(pyo.value(model.slowest))
