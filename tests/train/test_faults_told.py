"""User mistakes give a one-line error that says what to do, exit code 2, and no data loss."""

from __future__ import annotations

import html
import os
import random
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from interlace.cli import main
from interlace.train.checkpoint import checkpoints
from interlace.train.checkpoint import folder as checkpointfolder
from tests.data.chat_faults import FAULTS, RIGHT, write_files
from tests.train.faults import Fault, Place, as_a_command, left_behind, lost
from tests.train.faults_checkpoints import HUGGINGFACE
from tests.train.faults_config import CONFIG
from tests.train.faults_runs import RUNS

TABLE = [*CONFIG, *HUGGINGFACE, *RUNS]
REWRITTEN = ("metrics.jsonl", "summary.json", "report.html")  # rewritten by a resumed run
HEARD = """
[model.audio]
architecture = "WhisperEncoder"
downsample = 4
config = { d_model = 16, encoder_layers = 1, encoder_attention_heads = 2, encoder_ffn_dim = 16, num_mel_bins = 8 }
"""
SAMPLE = {fault.name for fault in random.Random(13).sample([f for f in TABLE if f.code == 2], 24)}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    with as_a_command():
        return Place(tmp_path_factory.mktemp("user"))


@pytest.fixture
def user(place: Place, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    """The folder, restored before each test."""
    for module in (checkpoints, checkpointfolder):
        monkeypatch.setattr(module, "LATE_SECONDS", 0.0)
    with as_a_command():
        yield place
    place.restore()


def command(fault: Fault, user: Place) -> list[str]:
    return shlex.split(fault.command.replace("{at}", str(user.at)).replace("{run}", str(user.run)))


def check(fault: Fault, user: Place, code: int, out: str, err: str, before: dict[str, bytes]) -> None:
    assert code == fault.code, (code, err, out)
    told = err + out * (fault.code == 0)
    for words in fault.says:
        assert words.replace("{at}", str(user.at)) in told, (words, told)
    assert "Traceback" not in told
    errors = [line for line in err.splitlines() if line.startswith("interlace: ") and "; using the" not in line]
    assert not fault.code or (len(errors) == 1 and err.rstrip().endswith(errors[0])), err
    after = user.contents()
    gone = lost(before, after)
    assert not [name for name in gone if fault.code or not name.endswith(REWRITTEN)]
    assert fault.code != 2 or not left_behind(before, after)


@pytest.mark.parametrize(
    "fault", [pytest.param(f, marks=() if f.name in SAMPLE else pytest.mark.slow, id=f.name) for f in TABLE]
)
def test_a_fault_is_one_line_and_nothing_is_lost(fault: Fault, user: Place, capfd: pytest.CaptureFixture[str]) -> None:
    if fault.plant is not None:
        fault.plant(user)
    before = user.contents()
    capfd.readouterr()
    code = main(command(fault, user))
    check(fault, user, code, *capfd.readouterr(), before)


def test_what_is_lost_and_left_behind_is_seen() -> None:
    inner = "runs/own/T/checkpoints/step-00000002"
    before = {"a.toml": b"a", "b.toml": b"b", f"{inner}/manifest.json": b"m"}
    assert not lost(before, before) and not left_behind(before, before)
    assert lost(before, before | {"a.toml": b"b"}) == ["a.toml"]  # the same bytes under another name do not count
    assert lost({"a.toml": b"a"}, {"c.toml": b"a"}) == ["a.toml"]
    aside = {"a.toml": b"a", "b.toml": b"b", f"{inner}.torn/manifest.json": b"m"}
    assert not lost(before, aside) and not left_behind(before, aside)
    assert lost(before, aside | {f"{inner}.torn/manifest.json": b"x"}) == [f"{inner}/manifest.json"]
    assert left_behind(before, before | {"runs/own/T/run.json": b"", "runs/own/T/x": b"", "y": b""}) == [
        "runs/own/T/x",
        "y",
    ]


def test_the_table_is_whole() -> None:
    assert len({fault.name for fault in TABLE}) == len(TABLE) > 110 and len(FAULTS) > 50
    assert all(fault.says for fault in TABLE)


@pytest.mark.slow
def test_without_a_fault_there_is_none(user: Place) -> None:
    """Each config of the folder trains. Otherwise the cases above would prove nothing."""
    for name in ("parts", "whole"):
        assert main(["train", str(user.at / f"{name}.toml")]) == 0


def test_check_finds_every_planted_fault_by_line_and_reason(user: Place, capsys: pytest.CaptureFixture[str]) -> None:
    write_files(user.at)
    lines = [line if isinstance(line, bytes) else line.encode() for _, _, line in FAULTS]
    right = [line.encode() for line in RIGHT.values()]
    data = b"\n".join([*right, *lines])
    (user.at / "train.jsonl").write_bytes(data)
    user.edit("own.toml", "max_tokens = 160", "max_tokens = 512\nmax_audio_seconds = 2.0")
    user.edit("own.toml", "\n[model.language_model]", f"{HEARD}\n[model.language_model]")
    before = user.contents()
    assert main(["data", "check", str(user.at / "own.toml"), "--out", str(user.at / "page.html")]) == 1
    output = capsys.readouterr().out
    assert f"{len(right) + len(lines)} records, {len(right)} usable, 0 cut, {len(lines)} left out" in output
    page = html.unescape((user.at / "page.html").read_text())
    for number, (kind, words, line) in enumerate(FAULTS, len(right) + 1):
        rows = re.findall(rf"/train\.jsonl:{number}<td>[^\n]*", page)
        assert len(rows) == 1 and kind in rows[0] and words in rows[0], (number, words, line[:100], rows)
    assert not lost(before, user.contents())


def test_records_for_training_and_validation_are_compared(user: Place, capsys: pytest.CaptureFixture[str]) -> None:
    user.edit("own.toml", "validation.jsonl", "train.jsonl")
    assert main(["data", "check", str(user.at / "own.toml"), "--samples", "0"]) == 1
    assert "8 of 8 records for validation are among those for training" in capsys.readouterr().out
    user.restore()
    assert main(["data", "check", str(user.at / "own.toml"), "--samples", "0"]) == 0


@pytest.mark.slow
def test_the_program_says_the_same_as_a_process(user: Place) -> None:
    [fault] = [fault for fault in TABLE if fault.name == "a quantized model"]
    assert fault.plant is not None
    fault.plant(user)
    before = user.contents()
    root = Path(__file__).parents[2]
    path = os.pathsep.join([str(root / "python"), str(root)])
    done = subprocess.run(
        [sys.executable, "-m", "interlace", *command(fault, user)],
        env={**os.environ, "PYTHONPATH": path},
        cwd=root,
        capture_output=True,
        text=True,
        timeout=600,
    )
    check(fault, user, done.returncode, done.stdout, done.stderr, before)


def test_a_config_that_may_not_be_read(user: Place, capfd: pytest.CaptureFixture[str]) -> None:
    config = user.at / "own.toml"
    os.chmod(config, 0)
    nobody = os.geteuid() == 0
    if nobody:
        os.seteuid(65534)
    try:
        assert main(["train", str(config)]) == 2
    finally:
        if nobody:
            os.seteuid(0)
        os.chmod(config, 0o644)
    assert "own.toml: cannot read the config: Permission denied" in capfd.readouterr().err


def test_a_port_that_is_taken(user: Place, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        variables = {"RANK": 0, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 2}
        variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": taken.getsockname()[1]}
        for key, value in variables.items():
            monkeypatch.setenv(key, str(value))
        code = main(["train", str(user.at / "own.toml"), "--set", "parallel.ranks=2"])
    output = capfd.readouterr().err
    assert code == 1 and len(output.splitlines()) == 1 and "Address already in use" in output, output
    assert "MASTER_PORT free there" in output
