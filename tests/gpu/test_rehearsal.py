"""bench/gpu.sh, rehearsed without a GPU and without what a bare machine lacks: it must work there the first time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ABSENT = (
    "hypothesis",
    "matplotlib",
    "pytest_timeout",
    "pytest_benchmark",
    "xdist",
    "tensorboard",
    "rich",
    "pydantic",
    "flash_attn",
    "soundfile",
    "scipy",
    "sklearn",
)
HIDE = f"""
import sys


class Hiding:
    def __init__(self, finder):
        self.finder = finder

    def find_spec(self, name, path=None, target=None):
        return None if name.split(".")[0] in {ABSENT!r} else self.finder.find_spec(name, path, target)

    def __getattr__(self, name):
        return getattr(self.finder, name)


sys.meta_path[:] = [Hiding(finder) for finder in sys.meta_path]
"""


@pytest.fixture
def bare(tmp_path):
    """Environment of a process that cannot import what is ABSENT."""
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "sitecustomize.py").write_text(HIDE)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    return environment | {
        "DRY": "1",
        "PATIENCE": "8",  # limits are for a machine that does nothing else
        "LIMIT": "2500",
        "PYTHON": sys.executable,
        "PYTHONPATH": str(tmp_path / "bare"),
        "OUT": str(tmp_path / "out"),
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    }


def rehearse(environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "bench/gpu.sh"], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=2700
    )


@pytest.mark.slow
@pytest.mark.timeout(2800)
def test_every_phase_runs(bare):
    done = rehearse(bare)
    assert done.returncode == 0, done.stdout + done.stderr
    out = Path(bare["OUT"])
    for name in ("build", "sanity", "tests", "attention", "kernels", "subblocks"):
        assert f"\n{name:10} ok" in (out / "summary.txt").read_text(), name
    log = (out / "gpu.log").read_text()
    assert "no chart: matplotlib cannot be imported" in log and " passed" in log
    report = json.loads((out / "attention.json").read_text())
    assert report["complete"] and report["machine"]["cpu"] and report["versions"]["torch"] and report["command"]
    assert {case["contenders"]["interlace"]["status"] for case in report["cases"]} == {"ok"}
    assert report["cases"][0]["contenders"]["flash_attn"]["reason"]
    assert json.loads((out / "subblocks.json").read_text())["complete"]
    assert json.loads((out / "copy_engines.json").read_text())["cases"]
    assert json.loads((out / "overlap_gpu.json").read_text())["rows"]


@pytest.mark.slow
@pytest.mark.timeout(2800)
def test_the_extension_builds_without_setuptools(tmp_path):
    core = tmp_path / "_core.so"
    environment = os.environ | {"BUILD_DIRECTLY": "1", "CORE": str(core), "INTERLACE_OPTIMIZE": "-O0"}
    subprocess.run(["bash", "bench/build_core.sh", sys.executable], cwd=ROOT, env=environment, check=True, timeout=2700)
    load = f"import importlib.util as u; s = u.spec_from_file_location('_core', {str(core)!r}); u.module_from_spec(s)"
    subprocess.run([sys.executable, "-c", load], check=True, timeout=300)


@pytest.mark.slow
@pytest.mark.timeout(2800)
def test_a_failed_phase_shows_and_stops_no_other(bare):
    done = rehearse(bare | {"ATTENTION_ARGS": "--masks nonsense", "TESTS": "0"})
    assert done.returncode == 1
    summary = (Path(bare["OUT"]) / "summary.txt").read_text()
    assert "attention  FAILED with status 2" in summary and "\nsubblocks  ok" in summary
    assert "missing: its phase wrote nothing" in summary
