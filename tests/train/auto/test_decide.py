"""The choice: near the best of all listed layouts, within memory, with errors that say what to do."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from interlace.estimate.predict import predict
from interlace.layout import ParallelSpec
from interlace.run import parallelize
from interlace.run.tables.batch import GlobalBatch
from interlace.schedule import GENERATORS, Schedule
from interlace.train.auto import choose as decide_module
from interlace.train.auto import evaluate
from interlace.train.auto.candidates import Candidate, Fixed, applied, unsharded
from interlace.train.auto.choose import batch_size_of, decide
from interlace.train.auto.estimate import Estimator
from interlace.train.auto.evaluate import Evaluator, Outcome
from interlace.train.config.load import ConfigError
from interlace.train.models.build import build_layout, materialize
from interlace.train.scheduling import kept_bytes
from tests.train.auto import oracle

WITHIN = 1.05


@pytest.mark.slow
@pytest.mark.parametrize("name", list(json.loads(oracle.FILE.read_text()))[:1])
def test_a_sample_of_all_layouts_of_four_ranks_is_no_faster(name: str) -> None:
    row = json.loads(oracle.FILE.read_text())[name]
    config, model, work, machine = oracle.case(name)
    everything = list(oracle.everything(config, oracle.WORLD))
    sample = random.Random(5).sample(everything, 12)
    result = oracle.simulated(Evaluator(config, model, work, machine), iter(sample))
    assert result and min(result)[0] >= row["best"] * (1 - 1e-9)
    assert row["taken"] <= WITHIN * row["best"] and row["possible"] > 500


@pytest.mark.slow
@pytest.mark.parametrize("name", json.loads(oracle.FILE.read_text()))
def test_four_ranks_are_decided_as_the_table_says(name: str) -> None:
    row = json.loads(oracle.FILE.read_text())[name]
    best = oracle.decision_of(name).best
    assert str(best.candidate) == row["taken_layout"]
    assert best.seconds == pytest.approx(row["taken"], rel=1e-9) and best.seconds <= WITHIN * row["best"]


@pytest.mark.slow
@settings(max_examples=4, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(
    layers=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    freeze=st.booleans(),
    latency=st.sampled_from([1e-6, 2e-5, 4e-4]),
    bandwidth=st.sampled_from([1e8, 1e10]),
)
def test_up_to_two_ranks_nothing_listed_is_much_faster(
    layers: tuple[int, int], freeze: bool, latency: float, bandwidth: float
) -> None:
    config = oracle.config_of(layers, freeze)
    model = oracle.model_of(config)
    work = oracle.work_of(model)
    machine = oracle.machine_of(config, model, latency=latency, bandwidth=bandwidth)
    best = decide(config, model, work, machine, [1, 2]).best
    evaluator = Evaluator(config, model, work, machine)
    everything = (candidate for world in (1, 2) for candidate in oracle.everything(config, world))
    assert best.seconds <= WITHIN * min(oracle.simulated(evaluator, everything))[0]


def _outcome(candidate: Candidate, seconds: float) -> Outcome:
    return Outcome(candidate, seconds, seconds, 0.0, 0.0, 1, 2.0)


def _candidate(dp: int, shard: str = "none", microbatches: int = 1, **given: Any) -> Candidate:
    specs = tuple((name, ParallelSpec(dp=dp, shard=shard)) for name in ("vision", "language_model"))
    return Candidate("colocated", specs, 8, microbatches, ranks=1, **given)


def test_near_ties_go_to_simpler_layouts_and_fewer_ranks() -> None:
    one, two, sharded = _candidate(1), _candidate(2), _candidate(2, "full")
    result = [_outcome(sharded, 0.9), _outcome(two, 0.905), _outcome(one, 1.0)]
    assert decide_module._best_of(result).candidate == two
    assert decide_module._best_of(result, worth=0.2).candidate == one
    assert decide_module._best_of([_outcome(sharded, 0.9), _outcome(two, 0.92)]).candidate == sharded


def test_of_numbers_of_threads_the_faster_is_taken() -> None:
    config = oracle.config_of((1, 1))
    model = oracle.model_of(config)
    slow, fast = (oracle.machine_of(config, model, latency=1e-6, bandwidth=1e9, tflops=each) for each in (1e-3, 2e-3))
    machine = replace(slow, costs=lambda world, n: (fast if n == 1 else slow).costs(world, n), threads=lambda _: (4, 1))
    best = decide(config, model, oracle.work_of(model), machine, [1]).best
    assert best.candidate.threads == 1 and "one process with 1 thread," in str(best.candidate)
    assert applied(config, best.candidate).parallel.threads == 1


def test_simulated_layouts_are_distinct_and_include_unsharded() -> None:
    shards = [_candidate(4, shard, count) for shard in ("full", "optimizer", "none") for count in (1, 2, 4)]
    mixed = Candidate("shared", (("vision", ParallelSpec(tp=4)), ("language_model", ParallelSpec(dp=4))), 8, 1)
    threads = [_candidate(1, threads=count) for count in (1, 2)]
    every = [*shards, mixed, *threads]
    taken = list(decide_module._best([(1.0 + place / 100, each) for place, each in enumerate(every)]))
    assert len(set(taken)) == len(taken) and {mixed, *threads} <= set(taken)
    for each in taken:
        assert unsharded(each) in taken
    assert len([each for each in taken if each in shards]) <= 6


def test_a_schedule_for_virtual_stages_can_be_fixed() -> None:
    for schedule in ("interleaved", "zb_v"):
        config = oracle.config_of((1, 4), schedule=schedule)
        model = oracle.model_of(config)
        machine = oracle.machine_of(config, model, latency=1e-6, bandwidth=1e9)
        estimator = Estimator(config, model, oracle.work_of(model), machine)
        fixed, openings = Fixed.of(config), decide_module.openings_of(config)
        result = [each for each in decide_module._of_world(config, estimator, 3, openings, fixed) if fixed.allows(each)]
        assert result and {each.schedule for each in result} == {schedule}
        assert {each.of["language_model"].virtual for each in result} == {2}
        evaluator = Evaluator(config, model, oracle.work_of(model), machine)
        possible = next(each for each in result if each.of["language_model"].pp == 2)
        assert evaluator.simulate(possible).seconds > 0


@pytest.mark.slow
def test_slow_links_give_one_rank_and_runs_follow_simulation() -> None:
    config = oracle.config_of((2, 2))
    model = oracle.model_of(config)
    work = oracle.work_of(model)
    slow = decide(config, model, work, oracle.machine_of(config, model, latency=1e-2, bandwidth=1e6), [1, 2])
    assert slow.best.candidate.world == 1 and max(each.candidate.world for each in slow.outcomes) == 2
    assert slow.best.seconds == pytest.approx(slow.best.compute + slow.best.bubble + slow.best.communication)
    fast = decide(config, model, work, oracle.machine_of(config, model, latency=1e-7, bandwidth=1e11), [1, 2]).best
    assert fast.candidate.world == 2 and fast.seconds < 0.7 * slow.best.seconds

    from interlace.train.scheduling import schedule_options

    settled = applied(config, fast.candidate)
    layout = build_layout(settled, model)
    options = schedule_options(settled, model, layout, settled.train.microbatches)
    parallel = parallelize(
        materialize(oracle.model_of(config), seed=0),
        layout,
        schedule=settled.parallel.schedule,
        schedule_options=options,
        transport="local",
    )
    table = GlobalBatch.of(work.batches[0], settled.train.microbatches, settled.chunks()).table(layout)
    mine = GENERATORS[fast.candidate.schedule](parallel.graph, table, **options)
    assert parallel.schedule(table).rows.tolist() == mine.rows.tolist()


@pytest.mark.parametrize("method", ["tokens", "stratified", "as_printed"])
def test_simulated_tables_and_schedules_match_the_run(method: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    config = oracle.config_of((2, 2), batch=16)
    config = config.model_copy(update={"train": config.train.model_copy(update={"assign": method})})
    model = oracle.model_of(config)
    work, machine = oracle.work_of(model, 16), oracle.machine_of(config, model, latency=1e-6, bandwidth=1e10)
    candidate = Candidate("parallel", (("vision", ParallelSpec()), ("language_model", ParallelSpec(pp=2))), 16, 4)
    played: list[Schedule] = []

    def noted(schedule: Schedule, *given: Any, **options: Any) -> Any:
        played.append(schedule)
        return predict(schedule, *given, **options)

    monkeypatch.setattr(evaluate, "predict", noted)
    Evaluator(config, model, work, machine).simulate(candidate)
    assert Estimator(config, model, work, machine).seconds(candidate) < math.inf

    settled = applied(config, candidate)
    parallel = parallelize(
        materialize(oracle.model_of(config), seed=0), build_layout(settled, model), assign=method, transport="local"
    )
    tables = [parallel.table(batch, 4) for batch in work.batches]
    assert [schedule.table.digest for schedule in played[::2]] == [table.digest for table in tables]
    assert [schedule.rows.tolist() for schedule in played[::2]] == [parallel.schedule(t).rows.tolist() for t in tables]
    assert any(len(table.deferred) for table in tables) == (method == "as_printed")


@pytest.mark.slow
def test_memory_decides() -> None:
    config = oracle.config_of((2, 2))
    model = oracle.model_of(config)
    work = oracle.work_of(model)
    roomy = oracle.machine_of(config, model, latency=1e-2, bandwidth=1e8)
    whole = decide(config, model, work, roomy, [1, 2]).best
    tight = oracle.machine_of(config, model, latency=1e-2, bandwidth=1e8, memory=0.9 * whole.peak)
    result = decide(config, model, work, tight, [1, 2])
    assert whole.candidate.world == 1 and result.best.candidate.world == 2
    assert result.best.peak <= 0.9 * whole.peak and result.refused["memory"] > 0


def test_what_does_not_fit_is_said_with_the_way_out() -> None:
    config = oracle.config_of((2, 2))
    model = oracle.model_of(config)
    work = oracle.work_of(model)
    nothing = oracle.machine_of(config, model, latency=1e-3, bandwidth=1e8, memory=1000.0)
    with pytest.raises(ConfigError, match=r"none of \d+ candidates on 1 rank fits .* lacks 0.00 GiB. Allow more ranks"):
        decide(config, model, work, nothing, [1])


def test_degrees_by_hand_that_no_layout_of_the_ranks_has() -> None:
    config = oracle.config_of((2, 2), language_model={"tp": 3})
    model = oracle.model_of(config)
    machine = oracle.machine_of(config, model, latency=1e-6, bandwidth=1e9)
    with pytest.raises(ConfigError, match=r"no layout of 1, 2 ranks has the degrees that .* sets \(language_model = "):
        decide(config, model, oracle.work_of(model), machine, [1, 2])


def test_an_open_batch_is_the_stable_one() -> None:
    config = oracle.config_of((2, 2))
    model = oracle.model_of(config)
    machine = oracle.machine_of(config, model, latency=1e-6, bandwidth=1e9)
    samples = oracle.work_of(model).samples()
    assert batch_size_of(config, model, samples, machine, 2) == (8, "")
    choose = config.parallel.model_copy(update={"choose": ["batch_size"]})
    size, why = batch_size_of(config.model_copy(update={"parallel": choose}), model, samples, machine, 2)
    assert size >= 2 and size & (size - 1) == 0 and f"batch_size {size}: the smallest with balanced work" in why


def test_memory_estimate_counts_deferred_weight_gradients() -> None:
    """Under checkpointing, more than forwards keep: for the memory limit, and where a search compares schedules."""
    config = oracle.config_of((1, 4))
    model = oracle.model_of(config)
    specs = (("vision", ParallelSpec()), ("language_model", ParallelSpec(pp=2)))
    whole, split = (Candidate("parallel", specs, 8, 4, name, checkpointing="full") for name in ("1f1b", "zb_h1"))
    kept = []
    for candidate in (whole, split):
        settled = applied(config, candidate)
        kept.append(kept_bytes(settled, model, build_layout(settled, model), 4))
    assert kept[1]["language_model", 0] > 2 * kept[0]["language_model", 0]
    machine = oracle.machine_of(config, model, latency=1e-6, bandwidth=1e10)
    evaluator = Evaluator(config, model, oracle.work_of(model), machine)
    peak = evaluator.simulate(split).peak
    without = {key: replace(each, deferred=()) for key, each in evaluator._activations.items()}
    evaluator._activations.update(without)
    assert peak > evaluator.simulate(split).peak
