"""`data.dataset = "package.module:Class"`: the protocol of a dataset, and its errors."""

from __future__ import annotations

import json
import pickle
import re
from pathlib import Path

import pytest
import torch

from interlace.cli import main
from interlace.train.config.data import Data
from interlace.train.config.load import ConfigError, dumps, loads
from interlace.train.data.feed import datasets
from interlace.train.data.texts import tokenizer_of
from interlace.train.models.build import build
from tests.train.own_datasets import config_of

PAGE = Path(__file__).parents[2] / "docs" / "your-own-data.md"


@pytest.mark.parametrize("packed", [False, True])
def test_a_class_of_the_user_trains_and_resumes(tmp_path: Path, packed: bool, in_process: None) -> None:
    (tmp_path / "own.toml").write_text(config_of(tmp_path, "Colours"))
    rows = ["--set=data.pack=true", "--set=train.batch_size=2", "--set=log.samples=0"] if packed else []
    assert main(["train", str(tmp_path / "own.toml"), *rows, "--set=data.options.count=12"]) == 0
    [folder] = [path for path in (tmp_path / "runs" / "own").iterdir() if path.name != "latest"]
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["data"], summary["steps"], summary["colour_questions"]) == ("colours", 2, 12)
    assert summary["colour_swapped_media_accuracy"] == 0.0 and summary["unigram_token_baseline"] > 0
    steps = ["--set", "train.steps=3", "--set", "train.schedule_steps=3"]
    if not packed:
        assert main(["train", "--resume", str(folder), *steps, "--set", "data.options.count=13"]) == 2
        assert main(["train", "--resume", str(folder), *steps]) == 0
        assert len((folder / "metrics.jsonl").read_text().splitlines()) == 3


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("Gone", {}, "tests.train.own_datasets has no 'Gone'"),
        ("NOTHING", {}, "is no class, but the int 3"),
        ("Plain", {}, "derive the class from interlace.data.SampleDataset"),
        ("Lacking", {}, "lacks the method fingerprint"),
        ("Colours", {"number": 3}, "got an unexpected keyword argument 'number'"),
        ("Empty", {}, "split 'train': has no samples"),
        ("Dicts", {}, r"sample\(0, 0\) gives a dict, not an interlace.data.Sample"),
        ("Raises", {}, "split 'train': OSError: no disk at all"),
    ],
)
def test_a_faulty_class_is_refused_in_one_line(tmp_path: Path, name: str, options: dict[str, int], said: str) -> None:
    config = loads(config_of(tmp_path, name), [f"data.options.{key}={value}" for key, value in options.items()])
    tokenizer = tokenizer_of(config)
    with pytest.raises(ConfigError, match=said) as refused:
        datasets(config, build(config, tokenizer), tokenizer, source="own.toml")
    assert len(str(refused.value).splitlines()) == 1 and f"tests.train.own_datasets:{name}" in str(refused.value)


def test_a_module_that_cannot_be_imported_is_named(tmp_path: Path) -> None:
    config = loads(config_of(tmp_path, "Colours"), ["data.dataset=no_such_package:Colours"])
    tokenizer = tokenizer_of(config)
    with pytest.raises(ConfigError, match="'no_such_package:Colours': cannot import no_such_package"):
        datasets(config, build(config, tokenizer), tokenizer)


def test_samples_longer_than_a_row_are_refused(tmp_path: Path) -> None:
    config = loads(config_of(tmp_path, "Colours"), ["data.max_tokens=20"])
    tokenizer = tokenizer_of(config)
    with pytest.raises(ConfigError, match=r"split 'train': sample [0-9] has [0-9]+ tokens, at most 20 fit"):
        datasets(config, build(config, tokenizer), tokenizer)


def test_a_copy_for_workers_makes_the_same_samples(tmp_path: Path) -> None:
    config = loads(config_of(tmp_path, "Colours"))
    tokenizer = tokenizer_of(config)
    train, held_out = datasets(config, build(config, tokenizer).to_empty(device="cpu"), tokenizer)
    sent = pickle.dumps(train)
    assert len(sent) < 50_000  # without the encoder's weights
    one, other = train.sample(1, 0), pickle.loads(sent).sample(1, 0)
    assert torch.equal(one.input_ids, other.input_ids) and one.media["vision"][0].tokens == 4
    assert torch.equal(one.media["vision"][0].data, other.media["vision"][0].data)
    assert (len(train), held_out.fingerprint()) == (9, "colours heldout 9")


def test_the_example_on_the_page_trains(tmp_path: Path, in_process: None, monkeypatch: pytest.MonkeyPatch) -> None:
    section = PAGE.read_text().partition("## A class of your own")[2].partition("\n## ")[0]
    for kind, name in (("python", "colours.py"), ("toml", "colours.toml")):
        (tmp_path / name).write_text(re.findall(rf"```{kind}\n(.*?)```", section, flags=re.S)[0])
    monkeypatch.syspath_prepend(tmp_path)
    settings = [f"run.folder={tmp_path}", f"data.cache={tmp_path}", "train.steps=2", "log.samples=0"]
    assert main(["train", str(tmp_path / "colours.toml"), *(f"--set={each}" for each in settings)]) == 0


def test_names_of_datasets_are_checked() -> None:
    for name, said in (("chat", "did you mean 'chats'"), ("chat:", "there is no dataset 'chat:'")):
        with pytest.raises(ValueError, match=said):
            Data.model_validate({"dataset": name})
    assert Data(dataset="mine.data:Chats").own


def test_keys_of_one_kind_are_refused_for_another() -> None:
    for table, said in (
        ({"dataset": "mine:Chats", "limit": 3}, "limit is a key of dataset 'chats', not of 'mine:Chats'"),
        (
            {"dataset": "chats", "train": ["a.jsonl"], "options": {"a": 1}},
            "options is a key of dataset 'package.module:Class', not of",
        ),
    ):
        with pytest.raises(ValueError, match=said):
            Data.model_validate(table)


def test_a_saved_config_has_the_options(tmp_path: Path) -> None:
    config = loads(config_of(tmp_path, "Colours"), ["data.options.count=4", "data.options.names=['a']"])
    assert loads(dumps(config)) == config and config.data.options == {"count": 4, "names": ["a"]}
