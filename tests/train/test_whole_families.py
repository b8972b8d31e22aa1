"""Every command on every family of docs/whole-checkpoints.md, and the statements of that page."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from interlace.cli import main
from interlace.model import MultimodalModel
from interlace.train.config.load import dumps, from_table, load
from interlace.train.data.feed import datasets
from interlace.train.data.texts import tokenizer_of
from interlace.train.models.build import freeze
from interlace.train.selection import choose, fill
from tests.data import chat_families
from tests.model import wholes
from tests.train.pretrained import all_weights
from tests.train.whole_families import MODELS, huggingface_loss, kind_of, prepare

PAGE = Path(__file__).parents[2] / "docs" / "whole-checkpoints.md"
STEPS = ("check", "full", "LoRA", "checkpointing", "resume", "export", "reload", "generate")
FAST = "internvl"
WAYS = {
    "full": "train.lr=1e-2",
    "LoRA": "train.lora={rank=2, alpha=8, targets=['all-linear', 'ENCODER']}",
    "checkpointing": "train.activation_checkpointing='full'",
}
REFUSED = {
    "video_llava": wholes.video_llava,
    "granite4_vision": wholes.granite4_vision,
    "deepseek_ocr2": wholes.deepseek_ocr2,
}


def rows_of_page(first: str) -> dict[str, list[str]]:
    """model type -> cells after the first one, of the table whose head begins with `first`."""
    _, table = PAGE.read_text(encoding="utf-8").split(f"\n| {first} ", 1)
    result = {}
    for line in table.split("\n\n")[0].splitlines()[2:]:
        name, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        result[re.findall(r"`(\w+)`", name)[0]] = cells
    return result


def test_the_page_has_every_family() -> None:
    assert rows_of_page("family").keys() == MODELS.keys()
    assert rows_of_page("refused").keys() == REFUSED.keys()


@pytest.mark.parametrize("name", REFUSED)
def test_a_family_is_refused_with_the_reason_of_the_page(name: str) -> None:
    whole = REFUSED[name]()
    assert whole.config.model_type == name
    [reason] = rows_of_page("refused")[name]
    with pytest.raises(ValueError, match=f"^{type(whole).__name__} .*{re.escape(reason)}"):
        MultimodalModel.of_whole(whole)


class Commands:
    """`interlace` as typed by a user, in this process."""

    def __init__(self, capsys: Any) -> None:
        self.capsys = capsys

    def __call__(self, *words: object) -> str:
        """ "ok", or the last line of an error."""
        self.capsys.readouterr()
        code = main([str(word) for word in words])
        self.said = self.capsys.readouterr()
        return "ok" if code == 0 else f"{code}: {self.said.err.strip().splitlines()[-1]}"


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == FAST else pytest.mark.slow) for name in MODELS]
)
def test_every_command(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("INTERLACE_LAUNCHER", raising=False)
    for key, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(key, value)
    family, records, table = prepare(name, tmp_path, kind_of(name), count=7)
    for part, some in (("train", records[:4]), ("validation", records[4:])):
        (tmp_path / f"{part}.jsonl").write_text("\n".join(map(json.dumps, some)))
        table["data"][part] = [str(tmp_path / f"{part}.jsonl")]
    table["train"] |= {"validation_samples": len(records[4:]), "lr": 1e-2}
    table |= {"checkpoint": {"every": 1}}
    config = tmp_path / "config.toml"
    config.write_text(dumps(from_table(table)))
    do, result = Commands(capsys), {}

    result["check"] = do("data", "check", config, "--out", tmp_path / "data.html")
    for way, setting in WAYS.items():
        setting = setting.replace("ENCODER", family.encoder)
        result[way] = do("train", config, "--set", f"run.name={way}", "--set", setting)
    runs = {way: tmp_path / "runs" / way / "latest" for way in WAYS}
    exports = {do("export", run, tmp_path / "out" / way, "--check", 3) for way, run in runs.items()}
    result["export"] = ", ".join(exports)
    assert set(result.values()) == {"ok"}, result
    losses = {way: held_out_loss(run) for way, run in runs.items()}
    result["resume"] = do("train", "--resume", runs["full"] / "checkpoints" / "step-00000001")
    assert do("export", runs["full"], tmp_path / "out" / "resumed") == "ok"
    given = ("--audio", "0.wav") if kind_of(name) == "audio" else ("--image", "0.png")
    asked = (given[0], tmp_path / "media" / given[1], "--text", "What?", "--max-new-tokens", 3)
    result["generate"] = do("generate", runs["full"], *asked)
    answer = do.said.out
    assert do("generate", tmp_path / "out" / "full", *asked) == "ok" and do.said.out == answer and answer.endswith("\n")

    weights = {way: all_weights(tmp_path / "out" / way) for way in (*WAYS, "resumed")}
    before = all_weights(tmp_path / "model")
    assert all(each.keys() == before.keys() for each in weights.values())
    for same in ("checkpointing", "resumed"):
        assert all(torch.equal(weights[same][key], value) for key, value in weights["full"].items()), same
    for way in ("full", "LoRA"):
        assert any(not torch.equal(weights[way][key], value) for key, value in before.items())
        reloaded = huggingface_class(tmp_path / "out" / way)
        held_out, differences = reload(family, records[4:], runs[way], reloaded)
        assert held_out == pytest.approx(losses[way], rel=1e-5)
        assert max(differences) < 1e-5
    assert losses["full"] == losses["checkpointing"] == held_out_loss(runs["full"])
    result["reload"] = "ok"
    assert dict(zip(STEPS, rows_of_page("family")[name], strict=True)) == result


def held_out_loss(run: Path) -> float:
    """The last held-out loss measured by the run."""
    loss: float = json.loads((run / "summary.json").read_text())["held_out_loss"]
    return loss


def huggingface_class(folder: Path) -> Any:
    """The exported model, loaded by the class that its config names."""
    [kind] = json.loads((folder / "config.json").read_text())["architectures"]
    return getattr(transformers, kind).from_pretrained(folder, attn_implementation="eager").eval()


@torch.no_grad()
def reload(family: Any, records: list[Any], run: Path, reloaded: Any) -> tuple[float, list[float]]:
    """HuggingFace's mean loss on the held-out records, and the distance of its logits from those of the run's
    weights."""
    config = load(str(run / "config.toml"), [])
    model = MultimodalModel.from_pretrained(config.model.path).eval()
    freeze(config, model, "config")
    fill(config, model, choose(config, run))
    model.eval()
    _, held_out = datasets(config, model, tokenizer_of(config))
    samples = [held_out.sample(i) for i in range(len(records))]
    differences = []
    for record, sample in zip(records, samples, strict=True):
        own = reloaded(**chat_families.own(family.processor, record)).logits[0]
        differences.append(float((model(**model.collate([sample])).logits[0] - own).abs().max()))
    return huggingface_loss(reloaded, family, records, samples), differences
