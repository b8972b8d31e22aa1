"""`make train`: configs/stamps.toml writes its data, trains and exports; answers are equal inside and outside of
Interlace.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from interlace.cli import main
from interlace.data.builtin import fetch, stamps_folder
from interlace.data.chats import store as chats_store
from interlace.train.config.load import Config, ConfigError, load
from interlace.train.data import feed
from interlace.train.data.prepared import write_chats
from interlace.train.data.texts import tokenizer_of
from tests.data.package import SETTINGS, cached

CONFIG = Path(__file__).parents[2] / "configs" / "stamps.toml"


def settings(folder: Path, cache: Path) -> list[str]:
    """configs/stamps.toml, reduced and with the data of a test."""
    names = {split: [str(folder / f"{split}.jsonl")] for split in ("train", "validation")}
    given: dict[str, Any] = {f"data.{split}": files for split, files in names.items()}
    given |= {"data.tokenizer": str(folder / "tokenizer"), "data.cache": str(cache)}
    given |= {"run.folder": str(folder.parent / "runs"), "train.steps": 3, "train.warmup_steps": 1, "log.every": 1}
    given |= {"log.trackers": [], "log.trace_step": 0, "log.samples": 4, "log.max_new_tokens": 6}
    given |= {"log.accuracy_samples": 6, "train.validate_every": 0, "train.validation_samples": 8}
    return [f"{key}={json.dumps(value)}" for key, value in given.items()] + ["parallel={ranks=1}"]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stamps' folder, reduced for tests."""
    make, few = stamps_folder.make, replace(SETTINGS, records=40)
    monkeypatch.setattr(stamps_folder, "make", lambda folder, _, **more: make(folder, few, **more))


def test_the_data_are_written_once(small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cached(tmp_path / "cache")
    config, said = load(CONFIG, settings(tmp_path / "made", tmp_path / "cache")), list[str]()
    with pytest.raises(
        ConfigError,
        match=f"not there yet; write them first: interlace data stamps {tmp_path}/made --cache {tmp_path}/cache$",
    ):
        tokenizer_of(config, source="stamps.toml")
    feed.prepare(config, said.append)
    assert [line.split()[0] for line in said] == ["reading", "writing", "written", "prepared", "prepared"]
    assert (tmp_path / "made" / "made.json").exists()

    def forbidden(*_: Any, **__: Any) -> Any:
        raise AssertionError("done again")

    monkeypatch.setattr(fetch, "_fetch", forbidden)
    monkeypatch.setattr(stamps_folder, "_make", forbidden)
    monkeypatch.setattr(chats_store, "_write", forbidden)
    feed.prepare(config, lambda line: pytest.fail(line))


def test_without_apt_one_line_says_so_at_every_start(small: None, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    config = load(CONFIG, settings(tmp_path / "made", tmp_path / "cache"))
    for _ in range(2):
        lines: list[str] = []
        feed.prepare(config, lines.append)
        assert lines[-1] != lines[0] or len(lines) == 1
        [line] = [each for each in lines if each.startswith("stamps not available (apt-get not found")]
        assert "digits instead" in line


def test_the_config_can_be_planned_before_its_data_are_there(tmp_path: Path, capfd: Any) -> None:
    gone = [f"--set={each}" for each in settings(tmp_path / "made", tmp_path / "cache") if "parallel" not in each]
    two = ["--set=parallel={placement='colocated'}", "--set=train.microbatches=2"]
    assert main(["plan", str(CONFIG), "--tflops", "1", *gone, *two]) == 0
    assert "vision 288" in capfd.readouterr().out.replace("\n", " ")  # 8 pictures of 36 patches
    assert main(["mask", str(CONFIG), *gone]) == 2
    assert "write them first: interlace data stamps" in capfd.readouterr().err


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("INTERLACE_LAUNCHER", raising=False)


@pytest.mark.slow
def test_from_nothing_to_an_export_that_answers_equally(
    small: None, in_process: None, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    cached(tmp_path / "cache")
    given = [f"--set={each}" for each in settings(tmp_path / "made", tmp_path / "cache")]
    assert main(["train", str(CONFIG), *given]) == 0, capfd.readouterr().err
    run = tmp_path / "runs" / "stamps" / "latest"
    summary = json.loads((run / "summary.json").read_text())
    for kind in ("category", "language"):
        assert 0 <= summary[f"{kind}_accuracy"] <= 1 and summary[f"{kind}_majority_accuracy"] > 0
    assert "category_swapped_media_accuracy" in summary or "language_swapped_media_accuracy" in summary
    capfd.readouterr()
    assert main(["export", str(run), str(tmp_path / "out"), "--check", "6"]) == 0
    assert "6 held-out questions answered by HuggingFace's own classes" in capfd.readouterr().out
    assert main(["export", str(run), str(tmp_path / "more"), "--check", "0"]) == 2
    assert not (tmp_path / "more").exists()


def test_the_configs_keys_are_those_of_chats() -> None:
    config: Config = load(CONFIG)
    assert config.data.prepare == "stamps" and config.parallel.auto
    assert {Path(file).parent.name for file in (*config.data.train, *config.data.validation)} == {"stamps"}


def test_stamps_replace_digits_with_settings_of_the_folder(tmp_path: Path, monkeypatch: Any) -> None:
    asked: list[Any] = []
    own = replace(SETTINGS, records=7)
    monkeypatch.setattr(stamps_folder, "look", lambda _: stamps_folder.Made("digits", "few", own))
    stamps = stamps_folder.Made("stamps", "many", own)
    monkeypatch.setattr(stamps_folder, "make", lambda _, wanted, **__: asked.append(wanted) or stamps)
    write_chats(load(CONFIG, settings(tmp_path / "made", tmp_path / "cache")), asked.append)
    assert asked == [own]
