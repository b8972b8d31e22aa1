"""Configs and run folders of versions in which the digits were a dataset of their own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from interlace.cli import main
from interlace.data import IGNORE, ByteTokenizer
from interlace.train import rank
from interlace.train.auto.layout_file import digest_of, digests
from interlace.train.config.earlier import read_as_chats
from interlace.train.config.load import ConfigError, dumps, loads
from interlace.train.data import feed
from interlace.train.data.texts import tokenizer_of
from interlace.train.models.build import build
from interlace.train.report.metrics import HELD_OUT, read_metrics
from tests.cli import TINY
from tests.digits import digits

DATA = 'dataset = "digits"\ndigit_jitter = 0.0\nheld_out = 0.2\ntrain = []\nvalidation = []\n'
SETTINGS = ["parallel.ranks=1", "log.samples=0", "log.accuracy_samples=0", "log.trace_step=0"]


def earlier(folder: Path, data: str = DATA) -> str:
    """A config as earlier versions saved it."""
    return TINY.format(folder=folder).replace('dataset = "tests.digits:Digits"\nworkers = 0\nmax_tokens = 14\n', data)


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for variable in ("RANK", "WORLD_SIZE", "INTERLACE_LAUNCHER"):
        monkeypatch.delenv(variable, raising=False)
    deterministic, threads = torch.are_deterministic_algorithms_enabled(), torch.get_num_threads()
    yield
    torch.use_deterministic_algorithms(deterministic)
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run with config and dataset state of an earlier version."""
    folder = tmp_path_factory.mktemp("earlier")
    config = loads(earlier(folder), [*SETTINGS, "train.steps=4", "train.validate_every=4"])
    state = feed.Feed.state_dict
    with pytest.MonkeyPatch.context() as patch:
        others = {"held_out": "0123456789abcdef", "fingerprint": "fedcba9876543210", "dataset_size": 1463}
        patch.setattr(feed.Feed, "state_dict", lambda self, gather=None: state(self, gather) | others)
        feed.prepare(config, lambda line: None)
        assert rank.run(config, source="tiny.toml") == 0
    run = (folder / "tiny" / "latest").resolve()
    (run / "config.toml").write_text(earlier(folder))
    return run


def test_samples_are_those_of_earlier_versions(tmp_path: Path) -> None:
    lines: list[str] = []
    config = loads(earlier(tmp_path), SETTINGS)
    assert loads(dumps(config)) == config and config.data.of_earlier_version
    feed.prepare(config, lines.append)
    assert lines[0].startswith("data.dataset = 'digits' of earlier versions is read as the chats of ")
    tokenizer = tokenizer_of(config)
    assert (tokenizer.vocab_size, tokenizer.EOS) == (ByteTokenizer.vocab_size, ByteTokenizer.EOS)
    model: Any = build(config, tokenizer)
    assert model.language_model.config.vocab_size == ByteTokenizer.vocab_size
    train, held_out = feed.datasets(config, model, tokenizer)
    before = digits("heldout")
    assert (len(train), len(held_out)) == (len(digits()), len(before))
    for index in range(0, len(before), 31):
        ours, theirs = held_out.sample(index, 0), before.sample(index, 0)
        assert torch.equal(ours.input_ids[:-1], theirs.input_ids) and torch.equal(ours.labels[:-1], theirs.labels)
        assert ours.input_ids[-1] == ByteTokenizer.EOS and ours.labels[-1] == IGNORE  # chats keep the end as input
        [picture], [wanted] = ours.media["vision"], theirs.media["vision"]
        assert torch.equal(picture.data, wanted.data) and picture.tokens == wanted.tokens  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("vision", "side"), [("patch_size = 14", 14), ("patch_size = 3", 9), ("patch_size = 4", 8), ("num_channels = 3", 8)]
)
def test_pictures_are_as_large_as_whole_patches(vision: str, side: int, tmp_path: Path) -> None:
    text = earlier(tmp_path).replace("image_size = 8, patch_size = 4", vision)
    assert loads(text).data.options == {"side": side, "looks": 1, "held_out": 0.2, "byte_encoders": ["vision"]}
    given = loads(text, ["data.digit_size=16", "data.digit_jitter=0.5"]).data
    assert (given.options["side"], given.options["looks"]) == (16, 12)
    assert given.train != loads(text).data.train and given.max_image_tokens == 64


def test_encoders_of_different_patches_need_a_size() -> None:
    def options(*patches: int | None, **data: Any) -> Any:
        sections = {
            f"e{i}": {"config": {} if patch is None else {"patch_size": patch}} for i, patch in enumerate(patches)
        }
        table: dict[str, Any] = {"data": {"dataset": "digits", **data}, "model": {**sections, "language_model": {}}}
        read_as_chats(table)
        return table["data"]["options"]

    assert options(None, 14)["side"] == 14  # the first encoder is for sound
    assert options(8, 4)["side"] == 8 and options(8, 6, digit_size=24)["side"] == 24
    for key, words in (("cache", "cache = 3: a folder"), ("held_out", "held_out = '3': a number")):
        with pytest.raises(ValueError, match=words):
            options(8, **{key: 3 if key == "cache" else "3"})
    with pytest.raises(ValueError, match=r"patches of \[6, 8\] pixels; set data.digit_size"):
        options(8, 6)


def test_a_layout_chosen_by_an_earlier_version_fits(tmp_path: Path) -> None:
    config = loads(earlier(tmp_path), ["parallel=auto"])
    assert digests(config)["data"] == digest_of({"dataset": "digits", "max_tokens": None, "pack": False})


def test_a_run_of_an_earlier_version_goes_on(
    saved: Path, in_process: None, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    more = [*SETTINGS, "train.steps=5", "train.validate_every=5", "train.schedule_steps=5", "train.lr=1e-9"]
    assert main(["train", "--resume", str(saved), *(f"--set={each}" for each in more)]) == 0, capfd.readouterr().err
    assert "their order begins anew" in caplog.text
    lines = read_metrics(saved)
    before, after = (line[HELD_OUT] for line in lines if HELD_OUT in line)
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5] and after == pytest.approx(before, rel=1e-4)


def test_a_model_of_an_earlier_version_answers(
    saved: Path, tmp_path: Path, in_process: None, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from PIL import Image

    image = tmp_path / "digit.png"
    Image.new("RGB", (16, 16), (200, 10, 10)).save(image)
    assert main(["generate", str(saved), "--image", str(image), "--max-new-tokens", "4"]) == 0
    assert len(capfd.readouterr().out.strip()) <= 4
    for arguments, message in [
        (["--text", "x" * 70], "reads max_position_embeddings = 64"),
        (["--text", "x", "--max-new-tokens", "0"], "--max-new-tokens 0: at least 1"),
        (["--image", str(tmp_path)], "a folder, not a file"),
    ]:
        capfd.readouterr()
        assert main(["generate", str(saved), *arguments]) == 2, arguments
        output = capfd.readouterr().err
        assert message in output and len(output.strip().splitlines()) == 1
    assert main(["generate", str(saved), "--text", "x" * 58, "--max-new-tokens", "50"]) == 0  # up to the last token

    def missing(*_: object) -> None:
        raise ImportError("pillow is not installed")

    monkeypatch.setattr("interlace.modalities.image.Image.load", missing)
    assert main(["generate", str(saved), "--image", str(image)]) == 2
    assert "pillow is not installed" in capfd.readouterr().err


def test_what_cannot_be_read_is_refused_in_one_line(tmp_path: Path) -> None:
    for data, words in (
        ('dataset = "stamps"\nmax_images = 3\n', "data.prepare = 'stamps'"),
        ('dataset = "digits"\ntrain = ["a.jsonl"]\n', "there is no dataset 'digits'; valid: chats"),
        ('dataset = "digits"\ntrain = ["a.jsonl"]\n', "data.prepare = 'digits' writes them as chats"),
        ('dataset = "digits"\ndigit_size = -3\n', "digit_size = -3: a number of pixels"),
        ('dataset = "digits"\ndigit_jitter = "x"\n', "digit_jitter = 'x': a number from 0 to 10"),
        ('dataset = "chats"\ntrain = ["a.jsonl"]\ndigit_jitter = 1.0\n', r"\[data\] has no key 'digit_jitter'"),
    ):
        with pytest.raises(ConfigError, match=words) as refused:
            loads(earlier(tmp_path, data))
        assert len(str(refused.value).splitlines()) == 1
    default = 'dataset = "chats"\ntrain = ["a.jsonl"]\ntokenizer = "t"\ndigit_jitter = 0.0\n'
    assert loads(earlier(tmp_path, default)).data.dataset == "chats"  # saved configs list all defaults
