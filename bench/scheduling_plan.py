"""Cuts and placements: the planning part of `bench.scheduling`.

Pipeline templates, instantiation and batch shares (Oobleck), contiguous partition, orchestration (DistTrain), the
search for a whole configuration. Bounds come from `bench.scheduling_bounds`, which shares no code with the planner.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np

from bench import scheduling_bounds as bounds
from bench import scheduling_peers as peers
from bench.printed_oobleck import combinations, divide_and_conquer
from bench.scheduling_rows import Row, Solver, cp_sat, installed, milp
from interlace import plan

PAPER = "the paper on its machine"


def templates(quick: bool) -> Iterator[Row]:
    """Sizes of dissertation table 2.3; then the printed divide and conquer on inputs that are feasible in Python."""
    rng = np.random.default_rng(0)
    for nodes, gpus, layers, seconds in (
        (8, 8, 96, 109.76),
        (16, 8, 96, 1213.63),
        (24, 1, 96, 1477.54),
        (24, 8, 96, 3297.92),
    ):
        costs = rng.lognormal(0, 0.3, (layers, 1)) / np.arange(1, gpus + 1) ** 0.8
        if quick and nodes * gpus != 24:
            continue
        result = plan.pipeline_template(costs, nodes, gpus).iteration_time
        yield Row(
            f"template, {nodes} nodes x {gpus} GPUs x {layers} layers",
            [Solver("interlace", partial(plan.pipeline_template, costs, nodes, gpus))],
            "T1 + T2 + T3",
            lambda template: template.iteration_time,
            bound=bounds.template(costs, nodes, gpus, result),
            target_ms=1000.0,
            quoted_ms={PAPER: 1e3 * seconds},
        )
    rng = np.random.default_rng(3)
    cases = [
        (rng.integers(1, 30, (int(layers), 1)), int(nodes), 1)
        for layers, nodes in rng.integers((6, 3), (12, 6), (10 if quick else 150, 2))
    ]
    theirs = np.array([divide_and_conquer(*case) for case in cases])
    over = theirs / [plan.pipeline_template(*case).iteration_time for case in cases] - 1
    yield Row(
        f"{len(cases)} templates, 3 to 5 nodes x 1 GPU x 6 to 11 layers",
        [
            Solver("interlace", lambda: [plan.pipeline_template(*case).iteration_time for case in cases]),
            Solver("divide and conquer as printed (Python)", lambda: [divide_and_conquer(*case) for case in cases]),
        ],
        "sum of T1 + T2 + T3",
        lambda found: float(np.sum(found)),
        properties={"none above the paper's": lambda found: (np.array(found) <= theirs).all()},
        notes={"above ours as printed": f"{(over > 0).sum()} of {len(cases)}", "by at most": float(over.max())},
    )


def instantiations(quick: bool) -> Iterator[Row]:
    """Combinations of templates: HiGHS by bisection over the time; the paper's list of combinations for 30 nodes."""
    rng = np.random.default_rng(0)
    for nodes, batch in ((30, 256), (1000, 8192)):
        sizes = plan.node_counts(nodes, 2, 3)
        times = 100.0 / sizes**1.05 * rng.uniform(1.0, 1.02, len(sizes))
        run = partial(plan.instantiate, sizes, times, nodes, faults=2, microbatches=batch)
        solvers = [Solver("interlace", run, lambda found: found.time)]
        if nodes == 30:
            listed = partial(_listed, sizes, times, nodes, batch)
            solvers.append(Solver("every combination listed (eq. 2.5, Python)", listed, float, float, "equal"))
        if nodes == 30 or not quick:
            bisection = partial(peers.milp_instantiate, sizes, times, nodes, 3, batch)
            solvers.append(milp(bisection, "equal"))
        yield Row(f"instantiate, {nodes:,} nodes, batch {batch:,}", solvers, "slowest pipeline", float, target_ms=100.0)


def _listed(sizes: np.ndarray, times: np.ndarray, nodes: int, batch: int) -> float:
    """Every combination, with our batch shares."""
    best = np.inf
    for counts in combinations(sizes.tolist(), nodes, 3):
        each = np.repeat(times, counts)
        best = min(best, float((plan.split_batch(each, batch) * each).max()))
    return best


def shares(quick: bool, limit: float) -> Iterator[Row]:
    """Batch shares: min-max, and eq. 2.6 (times in integer thousandths, so that CP-SAT has the same problem)."""
    times, batch = np.round(np.random.default_rng(0).uniform(1.0, 3.0, 24), 3), 512
    solvers = [
        Solver("interlace", partial(plan.split_batch, times, batch), lambda counts: (counts * times).max()),
        milp(partial(peers.milp_split, times, batch, limit), "equal"),
        cp_sat(partial(peers.cp_sat_split, times, batch, limit), "equal"),
    ]
    if not quick and installed("pyomo", "highspy"):
        solvers.append(Solver("Pyomo + HiGHS", peers.apart(peers.pyomo_split, times.tolist(), batch), ours="equal"))
    yield Row("batch of 512 over 24 pipelines, min-max", solvers, "slowest pipeline", float)

    for count, batch in ((5, 32), (24, 512)):
        own = times[:count]

        def spread(counts: np.ndarray, own: np.ndarray = own) -> float:
            return float((counts * own).var() * len(own))

        solvers = [Solver("interlace", partial(plan.split_batch, own, batch, objective="variance"), spread)]
        if count == 5 or not quick:
            solvers.append(cp_sat(partial(peers.cp_sat_split_variance, own, batch, limit)))
        yield Row(f"batch of {batch} over {count} pipelines, eq. 2.6", solvers, "sum of squared differences")


def partitions(quick: bool) -> Iterator[Row]:
    """10,000 layers into 512 stages, plain, with speeds and with memory; the printed dynamic program on a shorter row.

    The target rows are compared with an exact peer: the same dynamic program with a bisection in place of its inner
    loop, in numpy. It may leave stages empty, so its value is a bound.
    """
    rng = np.random.default_rng(0)
    costs, speeds, limits = rng.lognormal(size=10_000), rng.uniform(0.5, 2.0, 512), np.linspace(60.0, 90.0, 512)
    cases: tuple[tuple[str, dict[str, Any]], ...] = (
        ("", {}),
        (", speeds", {"speeds": speeds}),
        (", memory", {"memory": costs, "memory_limits": limits}),
        (", speeds and memory", {"speeds": speeds, "memory": costs, "memory_limits": limits}),
    )
    for name, how in cases[: 1 if quick else None]:
        pace = how.get("speeds", 1.0)
        yield Row(
            f"partition 10,000 layers into 512 stages{name}",
            [
                Solver("interlace", partial(plan.partition, costs, 512, **how), partial(_slowest, costs, pace)),
                Solver(
                    "eq. 3.5 by bisection (numpy)", partial(bounds.partition, costs, 512, **how), float, float, "equal"
                ),
            ],
            "slowest stage",
            target_ms=5.0,
        )
    short = costs[:300]
    yield Row(
        "partition 300 layers into 24 stages",
        [
            Solver("interlace", partial(plan.partition, short, 24), partial(_slowest, short, 1.0)),
            Solver("eq. 3.5 as printed (numpy)", partial(_dynamic_program, short, 24), float, ours="equal"),
        ],
        "slowest stage",
    )


def _slowest(costs: np.ndarray, speeds: Any, cuts: np.ndarray) -> float:
    return float((np.add.reduceat(costs, cuts[:-1]) / speeds).max())


def _dynamic_program(costs: np.ndarray, stages: int) -> float:
    prefix = np.concatenate([[0.0], np.cumsum(costs)])
    best = prefix.copy()
    for _ in range(stages - 1):
        after = np.full_like(best, np.inf)
        for i in range(1, len(prefix)):
            after[i] = np.maximum(best[:i], prefix[i] - prefix[:i]).min()
        best = after
    return float(best[-1])


def orchestrations(quick: bool) -> Iterator[Row]:
    """1,296 GPUs and a batch of 1,920 (DistTrain table 2), with and without layers, VPP and memory.

    The bound is the best value of the paper's convex problem over all choices of TP and DP, without memory. If stages
    must divide the layers, it is the optimum: the best of all enumerated choices, with memory. cvxpy solves the convex
    problem for one choice, and the value is that solution rounded to whole stages, as in the paper.
    """
    gpus, batch, sizes = 1296, 1920, np.array([1, 2, 4, 8])

    def work(seconds: float, depth: int, weights: float, states: float, kept: float) -> plan.ModuleWork:
        return plan.ModuleWork(list(seconds / sizes**0.9), depth, weights, states, kept)

    def modules(layers: bool) -> dict[str, plan.ModuleWork]:
        return {
            "encoder": work(0.05, 32 * layers, 2e9, 8e9, 5e8),
            "language_model": work(2.0, 80 * layers, 280e9, 840e9, 30e9),
            "generator": work(0.2, 32 * layers, 4e9, 12e9, 2e9),
        }

    cases = list(itertools.product((False, True), (1, 2), (float("inf"), 80e9)))
    for layers, vpp, memory in [cases[0], cases[1]] if quick else cases:
        given = modules(layers)
        works = given.values()
        forward, depths = [work.forward for work in works], [work.layers for work in works]
        held = [(work.weight_bytes, work.optimizer_bytes, work.activation_bytes) for work in works]
        if layers:
            bound = bounds.orchestration_of_layers(forward, depths, held, 1, sizes, gpus, batch, vpp, memory)
        else:
            bound = bounds.orchestration(forward, 1, sizes, gpus, batch, vpp)
        run = partial(plan.orchestrate, given, gpus, batch, vpp=vpp, gpu_memory=memory)
        solvers = [Solver("interlace", run, lambda found: found.iteration_time)]
        if (layers, vpp, memory) == cases[0] and not quick and installed("cvxpy", "clarabel"):
            solvers.append(_clarabel(given, run(), gpus, batch))
        name = f"orchestrate {gpus:,} GPUs, batch {batch:,}{', layers' if layers else ''}, vpp {vpp}"
        name += ", 80 GB" if memory < float("inf") else ""
        yield Row(name, solvers, "seconds", bound=bound, target_ms=10.0, quoted_ms={PAPER: 922.0})


def _clarabel(modules: dict[str, plan.ModuleWork], best: plan.Orchestration, gpus: int, batch: int) -> Solver:
    dp = best.specs["language_model"].dp
    warm = [-(-dp // spec.dp) * modules[name].forward[int(np.log2(spec.tp))] for name, spec in best.specs.items()]
    widths = [spec.tp * spec.dp for spec in best.specs.values()]

    def rounded(solved: tuple[float, list[float]]) -> float:
        stages = [max(1, int(g / w + 1e-6)) for g, w in zip(solved[1], widths)]
        return sum(warm) + (batch / dp - 1) * max(w / pp for w, pp in zip(warm, stages))

    solve = peers.apart(peers.clarabel_orchestration, warm, widths, batch / dp - 1, gpus)
    return Solver("cvxpy + Clarabel, one choice of TP and DP", solve, rounded, ours="at most")


def searches(quick: bool) -> Iterator[Row]:
    """Degrees, placement and cuts of a whole model; Entrain's algorithm 3 splits the GPUs in only one way."""
    degrees = [(tp, cp) for tp in (1, 2, 4, 8) for cp in (1, 2)]

    def module(seconds: float, layers: int, weight: float, hidden: float, frozen: bool) -> plan.SearchModule:
        base = seconds / layers * np.random.default_rng(layers).uniform(0.9, 1.1, layers)
        forward = {(tp, cp): base / (tp * cp) ** 0.9 for tp, cp in degrees}
        backward = {key: row * (0 if frozen else 2) for key, row in forward.items()}
        weights, hiddens = np.full(layers, weight / layers), np.full(layers, hidden)
        trained = weights * (not frozen)
        reduces = np.full(layers, 2.0)  # after attention and after the MLP
        return plan.SearchModule(forward, backward, weights, trained, 6 * trained, 34 * hiddens, 2 * hiddens, reduces)

    modules = {
        "vision": module(0.6, 32, 12e9, 2e7, False),
        "audio": module(0.2, 24, 1.2e9, 1e7, True),
        "language_model": module(2.0, 80, 140e9, 7e7, False),
    }
    # 200 Gbit/s between nodes, and 300 GB/s inside one.
    slow, fast = plan.LinkModel(1e-5, 1 / 25e9), plan.LinkModel(5e-6, 1 / 300e9)
    links = {"stage_link": slow, "tensor_link": fast, "data_link": slow}
    for gpus, batch in ((24, 192), (1296, 1920))[: 1 if quick else None]:
        run = partial(plan.search_configuration, modules, gpus, batch, 1, gpu_memory=80e9, **links)
        proportional = partial(run, allocation="proportional")
        yield Row(
            f"search a configuration, {gpus:,} GPUs, batch {batch:,}, 3 modules",
            [
                Solver("interlace", run),
                Solver("interlace, GPUs in proportion (algorithm 3)", proportional, ours="at most"),
            ],
            "seconds",
            lambda found: found.iteration_time,
            target_ms=1000.0,
        )


def rows(quick: bool, limit: float) -> Iterator[Row]:
    """All rows of this part; limit: seconds that an exact peer may take for one instance."""
    yield from templates(quick)
    yield from instantiations(quick)
    yield from shares(quick, limit)
    yield from partitions(quick)
    yield from orchestrations(quick)
    yield from searches(quick)
