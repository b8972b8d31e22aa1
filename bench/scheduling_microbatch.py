"""Microbatches and their order: the microbatch part of `bench.scheduling`.

Bottleneck matching, deferral and subset sums (Entrain), reordering (DistTrain), the event simulator,
schedules with split backwards.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np

from bench import scheduling_peers as peers
from bench.scheduling_rows import Row, Solver, cp_sat, milp
from interlace import _core, balance
from interlace.schedule import Op, Schedule, StageGraph, StepTable, check, lower_bound, one_f_one_b, zb_h1, zb_h2
from interlace.schedule.actions import OP, OPS
from interlace.simulate import Simulated, simulate, simulate_arrays
from tests.simulate.reference import simulate_in_python


def matchings(quick: bool) -> Iterator[Row]:
    """Entrain's bottleneck matching, dissertation 4.5.2: the largest cost of any row."""
    rng = np.random.default_rng(0)
    for size in (32, 256) if quick else (32, 128, 256):
        loads = np.sort(rng.lognormal(5.0, 0.5, 2 * size))
        deferral = np.maximum(np.add.outer(loads[size:], loads[:size]) / 2, loads[:size]) + rng.random((size, size))
        for name, cost, alone in (
            ("uniform", rng.random((size, size)), np.full(size, np.inf)),
            ("deferral", deferral, loads[size:]),
            ("integers", rng.integers(0, 1000, (size, size)).astype(float), np.full(size, np.inf)),
        ):
            bisection, total = partial(peers.scipy_bottleneck, cost, alone), partial(peers.scipy_sum, cost, alone)
            solvers = [
                Solver("interlace", partial(balance.bottleneck_match, cost, alone), lambda found: found[0]),
                Solver("scipy maximum_bipartite_matching + bisection", bisection, float, float, "equal", "scipy"),
                Solver("scipy linear_sum_assignment (the sum)", total, ours="at most", needs="scipy"),
            ]
            yield Row(f"bottleneck matching {size} x {size}, {name}", solvers, "costliest row", float, target_ms=2.0)


def deferrals(quick: bool) -> Iterator[Row]:
    """K = 128 microbatches of 64 samples: the matrix of equation 4.3 and the matching; then all of algorithm 4.

    With integer costs both are exact. Other costs are rounded to 1/16384 of a microbatch per sample, here and in the
    printed procedure, so the two agree only within that.
    """
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
        solvers = [Solver("interlace", partial(_deferral, over, under, alone))]
        if not quick:
            printed = partial(_deferral_as_printed, over, under, alone)
            exact = {"proves": float, "ours": "equal"} if name == "tokens" else {}
            solvers.append(Solver("one table per pair as printed (numpy)", printed, needs="scipy", **exact))
        problem = f"deferral, {count} microbatches of {each} samples, {name}"
        # A pair's best load is an even share; then the heaviest is paired with the lightest.
        bound = (alone + np.sort(under)).max() / 2
        yield Row(problem, solvers, "heaviest LLM microbatch", float, bound=bound, target_ms=10.0)

        encoder = rng.lognormal(5.0, 1.0, count * each)
        assign = partial(balance.assign_microbatches, encoder, llm, count)
        result, printed = assign(), assign(as_printed=True)
        before = np.bincount(printed.encoder_of, weights=llm).max()
        yield Row(
            f"assign_microbatches, {count * each:,} samples to {count}, {name}",
            [
                Solver("interlace", assign),
                Solver("algorithm 4 as printed", partial(assign, as_printed=True), ours="at most"),
            ],
            "heaviest LLM microbatch",
            lambda plan: plan.llm_bottleneck,
            bound=result.llm_bound,
            target_ms=10.0,
            notes={
                "LLM over bound as printed, without deferral": before / result.llm_bound - 1,
                "encoder over bound": result.encoder_loads.max() / result.encoder_bound - 1,
                "encoder over bound as printed": printed.encoder_loads.max() / printed.encoder_bound - 1,
                "deferred samples": len(result.deferred),
            },
        )


def _deferral(over: list[np.ndarray], under: np.ndarray, alone: np.ndarray) -> float:
    return balance.bottleneck_match(_core.deferral_costs(over, under), alone)[0]


def _deferral_as_printed(over: list[np.ndarray], under: np.ndarray, alone: np.ndarray) -> float:
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
    return peers.scipy_bottleneck(cost, alone)


def subset_sums(quick: bool, limit: float) -> Iterator[Row]:
    """One subset sum: the remaining distance to half the total."""
    rng = np.random.default_rng(0)
    for items, largest in ((64, 4000), (500, 4000), (64, 100_000))[: 1 if quick else None]:
        weights = rng.integers(1, largest, items)
        target = int(weights.sum()) // 2

        def distance(chosen: np.ndarray, weights: np.ndarray = weights, target: int = target) -> float:
            return float(abs(weights[chosen].sum() - target))

        solvers = [
            Solver("interlace", partial(balance.subset_sum, weights, target), distance),
            cp_sat(partial(peers.cp_sat_subset, weights, target, limit)),
            milp(partial(peers.milp_subset, weights, target, limit)),
        ]
        yield Row(f"subset sum, {items} weights up to {largest:,}", solvers, "distance to half the total")


def reorders(quick: bool) -> Iterator[Row]:
    """DistTrain 6.2: seconds of a step whose encoder stage varies, all by the event simulator; then 6.1."""
    rng = np.random.default_rng(0)
    for count, ranks, chunks in ((7, 4, 1), (16, 4, 1), (64, 8, 1), (64, 8, 2))[: 2 if quick else None]:
        forward = rng.uniform(0.95, 1.05, (count, ranks * chunks))
        forward[:, 0] *= rng.lognormal(0.0, 0.6, count)
        backward = 2 * forward
        run = partial(balance.reorder_microbatches, forward, backward, ranks=ranks)
        given = partial(_core.pipeline_makespan, forward, backward, ranks, 0.0)
        solvers = [
            Solver("interlace", partial(run, evaluations=6000)),
            Solver("algorithm 3 as printed", partial(run, evaluations=0), ours="at most"),
            Solver("given order", partial(given, np.arange(count)), float, ours="at most"),
        ]
        if count <= 7:
            best = partial(_best_order, given, count)
            solvers.append(Solver("best of all permutations", best, float, float, "equal"))
        result = run()
        yield Row(
            f"reorder {count} microbatches, {ranks} ranks x {chunks}",
            solvers,
            "seconds of the step",
            lambda order: order.seconds,
            bound=result.bound,
            notes={"orders tried": result.evaluations},
        )

    cost = rng.lognormal(5.8, 1.0, 64 * 16)
    deal = partial(balance.reorder_samples, cost, 64)
    yield Row(
        "reorder 1,024 samples to 64 groups",
        [
            Solver("interlace", deal),
            Solver("algorithm 2 as printed", partial(deal, as_printed=True), ours="at most"),
        ],
        "heaviest group",
        lambda found: float(np.bincount(found.group_of, weights=cost).max()),
        bound=balance.lower_bound(cost, 64, capacity=16),
    )


def _best_order(given: partial[float], count: int) -> float:
    return min(given(np.array(order)) for order in itertools.permutations(range(count)))


def simulations(quick: bool) -> Iterator[Row]:
    """Events of 1F1B on 64 ranks: the step's length."""
    microbatches = 66 if quick else 2640
    graph = StageGraph.build({"m": list(range(64))})
    table = StepTable.aligned((), [graph.modules] * microbatches)
    schedule = one_f_one_b(graph, table, reduce_grad=False)
    actions = len(schedule.rows)
    durations = {Op.FORWARD: 1.0, Op.BACKWARD: 2.0}
    seconds = np.array([durations.get(op, 0.0) for op in OPS])[schedule.rows[:, OP]]
    solvers = [
        Solver("interlace", partial(simulate_arrays, schedule, seconds)),
        Solver("simulate() of Action objects", partial(simulate, schedule, durations), ours="equal"),
        Solver("the same in Python", partial(simulate_in_python, schedule, durations), ours="equal"),
    ]
    yield Row(
        f"simulate {actions:,} actions",
        solvers,
        "seconds of the step",
        lambda timeline: timeline.makespan,
        # The last of 64 stages starts after 63 forwards, and is then busy; the gradients travel back.
        bound=63 * 1.0 + microbatches * 3.0 + 63 * 2.0,
        target_ms=1e-3 * actions,
    )


def generations(quick: bool) -> Iterator[Row]:
    """Split schedules of 128 stages and 1,024 chunks: built, proved and simulated, within one second."""
    stages, microbatches = (32, 128) if quick else (128, 1024)
    graph = StageGraph.build({"m": list(range(stages))})
    table = StepTable.aligned((), [graph.modules] * microbatches)
    costs = {Op.FORWARD: 1.0, Op.BACKWARD: 2.0, Op.BACKWARD_INPUT: 1.0, Op.BACKWARD_WEIGHT: 1.0}
    of_op = np.array([costs.get(op, 0.0) for op in OPS])

    def made(generate: Callable[..., Schedule]) -> tuple[Schedule, Simulated]:
        schedule = generate(graph, table)
        check(schedule)
        return schedule, simulate_arrays(schedule, of_op[schedule.rows[:, OP]])

    bound = lower_bound(graph, table, costs)
    for generate in (zb_h1, zb_h2, one_f_one_b):
        split = generate is not one_f_one_b
        yield Row(
            f"{generate.__name__}: write, prove and simulate {stages} stages x {microbatches:,} chunks",
            [Solver("interlace", partial(made, generate))],
            "seconds of the step",
            lambda found: found[1].makespan,
            bound=bound,
            target_ms=1000.0,
            target_gap=1e-9 if split else None,
            notes={"actions": len(generate(graph, table).rows)},
        )


def rows(quick: bool, limit: float) -> Iterator[Row]:
    """All rows of this part; limit: seconds that an exact peer may take for one instance."""
    yield from matchings(quick)
    yield from deferrals(quick)
    yield from subset_sums(quick, limit)
    yield from reorders(quick)
    yield from simulations(quick)
    yield from generations(quick)
