"""Examples run and print correct statements."""

from __future__ import annotations

import os
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, SiglipVisionModel

from interlace.cli import main
from tests.train.faults import as_a_command

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"


def test_every_example_is_run_here():
    text = Path(__file__).read_text()
    assert all(f'"{path.name}"' in text for path in EXAMPLES.glob("*.py"))


def test_the_op_in_a_model_and_by_itself(capsys):
    runpy.run_path(str(EXAMPLES / "attention_op.py"), run_name="__main__")
    output = capsys.readouterr().out
    apart = [float(number) for number in re.findall(r"at most (\S+) apart", output)]
    assert len(apart) == 2 and max(apart) < 1e-5, output


def test_the_benchmark_prints_a_line_per_length(monkeypatch, capsys):
    """The benchmark compares results before timing; speed is not tested."""
    monkeypatch.setattr(sys, "argv", ["benchmark.py", "64", "256"])
    runpy.run_path(str(EXAMPLES / "benchmark.py"), run_name="__main__")
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[2:]] == ["64", "256"]


@pytest.mark.slow
def test_pictures_to_a_model_that_huggingface_loads(tmp_path):
    folder = tmp_path / "shapes"
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'python'}", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "train_and_export.py"), str(folder)],
        capture_output=True,
        text=True,
        env=environment,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert "40 records, 40 usable" in done.stdout and "all finite: True" in done.stdout
    assert re.search(r"^A \w+ (disc|square)\.$", done.stdout, flags=re.M), done.stdout
    for kind, part in ((SiglipVisionModel, "vision"), (AutoModelForCausalLM, "language_model")):
        model = kind.from_pretrained(folder / "exported" / part)
        assert all(torch.isfinite(parameter).all() for parameter in model.parameters())


@pytest.mark.slow
def test_commands_of_the_session_page_run_on_a_small_checkpoint(tmp_path, monkeypatch, capfd):
    """docs/a-session.md with one step instead of its epochs: its config and its commands."""
    runpy.run_path(str(EXAMPLES / "small_checkpoint.py"))["write"](tmp_path / "checkpoint")
    for number, kind in enumerate(["birds", "fruit"] * 6):
        place = tmp_path / "pictures" / kind / f"{number}.png"
        place.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (40 + number, 30), (20 * number, 9, 90)).save(place)
    page = (ROOT / "docs" / "a-session.md").read_text()
    [config] = re.findall(r"```toml\n(.*?)```", page, flags=re.S)
    config = re.sub(r"epochs = \d+", "steps = 1", config).replace("warmup_steps = 10", "warmup_steps = 1")
    config = config.replace("batch_size = 16", "batch_size = 2").replace(
        "validation_samples = 38", "validation_samples = 2"
    )
    (tmp_path / "tune.toml").write_text(f"{config}\n[checkpoint]\nasynchronous = false\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    commands = re.findall(r"^\$ interlace (.*)$", page, flags=re.M)
    assert [command.split()[0] for command in commands] == ["data", "data", "train", "generate", "export"]
    with as_a_command():
        for command in commands:
            picture = next((tmp_path / "pictures" / "birds").iterdir())
            given = re.sub(r"pictures/birds/\$\(.*?\)", str(picture), command)
            assert main(shlex.split(given)) == 0, (given, capfd.readouterr().err)
    for folder in ("checkpoint", "tuned"):
        model = AutoModelForImageTextToText.from_pretrained(tmp_path / folder)
        assert type(model).__name__ == "LlavaForConditionalGeneration"
    assert (tmp_path / "tuned" / "tokenizer.json").exists() and (tmp_path / "tuned" / "processor_config.json").exists()
