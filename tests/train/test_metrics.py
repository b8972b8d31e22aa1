"""Metrics: tokens computed by modules, speeds, waits of ranks, time left; the terminal; recordings."""

from __future__ import annotations

import gzip
import io
import json
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from interlace import Layout, ParallelSpec, parallelize
from interlace.layout import Lane, Pipeline, Stage
from interlace.model import Sample
from interlace.run.tables.dispatch import Dispatcher, Phase
from interlace.run.tables.table import Lengths, step_table
from interlace.schedule import Op, StageGraph, StepTable, one_f_one_b
from interlace.simulate import simulate
from interlace.train.config.log import Profile
from interlace.train.observers.base import Outputs
from interlace.train.observers.profiler import Profiler
from interlace.train.report.metrics import (
    BLANK,
    HELD_OUT,
    LOSS,
    RESTARTS,
    LogWindow,
    computed_tokens,
    dispatch_metrics,
    of_ranks,
    padding,
    pipeline_metrics,
    read_metrics,
)
from interlace.train.report.terminal import Screen, TimeLeft, duration, rate
from interlace.train.trainer import Trainer
from tests.tiny import random_sample, tiny_mllm
from tests.train.one_process import OneProcess, ToyModel, toy_config, toy_feed


def test_computed_tokens_match_the_tokens_in_layers() -> None:
    mllm = tiny_mllm()
    generator = torch.Generator().manual_seed(3)
    samples = [random_sample(mllm, generator, images=i % 3, clips=i % 2) for i in range(5)]
    seen: Counter[str] = Counter()

    def count(name: str):
        def hook(module: torch.nn.Module, given: tuple[torch.Tensor, ...]) -> None:
            seen[name] += given[0].shape[:-1].numel()

        return hook

    for name in mllm.modules_order():
        mllm.layer_list(name)[0].register_forward_pre_hook(count(name))
    mllm(**mllm.collate(samples))
    assert computed_tokens(samples, dict(mllm.encoders.items())) == dict(seen)
    assert seen["vision"] and seen["audio"] and seen["language_model"] == sum(map(len, samples))


def test_microbatches_assigned_by_cost_report_balance() -> None:
    """Two microbatches of 3 s and 5 s: 1 s from the mean of 4; and two samples that are read later."""
    graph = StageGraph.build({"vision": [0], "language_model": [1]}, [("vision", "language_model")])
    plain = StepTable.aligned(graph.links, [graph.modules] * 2)
    late = np.array([0, 1], np.int32)
    table = replace(plain, work=np.ones(4, np.int64), deferred=late)
    schedule = one_f_one_b(graph, table, reduce_grad=False)
    first, second = table.of("language_model", 0)
    costs = {(Op.FORWARD, "language_model", 0, first): 1.0, (Op.BACKWARD, "language_model", 0, first): 2.0}
    costs |= {(Op.FORWARD, "language_model", 0, second): 2.0, (Op.BACKWARD, "language_model", 0, second): 3.0}
    result = pipeline_metrics(simulate(schedule, {**costs, Op.FORWARD: 1.0, Op.BACKWARD: 1.0}))
    assert result["balance/microbatch_spread(%)"] == pytest.approx(25.0)
    assert result["balance/deferred_samples"] == 2
    plain_schedule = one_f_one_b(graph, plain, reduce_grad=False)
    unassigned = pipeline_metrics(simulate(plain_schedule, {**costs, Op.FORWARD: 1.0, Op.BACKWARD: 1.0}))
    assert not any(name.startswith("balance") for name in unassigned)


def test_padding_is_what_rows_have_beyond_their_samples() -> None:
    table = SimpleNamespace(
        chunks=[
            SimpleNamespace(module="vision", samples=[0, 1, 2]),
            SimpleNamespace(module="language_model", samples=[0, 2]),
            SimpleNamespace(module="language_model", samples=[1]),
        ]
    )
    assert padding(table, [10, 7, 30]) == pytest.approx(100 * 20 / 67)  # type: ignore[arg-type]


def test_log_window_averages_and_excludes_profiled_steps() -> None:
    window = LogWindow()
    step = {"read_tokens": 40, "samples": 4, "computed": {"vision": 100, "language_model": 40}}
    window.add(loss=2.0, targets=10, data=0.5, seconds=2.0, **step)
    window.add(loss=1.0, targets=30, data=0.0, seconds=2.0, room=150, **step)
    window.add(loss=9.0, targets=40, data=7.0, seconds=9.0, timed=False, **step)
    window.checkpoint_seconds = 0.25
    values = window.metrics()
    assert values == {
        "time_metrics/checkpoint(s)": 0.25,
        LOSS: (20.0 + 30.0 + 360.0) / 80,
        "data/targets(%)": 100 * 80 / 120,
        "data/row_fill(%)": 100 * 120 / 150,
        "throughput(tps)": 20.0,
        "throughput(tps)/vision": 50.0,
        "throughput(tps)/language_model": 20.0,
        "throughput(samples/s)": 2.0,
        "time_metrics/end_to_end(s)": 2.0,
    }
    assert of_ranks(window, [[0.5, 1.0, 0.0, 0.0, 6.0, 0.0]]) == {
        "time_metrics/data_loading(s)": 0.5,
        "time_metrics/data_loading(%)": 12.5,
        "data/decoded(items/s)": 1.5,
        "memory/max_active(GiB)": 1.0,
        "memory/all_ranks(GiB)": 1.0,
    }
    told = of_ranks(window, [[0.5, 1.0, 2.0, 1.0, 6, 0], [1.0, 3.0, 4.0, 0.0, 8, 1], [0.0, 2.0, 3.0, 2.0, 2, 2]])
    assert told == {
        "time_metrics/data_loading(s)": 1.0,
        "time_metrics/data_loading(%)": 25.0,
        "data/decoded(items/s)": 4.0,
        "time_metrics/data_loading_rank": 1,
        "memory/max_active(GiB)": 3.0,
        "memory/all_ranks(GiB)": 6.0,
        "memory/max_active_rank": 1,
        "memory/max_reserved(GiB)": 4.0,
        BLANK: 3.0,
        RESTARTS: 3,
    }
    only = LogWindow()
    only.add(loss=9.0, targets=40, data=7.0, seconds=9.0, timed=False, **step)
    assert set(only.metrics()) == {LOSS, "data/targets(%)"}
    assert LogWindow.model_validate(window.model_dump()) == window and LogWindow().metrics() == {}


@given(
    st.integers(1, 60), st.integers(0, 12), st.integers(0, 12), st.integers(0, 60), st.floats(0.1, 5), st.floats(0.1, 5)
)
def test_time_left_counts_steps_validations_and_checkpoints(
    last: int, validation: int, checkpoint: int, done: int, validating: float, saving: float
) -> None:
    done = min(done, last)
    left = TimeLeft(last, {"validation": validation, "checkpoint": checkpoint})
    assert left.after(done) is None
    left.step(100.0)  # the first step is a warm-up
    for _ in range(3):
        left.step(2.0)
    left.beside("validation", validating)
    left.beside("checkpoint", saving)
    expected = 0.0
    for step in range(done + 1, last + 1):
        expected += 2.0
        expected += validating * bool((validation and step % validation == 0) or step == last)
        expected += saving * bool((checkpoint and step % checkpoint == 0) or step == last)
    assert left.after(done) == pytest.approx(expected)


def test_time_left_follows_steps_that_become_slower() -> None:
    left = TimeLeft(1000, {})
    for seconds in [1.0] * 200 + [3.0] * 200:
        left.step(seconds)
    assert left.after(900) == pytest.approx(300, rel=0.01)


def test_lines_of_a_log_file(capsys: pytest.CaptureFixture[str]) -> None:
    screen = Screen(60, 0, name="toy", epoch_steps=20)
    speeds = {"throughput(tps)": 1234.5, "throughput(samples/s)": 8.0}
    busy = {"busy(%)/vision": 40.0, "bubble(%)": 60.0, "memory/max_active(GiB)": 1.5}
    screen.show(26, {LOSS: 1.25, HELD_OUT: 2.0, **speeds, "time_metrics/data_loading(%)": 7.0, **busy}, 3725.4)
    screen.advance(27, 3.0)
    screen.show(60, {LOSS: 1.0, "time_metrics/data_loading(%)": 0.5, "mfu(%)": 55.0}, 0.0)
    Screen(5, 0, name="short", epoch_steps=20).show(1, {HELD_OUT: 2.0}, None)
    screen.close()
    assert capsys.readouterr().out.splitlines() == [
        "toy 26/60 · epoch 1.3 of 3 · 1:02:05 left · loss 1.250 held-out 2.000 · 1,234 tok/s · 8 samples/s · "
        "waits 7% for data · busy vision 40% · bubble 60% · 1.50 GiB",
        "toy 60/60 · epoch 3.0 of 3 · loss 1.000 · MFU 55%",
        "short 1/5 · held-out 2.000",
    ]
    assert [rate(steps) for steps in (None, 0.25, 12.5)] == ["", "4 s/step", "12.5 steps/s"]
    assert [duration(seconds) for seconds in (0.4, 59.6, 3600)] == ["0:00", "1:00", "1:00:00"]


def test_a_terminal_has_a_bar_below_the_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    shown = Terminal()
    monkeypatch.setattr("sys.stdout", shown)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    screen = Screen(60, 0, name="toy", epoch_steps=20)
    assert screen.live
    screen.show(30, {LOSS: 1.25}, 95.0)
    screen.advance(31, 92.0)
    screen.close()
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown.getvalue())
    assert "toy 30/60 · loss 1.250" in text and "31/60" in text and "epoch 1.6 of 3 · 1:32 left" in text


def test_profile_contains_named_actions_of_its_window_only(tmp_path: Path) -> None:
    mllm = tiny_mllm(encoders=("vision",))
    layout = Layout.from_specs(mllm, {name: ParallelSpec() for name in mllm.modules_order()}, placement="shared")
    parallel = parallelize(mllm, layout)
    generator = torch.Generator().manual_seed(0)
    samples = [random_sample(mllm, generator, images=1)]  # writing a recording takes longer than the steps
    unused: Any = None
    profiler = Profiler(Profile(start=3, steps=1), tmp_path, 0)
    assert [step for step in range(1, 7) if profiler.slows(step)] == [2, 3]
    for step in range(1, 5):
        profiler.before_step(step)
        parallel.step(samples, microbatches=1)
        profiler.after_step(unused, unused)
    with gzip.open(tmp_path / "profile" / "rank-0.json.gz", "rt") as file:
        events = json.load(file)["traceEvents"]
    names = Counter(event["name"] for event in events if event.get("cat") == "user_annotation")
    timeline = parallel.timeline()
    actions = [str(action) for action in timeline.actions[0]]
    assert len(actions) >= 4 and {name: names[name] for name in actions} == dict.fromkeys(actions, 1)
    assert any(event["name"] == "aten::mm" or event["name"] == "aten::addmm" for event in events)
    later = Profiler(Profile(start=3, steps=3), tmp_path / "later", 0)
    for step in range(4, 7):  # a resumed run inside the window has the rest of it: 4 and 5
        later.before_step(step)
        parallel.step(samples, microbatches=1)
        later.after_step(unused, unused)
    with gzip.open(tmp_path / "later/profile/rank-0.json.gz", "rt") as file:
        names = Counter(
            event["name"] for event in json.load(file)["traceEvents"] if event.get("cat") == "user_annotation"
        )
    assert {name: names[name] for name in actions} == dict.fromkeys(actions, 2)
    assert not Profiler(Profile(start=3, ranks=[1]), tmp_path, 0).records
    assert Profiler(Profile(start=3, ranks=[]), tmp_path, 7).records


def test_recorded_steps_count_for_the_loss_and_no_speed(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    config = toy_config("log.profile={start=4, steps=20}", "train.steps=6", "train.validate_every=0")
    model = ToyModel()
    outcome = Trainer(config, model, OneProcess(model), toy_feed(config), Outputs(tmp_path, quiet=True)).run()
    assert outcome["finished"]
    lines = read_metrics(tmp_path)
    assert ["throughput(tps)" in line for line in lines] == [True, True, False, False, False, False]
    assert all(LOSS in line for line in lines)
    assert (tmp_path / "profile" / "rank-0.json.gz").stat().st_size > 1000  # the data at the end of the run
    assert re.search("recorded .*rank-0.json.gz", capfd.readouterr().out)


def test_a_logged_step_ends_with_the_work_of_the_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the optimizer's time would be lost when a line is written between two steps."""
    finished: list[int] = []
    config = toy_config("log.every=3", "train.steps=7", "train.validate_every=0")
    model = ToyModel()
    trainer = Trainer(config, model, OneProcess(model), toy_feed(config), Outputs(tmp_path, quiet=True))
    monkeypatch.setattr("interlace.train.device.finish", lambda: finished.append(trainer.step))
    trainer.run()
    assert finished == [3, 6, 7]


def test_a_recording_that_fails_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("no CUPTI")

    monkeypatch.setattr(torch.profiler, "profile", broken)
    config = toy_config("log.profile={start=2, steps=2}", "train.steps=6", "train.validate_every=0")
    model = ToyModel()
    assert Trainer(config, model, OneProcess(model), toy_feed(config), Outputs(tmp_path, quiet=True)).run()["finished"]
    assert capfd.readouterr().err.count("no steps are recorded (log.profile): no CUPTI") == 1


def test_replicas_tell_how_even_they_are_and_had_been() -> None:
    """Four samples of 1, 1, 1 and 3 tokens on two replicas: drawn as 2 and 4 with a mean of 3, dealt as 3 and 3."""
    pipelines = tuple(Pipeline("language_model", r, (Stage("language_model", 0, 0, 1, Lane((r,))),)) for r in range(2))
    layout = Layout({"language_model": (ParallelSpec(dp=2), pipelines)}, 2)
    ids = [torch.zeros(n, dtype=torch.long) for n in (1, 1, 1, 3)]
    samples = [Sample(each, each, {}, "text") for each in ids]
    dispatcher = Dispatcher("llm", layout, {"language_model": Phase()})
    lengths = Lengths.of(samples, [])
    table = step_table(layout, lengths, microbatches=1, replicas=dispatcher(lengths))
    parallel = SimpleNamespace(dispatcher=dispatcher, layout=layout, feature_bytes=4)
    assert dispatch_metrics(parallel, table, samples) == {
        "balance/imbalance/language_model": 1.0,
        "balance/imbalance_as_drawn/language_model": pytest.approx(4 / 3),
        "balance/moved(MB)": 0.0,
    }
    assert dispatch_metrics(SimpleNamespace(dispatcher=None), table, samples) == {}
