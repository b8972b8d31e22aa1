"""examples/ run, and say what is so."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, SiglipVisionModel

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"


def test_every_example_is_run_here():
    text = Path(__file__).read_text()
    assert all(f'"{path.name}"' in text for path in EXAMPLES.glob("*.py"))


def test_the_op_in_a_model_and_by_itself(capsys):
    runpy.run_path(str(EXAMPLES / "attention_op.py"), run_name="__main__")
    told = capsys.readouterr().out
    apart = [float(number) for number in re.findall(r"at most (\S+) apart", told)]
    assert len(apart) == 2 and max(apart) < 1e-5, told


def test_the_benchmark_prints_a_line_per_length(monkeypatch, capsys):
    """It compares what it times; how fast that is no test can say."""
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
    page = (ROOT / "docs" / "a-session.md").read_text()
    commands = re.findall(r"^\$ .*$", done.stdout.replace(str(folder), "shapes"), flags=re.M)
    assert commands == re.findall(r"^\$ .*$", page, flags=re.M), "record docs/a-session.md anew"
    assert re.search(r"^A \w+ (disc|square)\.$", done.stdout, flags=re.M), done.stdout
    for kind, part in ((SiglipVisionModel, "vision"), (AutoModelForCausalLM, "language_model")):
        model = kind.from_pretrained(folder / "exported" / part)
        assert all(torch.isfinite(parameter).all() for parameter in model.parameters())
