"""Lengths of a config's data for cuts and predictions, and cuts of a step by modules."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from interlace.cli import main
from interlace.layout import Layout
from interlace.schedule import GENERATORS
from interlace.train.commands.planning import costs as layer_costs
from interlace.train.commands.planning import large, show
from interlace.train.commands.planning.step import own_layout, played
from interlace.train.config.load import ConfigError, dumps_table
from interlace.train.data.texts import vocabulary_of
from interlace.train.models.build import build, build_layout
from interlace.train.models.costs import budget_loads, flop_costs
from interlace.train.scheduling import chunk_counts
from tests.train.build import TABLE, _build, _config


def dense(lengths: list[int], causal: bool) -> tuple[int, float]:
    """Tokens of a packed row of these items, and keys per token, counted in its dense mask."""
    item = np.repeat(np.arange(len(lengths)), lengths)
    seen = item[:, None] == item
    if causal:
        seen &= np.tri(len(item), dtype=bool)
    return len(item), seen.sum() / len(item)


CHATS = ["data.dataset=chats", "data.train=['gone.jsonl']", "data.tokenizer=gone"]
CHATS += ["model.language_model.config.vocab_size=300", "model.language_model.config.max_position_embeddings=8192"]


def test_chats_fill_their_rows_and_need_no_files_for_that() -> None:
    config = _config(*CHATS, "data.max_tokens=100", "train.batch_size=16", "train.microbatches=2")
    model = build(config, vocabulary_of(config))
    result = budget_loads(config, model)
    assert (result["vision"].tokens, result["audio"].tokens) == (8 * 4, 8 * 50)
    tokens, keys = dense([100] * 8, causal=True)
    assert (result["language_model"].tokens, result["language_model"].keys) == pytest.approx((tokens, keys))
    with pytest.raises(ConfigError, match="gone: no such folder"):
        vocabulary_of(_config(*CHATS[:3]))  # its vocabulary size is unknown


def flops(costs: Any, name: str) -> float:
    return float(costs[name].times.forward.sum())


def test_long_samples_cost_more_attention_than_short_ones() -> None:
    """Regression: attention over samples of 4,000 tokens was charged 512 keys."""
    per_token = {}
    for size in (100, 2000):
        config = _config(*CHATS, f"data.max_tokens={size}")
        model = build(config, vocabulary_of(config))
        lengths = budget_loads(config, model)["language_model"]
        assert lengths.keys == (size + 1) / 2  # a query sees half of the keys
        per_token[size] = flops(flop_costs(config, model), "language_model") / lengths.tokens
    # Two layers, 4 * keys * width for scores and values.
    assert per_token[2000] - per_token[100] == pytest.approx(2 * 4 * 950 * 16)


def test_stages_that_share_ranks_weigh_what_passes_through_them() -> None:
    """With equal layers and one token each, three ranks would take two stages each, for any data."""
    modules = [f"parallel.{name}.pp=2" for name in ("vision", "audio", "language_model")]
    config = _config("parallel.placement=parallel", "parallel.ranks=3", *modules)
    model = _build()
    layout = build_layout(config, model)
    costs = flop_costs(config, model)
    lightest, *heaviest = sorted(costs, key=lambda name: flops(costs, name))
    assert lightest == "vision" and flops(costs, "audio") > 10 * flops(costs, "vision")
    assert len({rank for s in layout.stages() if s.module in heaviest for rank in s.lane.ranks}) == 3


def play(*overrides: str) -> Any:
    """Simulation of `interlace simulate step` at one TFLOP/s per rank."""
    overrides = ("train.batch_size=16", "train.microbatches=4", *overrides)
    config, model = _config(*overrides), _build(*overrides)
    costs = layer_costs.counted(config, model, 1.0)
    priced = layer_costs.Priced(config, model, costs, "tiny.toml", 4)
    return played(priced, own_layout(config, model, "tiny.toml"))


def test_a_replica_stands_for_all_where_modules_have_one_dp() -> None:
    one, two = play("train.batch_size=8", "parallel.ranks=2"), play("parallel={ranks=2, dp=2}")
    assert (one.num_ranks, two.num_ranks) == (2, 2)
    assert two.makespan == pytest.approx(one.makespan)


@pytest.mark.parametrize(
    "layout",
    [
        "{placement='parallel', vision={dp=2}}",
        "{placement='parallel', vision={dp=2, chunks=1}}",
        "{placement='parallel', vision={chunks=2}}",
        "{placement='parallel', vision={pp=2}, language_model={dp=2}}",
        "{placement='shared', vision={dp=2}, audio={dp=2}, language_model={pp=2}}",
    ],
)
def test_replicas_and_chunks_move_work_and_make_none(layout: str) -> None:
    """A step computes the same samples for any cut of its modules: the total busy time of all ranks is equal."""
    result = play(f"parallel={layout}")
    assert sum(result.busy_per_rank) == pytest.approx(sum(play("parallel.placement=parallel").busy_per_rank))


def test_chunk_count_is_kept_when_a_chain_replaces_replicas() -> None:
    config = _config("parallel={placement='parallel', vision={dp=4, chunks=2}, language_model={dp=2}}")
    model = _build()
    own = own_layout(config, model, "tiny.toml")
    assert chunk_counts(config, own, 3) == {"vision": 2, "audio": 3, "language_model": 3}
    chain = Layout.balanced(model, 3)
    assert chunk_counts(config, chain, 3) == {"vision": 8, "audio": 6, "language_model": 6}
    shared = _config("parallel={placement='shared', dp=2}")
    own = own_layout(shared, model, "tiny.toml")
    assert chunk_counts(shared, own, 3) == {"vision": 1, "audio": 1, "language_model": 3}
    assert chunk_counts(shared, chain, 3) == {"vision": 3, "audio": 3, "language_model": 3}


def test_every_schedule_is_played_by_its_name() -> None:
    four = ("model.language_model.config.num_hidden_layers=4", "parallel.placement=parallel")
    v = "parallel.language_model={pp=2, virtual=2, order='v'}"
    result = {name: play(*four, v, f"parallel.schedule={name}") for name in GENERATORS}
    assert all(timeline.num_ranks == 4 for timeline in result.values())
    assert result["auto"].makespan <= min(timeline.makespan for timeline in result.values()) + 1e-12
    assert result["zb_v"].makespan < result["1f1b"].makespan
    halves = [{str(a.op.value) for actions in t.actions for a in actions} & {"I", "W"} for t in result.values()]
    assert {frozenset(ops) for ops in halves} == {frozenset(), frozenset("IW")}


def test_forwards_run_ahead_as_activation_memory_allows() -> None:
    small = ("parallel.placement=parallel", "data.max_tokens=9", "model.audio.config.max_source_positions=4")
    limits = ("parallel.activation_memory=1.1e-4", "parallel.activation_memory=1", "parallel.schedule=1f1b")
    vision = [play(*small, limit).peak_in_flight[0] for limit in limits]
    assert vision == [3, 4, 2]  # chunks of 34 KB each in 118, in a GiB, and under 1F1B
    with pytest.raises(ValueError, match="bytes of activations, over its limit of 10737"):
        play("parallel.placement=parallel", "parallel.activation_memory=1e-5")


LINKS = "links={host={microseconds=1e6, gb_per_second=1}}"


@pytest.mark.parametrize("degrees", ["tp=2", "cp=2", "tp=1"])
def test_few_ranks_and_many_are_simulated_alike(degrees: str) -> None:
    """If a message takes a second. Regression: a lane's messages were free unless all replicas were simulated."""
    overrides = ["train.batch_size=16", "train.microbatches=4", "model.language_model.config.num_key_value_heads=2"]
    overrides += [f"parallel={{placement='parallel', {LINKS}, language_model={{{degrees}}}}}"]
    config, model = _config(*overrides), _build(*overrides)
    priced = layer_costs.Priced(config, model, layer_costs.counted(config, model, 1.0), "tiny.toml", 4)
    layout = own_layout(config, model, "tiny.toml", whole=True)
    one = played(priced, layout).makespan
    assert one > 4.0
    assert one == pytest.approx(large.drawn_step(priced, layout, 0.0)[1].makespan, rel=1e-3)


def test_chains_are_shown_beside_lanes() -> None:
    """`plan` compares with cuts without tensor parallelism, which also have costs."""
    overrides = ["train.batch_size=16", "train.microbatches=4", "model.language_model.config.num_key_value_heads=2"]
    overrides += [f"parallel={{placement='parallel', {LINKS}, language_model={{tp=2}}}}"]
    config, model = _config(*overrides), _build(*overrides)
    priced = layer_costs.Priced(config, model, layer_costs.counted(config, model, 1.0), "tiny.toml", 4)
    for layout in show._chains(priced, 2, needed=True).values():
        assert played(priced, layout).makespan > 0.0


# ---------------------------------------------------------------------- plan choose


def test_auto_leaves_the_files_own_layout_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The file's 8 replicas could not share the batch; the file's links are used."""
    path = tmp_path / "mine.toml"
    links = {"host": {"microseconds": 5.0, "gb_per_second": 400.0}}
    parallel = {"dp": 8, "language_model": {"shard": "optimizer"}, "links": links}
    train = {"steps": 10, "batch_size": 32, "microbatches": 4}
    path.write_text(dumps_table(copy.deepcopy(TABLE) | {"train": train, "parallel": parallel}))
    asked = ["--gpus", "2", "--memory", "10", "--tflops", "1", "--json"]
    batch = ["--set", "train.batch_size=4", "--set", "train.microbatches=2"]
    assert main(["plan", str(path), *batch]) == 2 and "on each of 8 replicas" in capsys.readouterr().err
    assert main(["plan", "choose", str(path), *asked, *batch]) == 0
    result = json.loads(capsys.readouterr().out)
    chosen = result["chosen"]
    assert (chosen["train"]["batch_size"], chosen["train"]["microbatches"]) == (4, 2)
    assert chosen["parallel"]["dp"] <= 2 and "links from parallel.links" in json.dumps(result)
    assert (
        main(["plan", "choose", str(path), *asked, "--set", "parallel.placment=chain"]) == 2
    )  # keys are still checked
    assert "[parallel] has no key 'placment'; did you mean 'placement'?" in capsys.readouterr().err
