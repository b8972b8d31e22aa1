"""Scheduling benchmark: its quick run, its verdicts on stubs, its bounds against enumeration, and its peers."""

from __future__ import annotations

import itertools
import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench import scheduling, scheduling_bounds, scheduling_peers, scheduling_rows
from bench.scheduling_balance import internode_volume
from bench.scheduling_report import lines, summary
from bench.scheduling_rows import Row, Solver, measure
from interlace import balance, plan
from tests.plan.oobleck import every_template


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    out = tmp_path_factory.mktemp("scheduling") / "scheduling.json"
    result = scheduling.main(["--quick", "--out", str(out)])
    assert json.loads(out.read_text()) == json.loads(json.dumps(result))
    return result


@pytest.mark.slow
def test_the_quick_run_measures_every_part(report):
    assert {row["part"] for row in report["rows"]} == set(scheduling.PARTS)
    assert {"cpu", "cores"} <= set(report["machine"]) and {"python", "interlace"} <= set(report["versions"])
    assert report["command"].startswith("python -m bench.scheduling --quick")
    for row in report["rows"]:
        assert next(iter(row["solvers"])) == "interlace"
        for each in row["solvers"].values():
            assert math.isfinite(each["ms"]) and 0 < each["best_ms"] <= each["ms"] and each["runs"] >= 1
            assert math.isfinite(each.get("value", 0.0))


@pytest.mark.slow
def test_our_answers_keep_what_the_rows_ask(report):
    assert scheduling.failures(report) == []
    asked = {name for row in report["rows"] for name in row["met"]}
    assert {"time", "gap", "not below the bound", "equal counts"} <= asked


@pytest.mark.slow
def test_targets_are_those_of_the_project(report):
    targets = {row["problem"]: (row["target_ms"], row["target_gap"]) for row in report["rows"] if row["target_ms"]}
    expected = {
        "8,192 token blocks to 16 ranks, packed": (1.0, 0.001),
        "153,600 sequences to 2,560 ranks, 60 each": (15.0, 0.001),
        "node-wise placement, 256 ranks, 8 per node": (50.0, 0.02),
        "bottleneck matching 256 x 256, uniform": (2.0, None),
        "deferral, 128 microbatches of 64 samples, tokens": (10.0, None),
        "partition 10,000 layers into 512 stages": (5.0, None),
        "orchestrate 1,296 GPUs, batch 1,920, vpp 1": (10.0, None),
        "template, 24 nodes x 1 GPUs x 96 layers": (1000.0, None),
        "instantiate, 1,000 nodes, batch 8,192": (100.0, None),
    }
    assert expected.items() <= targets.items()
    simulated = [target for name, (target, _) in targets.items() if name.startswith("simulate ")]
    assert simulated == [pytest.approx(1e-3 * 25_080)]
    assert {target for name, (target, _) in targets.items() if "write, prove and simulate" in name} == {1000.0}


@pytest.mark.slow
def test_rows_and_summary_are_printed(report):
    row = next(row for row in report["rows"] if row["problem"].startswith("8,192"))
    text = lines(row)
    assert "target 1 ms, gap 0.1%" in text[0] and "equal counts" in text[1] and len(text) >= 3
    assert len(summary(report["rows"])) == 1 + sum(row["target_ms"] is not None for row in report["rows"])


def counted(answer, calls):
    def solve():
        calls.append(answer)
        return answer

    return solve


def test_verdicts():
    solvers = [
        Solver("ours", lambda: 10.0),
        Solver("exact", lambda: 10.0 + 1e-7, ours="equal"),
        Solver("better than ours", lambda: 9.5, ours="at most"),
        Solver("heuristic", lambda: 12.0, ours="at most", proves=lambda answer: 8.0),
        Solver("missing", lambda: 0.0, ours="equal", needs="no_such_package"),
        Solver("broken", lambda: 1 / 0, ours="equal"),
        Solver("found nothing", lambda: math.inf, proves=lambda answer: -math.inf, ours="at most"),
    ]
    row = Row(
        "p",
        solvers,
        "heaviest",
        float,
        bound=7.0,
        target_ms=1e4,
        target_gap=0.1,
        properties={"ten": lambda answer: answer == 10.0},
        quoted_ms={"paper": 500.0},
    )
    record = measure(row, repeats=3, seconds=100.0)
    assert record["bound"] == 8.0 and "missing" not in record["solvers"]
    assert record["solvers"]["broken"] == {"failed": "ZeroDivisionError: division by zero"}
    assert not {"value", "proved_bound", "gap"} & set(record["solvers"]["found nothing"])
    ours, exact = record["solvers"]["ours"], record["solvers"]["exact"]
    assert ours["gap"] == pytest.approx(0.25) and ours["runs"] == 3 and ours["properties"] == {"ten": True}
    assert exact["ratio"] == exact["ms"] / ours["ms"] and exact["properties"] == {"ten": False}
    assert record["quoted"]["paper"]["ratio"] == 500.0 / ours["ms"]
    assert record["met"] == {
        "time": True,
        "not below the bound": True,
        "gap": False,
        "ten": True,
        "equal exact": True,
        "at most better than ours": False,
        "at most heuristic": True,
    }
    text = "\n".join(lines(record))
    assert "MISSED: gap, at most better than ours" in text and "failed: ZeroDivisionError" in text
    assert scheduling.failures({"rows": [record]}) == ["p: gap", "p: at most better than ours"]


def test_a_value_below_the_bound_is_a_failure_and_time_is_not():
    record = measure(Row("p", [Solver("ours", lambda: 1.0)], value=float, bound=2.0, target_ms=0.0), 1, 1.0)
    assert record["met"] == {"time": False, "not below the bound": False}
    assert scheduling.failures({"rows": [record]}) == ["p: not below the bound"]


def test_slow_solvers_run_once_and_our_failures_are_raised(monkeypatch):
    ours, slow, quick = [], [], []
    solvers = [
        Solver("ours", counted(1.0, ours)),
        Solver("slow", counted(1.0, slow)),
        Solver("quick", counted(1.0, quick)),
    ]
    # A clock by which each call takes 1 ms, except those of the slow one: 30 ms.
    monkeypatch.setattr(scheduling_rows, "CLOCK", lambda call: (call(), 30.0 if call is solvers[1].solve else 1.0))
    record = measure(Row("p", solvers), repeats=4, seconds=0.02)
    assert (len(ours), len(slow), len(quick)) == (5, 1, 5)  # one call of the others warms up
    assert record["solvers"]["slow"]["runs"] == 1 and record["solvers"]["slow"]["ms"] == 30
    assert record["solvers"]["ours"]["runs"] == 4 and record["bound"] is None and record["met"] == {}
    with pytest.raises(ZeroDivisionError):
        measure(Row("p", [Solver("ours", lambda: 1 / 0)]), 1, 1.0)
    with pytest.raises(ValueError, match="our value is nan"):
        measure(Row("p", [Solver("ours", lambda: math.nan)], value=float), 1, 1.0)


@pytest.mark.parametrize("argv", [["--only", "balance,nonsense"], ["--repeats", "0"], ["--nonsense"]])
def test_bad_arguments_are_refused(argv, capsys):
    with pytest.raises(SystemExit):
        scheduling.parse(argv)
    assert "nonsense" in (text := capsys.readouterr().err) or "at least 1" in text


def test_parts_are_chosen():
    assert scheduling.parse(["--only", "plan,balance"]).only == ["plan", "balance"]


def test_only_a_whole_run_replaces_the_report():
    assert scheduling.parse([]).out.name == "scheduling.json"
    assert scheduling.parse(["--quick"]).out is None and scheduling.parse(["--only", "plan"]).out is None


# Bounds, against enumeration


@st.composite
def rows_to_cut(draw):
    layers, stages = draw(st.integers(1, 6)), draw(st.integers(1, 4))
    row = lambda least, most, n: np.array(draw(st.lists(st.integers(least, most), min_size=n, max_size=n)), float)  # noqa: E731
    costs, speeds = row(0, 9, layers), row(1, 3, stages)
    memory, limits = row(0, 9, layers), row(0, 30, stages)
    return costs, stages, speeds, memory, limits


@given(rows_to_cut())
def test_partition_bound_is_the_best_of_all_cuts(case):
    costs, stages, speeds, memory, limits = case
    best = math.inf
    for inner in itertools.combinations_with_replacement(range(len(costs) + 1), stages - 1):
        cuts = (0, *inner, len(costs))
        parts = [slice(a, b) for a, b in itertools.pairwise(cuts)]
        if all(memory[part].sum() <= limit for part, limit in zip(parts, limits)):
            best = min(best, max(costs[part].sum() / speed for part, speed in zip(parts, speeds)))
    assert scheduling_bounds.partition(costs, stages, speeds, memory, limits) == pytest.approx(best, abs=1e-9)


@settings(max_examples=25)
@given(st.integers(0, 10**6))
def test_template_bound_is_below_the_best_template_and_near_it(seed):
    rng = np.random.default_rng(seed)
    nodes, gpus = int(rng.integers(1, 4)), int(rng.integers(1, 3))
    costs = rng.uniform(1, 10, (int(rng.integers(nodes, 7)), 1)) / np.arange(1, gpus + 1) ** 0.8
    best = every_template(costs.tolist(), nodes, gpus, list(range(1, gpus + 1)), 4)
    bound = scheduling_bounds.template(costs, nodes, gpus, best)
    assert 0.8 * best < bound <= best * (1 + 1e-12)
    # It depends on the costs and not on the given value.
    assert scheduling_bounds.template(costs, nodes, gpus, 2 * best) <= best * (1 + 1e-12)


@pytest.mark.parametrize("vpp", [1, 2])
@pytest.mark.parametrize("memory", [math.inf, 5.0])
@pytest.mark.parametrize("seed", range(4))
def test_orchestration_bounds(seed, memory, vpp):
    rng = np.random.default_rng(seed)
    tp, names, layers = np.array([1, 2]), ("encoder", "language_model", "generator"), (4, 8, 4)
    works = {
        name: plan.ModuleWork(list(rng.uniform(1, 9) / tp**0.8), depth, *rng.uniform(0.1, 3, 3))
        for name, depth in zip(names, layers)
    }
    result = plan.orchestrate(works, 24, 12, tp=tp, vpp=vpp, gpu_memory=memory).iteration_time
    forward = [work.forward for work in works.values()]
    held = [(work.weight_bytes, work.optimizer_bytes, work.activation_bytes) for work in works.values()]
    best = scheduling_bounds.orchestration_of_layers(forward, layers, held, 1, tp, 24, 12, vpp, memory)
    assert result == pytest.approx(best, rel=1e-12)
    assert 0 < scheduling_bounds.orchestration(forward, 1, tp, 24, 12, vpp) <= best


# Installed peers, against known results


def test_milp_peers():
    pytest.importorskip("scipy")
    rng = np.random.default_rng(0)
    weights = rng.integers(1, 100, 9)
    solved = scheduling_peers.milp_makespan(weights, 3, 10.0)
    assert solved.value == pytest.approx(balance.assign_exact(weights, 3).makespan) == solved.bound
    best = min(abs(sum(s) - 200) for r in range(10) for s in itertools.combinations(weights.tolist(), r))
    assert scheduling_peers.milp_subset(weights, 200, 10.0).value == pytest.approx(best, abs=1e-6)
    times = rng.uniform(1, 3, 4)
    every = [c for c in itertools.product(range(1, 8), repeat=4) if sum(c) == 10]
    split = min(float((np.array(c) * times).max()) for c in every)
    assert scheduling_peers.milp_split(times, 10, 10.0).value == pytest.approx(split)
    volume = rng.integers(0, 50, (6, 6)).astype(float)
    placed = min(internode_volume(volume, np.array(p), 2).max() for p in itertools.permutations(range(6)))
    assert scheduling_peers.milp_nodewise(volume, 2, 10.0).value == pytest.approx(placed)
    sizes, each = np.array([2, 3, 4]), np.array([3.1, 2.2, 1.7])
    mixes = [np.repeat(each, c) for c in itertools.product(range(6), repeat=3) if np.dot(c, sizes) == 11 and sum(c) > 1]
    time_of = lambda mix: float((plan.split_batch(mix, 20) * mix).max())  # noqa: E731
    result = scheduling_peers.milp_instantiate(sizes, each, 11, 2, 20)
    assert result.value == pytest.approx(min(map(time_of, mixes)), rel=1e-6) and result.bound <= result.value


def test_scipy_peers():
    pytest.importorskip("scipy")
    rng = np.random.default_rng(1)
    cost, alone = rng.integers(0, 20, (4, 4)).astype(float), np.array([15.0, 9.0, np.inf, np.inf])
    best = math.inf
    for order in itertools.permutations(range(4)):
        best = min(best, max(min(cost[i, j], alone[i]) for i, j in enumerate(order)))
    assert scheduling_peers.scipy_bottleneck(cost, alone) == best <= scheduling_peers.scipy_sum(cost, alone)
    volume = rng.integers(0, 50, (6, 6)).astype(float)
    kept = lambda ranks: volume.sum() - internode_volume(volume, ranks, 2).sum()  # noqa: E731
    most = max(kept(np.array(p)) for p in itertools.permutations(range(6)))
    assert kept(scheduling_peers.scipy_nodewise_sum(volume, 2)) == most


def test_cp_sat_peers():
    pytest.importorskip("ortools")
    rng = np.random.default_rng(2)
    weights = rng.integers(1, 100, 9)
    assert scheduling_peers.cp_sat_makespan(weights, 3, 10.0).value == balance.assign_exact(weights, 3).makespan
    assert scheduling_peers.cp_sat_subset(weights, 200, 10.0) == scheduling_peers.milp_subset(weights, 200, 10.0)
    volume = rng.integers(0, 50, (6, 6)).astype(float)
    placed = min(internode_volume(volume, np.array(p), 2).max() for p in itertools.permutations(range(6)))
    assert scheduling_peers.cp_sat_nodewise(volume, 2, 10.0).value == placed
    times = np.array([1.25, 2.5, 1.75])
    every = [np.array(c) * times for c in itertools.product(range(1, 11), repeat=3) if sum(c) == 12]
    assert scheduling_peers.cp_sat_split(times, 12, 10.0).value == pytest.approx(min(each.max() for each in every))
    spread = min(3 * each.var() for each in every)
    assert scheduling_peers.cp_sat_split_variance(times, 12, 10.0).value == pytest.approx(spread)


def test_prtpy_peer():
    pytest.importorskip("prtpy")
    weights = np.array([5.0, 4.0, 3.0, 3.0, 3.0])
    for algorithm in ("greedy", "kk"):
        loads = np.bincount(scheduling_peers.prtpy_assign(algorithm, weights, 2), weights, 2)
        assert loads.sum() == 18 and loads.max() <= 10


def test_peers_apart():
    pytest.importorskip("pyomo")
    pytest.importorskip("clarabel")
    times = [1.0, 2.0, 1.5]
    best = (plan.split_batch(times, 12) * times).max()
    assert scheduling_peers.apart(scheduling_peers.pyomo_split, times, 12)() == pytest.approx(best)
    relaxed, gpus = scheduling_peers.apart(scheduling_peers.clarabel_orchestration, [1.0, 3.0], [1, 1], 9.0, 8)()
    assert relaxed == pytest.approx(4.0 + 9.0 * 0.5, rel=1e-4) and gpus == pytest.approx([2.0, 6.0], rel=1e-3)
