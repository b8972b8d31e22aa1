"""`interlace simulate` with all replicas: drawn lengths, printed and written output, refused cases."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from interlace.cli import main
from interlace.costs.links import Links
from interlace.costs.step import ScaledCosts
from interlace.run import step_table
from interlace.run.tables.assign import Method, assigner_of
from interlace.run.tables.dispatch import dispatcher_of
from interlace.schedule import GENERATORS
from interlace.schedule.memory import peak
from interlace.train.commands.planning import large
from interlace.train.config.load import load
from interlace.train.data.texts import vocabulary_of
from interlace.train.models.build import build, build_layout
from interlace.train.models.costs import budget_loads, flop_costs
from interlace.train.scheduling import _peaks

CONFIG = Path(__file__).parents[3] / "configs" / "vlm_10240_example.toml"
SMALL = [
    "parallel.vision.dp=3",
    "parallel.audio.dp=1",
    "parallel.language_model.dp=2",
    "parallel.language_model.tp=2",
    "parallel.language_model.pp=3",
    "train.batch_size=24",
    "train.microbatches=4",
    *(f"model.language_model.config.{key}" for key in ("num_hidden_layers=6", "hidden_size=64", "vocab_size=128256")),
    "model.language_model.config.intermediate_size=128",
    "model.language_model.config.num_attention_heads=4",
    "model.language_model.config.num_key_value_heads=2",
]
ENCODERS = ("vision", "audio")
WORDS = [word for setting in SMALL for word in ("--set", setting)]


def test_lengths_have_the_mean_of_the_budgets_and_repeat() -> None:
    config = load(CONFIG, [*SMALL, "train.batch_size=40000"])
    model = build(config, vocabulary_of(config, source="x"), source="x")
    loads = budget_loads(config, model)
    each = 40000 / 2 / 4  # samples of a microbatch
    alike, spread, again = (large.drawn_samples(config, model, sigma) for sigma in (0.0, 0.5, 0.5))
    for name, whole in loads.items():
        assert np.allclose(alike.rows[name], whole.tokens / each)
        assert np.mean(spread.rows[name]) == pytest.approx(whole.tokens / each, rel=0.02)
        assert np.std(np.log(spread.rows[name])) == pytest.approx(0.5, rel=0.02)
        assert (spread.rows[name] == again.rows[name]).all()
        assert np.allclose(alike.pairs[name], whole.tokens / each * whole.keys, rtol=1e-3)


@pytest.mark.parametrize("method", ["tokens", "as_printed"])
def test_drawn_samples_are_assigned_as_the_run_does(method: Method) -> None:
    config = load(CONFIG, [*SMALL, f"train.assign={method}", *(f"parallel.{name}.dp=2" for name in ENCODERS)])
    model = build(config, vocabulary_of(config, source="x"), source="x")
    layout, samples = build_layout(config, model, source="x"), large.drawn_samples(config, model, 0.8)
    loads = budget_loads(config, model)
    costs = ScaledCosts(flop_costs(config, model), {name: each.tokens for name, each in loads.items()})
    schedule, _ = large.play(config, model, layout, samples, costs, Links(), 4)
    assigner = assigner_of(method, layout, model, recompute=config.train.recompute)
    assignment = assigner and assigner(samples.lengths, 4)
    dispatcher = dispatcher_of(config.train.balance, layout, model, recompute=config.train.recompute)
    assert dispatcher is not None and dispatcher.method == "llm"
    replicas = dispatcher(samples.lengths)
    table = step_table(layout, samples.lengths, microbatches=4, assignment=assignment, replicas=replicas)
    timed = assigner.options(table) if assigner else {}
    assert schedule.table.digest == table.digest and (len(table.deferred) > 0) == bool(timed) == (method != "tokens")
    assert schedule.rows.tolist() == GENERATORS[config.parallel.schedule](schedule.graph, table, **timed).rows.tolist()


def test_a_plan_knows_the_nodes_of_the_run() -> None:
    """Nodes decide which replica of an encoder gets which batch: the simulation must use the run's nodes."""
    settings = ["train.balance=per_module", *(f"parallel.{name}.dp=2" for name in ENCODERS)]
    config = load(CONFIG, [*SMALL, *settings, "parallel.ranks_per_node=2"])
    model = build(config, vocabulary_of(config, source="x"), source="x")
    layout, samples = build_layout(config, model, source="x"), large.drawn_samples(config, model, 0.8)
    loads = budget_loads(config, model)
    costs = ScaledCosts(flop_costs(config, model), {name: each.tokens for name, each in loads.items()})
    schedule, _ = large.play(config, model, layout, samples, costs, Links(), 4)
    dispatcher = dispatcher_of("per_module", layout, model, recompute=config.train.recompute, ranks_per_node=2)
    assert dispatcher is not None
    replicas = dispatcher(samples.lengths)
    assert schedule.table.digest == step_table(layout, samples.lengths, microbatches=4, replicas=replicas).digest


def test_a_small_cluster_is_drawn_in_groups(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    stream = ["--set", "data.reading=stream", "--set", "data.validation=['held_out.jsonl']"]
    words = ["simulate", str(CONFIG), *WORDS, *stream, "--tflops", "0.001", "--spread", "0.5", "--out", str(tmp_path)]
    assert main(words) == 0
    output = capfd.readouterr().out
    assert "vlm-10240: 16 ranks, " in output and "lengths with sigma 0.5" in output and "over the links of" in output
    assert "left out: the items of data.reading = 'stream'" in output
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = [e["args"]["name"] for e in events if e["name"] == "process_name"]
    assert [name.split(":")[0] for name in names] == ["vision 0-2", "audio 0", "language_model 0", "language_model 1"]
    assert (tmp_path / "timeline.png").stat().st_size > 1000 and "<canvas" in (tmp_path / "timeline.html").read_text()
    assert main([*words[:-1], str(tmp_path / "timeline.png")]) == 2
    assert "cannot write there" in capfd.readouterr().err
    assert main([*words, "--microbatches", "13"]) == 2
    assert "train.batch_size = 24 gives less than a sample to each of 13 microbatches" in capfd.readouterr().err
    assert main([*words, "--spread", "-1"]) == 2
    assert "--spread -1: 0 or more" in capfd.readouterr().err


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_ranks_alike_hold_what_each_does(schedule: str) -> None:
    """Peaks are computed once for ranks with equal work; they are compared with each rank's own list."""
    config = load(CONFIG, [*SMALL, f"parallel.schedule={schedule}"])
    model = build(config, vocabulary_of(config, source="x"), source="x")
    layout, samples = build_layout(config, model, source="x"), large.drawn_samples(config, model, 0.8)
    loads = budget_loads(config, model)
    costs = ScaledCosts(flop_costs(config, model), {name: each.tokens for name, each in loads.items()})
    made, _ = large.play(config, model, layout, samples, costs, Links(), 4)
    chunks = made.table.chunks
    sizes = {(c.module, stage, i): 1.0 + 7 * i % 5 for i, c in enumerate(chunks) for stage in range(3)}
    later = {key: 3.0 * value for key, value in sizes.items()}
    assert _peaks(made, sizes, later) == [peak(actions, sizes, later) for actions in made.actions]
