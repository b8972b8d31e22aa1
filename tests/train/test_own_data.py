"""Own chats through the command line: a model assembled from modules trains on a folder of images."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from interlace.cli import main
from interlace.data.chats.files.shapes import parse
from interlace.train.config.data import Data
from interlace.train.config.load import ConfigError, from_table, load, loads, tomllib
from interlace.train.data.texts import tokenizer_of
from tests.data.chat_faults import TEMPLATE
from tests.train.own_data import CONFIG


@pytest.mark.parametrize("packed", [pytest.param(False, marks=pytest.mark.slow), True])
def test_two_steps_on_own_chats(own: Path, packed: bool, in_process: None, capfd: pytest.CaptureFixture[str]) -> None:
    rows = ["--set=data.pack=true", "--set=train.batch_size=2", "--set=log.samples=0"] if packed else []
    assert main(["train", str(own / "own.toml"), *rows]) == 0, capfd.readouterr().err
    [folder] = [path for path in (own / "runs" / "own").iterdir() if path.name != "latest"]
    listing = (folder / "left_out.txt").read_text().splitlines()
    assert [line.split(": ")[:2] for line in listing] == [
        [f"{own}/train.jsonl:4", "json"],
        [f"{own}/train.jsonl:5", "missing file"],
        [f"{own}/train.jsonl:6", "too long"],
    ]
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["data"] == "chats" and summary["steps"] == 2 and summary["uniform_token_baseline"] > 5
    assert [summary[f"cat_{what}"] for what in ("accuracy", "majority_accuracy", "swapped_media_accuracy")] == [
        0,
        1 / 3,
        0,
    ]
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert len(steps) == 2
    if not packed:
        assert (folder / "report.html").stat().st_size > 1000
        assert (
            main(["train", "--resume", str(folder), "--set", "train.steps=3", "--set", "train.schedule_steps=3"]) == 0
        )
        picture = str(own / "pictures" / "0.png")
        capfd.readouterr()
        assert main(["generate", str(folder), "--image", picture, "--text", "What?", "--max-new-tokens", "3"]) == 0
        assert main(["generate", str(folder), "--image", str(own / "own.toml")]) == 2
        assert "own.toml: cannot identify image file" in capfd.readouterr().err
        for command in ("plan", "simulate"):
            assert main([command, str(own / "own.toml"), *["--out", str(own / "out")] * (command == "simulate")]) == 0
        assert main(["mask", str(own / "own.toml"), "--out", str(own / "mask.png")]) == 0


@pytest.mark.parametrize("packed", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_an_epoch_is_all_records_unless_drop_last_is_set(
    own: Path, packed: bool, in_process: None, capfd: pytest.CaptureFixture[str]
) -> None:
    """Of 30 records 27 are valid; 3 of them do not fill a batch of 4."""
    config = own / "own.toml"
    text = CONFIG.format(folder=own).replace("steps = 2", "epochs = 1")
    config.write_text(text.replace("samples = 3", "samples = 0"))
    rows = ["--set=data.pack=true", "--set=train.batch_size=2"] if packed else []
    result: dict[str, int] = {}
    for drop in ("false", "true"):
        capfd.readouterr()
        dropping = [f"--set=data.drop_last={drop}", f"--set=run.name=drop-{drop}", "--set=parallel.threads=1", *rows]
        assert main(["train", str(config), *dropping]) == 0, capfd.readouterr().err
        output = capfd.readouterr().out
        [folder] = [path for path in (own / "runs" / f"drop-{drop}").iterdir() if path.name != "latest"]
        summary = json.loads((folder / "summary.json").read_text())
        result[drop] = round(summary["samples_per_second"] * summary["seconds_of_training"])
        assert f"drop-{drop} {summary['steps']}/{summary['steps']} · epoch 1.0 of 1 · " in output
    assert result["false"] == 27 and result["true"] < 27 and (packed or result["true"] == 24)
    line = f"data.drop_last: the first epoch leaves out {27 - result['true']} of 27 samples, which do not fill a batch"
    assert line in output
    assert main(["data", "check", str(config), "--samples=0", *dropping]) == 1  # exit code for broken records
    assert capfd.readouterr().out.endswith(f"{line}\n")


@pytest.mark.slow
def test_packed_loss_is_equal_on_one_rank_and_two_replicas(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over an epoch, of which the last batch has less than 4 rows, and into the next one."""
    monkeypatch.delenv("RANK", raising=False)
    packed = ["--set=data.pack=true", "--set=train.batch_size=4", "--set=log.samples=0", "--set=train.steps=4"]
    curves = []
    for name, cut in {
        "one": ["--set=train.microbatches=4"],
        "two": ["--set=train.microbatches=2", "--set=parallel.dp=2"],
    }.items():
        assert main(["train", str(own / "own.toml"), f"--set=run.name={name}", *packed, *cut]) == 0
        [folder] = [path for path in (own / "runs" / name).iterdir() if path.name != "latest"]
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        curves.append([value for line in lines for key, value in line.items() if "loss" in key])
    assert len(curves[0]) >= 6 and curves[0] == pytest.approx(curves[1], rel=1e-4)


def test_check_of_a_config_shows_samples_in_tokens(own: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "check", str(own / "own.toml"), "--out", str(own / "page.html")]) == 1
    output = capsys.readouterr().out
    assert "30 records, 27 usable, 0 cut, 3 left out" in output and "6 records, 6 usable" in output
    assert "1 x too long" in output and "1 x json" in output and "learnt" in output
    page = (own / "page.html").read_text()
    assert page.count("<section>") == 12 and 'class="t learnt special">&lt;|im_end|&gt;<' in page
    assert "vision x " in page and "data:image/jpeg" in page


def test_the_page_about_own_data_is_right() -> None:
    page = (Path(__file__).parents[2] / "docs" / "your-own-data.md").read_text()
    records = "".join(re.findall(r"```json\n(.*?)```", page, flags=re.S))
    chats = [parse(json.loads(line), Path(".")) for line in records.splitlines()]
    assert [(len(chat.media), chat.kind) for chat in chats] == [*((n, "") for n in (1, 1, 1, 2, 0)), (1, "colour")]
    config, several, _of_a_class, prepared, streamed = re.findall(r"```toml\n(.*?)```", page, flags=re.S)
    chosen = Data.model_validate({"dataset": "chats", "train": ["a.jsonl"]} | tomllib.loads(prepared)["data"])
    assert (chosen.workers, chosen.prefetch, chosen.cache_gb) == (8, 4, 16.0)
    chosen = Data.model_validate(tomllib.loads(streamed)["data"])
    assert (chosen.reading, chosen.shuffle_buffer, chosen.readers, chosen.exchange_mb) == ("stream", 1000, 2, 1024)
    assert [each.weight for each in Data.model_validate(tomllib.loads(several)["data"]).each_source()] == [3.0, 1.0]
    table = tomllib.loads(config)
    del table["model"]["vision"]["path"], table["model"]["language_model"]["path"]
    table["model"]["vision"]["architecture"] = "SiglipVisionModel"
    table["model"]["language_model"]["architecture"] = "LlamaForCausalLM"
    assert from_table(table).data.pack


def test_files_of_a_config_are_found_from_any_folder(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(own)
    text = CONFIG.format(folder=".")
    assert loads(text).data.train == [str(own / "train.jsonl")]
    assert load(own / "own.toml").data.tokenizer == str(own / "tokenizer")
    with pytest.raises(ConfigError, match="pack fills rows up to max_tokens"):
        loads(text.replace("max_tokens = 160", "pack = true"))


@pytest.mark.parametrize("key", ["on_broken='error'", "decode_first=false", "video_fps=2.0", "max_video_tokens=8"])
def test_keys_of_chats_are_refused_for_other_data(key: str) -> None:
    table = tomllib.loads(f"[data]\ndataset = 'mine:Data'\n{key}")["data"]
    with pytest.raises(ValueError, match=f"{key.partition('=')[0]} is a key of dataset 'chats', not of 'mine:Data'"):
        Data.model_validate(table)
    same = Data(dataset="mine:Data")
    assert Data.model_validate(same.model_dump()) == same  # a saved config lists the defaults


@pytest.mark.parametrize("key", ["max_image_tokens=64", "on_too_large='error'", "max_audio_seconds=9.0"])
def test_processor_settings_are_refused_with_whole_checkpoint(own: Path, key: str) -> None:
    table = tomllib.loads(CONFIG.format(folder=own))
    del table["data"]["max_image_tokens"]
    table["data"] |= tomllib.loads(key)
    config = from_table(table)
    config.model.path = str(own / "whole")
    with pytest.raises(ConfigError, match=rf"data\.{key.partition('=')[0]}: a whole checkpoint .* remove it"):
        tokenizer_of(config)


@pytest.mark.parametrize(
    "keys", [["data.max_tokens=4096"], ['data.on_broken="error"'], ["train.batch_size=4000", "data.drop_last=true"]]
)
@pytest.mark.parametrize("launched", [False, True])
def test_a_start_that_fails_leaves_no_run_folder(
    own: Path, keys: list[str], launched: bool, request: pytest.FixtureRequest, capfd: pytest.CaptureFixture[str]
) -> None:
    """Refused by the config, by the data, or by a check after loading the data; also under torchrun."""
    if launched:
        request.getfixturevalue("in_process")
    assert main(["train", str(own / "own.toml"), *(f"--set={key}" for key in keys)]) == 2
    assert keys[0].partition("=")[0].rpartition(".")[2] in capfd.readouterr().err
    assert not (own / "runs" / "own").exists()


def test_a_template_that_ends_no_answer_is_told_and_mended(own: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (own / "endless.jinja").write_text(TEMPLATE.replace("{{ m['content'] }}<|im_end|>", "{{ m['content'] }}"))
    command = ["data", "check", str(own / "own.toml"), "--out", str(own / "page.html")]
    endless = f"--set=data.chat_template={own / 'endless.jinja'}"
    assert main([*command, endless]) == 1
    assert capsys.readouterr().out.count('set data.end_of_turn, such as "</s>"') == 2  # training and validation
    assert main([*command, endless, '--set=data.end_of_turn="</s>"']) == 1
    assert "end_of_turn" not in capsys.readouterr().out
    assert 'class="t learnt special">&lt;/s&gt;<' in (own / "page.html").read_text()
    for wrong, words in (
        ((endless, '--set=data.end_of_turn="</w>"'), "'</w>' is no special token of the tokenizer; its eos_token is"),
        (('--set=data.end_of_turn="</s>"',), "ends answers with <|im_end|> already: remove data.end_of_turn"),
    ):
        assert main([*command, *wrong]) == 2
        assert words in capsys.readouterr().err
