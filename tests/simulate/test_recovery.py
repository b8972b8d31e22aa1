"""Costs of failures: every second is counted once, dead nodes compute nothing, repairs are the planner's."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.printed_oobleck import combinations
from interlace import plan
from interlace.simulate.elastic_job import Cluster, Job, StateBytes
from interlace.simulate.failure_trace import Change, at_once, nodes_at_start
from interlace.simulate.pictures.recovery import plot_recovery
from interlace.simulate.recovery import (
    KINDS,
    Checkpoints,
    Oobleck,
    Pace,
    Rates,
    Redundant,
    Spent,
    book,
    replay,
    samples_over_time,
    throughput_over_time,
)
from tests.simulate.failure_trace import traces

SYSTEMS = (Oobleck, Checkpoints, Redundant)


def job(layers: int = 6, nodes: int = 6, **changes: Any) -> Job:
    """Layers of cost 1 + 3, of 10 bytes each."""
    ones = np.ones(layers)
    given = {
        "batch": 8,
        "microbatches": 8,
        "nodes": nodes,
        "copied": 10 * ones,
        "saved": 60.0,
        "loaded": 60.0,
    } | changes
    state = StateBytes(*(given.pop(name) for name in ("copied", "saved", "loaded")))
    samples = {name: given.pop(name) for name in ("batch", "microbatches")}
    return Job(ones, 3 * ones, **samples, cluster=Cluster(**given), state=state)


def counted(seconds: int, iteration: int, every: int, save: int, recovery: int, redo: int) -> dict[str, float]:
    """`book`, iteration by iteration."""
    now, spent = min(recovery, seconds), dict.fromkeys(("effective", "fallback", "saving", "done"), 0)
    while now + every * iteration + save <= seconds:
        for _ in range(every):
            spent["fallback" if spent["done"] < redo else "effective"] += iteration
            spent["done"] += 1
        spent["saving"] += save
        now += every * iteration + save
    spent["fallback"] += seconds - now
    return {**spent, "restarting": min(recovery, seconds)}


@given(
    seconds=st.integers(0, 200),
    iteration=st.integers(1, 20),
    every=st.integers(1, 4),
    save=st.integers(0, 9),
    recovery=st.integers(0, 60),
    redo=st.integers(0, 5),
)
def test_booked_as_counted_by_hand(seconds, iteration, every, save, recovery, redo):
    spent, done = book(seconds, Pace(iteration, every, save), 3, recovery=recovery, redo=redo)
    result = counted(seconds, iteration, every, save, recovery, redo)
    assert done == result.pop("done") and spent.samples == 3 * max(done - redo, 0)
    assert {kind: getattr(spent, kind) for kind in result} == result and spent.total == seconds
    assert spent.redundant == spent.waiting == 0


def test_who_is_warned_in_time_saves_what_is_done():
    # 35 seconds: a round of two iterations of 10 and a save of 3; then one more fits, with its save.
    spent, _ = book(35, Pace(10, 2, 3), 1)
    assert (spent.samples, spent.saving, spent.fallback) == (2, 3, 12)
    spent, _ = book(36, Pace(10, 2, 3), 1, saves_at_end=True)
    assert (spent.samples, spent.saving, spent.fallback) == (3, 6, 0)


def there_at(changes: list[Change], start: list[str], time: float) -> set[str]:
    """Nodes present just after `time`."""
    alive = set(start)
    for change in changes:
        if change.time <= time:
            (alive.add if change.event == "join" else alive.discard)(change.node)
    return alive


@settings(max_examples=25, deadline=None)
@given(
    changes=traces(),
    faults=st.integers(0, 1),
    least=st.integers(1, 2),
    layers=st.integers(2, 6),
    scale=st.sampled_from([0.01, 1.0, 50.0]),
)
def test_no_second_is_lost_and_dead_nodes_compute_nothing(changes, faults, least, layers, scale):
    nodes, until = 6, 30.0 + 1.5 * max((change.time for change in changes), default=0.0)
    own, start = job(layers, nodes=nodes, faults=faults, least_nodes=least), nodes_at_start(changes, nodes)
    for system in SYSTEMS:
        stretches = replay(system(own, Rates(unit=scale, network=1.0, save=30.0, load=10.0), start), changes, until)
        assert stretches[0].start == 0 and stretches[-1].stop == until
        assert all(a.stop == b.start for a, b in itertools.pairwise(stretches))
        for each in stretches:
            parts = [getattr(each.spent, kind) for kind in KINDS]
            assert min(parts) >= -1e-9 * until and sum(parts) == pytest.approx(each.stop - each.start)
            assert set(each.nodes) <= there_at(changes, start, each.start)
            assert len(set(each.nodes)) == len(each.nodes)
            assert each.nodes or (each.spent.samples == 0 and each.spent.waiting == pytest.approx(each.spent.total))
            assert each.spent.samples % own.batch == 0
        times, totals = samples_over_time(stretches)
        assert (np.diff(times) >= 0).all() and (np.diff(totals) >= 0).all()
        edges = np.linspace(0, until, 8)
        total = Spent.sum(each.spent for each in stretches).samples
        assert (throughput_over_time(stretches, edges) * np.diff(edges)).sum() == pytest.approx(total)


@pytest.mark.parametrize(("layers", "microbatches"), [(1, 2), (2, 3), (3, 2), (5, 4)])
def test_uses_the_most_nodes_layers_and_microbatches_allow(layers, microbatches):
    own = job(layers=layers, nodes=12, microbatches=microbatches)
    for nodes in range(2, 20):
        feasible = [
            used
            for used in range(nodes + 1)
            if any(2 <= sum(each) <= microbatches for each in combinations(own.sizes, used))
        ]
        assert sum(own.best_pipelines(nodes)) == max(feasible)


@settings(max_examples=40, deadline=None)
@given(changes=traces(), least=st.integers(1, 2))
def test_repairs_are_the_planners_and_use_all_nodes(changes, least):
    own, start = job(layers=12, nodes=6, least_nodes=least, microbatches=16), nodes_at_start(changes, 6)
    system = Oobleck(own, Rates(), start)
    alive = set(start)
    for together in at_once(changes):
        gone = {change.node for change in together if change.event == "fail"}
        came = [change.node for change in together if change.event == "join"]
        before = [list(nodes) for nodes in system.pipelines]
        system.change(gone, came)
        alive, now = (alive - gone) | set(came), system.pipelines
        if len(alive) < 2 * least:
            assert now == []
            continue
        assert sorted(node for nodes in now for node in nodes) == sorted(alive)
        if before and sum(node not in gone for nodes in before for node in nodes) >= 2 * least:
            result = plan.reconfigure(before, gone, own.sizes, faults=1)
            assert all(len(each.nodes) <= own.sizes[-1] for each in result)
            result = plan.admit([each.nodes for each in result], came, own.sizes, max_pipelines=16)
            assert now == [list(each.nodes) for each in result]
        elif not before:
            assert sorted(map(len, now)) == sorted(own.best_pipelines(len(alive)))


def test_nodes_that_come_move_no_layer_that_can_stay():
    own = job(layers=12, nodes=6, least_nodes=2)
    system = Oobleck(own, Rates(), list("abcdef"))
    before = [list(nodes) for nodes in system.pipelines]
    system.change([], ["g", "h"])
    assert system.pipelines == [*before, ["g", "h"]]


def test_only_what_a_node_lacks_is_copied():
    own = job(layers=6, nodes=6, least_nodes=2)
    system = Oobleck(own, Rates(network=5.0, regroup=1.0), list("abcdef"))
    before = {
        node: set(held) for nodes in system.pipelines for node, held in zip(nodes, own.layers_of_nodes(len(nodes)))
    }
    system.change(["a"], [])
    lacks = [
        len(set(held) - before[node])
        for nodes in system.pipelines
        for node, held in zip(nodes, own.layers_of_nodes(len(nodes)))
    ]
    assert max(lacks) > 0
    assert system.run(1e6)[0].restarting == pytest.approx(1.0 + max(lacks) * 10 / 5.0)


def test_lost_layer_is_read_from_checkpoint_and_steps_repeat():
    own = job(layers=2, nodes=4, least_nodes=2)  # two pipelines of two nodes, a layer each
    rates = Rates(start=7.0, load=6.0, every=10)
    system = Oobleck(own, rates, list("abcd"))
    assert system.pipelines == [["a", "b"], ["c", "d"]]
    iteration = own.iteration([2, 2])
    assert system.run(13.5 * iteration)[0].samples == 13 * own.batch
    system.change(["a", "c"], ["e", "f"])  # no node has the first layer
    spent, again = system.run(7.0 + 10.0 + 5 * iteration)
    assert spent.restarting == pytest.approx(17.0) and again == pytest.approx(3 * iteration)
    assert spent.samples == 2 * own.batch and spent.fallback == pytest.approx(3 * iteration)
    system.change([], ["g"])  # pipelines of two nodes leave it idle, and nothing is lost
    assert sorted(map(len, system.pipelines)) == [2, 2] and len(system.alive) == 5
    assert system.run(1e3 * iteration)[0].restarting < 17.0


def test_a_recovery_that_is_interrupted_has_brought_nothing():
    own = job(layers=2, nodes=4, least_nodes=2)
    rates = Rates(start=7.0, load=6.0, network=1.0, regroup=0.0)
    for seconds, restarts in ((16.0, True), (17.0, False)):
        system = Oobleck(own, rates, list("abcd"))
        system.run(1.0)
        system.change(["a", "c"], ["e", "f"])
        assert system.run(seconds)[0].restarting == seconds
        system.change([], ["g"])
        assert (system.run(1e3)[0].restarting == 17.0) == restarts
    for seconds, copied in ((9.0, 10.0), (10.0, 0.0)):  # a layer of 10 bytes
        system = Oobleck(own, rates, list("abcd"))
        system.change(["a"], ["e"])
        assert system.pipelines == [["e", "b"], ["c", "d"]]  # in place of the lost one
        system.run(seconds)
        system.change([], [])
        assert system.run(1e3)[0].restarting == copied


def test_too_few_nodes_wait_and_keep_their_layers():
    own = job(layers=2, nodes=4, least_nodes=2)
    system = Oobleck(own, Rates(start=100.0), list("abcd"))
    system.run(1.0)
    system.change(["a"], [])
    assert system.pipelines == [] and system.run(50.0)[0] == Spent(waiting=50.0)
    system.change([], ["e"])  # c has what a had
    assert len(system.pipelines) == 2 and system.run(1e3)[0].restarting < 100.0


def test_redundant_grid_restarts_only_if_two_neighbours_fail():
    own = job(layers=4, nodes=8, least_nodes=2)
    rates = Rates(start=40.0, load=60.0, network=1e9)
    assert own.grid(8, redundant=True).depth == 4  # one must have twice the memory
    for gone, restarts in ((["a"], False), (["a", "c"], False), (["a", "b"], True), (["a", "d"], True)):
        system = Redundant(own, rates, list("abcdefgh"))
        assert system.pipelines[0] == list("abcd")
        system.change(gone, [])
        assert (system.run(1e4)[0].restarting > 40.0) == restarts, gone


def test_a_redundant_stage_also_does_the_forward_of_the_next():
    own = job(layers=6, nodes=6)
    once, twice = (own.pipeline_seconds(3, 5, redundant=redundant) for redundant in (False, True))
    # 1F1B of equal stages: (microbatches + stages - 1) times forward and backward, 2 * (1 + 3) and 2 * (1 + 1 + 3).
    assert (once, twice) == (pytest.approx(7 * 8), pytest.approx(7 * 10))
    grid = own.grid(6, redundant=True)
    share = own.pipeline_seconds(grid.depth, -(-8 // grid.pipelines))
    assert grid.seconds * (1 - grid.redundant) == pytest.approx(share) and 0 < grid.redundant < 0.5
    assert grid.depth == min(
        range(2, 7), key=lambda depth: own.pipeline_seconds(depth, -(-8 // (6 // depth)), redundant=True)
    )


def test_nodes_of_several_ranks_have_as_many_stages():
    own = job(layers=12, nodes=4, stages_per_node=2)
    assert own.template(3).gpus.tolist() == [1] * 6
    assert [list(held) for held in own.layers_of_nodes(3)] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    assert own.pipeline_seconds(3, 4) == pytest.approx((4 + 5) * 8)
    assert max(job(layers=5, nodes=4, stages_per_node=2).sizes) == 2  # six stages have no layer each


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"least_nodes": 4}, "6 nodes cannot hold 2 pipelines of 4 nodes"),
        ({"least_nodes": 4, "stages_per_node": 2}, "4 nodes of 2 stages need more than the model's 6 layers"),
        ({"microbatches": 1}, "1 microbatches are too few for 2 pipelines"),
        ({"copied": np.ones(3)}, "different numbers of layers"),
    ],
)
def test_jobs_that_cannot_be_are_refused(changes, said):
    with pytest.raises(ValueError, match=said):
        job(**changes)


def test_a_job_on_too_few_nodes_has_no_grid():
    with pytest.raises(ValueError, match="1 nodes cannot hold the model: a pipeline needs at least 2"):
        job(least_nodes=2).grid(1)


def test_a_redundant_share_and_parts_of_iterations():
    spent, done = book(10.0, Pace(4.0, redundant=0.25, whole=False), 8, recovery=2.0)
    assert (spent.effective, spent.redundant, spent.samples, done) == (6.0, 2.0, 16.0, 0)
    assert replay(Oobleck(job(), Rates(), range(6)), [], math.pi)[0].stop == math.pi


def test_the_picture_has_all_that_is_spent(tmp_path):
    changes = [Change(100.0, "0", "fail"), Change(900.0, "0", "join"), Change(1500.0, "3", "fail")]
    start = nodes_at_start(changes, 6)
    runs = {system.__name__: replay(system(job(), Rates(), start), changes, 3600.0) for system in SYSTEMS}
    nodes = np.array([0.0, 100.0, 900.0, 1500.0]), np.array([6.0, 5.0, 6.0, 5.0])
    plot_recovery(runs, nodes, tmp_path / "a.svg", title="Six nodes")
    drawn = (tmp_path / "a.svg").read_text()
    assert all(word in drawn for word in ("Six nodes", "Oobleck", "Checkpoints", "computed twice", "lost work"))
    assert "too few nodes" not in drawn
    with pytest.raises(ValueError, match="no run to draw"):
        plot_recovery({"a": []}, nodes, tmp_path / "b.png")
