"""log.predict: the forecast of a run's own steps, its file, and the readers of that file."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from interlace.cli import main
from interlace.costs.fitted import FREE
from interlace.costs.links import Link, Links
from interlace.costs.step import read_costs
from interlace.data import StreamLoader, StreamOptions
from interlace.estimate.predictor import Predictor
from interlace.estimate.profiling import profile_costs
from interlace.layout import Layout, ParallelSpec
from interlace.plan import LinkModel
from interlace.run import parallelize
from interlace.schedule import Action, Op
from interlace.simulate import Timeline
from interlace.train.config.load import ConfigError, load
from interlace.train.data.texts import vocabulary_of
from interlace.train.models.build import build
from interlace.train.models.costs import stated_links
from interlace.train.optim import Optimizer
from interlace.train.report import forecast
from tests.run.streamed import Counted
from tests.simulate.timelines import timeline_of
from tests.tiny import tiny_mllm

SIZE = "hidden_size = 16, intermediate_size = 24, num_hidden_layers = 2, num_attention_heads = 2"
TABLE = """
[run]
name = "mine"
folder = "{folder}"
[model.vision]
architecture = "SiglipVisionModel"
config = {{ {size}, image_size = 8, patch_size = 4 }}
[model.language_model]
architecture = "LlamaForCausalLM"
config = {{ {size}, max_position_embeddings = 128 }}
[data]
dataset = "tests.digits:Digits"
workers = 0
[train]
steps = 3
batch_size = 8
microbatches = 2
warmup_steps = 1
validate_every = 3
validation_samples = 8
[parallel]
threads = 1
[checkpoint]
every = 3
[log]
every = 1
samples = 0
accuracy_samples = 0
trace_step = 0
trackers = []
predict = true
"""


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(forecast, "SECONDS", 0.0)
    path = tmp_path / "mine.toml"
    path.write_text(TABLE.format(folder=tmp_path / "runs", size=SIZE))
    return path


@pytest.mark.slow
def test_a_run_predicts_its_steps_and_others_read_its_costs(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", str(config)]) == 0
    folder = (config.parent / "runs" / "mine" / "latest").resolve()
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["predicted_step_seconds"] > summary["predicted_lists_seconds"] > 0.0
    assert summary["measured_step_seconds"] > summary["measured_lists_seconds"] > 0.0
    assert 0.0 <= summary["predicted_bubble_percent"] < 100.0 and 0.0 <= summary["measured_bubble_percent"] < 100.0
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for name in ("predicted_step", "predicted_lists", "lists"):
        assert all(line[f"time_metrics/{name}(s)"] > 0.0 for line in lines) and len(lines) == 3
    costs, table = read_costs(folder / forecast.NAME)
    assert set(costs.modules) == {"vision", "language_model"} and costs.optimizer.transfer(1 << 20) > 0.0
    assert table["links"]["host"]["message"] == {"latency": 0.0, "per_byte": 0.0}  # there is one rank

    out = config.parent / "out"
    file = str(folder / forecast.NAME)
    capsys.readouterr()
    assert main(["simulate", str(config), "--costs", file, "--out", str(out)]) == 0
    output = capsys.readouterr().out
    assert "costs.json: timed on this machine" in output and "its fits are off by vision" in output
    assert "OPTIMIZER_STEP" in (out / "trace.json").read_text()
    assert main(["plan", str(config), "--costs", file]) == 0
    other = ["--set", "model.language_model.config.num_hidden_layers=3"]
    assert main(["plan", str(config), "--costs", file, *other]) == 2
    assert "whose language_model has 2 layers, the config's has 3" in capsys.readouterr().err
    assert main(["plan", str(config), "--costs", file, "--profile"]) == 2
    assert "give one of them" in capsys.readouterr().err
    assert main(["plan", str(config), "--costs", str(config)]) == 2
    assert "a run with log.predict = true writes such a file" in capsys.readouterr().err


def test_links_that_are_stated_take_part(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two replicas on two hosts: sums over a slow link are in the step, with the cost of the formula."""
    arguments = [
        "simulate",
        str(config),
        "--tflops",
        "1",
        "--out",
        str(config.parent / "out"),
        "--set",
        "parallel.dp=2",
    ]
    assert main(arguments) == 0
    free = capsys.readouterr().out
    host, network = "{microseconds=1,gb_per_second=100}", "{microseconds=2e6,gb_per_second=1}"
    links = f"parallel.links={{host={host},network={network},ranks_per_host=1}}"
    assert main([*arguments, "--set", links]) == 0
    slow = capsys.readouterr().out
    assert "taken as free" in free and "over the links of parallel.links" in slow
    seconds = [float(text.split("iteration ")[1].split(" ms")[0].replace(",", "")) / 1e3 for text in (free, slow)]
    # Two all-reduces over the same ranks follow each other: 2 steps of 2 s each, and a negligible time for the bytes.
    assert seconds[1] - seconds[0] == pytest.approx(8.0, abs=0.1)
    stated = stated_links(load(config, [links]))
    assert stated is not None and stated.message(1e9, 0, 1) == pytest.approx(3.0) and stated.message(1, 1, 1) == 0.0
    assert stated_links(load(config, [])) is None


@pytest.mark.slow
def test_a_model_that_cannot_be_predicted_trains_on(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("this layer\nruns with others only")

    monkeypatch.setattr(forecast, "measure", fails)
    assert main(["train", str(config)]) == 0
    assert "no steps are predicted (log.predict): this layer runs with others only" in capsys.readouterr().err


def test_the_optimizer_is_timed_on_what_the_model_trains(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All tensors in one step, as in training: one matrix does not represent the cost of many."""
    settings = load(config, ["model.vision.freeze=true"])
    model = build(settings, vocabulary_of(settings, source="x"), source="x")
    trained = {name: parameter.shape for name, parameter in model.named_parameters() if parameter.requires_grad}
    seen: list[dict[str, torch.Size]] = []

    class Seen(Optimizer):
        def step(self, step: int) -> float:
            seen.append({name: parameter.shape for name, parameter in self.parameters.items()})
            return super().step(step)

    monkeypatch.setattr(forecast, "Optimizer", Seen)
    result = forecast.time_optimizer(settings, model, torch.device("cpu"))
    assert result.transfer(1 << 20) > 0.0 and trained in seen
    assert {len(each) for each in seen} == {len(trained), len(trained) // 2}
    monkeypatch.setattr(forecast, "MOST_BYTES", 4096)
    seen.clear()
    forecast.time_optimizer(settings, model, torch.device("cpu"))
    assert all(sum(shape.numel() for shape in each.values()) <= 1024 or len(each) == 1 for each in seen)
    assert forecast.time_optimizer(settings, model.requires_grad_(False), torch.device("cpu")) == FREE


def test_lists_are_compared_with_lists(config: Path) -> None:
    """Comparing a part of a step with the whole step would not test the prediction."""
    table = object()
    action = Action(Op.FORWARD, "m", 0, 0)

    def timeline(seconds: float) -> Timeline:
        return timeline_of([(0, action, 1.0, 1.0 + seconds)] * 2)  # busy for longer than the step lasts

    made: Any = object.__new__(forecast.Forecast)
    made._parallel = SimpleNamespace(schedule=lambda _, dispatch: _Schedule())
    made._predictor = SimpleNamespace(
        predict=lambda schedule, samples, items, optimizer=True: timeline(2.5 if optimizer else 2.0)
    )
    made._rows, made._failed = [], False
    said = made.add([], replace(timeline(3.0), table=table), 4.0)
    assert said["time_metrics/predicted_lists(s)"] == 2.0 and said["time_metrics/lists(s)"] == 3.0
    assert said["time_metrics/predicted_step(s)"] == 2.5 and said["predicted_bubble(%)"] == 0.0
    rows = made.rows()
    assert (rows["predicted_lists_seconds"], rows["measured_lists_seconds"]) == (2.0, 3.0)
    assert (rows["predicted_step_seconds"], rows["measured_step_seconds"]) == (2.5, 4.0)


@dataclass(frozen=True)
class _Schedule:
    table: object = None


def test_a_file_without_links_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    path.write_text(
        '{"version": 3, "origin": "", "optimizer": {"latency": 0, "per_byte": 0}, "modules": {}, "around": '
        '{"sample": 0, "read": 0, "decode": {}, "error": null}}'
    )
    with pytest.raises(ConfigError, match=r"--costs: .*costs.json: the table of links is invalid"):
        forecast.load(path)


def test_what_streams_move_has_its_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank sends to one peer after the other, and receives likewise; all wait for the slowest."""
    timelines, real = list[Timeline](), Predictor.predict
    monkeypatch.setattr(Predictor, "predict", lambda *a, **k: timelines.append(real(*a, **k)) or timelines[-1])
    mllm = tiny_mllm(layers=1)
    specs = {name: ParallelSpec(dp=3) for name in mllm.modules_order()}
    parallel = parallelize(mllm, Layout.from_specs(mllm, specs, placement="shared"), timeout=60)
    data = Counted(mllm, (9, 4, 7), kinds=((1, 1), (0, 0), (2, 0)))
    with StreamLoader(data.stream, parallel, 6, options=StreamOptions(timeout=60)) as loader:
        batch = next(loader)
        parallel.step(batch.given)
        costs = profile_costs(mllm, data.samples([sample.name for sample in batch.given.samples]), budget=0.0)
        link = Link(LinkModel(7.0, 0.5), LinkModel(0.0, 0.0))
        made = SimpleNamespace(
            train=SimpleNamespace(recompute=False, precision="fp32", balance="llm"),
            parallel=SimpleNamespace(sequence_parallel=True),
        )
        plan = batch.exchange
        sent, given = ([0.0] * 3 for _ in range(2))
        pairs: dict[tuple[int, int], int] = {}
        for source, destination, size in zip(plan.source, plan.destination, plan.sizes, strict=True):
            pairs[int(source), int(destination)] = pairs.get((int(source), int(destination)), 0) + int(size)
        assert len(pairs) > 2
        for (source, destination), size in pairs.items():
            sent[source] += 7.0 + 0.5 * size
            given[destination] += 7.0 + 0.5 * size
        told = forecast.Forecast(made, parallel, costs, Links(link, link, link))
        for exchange in (plan, None):
            assert told.add(batch.given.samples, parallel.timeline(), 1.0, exchange)
        with_items, _, without, _ = timelines
        for rank in range(3):
            first = with_items.actions[rank][0]
            assert first.op is Op.DISPATCH and with_items.start[rank][0] == 0.0
            assert with_items.finish[rank][0] == pytest.approx(max(*sent, *given))
            assert all(action.op is not Op.DISPATCH for action in without.actions[rank])
