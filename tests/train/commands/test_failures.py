"""`interlace simulate failures`: figures that add up, bytes of the model, flags and errors in one line."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from interlace.cli import main, parser
from interlace.costs.links import Link, Links
from interlace.plan import LinkModel
from interlace.train.commands.planning import failures
from interlace.train.commands.planning.costs import Costs, Priced
from interlace.train.config.load import load
from interlace.train.config.resilience import Resilience
from interlace.train.data.texts import vocabulary_of
from interlace.train.models.build import build
from interlace.train.models.costs import flop_costs
from tests.cli import TINY

TRACE = "time,node,event,warning\n60,3,fail,30\n600,3,join,\n900,0,fail,0\n1800,a,join,\n"


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.toml"
    path.write_text(TINY.format(folder=tmp_path))
    (tmp_path / "trace.csv").write_text(TRACE)
    return path


def simulated(tiny: Path, capfd: pytest.CaptureFixture[str], *more: str, trace: str = "trace.csv") -> dict[str, Any]:
    arguments = ["--trace", str(tiny.parent / trace), "--tflops", "1e-5", "--json"]
    assert main(["simulate", "failures", str(tiny), *arguments, *more]) == 0
    result = json.loads(capfd.readouterr().out)
    assert isinstance(result, dict)
    return result


def test_figures_add_up(tiny: Path, capfd: pytest.CaptureFixture[str]) -> None:
    result = simulated(tiny, capfd, "--nodes", "4", "--network", "0.001", "--disk", "0.001")
    assert (result["nodes"], result["failures"], result["joins"], result["seconds"]) == (4, 2, 2, 3600.0)
    assert set(result["systems"]) == {"reconfigure", "restart", "redundant"}
    edges = np.array(result["edges"])
    for each in result["systems"].values():
        assert sum(each["seconds"].values()) == pytest.approx(3600.0)
        assert each["samples"] > 0 and each["samples_per_second"] == pytest.approx(each["samples"] / 3600)
        assert np.dot(each["over_time"], np.diff(edges)) == pytest.approx(each["samples"])
    # 4 nodes until 60 s, 3 until 600, 4 until 900, 3 until 1800, 4 from then on; windows of 300 s.
    assert result["nodes_over_time"] == pytest.approx([3.2, 3, 4, 3, 3, 3] + [4] * 6)
    assert result["systems"]["restart"]["seconds"]["saving"] > 0 == result["systems"]["restart"]["seconds"]["redundant"]
    assert result["systems"]["redundant"]["seconds"]["redundant"] > 0


def test_a_lane_of_two_ranks_is_a_stage_of_twice_the_speed(tiny: Path, capfd: pytest.CaptureFixture[str]) -> None:
    fast = ("--nodes", "4", "--network", "1e6", "--disk", "1e6", "--start", "0", "--regroup", "0")
    lanes = [f"parallel.{name}.tp=2" for name in ("vision", "language_model")]
    heads = "model.language_model.config.num_key_value_heads=2"  # one per rank
    fast, lanes = (*fast, "--set", heads), [part for each in lanes for part in ("--set", each)]
    alone = simulated(tiny, capfd, *fast)
    cut = simulated(tiny, capfd, *fast, *lanes, "--ranks-per-node", "2")
    assert cut["ranks_per_node"] == 2 and cut["bytes"] == alone["bytes"]
    ratio = cut["systems"]["restart"]["samples"] / alone["systems"]["restart"]["samples"]
    assert ratio == pytest.approx(2.0, rel=0.02)


def test_each_rank_of_a_lane_is_sent_what_it_keeps(tiny: Path) -> None:
    def copied(**lane: Any) -> Any:
        heads = "model.language_model.config.num_key_value_heads=2"
        config = load(tiny, [heads, *(f"parallel.{name}={table(lane)}" for name in ("vision", "language_model"))])
        model = build(config, vocabulary_of(config))
        options = parser().parse_args(["simulate", "failures", str(tiny), "--trace", "x.csv"])
        options.ranks_per_node, options.faults, options.min_nodes = 4, 1, 1
        costs = Costs(flop_costs(config, model), "counted")
        return failures.job_of(Priced(config, model, costs, "tiny.toml", 4), options, 4).state.copied

    def table(lane: dict[str, Any]) -> str:
        return "{" + ", ".join(f"{key} = {json.dumps(value)}" for key, value in lane.items()) + "}"

    alone = copied()
    assert copied(cp=2) == pytest.approx(2 * alone)
    assert copied(cp=2, shard="full", shard_ranks=2) == pytest.approx(alone)
    between = copied(tp=2)  # norms and embeddings are replicated on both
    assert (alone < between).all() and (between < 2 * alone).any() and (between <= 2 * alone).all()


@pytest.mark.parametrize("memory", [(), ("--memory", "1")], ids=["nodes", "memory"])
@pytest.mark.parametrize(
    ("modules", "ranks", "message"),
    [
        (["vision", "language_model"], "1", r"nodes of 1 ranks cannot hold lanes of tp \* cp = 2: give"),
        (["language_model"], "2", r"vision\.tp = 1, but parallel\.language_model\.tp = 2: .* one tp and one cp"),
    ],
)
def test_lanes_that_no_elastic_run_has_are_refused(
    tiny: Path, capfd: pytest.CaptureFixture[str], modules: list[str], ranks: str, message: str, memory: tuple[str, ...]
) -> None:
    lanes = [part for name in modules for part in ("--set", f"parallel.{name}.tp=2")]
    arguments = ["--trace", str(tiny.parent / "trace.csv"), "--tflops", "1", "--ranks-per-node", ranks, *memory]
    assert main(["simulate", "failures", str(tiny), *arguments, *lanes]) == 2
    output = capfd.readouterr().err
    assert re.search(message, output) and len(output.strip().splitlines()) == 1


def test_bytes_are_those_of_the_model(tiny: Path, capfd: pytest.CaptureFixture[str]) -> None:
    frozen = ("--set", "model.language_model.freeze=true")
    for more in ((), frozen):
        result = simulated(tiny, capfd, "--nodes", "4", *more)["bytes"]
        config = load(tiny, list(more[1:]))
        model = build(config, vocabulary_of(config))
        sizes = [(p.numel() * p.element_size(), p.requires_grad) for p in model.parameters()]
        assert result["model"] == sum(size * (3 if trainable else 1) for size, trainable in sizes)
        assert result["checkpoint"] == result["model"]  # frozen weights have no folder here


def test_the_smallest_pipeline_is_what_holds_the_model(tiny: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def least(memory: float) -> int:
        result = simulated(tiny, capfd, "--nodes", "6", "--memory", str(memory))["min_nodes"]
        assert isinstance(result, int)
        return result

    assert least(1.0) == 1
    assert least(0.0004) == 2


@pytest.mark.parametrize(
    ("more", "assumed"),
    [((), True), (("--memory", "1"), False), (("--min-nodes", "1"), False)],
    ids=["nothing", "memory", "min-nodes"],
)
def test_assumed_min_nodes_is_reported(
    tiny: Path, capfd: pytest.CaptureFixture[str], more: tuple[str, ...], assumed: bool
) -> None:
    assert simulated(tiny, capfd, "--nodes", "4", *more)["min_nodes_assumed"] is assumed
    arguments = [
        "simulate",
        "failures",
        str(tiny),
        "--trace",
        str(tiny.parent / "trace.csv"),
        "--tflops",
        "1",
        "--nodes",
        "4",
    ]
    assert main([*arguments, "--out", str(tiny.parent / "out"), *more]) == 0
    assert ("assumed: the memory of one node is enough for" in capfd.readouterr().out) is assumed


@pytest.mark.slow
def test_twice_as_fast_ranks_do_twice_as_much(tiny: Path, capfd: pytest.CaptureFixture[str]) -> None:
    quiet = ("--nodes", "4", "--start", "0", "--regroup", "0", "--network", "1e5", "--disk", "1e5")
    (tiny.parent / "one.csv").write_text("time,node,event\n1,0,fail\n")
    once, twice = (
        simulated(tiny, capfd, *quiet, "--tflops", speed, trace="one.csv")["systems"] for speed in ("1e-4", "2e-4")
    )
    for name, each in once.items():
        assert twice[name]["samples"] == pytest.approx(2 * each["samples"], rel=0.01)


def test_a_trace_that_was_made_is_drawn(tiny: Path, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["simulate", "failures", "--make-trace", "gcp", "--hours", "2", "--nodes", "6", "--seed", "3"]) == 0
    made = tmp_path / "made.csv"
    made.write_text(capfd.readouterr().out)
    arguments = [
        "simulate",
        "failures",
        str(tiny),
        "--tflops",
        "1e-5",
        "--trace",
        str(made),
        "--nodes",
        "6",
        "--hours",
        "2",
    ]
    assert main([*arguments, "--out", str(tmp_path / "drawn")]) == 0
    output = capfd.readouterr().out
    assert "6 nodes of 1" in output and "where the time goes" in output and "samples per second over time" in output
    assert (tmp_path / "drawn" / "failures.png").stat().st_size > 1000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["simulate", "failures", "--trace", "{}/trace.csv"], "simulate failures needs a config"),
        (["simulate", "failures", "{}/tiny.toml", "--trace", "{}/none.csv"], "none.csv: cannot read it: No such file"),
        (["simulate", "failures", "{}/tiny.toml", "--trace", "{}/bad.csv"], "bad.csv:3: time 'soon'"),
        (["simulate", "failures", "{}/tiny.toml", "--trace", "{}/empty.csv"], "empty.csv: nothing happens in it"),
        (["simulate", "failures", "{}/tiny.toml", "--trace", "{}/trace.csv", "--nodes", "0"], "--nodes 0: at least 1"),
        (["simulate", "failures", "{}/tiny.toml", "--trace", "{}/trace.csv", "--hours", "0"], "--hours 0: more than 0"),
        (["simulate", "failures", "{}/tiny.toml", "--trace", "{}/trace.csv", "--start", "-1"], "--start -1: 0 or more"),
        (
            ["simulate", "failures", "{}/tiny.toml", "--trace", "{}/trace.csv", "--nodes", "1"],
            "2 nodes of the trace are present at the start, more than 1",
        ),
        (
            ["simulate", "failures", "{}/tiny.toml", "--trace", "{}/trace.csv", "--nodes", "4", "--min-nodes", "3"],
            "4 nodes cannot hold 2 pipelines of 3 nodes",
        ),
        (["simulate", "failures", "--make-trace", "ec2", "--nodes", "1"], "--make-trace: nodes is 1"),
        (["simulate", "failures", "--make-trace", "ec2", "--hours", "0"], "--hours 0: more than 0"),
        (["simulate", "failures", "{}/tiny.toml", "--make-trace", "ec2"], "leave out the config"),
    ],
)
def test_errors_are_one_line(tiny: Path, arguments: list[str], message: str, capfd: pytest.CaptureFixture[str]) -> None:
    (tiny.parent / "bad.csv").write_text("time,node,event\n1,a,fail\nsoon,b,fail\n")
    (tiny.parent / "empty.csv").write_text("time,node,event\n")
    speed = ["--tflops", "1"] if "--make-trace" not in arguments else []
    assert main([argument.format(tiny.parent) for argument in [*arguments, *speed]]) == 2
    output = capfd.readouterr().err
    assert message in output and len(output.strip().splitlines()) == 1


def test_what_no_flag_says_is_that_of_the_config(tiny: Path) -> None:
    def taken(own: dict[str, Any], *flags: str) -> tuple[Any, ...]:
        options = parser().parse_args(["simulate", "failures", str(tiny), "--trace", "x.csv", *flags])
        config = load(tiny, []).model_copy(update={"resilience": Resilience(**own)})
        result = failures.with_config(options, Priced(config, None, None, "tiny.toml", 4))  # type: ignore[arg-type]
        return result.nodes, result.ranks_per_node, result.faults, result.min_nodes

    assert taken({}) == (None, 1, 1, 1)
    assert taken({"nodes": 6, "faults": 2, "min_nodes": 2, "ranks_per_node": 4}) == (6, 4, 2, 2)
    assert taken({"nodes": 6, "faults": 2}, "--nodes", "9", "--faults", "0", "--min-nodes", "3") == (9, 1, 0, 3)


def test_the_network_is_that_of_the_links_unless_a_flag_says_so(tiny: Path) -> None:
    line = LinkModel(1e-6, 1 / 50e9)
    costs = SimpleNamespace(links=Links(network=Link(line, line)))

    def network(costs: Any, *flags: str) -> float:
        options = parser().parse_args(
            ["simulate", "failures", str(tiny), "--trace", "x.csv", "--ranks-per-node", "4", *flags]
        )
        return failures.rates_of(costs, options).network

    assert network(costs) == pytest.approx(4 * 50e9)  # all ranks of a node receive
    assert network(costs, "--network", "7") == 7e9
    assert network(SimpleNamespace(links=None)) == 25e9
