"""Rehearsal of bench/gpu.sh on a CPU, without packages that bare machines lack: it must work there the first time."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOR_TRAINING = ("pydantic", "rich", "matplotlib")
ABSENT = (
    "hypothesis",
    "pytest_timeout",
    "pytest_benchmark",
    "xdist",
    "tensorboard",
    "flash_attn",
    "soundfile",
    "scipy",
    "sklearn",
)
HIDE = """
import sys

ABSENT = {absent!r}


class Hiding:
    def __init__(self, finder):
        self.finder = finder

    def find_spec(self, name, path=None, target=None):
        return None if name.split(".")[0] in ABSENT else self.finder.find_spec(name, path, target)

    def __getattr__(self, name):
        return getattr(self.finder, name)


sys.meta_path[:] = [Hiding(finder) for finder in sys.meta_path]
"""
LINE = re.compile(r"(ok|FAIL|CUT OFF|NOT RUN) (\w+)")
MOST_FILES, MOST_BYTES = 8, 16 << 20  # of results


def bare(folder: Path, absent: tuple[str, ...]) -> dict[str, str]:
    """Environment of a process that cannot import the absent packages."""
    (folder / "bare").mkdir()
    (folder / "bare" / "sitecustomize.py").write_text(HIDE.format(absent=absent))
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    return environment | {
        "DRY": "1",
        "PATIENCE": "8",  # limits are for an idle machine
        "PYTHON": sys.executable,
        "PYTHONPATH": str(folder / "bare"),
        "OUT": str(folder / "out"),
        "PACK": str(folder / "no pack"),
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    }


def rehearse(run: str, environment: dict[str, str]) -> tuple[int, dict[str, str]]:
    """(exit status, {check: its line}) of a run; lines in the order in which they were printed."""
    command, lines, table = ["bash", "bench/gpu.sh", run], {}, []
    with subprocess.Popen(command, cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if match := LINE.match(line):
                assert process.poll() is None  # lines are printed while others are computed
                lines[match[2]] = line.rstrip()
            else:
                table.append(line)
    assert all(any(line in row for row in table) for line in lines.values()), (lines, table)
    files = list(Path(environment["OUT"]).iterdir())
    assert len(files) <= MOST_FILES and max(path.stat().st_size for path in files) <= MOST_BYTES, files
    return process.returncode, lines


def good(lines: dict[str, str]) -> set[str]:
    return {name for name, line in lines.items() if line.startswith("ok ")}


@pytest.mark.slow
@pytest.mark.timeout(2800)
def test_the_first_run(tmp_path):
    environment = bare(tmp_path, ABSENT + FOR_TRAINING)
    status, lines = rehearse("first", environment)
    log = (tmp_path / "out" / "gpu_first.log").read_text()
    assert good(lines) == {"sanity", "tests", "triton", "gluon", "ranks", "kernels", "tiles", "engines"}, log[-20_000:]
    assert status == 0 and log.count(" passed") == 4 and "TFLOP/s; copy" in log
    assert json.loads((tmp_path / "out" / "copy_engines.json").read_text())["cases"]


@pytest.mark.slow
@pytest.mark.timeout(2800)
def test_the_second_run_outlives_checks_that_hang_and_fail(tmp_path):
    environment = bare(tmp_path, ABSENT)
    environment["EXTRA"] = "hangs 1 echo begun; sleep 3600\nfails 60 echo broken; exit 3"
    status, lines = rehearse("second", environment)
    out = tmp_path / "out"
    log = (out / "gpu_second.log").read_text()
    assert re.fullmatch(r"CUT OFF hangs after \d+ s", lines["hangs"]) and lines["fails"] == "FAIL fails 3, broken"
    assert status == 1 and "\nbegun\n" in log
    assert good(lines) == {"tests", "repeats", "attention", "overlap", "trainer"}, log[-20_000:]
    assert list(lines)[-5:] == ["hangs", "fails", "attention", "overlap", "trainer"]
    report = json.loads((out / "attention.json").read_text())
    assert report["complete"] and report["machine"]["cpu"] and report["versions"]["torch"] and report["command"]
    assert {case["contenders"]["interlace"]["status"] for case in report["cases"]} == {"ok"}
    assert report["cases"][0]["contenders"]["flash_attn"]["reason"]
    assert json.loads((out / "overlap_gpu.json").read_text())["rows"]
    assert json.loads((out / "gpu_trainer.json").read_text())["cases"]["2B"]["interlace"]["tokens_per_s"] > 0


@pytest.mark.slow
@pytest.mark.every_case
@pytest.mark.timeout(2800)
def test_the_extension_builds_without_setuptools(tmp_path):
    core = tmp_path / "_core.so"
    environment = os.environ | {"BUILD_DIRECTLY": "1", "CORE": str(core), "INTERLACE_OPTIMIZE": "-O0"}
    subprocess.run(["bash", "bench/build_core.sh", sys.executable], cwd=ROOT, env=environment, check=True, timeout=2700)
    load = f"import importlib.util as u; s = u.spec_from_file_location('_core', {str(core)!r}); u.module_from_spec(s)"
    subprocess.run([sys.executable, "-c", load], check=True, timeout=300)
