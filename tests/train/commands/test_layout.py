"""`interlace plan` of a config's layout: the table, the blocks, the figure and the JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import matplotlib.image
import pytest

from interlace.cli import main
from interlace.data import ByteTokenizer
from interlace.layout import Lane, Layout, ParallelSpec, Pipeline, Stage
from interlace.plan.memory import RankMemory
from interlace.train.commands.planning.layout import LayoutFacts, blocks, size
from interlace.train.config.load import load
from interlace.train.models.build import build
from tests.cli import TINY

LLM = "language_model"
TWO = ["--set", "parallel={placement='parallel', vision={dp=2}, language_model={pp=2}}"]


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.toml"
    path.write_text(TINY.format(folder=tmp_path))
    return path


def said_as_json(capfd: pytest.CaptureFixture[str], *arguments: str) -> Any:
    capfd.readouterr()
    assert main(["plan", *arguments, "--tflops", "1", "--json"]) == 0

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    text = capfd.readouterr().out
    result = json.loads(text, parse_constant=refuse)
    assert text == json.dumps(result, indent=1, sort_keys=True) + "\n"
    return result


def test_json_has_the_keys_of_its_version(tiny: Path, capfd: pytest.CaptureFixture[str]) -> None:
    result = said_as_json(capfd, str(tiny), *TWO)
    keys = {"version", "run", "placement", "schedule", "microbatches", "world", "costs", "modules", "ranks"}
    assert set(result) == keys and result["version"] == 1
    assert (result["world"], result["placement"], len(result["ranks"])) == (4, "parallel", 4)
    assert [module["module"] for module in result["modules"]] == ["vision", LLM]
    for module in result["modules"]:
        assert set(module) == {"module", "tp", "cp", "pp", "virtual", "order", "dp", "shard", "shard_ranks", "stages"}
        for stage in module["stages"]:
            assert set(stage) == {"replica", "stage", "layers", "lanes", "parameters", "seconds"}
            assert stage["seconds"] > 0 and stage["parameters"] > 0
    for number, rank in enumerate(result["ranks"]):
        assert set(rank) == {
            "rank",
            "stages",
            "parameters",
            "in_flight",
            "bytes",
            "bytes_on_host",
            "bytes_gathered_once",
            "bytes_as_run",
            "gathered_by_layer",
        }
        assert rank["rank"] == number
        held = rank["bytes"]
        state = {"weights", "gradients", "optimizer", "activations", "messages", "gradient_sums", "workspace"}
        assert set(held) == state | {"peak"} and all(isinstance(each, int) and each >= 0 for each in held.values())
        larger = max(held["gradient_sums"], held["workspace"])
        rest = sum(held[kind] for kind in state - {"gradient_sums", "workspace"})
        assert held["peak"] == rest + larger == rank["bytes_gathered_once"]["peak"] == rank["bytes_as_run"]["peak"]
        assert rank["gathered_by_layer"] == []  # nothing is sharded
    assert [rank["stages"] for rank in result["ranks"][:2]] == [
        [{"module": "vision", "stage": 0, "replica": replica}] for replica in (0, 1)
    ]


def test_both_peaks_of_full_shards_and_which_applies(tiny: Path, capfd: pytest.CaptureFixture[str]) -> None:
    more = ["parallel.placement='shared'", "parallel.vision={dp=2, shard='full'}"]
    more += [f"parallel.{LLM}={{dp=2, shard='full'}}", f"model.{LLM}.config.num_hidden_layers=8"]
    words = [word for each in more for word in ("--set", each)]
    for rank in said_as_json(capfd, str(tiny), *words)["ranks"]:
        assert rank["gathered_by_layer"] == ["vision", LLM]
        assert rank["bytes_as_run"]["peak"] == rank["bytes"]["peak"] < rank["bytes_gathered_once"]["peak"]
        assert rank["bytes_as_run"]["weights"] == rank["bytes"]["weights"] < rank["bytes_gathered_once"]["weights"]
    assert main(["plan", str(tiny), *words, "--tflops", "1"]) == 0
    output = capfd.readouterr().out
    assert f"{LLM}: weights are gathered layer by layer" in output


def test_nothing_is_gathered_where_nobody_shares(tiny: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(tiny), "--set", f"parallel.{LLM}={{shard='full'}}", "--tflops", "1"]) == 0
    output = capfd.readouterr().out
    assert "full" in output and "gathered" not in output


def test_all_weights_of_the_model_are_on_some_rank(tiny: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Tied embeddings count once per rank that has them: both stages of the language model do."""
    model = build(load(tiny, []), ByteTokenizer())
    tied = model.language_model.get_input_embeddings().weight.numel()
    sizes = [rank["parameters"] for rank in said_as_json(capfd, str(tiny), *TWO)["ranks"]]
    encoder = sum(parameter.numel() for parameter in model.encoders.parameters())
    assert sizes[:2] == [encoder] * 2
    assert sum(sizes[2:]) == sum(parameter.numel() for parameter in model.language_model.parameters()) + tied


def test_activations_follow_the_rows_and_what_waits(tiny: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def ranks(*overrides: str) -> list[Any]:
        return said_as_json(capfd, str(tiny), *TWO, *(word for each in overrides for word in ("--set", each)))["ranks"]

    first, more, recomputed = ranks(), ranks("train.batch_size=16"), ranks("train.activation_checkpointing='full'")
    for rank in (2, 3):
        own = [each[rank]["bytes"]["activations"] for each in (first, more, recomputed)]
        assert 1.8 * own[0] < own[1] <= 2 * own[0]
        assert own[2] < 0.6 * own[0]
    assert first[2]["in_flight"] == 2 > first[3]["in_flight"] == 1
    assert recomputed[2]["bytes"]["workspace"] > 0 == first[2]["bytes"]["workspace"]


def test_optimizer_state_may_be_on_the_host(tiny: Path, capfd: pytest.CaptureFixture[str]) -> None:
    here, there = (
        said_as_json(capfd, str(tiny), *TWO, *more)["ranks"]
        for more in ((), ("--set", "train.offload_optimizer=true", "--set", "run.device='cuda'"))
    )
    for device, host in zip(here, there, strict=True):
        assert device["bytes"]["optimizer"] == host["bytes_on_host"]["optimizer"] > 0
        assert host["bytes"]["optimizer"] == device["bytes_on_host"]["optimizer"] == 0
        assert device["bytes"]["peak"] - host["bytes"]["peak"] == device["bytes"]["optimizer"]


def test_the_table_says_who_has_what(tiny: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "pictures" / "layout.png"
    assert main(["plan", str(tiny), *TWO, "--tflops", "1", "--picture", str(picture)]) == 0
    output = capfd.readouterr().out
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in output.splitlines() if line.startswith("│")]
    stages = [row[:9] for row in cells if len(row) == 11]
    assert stages == [
        ["vision", "0", "0:2", "0", "1", "1", "1", "2", "none"],
        [LLM, "0", "0:1", "2", "1", "1", "2", "1", "none"],
        ["", "1", "1:2", "3", "1", "1", "2", "1", "none"],
    ]
    ranks = [row[:2] for row in cells if len(row) == 10]
    assert ranks == [["0", "vision[0:2]"], ["1", "vision[0:2]"], ["2", f"{LLM}[0:1]"], ["3", f"{LLM}[1:2]"]]
    assert "config (parallel)" in output and f"wrote {picture}" in output.replace("\n", "")
    image = matplotlib.image.imread(picture)
    assert image.shape[1] > 800 and image[..., :3].std() > 0.05


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--picture", "layout.txt"], "name a file that ends in .png or .svg"),
        (["--picture", "{}/layout.png"], "cannot write there"),
        (["--json", "--ranks", "99"], "cannot cut"),
    ],
)
def test_wrong_arguments_are_one_line(
    tiny: Path, arguments: list[str], message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", str(tiny), "--tflops", "1", *(each.format(tiny) for each in arguments)]) == 2
    output = capfd.readouterr()
    assert output.out == "" and output.err.startswith("interlace: ") and message in output.err


def test_ranks_as_blocks() -> None:
    lanes = [Lane((0, 1)), Lane((2,))]
    vision = Pipeline("vision", 0, (Stage("vision", 0, 0, 3, lanes[0]),))
    language = Pipeline(LLM, 0, (Stage(LLM, 0, 0, 10, lanes[1]),))
    layout = Layout({"vision": (ParallelSpec(tp=2), (vision,)), LLM: (ParallelSpec(), (language,))}, 3)

    def memory(rank: int, *sizes: int) -> RankMemory:
        weights, gradients, optimizer, activations, messages = sizes
        more = (weights, gradients) * 2
        return RankMemory(rank, 10, weights, gradients, optimizer, activations, 1, messages, 0, 0, *more)

    held = (memory(0, 20, 20, 40, 0, 0), memory(1, 20, 20, 40, 0, 0), memory(2, 100, 100, 200, 300, 100))
    facts = LayoutFacts(cast(Any, None), layout, (), held, 3)
    assert blocks(facts) == [
        "rank  vision  language_model",
        "   0  [0:3]   .               wgoo 80 B",
        "   1  [0:3]   .               wgoo 80 B",
        "   2  .       [0:10]          wwwwwggggg" + 10 * "o" + 15 * "a" + 5 * "b" + " 800 B",
        "      w = weights, g = gradients, o = optimizer, a = activations, b = buffers",
    ]


def test_bytes_for_people() -> None:
    assert [size(n) for n in (0, 999, 1000, 102400, 2**30, 2**50)] == [
        "0 B", "999 B", "1.0 KiB", "100 KiB", "1.0 GiB", "1,024.0 TiB",
    ]  # fmt: skip
