"""The closing report of rank 0: what fails in it never costs the summary of a finished run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from interlace.train import rank, report
from interlace.train.config import ConfigError
from interlace.train.metrics import HELD_OUT, LOSS
from tests.train.one_process import ToyModel, toy_config, toy_feed

OUTCOME = {"step": 12, "seconds": 2.0, "samples": 8, "tokens": 80, "metrics": {LOSS: 1.5, HELD_OUT: 1.75}}


class Tokens:
    vocab_size = 32


def _close(folder: Path, *overrides: str) -> dict[str, Any]:
    config = toy_config(*overrides)
    feed = toy_feed(config)
    feed.held_out_data.name = "toy"
    rank.close(config, folder, OUTCOME, ToyModel(), Tokens(), feed, "toy.toml")
    return dict(json.loads((folder / "summary.json").read_text()))


def test_without_samples_no_model_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank, "load_whole", lambda *_: pytest.fail("nothing needs the model"))
    summary = _close(tmp_path, "log.samples=0")
    assert summary["train_loss"] == 1.5 and summary["tokens_per_second"] == 40
    assert summary["uniform_byte_baseline"] == pytest.approx(5.545, abs=1e-3) and "unigram_byte_baseline" in summary


def test_a_page_that_fails_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(rank, "load_whole", lambda *_: ToyModel())
    monkeypatch.setattr(report, "spread_by_kind", full)
    monkeypatch.setattr("tests.train.one_process.ToyData.tokens", {}, raising=False)
    assert _close(tmp_path, "log.samples=4")["held_out_loss"] == 1.75
    said = capfd.readouterr().err
    assert "the closing report lacks the answers to held-out samples: [Errno 28] No space left" in said
    assert len(said.strip().splitlines()) == 1


def test_other_data_than_a_run_was_prepared_with_is_refused() -> None:
    config = toy_config()
    assert rank.other_data(config, "no apt", "other", prepared=False, source="a.toml").data.dataset == "other"
    with pytest.raises(ConfigError, match=r"a.toml: the data that this run was prepared with is gone: no apt"):
        rank.other_data(config, "no apt", "other", prepared=True, source="a.toml")
