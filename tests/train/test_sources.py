"""Several sources through the command line: their shares, their losses, resumption and refused cases."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from interlace.cli import main
from interlace.modalities import IMAGE
from interlace.train.config.load import ConfigError, load
from interlace.train.report.metrics import HELD_OUT
from tests.data.tars import captioned, write_tar

SOURCES = """
[[data.sources]]
name = "chats"
train = ["{folder}/train.jsonl"]
validation = ["{folder}/validation.jsonl"]

[[data.sources]]
name = "tars"
train = ["{folder}/shards/s-{{00..01}}.tar"]
weight = 3.0
prompt = "Which number?"
limit = 9
"""


@pytest.fixture
def mixed(own: Path) -> Path:
    """A config of two sources: chats, and tars of images with captions."""
    for number in range(2):
        write_tar(own / "shards" / f"s-{number:02d}.tar", captioned(20, 20 * number))
    text = (own / "own.toml").read_text()
    lines = [line for line in text.splitlines() if not line.startswith(("train = [", "validation = ["))]
    text = (
        "\n".join(lines)
        .replace("[data]", '[data]\nheld_out = 0.3\nmix_by = "samples"')
        .replace("steps = 2", "steps = 6")
    )
    (own / "mixed.toml").write_text(text + SOURCES.format(folder=own))
    return own / "mixed.toml"


def _curve(folder: Path) -> list[dict[str, float]]:
    kept = ("data/share", "data/token_share", "data/epochs", "loss_metrics")
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key.startswith(kept)} for line in lines]


@pytest.mark.slow
def test_two_sources_train_and_go_on_as_if_never_stopped(
    mixed: Path,
    in_process: None,
    capfd: pytest.CaptureFixture[str],
) -> None:
    common = ["--set=log.samples=0", "--set=log.accuracy_samples=0"]
    assert main(["train", str(mixed), *common]) == 0, capfd.readouterr().err
    runs = mixed.parent / "runs" / "own"
    [whole] = [path for path in runs.iterdir() if path.name != "latest"]
    lines = _curve(whole)
    # An epoch draws 36 samples of 27 + 9; 27 of them are from the tars: 9 batches of 4.
    for line in lines:
        shares = [line["data/share(%)/chats"] if "data/share(%)/chats" in line else 0.0]
        assert shares[0] + line.get("data/share(%)/tars", 0.0) == pytest.approx(100)
    drawn = sum(4 * line.get("data/share(%)/tars", 0.0) / 100 for line in lines)
    assert lines[-1]["data/epochs/tars"] == pytest.approx(drawn / 9)
    assert lines[-1]["data/epochs/chats"] == pytest.approx((24 - drawn) / 27)
    losses = [lines[-1][f"{HELD_OUT}/{name}"] for name in ("chats", "tars")]
    assert min(losses) <= lines[-1][HELD_OUT] <= max(losses) and losses[0] != losses[1]
    listing = (whole / "left_out.txt").read_text()
    assert "train.jsonl:4: json" in listing

    assert main(["train", str(mixed), *common, "--set=train.steps=3", "--set=train.schedule_steps=6"]) == 0
    [part] = [path for path in runs.iterdir() if path.name != "latest" and path != whole]
    assert main(["train", "--resume", str(part), "--set=train.steps=6"]) == 0, capfd.readouterr().err
    resumed = _curve(part)
    assert [{k: v for k, v in line.items() if "held_out" not in k} for line in resumed] == [
        {k: v for k, v in line.items() if "held_out" not in k} for line in lines
    ]
    assert resumed[-1][HELD_OUT] == lines[-1][HELD_OUT]
    capfd.readouterr()
    code = main(["train", "--resume", str(part), "--set=train.steps=7", "--set=data.mix_by=tokens"])
    assert code == 2 and "the order of samples would differ" in capfd.readouterr().err


def test_check_says_what_an_epoch_draws(mixed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "check", str(mixed), "--out", str(mixed.parent / "page.html")]) == 1
    output = capsys.readouterr().out
    assert "chats train: " in output and "chats validation: " in output and "tars train: " in output
    assert "an epoch draws 36 samples (weights are shares of samples):" in output
    assert "tars: 75.0 % of the samples" in output and "gone through 3.00 times" in output
    page = (mixed.parent / "page.html").read_text()
    assert "s-00.tar:1" in page and "data:image/jpeg" in page


def test_index_of_a_config(mixed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "index", str(mixed), "--processes", "1"]) == 1
    output = capsys.readouterr().out
    assert "chats: 30 records, 1 of them broken" in output and "tars: 40 records, 0 of them broken" in output


def test_settings_of_sources(mixed: Path) -> None:
    first, second = load(mixed, ["data.prompt='What?'", "data.media='/m'"]).data.each_source()
    assert (first.prompt, second.prompt, first.media) == ("What?", "Which number?", "/m")
    assert second.train == [str(mixed.parent / "shards" / "s-{00..01}.tar")]
    assert IMAGE.question not in second.prompt
    [alone] = load(mixed.parent / "own.toml", ["data.limit=3"]).data.each_source()
    assert (alone.name, alone.limit, alone.weight) == ("data", 3, 1.0)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ('train = ["x.jsonl"]', "say it of a source"),
        ("limit = 4", "say it of a source"),
        ('mix_by = "bytes"', "mix_by"),
    ],
)
def test_what_does_not_go_together(mixed: Path, change: str, words: str) -> None:
    text = mixed.read_text().replace('mix_by = "samples"', change)
    mixed.write_text(text)
    with pytest.raises(ConfigError, match=words):
        load(mixed, [])


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        ('name = "tars"', 'name = "chats"', "two sources are called 'chats'"),
        ('name = "tars"', 'name = "a b"', "name"),
        ("weight = 3.0", "weight = 0.0", "weight"),
        ("limit = 9", "unknown = 9", "unknown"),
    ],
)
def test_sources_that_are_wrong(mixed: Path, before: str, after: str, words: str) -> None:
    mixed.write_text(mixed.read_text().replace(before, after))
    with pytest.raises(ConfigError, match=words):
        load(mixed, [])
