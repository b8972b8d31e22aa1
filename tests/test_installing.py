"""Installation: requirements resolve, hints are usable, and parts that need no torch work without it."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from interlace.cli import main
from interlace.train.commands import doctor
from interlace.train.models import build
from tests import resolution

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PAGE = ROOT / "docs" / "installing.md"


def run(program: str, **environment: str) -> subprocess.CompletedProcess[str]:
    given = {**os.environ, "PYTHONPATH": str(ROOT / "python"), **environment}
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=given, cwd=ROOT)


def test_plan_and_the_other_pure_parts_work_without_torch():
    """torch = None in sys.modules makes every `import torch` fail, as on a machine without torch."""
    program = """
import sys
sys.modules.update(torch=None, transformers=None, triton=None)
import numpy as np
from interlace import balance, plan, schedule, simulate
for name in sorted({*plan.__all__} - {"profile_layers", "profile_model"}):
    getattr(plan, name)
print(plan.partition([1, 2, 3, 4], 2).tolist(), balance.assign([3, 1, 2], 2).tolist())
work = {"vision": plan.ModuleWork([1.0]), "language_model": plan.ModuleWork([2.0])}
print(plan.orchestrate(work, 5, 6, tp=(1,)).iteration_time)
try:
    plan.profile_layers
except ImportError as error:
    print("needs torch" if "torch" in str(error) else error)
"""
    done = run(program)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["[0, 3, 4] [0, 1, 1]", "6.0", "needs torch"]


def declared() -> dict[str, list[Requirement]]:
    """Distribution -> its requirements: those of the package, of all extras and of the build."""
    extras = [line for lines in PROJECT["optional-dependencies"].values() for line in lines]
    result: dict[str, list[Requirement]] = {}
    for line in [*PROJECT["dependencies"], *extras]:
        requirement = Requirement(line)
        result.setdefault(requirement.name, []).append(requirement)
    return result


# In no extra: the user's own trackers, and requirements of one transformers processor or one comparison in bench/.
UNDECLARED = {"wandb", "mlflow", "trackio", "num2words", "accelerate"}


def check_hint(hint: str) -> None:
    """The arguments of `pip install` are a real extra, or a declared package in an allowed version."""
    if hint in UNDECLARED:
        return
    known = declared()
    for word in re.findall(r"'[^']+'|\"[^\"]+\"|\S+", hint):
        if word.strip("'\"").startswith("-"):
            continue
        requirement = Requirement(re.sub(r"^\.(?=\[)", "interlace", word.strip("'\"")))
        if requirement.name == "interlace":
            assert requirement.extras and requirement.extras <= set(PROJECT["optional-dependencies"]), hint
        else:
            assert requirement.name in known, hint
            versions = [f"{major}.{minor}" for major in range(30) for minor in range(30)]
            allowed = known[requirement.name][0].specifier
            assert any(v in requirement.specifier and v in allowed for v in versions), hint


HINT = re.compile(r"pip install ((?:'[^']+'|\"[^\"]+\"|-e|[\w.-]+(?:\[\w+\])?)(?: (?:'[^']+'|\"[^\"]+\"))*)")


def test_every_hint_names_what_can_be_installed():
    files = [*(ROOT / "python" / "interlace").rglob("*.py"), *ROOT.glob("bench/*.py"), ROOT / "README.md"]
    files += [*ROOT.glob("kernels/*.py"), *ROOT.glob("docs/*.md")]
    hints = [(path.name, hint) for path in files for hint in HINT.findall(path.read_text(encoding="utf-8"))]
    assert len(hints) >= 8
    for _, hint in hints:
        check_hint(hint)


def test_every_hint_of_the_doctor_names_what_can_be_installed(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    checks = {**doctor._basics(), **doctor._data()}
    shown = [doctor._tried(checks[name])[1] for name in checks if ":" in name or name == "triton"]
    hints = [match for text in shown for match in re.findall(r"\(pip install (.*)\)$", text)]
    assert len(hints) == 5
    for hint in hints:
        check_hint(hint)


@pytest.mark.parametrize(("version", "accepted"), [("4.57.1", False), ("5.0.0", True), ("6.0", False)])
def test_doctor_and_train_agree_on_transformers(version, accepted, monkeypatch, capfd):
    real = importlib.metadata.version
    monkeypatch.setattr("importlib.metadata.version", lambda name: version if name == "transformers" else real(name))
    if accepted:
        build._check_library()
    else:
        with pytest.raises(build.ConfigError, match="needs transformers 5"):
            build._check_library()
    assert main(["doctor"]) == (0 if accepted else 1)
    output = capfd.readouterr().out
    assert ("training can run here" in output) == accepted
    assert ("training cannot run here: transformers" in output) == (not accepted)


def test_doctor_names_versions_that_are_not_declared(monkeypatch):
    real = importlib.metadata.version
    monkeypatch.setattr("importlib.metadata.requires", lambda name: PROJECT["dependencies"])
    assert doctor._versions() == (True, "all libraries lie in the ranges that Interlace declares")
    monkeypatch.setattr("importlib.metadata.version", lambda name: "2.99.0" if name == "torch" else real(name))
    on, text = doctor._versions()
    assert on is None and re.fullmatch(r"torch is 2\.99\.0, declared is \S+", text)


def test_the_doctor_knows_which_pythons_are_declared(monkeypatch):
    declared_pythons = SpecifierSet(PROJECT["requires-python"])
    for minor in range(8, 18):
        monkeypatch.setattr(sys, "version_info", (3, minor, 0))
        assert doctor._basics()["python"]()[0] == (f"3.{minor}.0" in declared_pythons)


def test_a_machine_without_a_compiler_is_told_what_to_install(tmp_path):
    shutil.copytree(ROOT / "csrc", tmp_path / "csrc")
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "python" / "interlace").mkdir(parents=True)
    (tmp_path / "python" / "interlace" / "__init__.py").write_text('__version__ = "0.1.0"\n')
    done = subprocess.run(
        [sys.executable, "setup.py", "--quiet", "build_ext"],
        cwd=tmp_path,
        env={**os.environ, "CC": "/nowhere/gcc", "CXX": "/nowhere/g++"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "error: Interlace's C++ part cannot be compiled here" in done.stderr
    assert "'/nowhere/g++'" in done.stderr and "apt-get install g++ python3-dev" in done.stderr


def test_resolved_versions_match_the_declared_requirements():
    result = json.loads(resolution.RESULT.read_text())
    assert result["requirements"] == resolution.requirements(), "run python -m tests.resolution"
    rows = result["resolved"]
    cases = {(row["python"], row["pins"], row["extra"]) for row in rows}
    assert cases == {(*case,) for case in resolution.cases()}
    assert not [row for row in rows if "error" in row]
    for row in rows:
        for requirement in map(Requirement, [*PROJECT["dependencies"], *resolution.requirements()[row["extra"]]]):
            if (version := row["versions"].get(requirement.name)) is not None:
                assert requirement.specifier.contains(version), (row, requirement)
    assert resolution.table(rows) in PAGE.read_text(), "run python -m tests.resolution"


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("uv") is None, reason="needs uv, and a package index")
@pytest.mark.parametrize("pins", resolution.PINS)
def test_requirements_resolve(pins):
    """One Python per run, since the index is slow; python -m tests.resolution resolves all."""
    row = resolution.resolve("3.12", pins, "")
    if "error" in row and "fetch" in row["error"]:
        pytest.skip("no package index can be reached")
    assert "error" not in row and {"torch", "triton", "numpy"} <= set(row["versions"])
