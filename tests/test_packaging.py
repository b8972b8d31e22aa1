"""The source distribution and the wheel built from it are complete, and both builds are independent of torch."""

from __future__ import annotations

import email
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# torch = None in sys.modules makes every `import torch` fail.
BUILD = "import sys; sys.modules['torch'] = None; import setuptools.build_meta as b; b.{hook}(sys.argv[1])"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # compiles csrc/, while other tests run


def python(*arguments: str, cwd: Path) -> str:
    return run(sys.executable, *arguments, cwd=cwd)


def run(*command: str | Path, cwd: Path) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment["INTERLACE_OPTIMIZE"] = "-O0"  # only the content of the wheel is tested, not its speed
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def distributions(tmp_path_factory) -> tuple[set[str], Path]:
    """Files of the sdist, and the wheel built from it."""
    folder = tmp_path_factory.mktemp("packaging")
    tree = folder / "tree"
    tree.mkdir()
    junk = shutil.ignore_patterns("__pycache__", "*.so", "*.egg-info")
    for name in ("python", "kernels", "csrc", "configs"):
        if (ROOT / name).exists():
            shutil.copytree(ROOT / name, tree / name, symlinks=True, ignore=junk)
    for name in ("setup.py", "pyproject.toml", "MANIFEST.in", "Makefile", "constraints.txt", "LICENSE", "README.md"):
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, tree)
    (tree / "kernels" / "probe.py").write_text("reached = 'through the symlink'\n")
    python("-c", BUILD.format(hook="build_sdist"), str(folder), cwd=tree)
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        names = {name.partition("/")[2] for name in tar.getnames()}
        tar.extractall(folder / "unpacked")
    (unpacked,) = (folder / "unpacked").iterdir()
    python("-c", BUILD.format(hook="build_wheel"), str(folder), cwd=unpacked)
    (wheel,) = folder.glob("*.whl")
    return names, wheel


def relative(pattern: str, folder: str) -> set[str]:
    return {path.relative_to(ROOT / folder).as_posix() for path in (ROOT / folder).rglob(pattern)}


def test_sdist_holds_what_the_build_needs(distributions):
    names, _ = distributions
    assert {"setup.py", "pyproject.toml", "LICENSE", "python/interlace/py.typed"} <= names
    assert {f"csrc/{name}" for name in relative("*.h", "csrc") | relative("*.cpp", "csrc")} <= names
    assert {f"kernels/{name}" for name in relative("*.py", "kernels") | {"probe.py"}} <= names


def test_wheel_holds_the_package_and_nothing_else(distributions):
    names = set(zipfile.ZipFile(distributions[1]).namelist())
    kernels = {f"kernels/{name}" for name in relative("*.py", "kernels") | {"probe.py"}}
    files = relative("*.py", "python/interlace") | relative("*.html", "python/interlace")
    files |= kernels | {"py.typed", "_core.pyi"}
    assert {f"interlace/{name}" for name in files} <= names
    assert {name.split("/")[0] for name in names} == {"interlace", "interlace-0.1.0.dist-info"}
    assert not [name for name in names if "__pycache__" in name or name.endswith((".cpp", ".h"))]


def test_wheel_metadata(distributions):
    with zipfile.ZipFile(distributions[1]) as wheel:
        metadata = email.message_from_bytes(wheel.read("interlace-0.1.0.dist-info/METADATA"))
        scripts = wheel.read("interlace-0.1.0.dist-info/entry_points.txt").decode()
    assert metadata["Name"] == "interlace" and metadata["Version"] == "0.1.0"
    assert metadata["License-Expression"] == "Apache-2.0"
    extras = {"cuda12", "cuda13", "data", "dev", "docs", "lora", "peers", "ray", "video"}
    assert set(metadata.get_all("Provides-Extra")) == extras
    assert "interlace = interlace.cli:main" in scripts


def test_wheel_works_where_it_is_unpacked(distributions, tmp_path):
    zipfile.ZipFile(distributions[1]).extractall(tmp_path / "site")
    program = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "import interlace, interlace._core as core, interlace.kernels.probe as probe, numpy as np\n"
        "assert all(module.__file__.startswith(sys.argv[1]) for module in (interlace, core, probe))\n"
        "print(core.partition(np.ones(4), 2).tolist(), 'torch' in sys.modules)"
    )
    assert python("-c", program, str(tmp_path / "site"), cwd=tmp_path).split("\n")[0] == "[0, 2, 4] False"


def test_an_installed_wheel_computes_trains_and_exports(distributions, tmp_path):
    """In a separate environment, which has all packages of the tests except Interlace."""
    home = tmp_path / "venv"
    python("-m", "venv", "--without-pip", str(home), cwd=tmp_path)
    install = ("install", "--quiet", "--no-deps", "--no-index", str(distributions[1]))
    python("-m", "pip", "--python", str(home / "bin" / "python"), *install, cwd=tmp_path)
    (site,) = home.glob("lib/*/site-packages")  # others.pth must come after pip, which would find an Interlace there
    (site / "others.pth").write_text("\n".join({sysconfig.get_paths()[kind] for kind in ("purelib", "platlib")}))
    own = home / "bin" / "python"
    output = run(
        own, "-c", "import interlace, interlace._core as c; print(interlace.__file__, c.__file__)", cwd=tmp_path
    )
    assert all(Path(path).is_relative_to(home) for path in output.split())

    examples = ROOT / "examples"
    assert "apart" in run(own, examples / "attention_op.py", cwd=tmp_path)
    output = run(own, examples / "train_and_export.py", tmp_path / "shapes", cwd=tmp_path)
    assert "all finite: True" in output
    again = tmp_path / "again"
    run(home / "bin" / "interlace", "export", tmp_path / "shapes" / "runs" / "shapes" / "latest", again, cwd=tmp_path)
    for path in sorted((tmp_path / "shapes" / "exported").rglob("*.safetensors")):
        assert (again / path.relative_to(tmp_path / "shapes" / "exported")).read_bytes() == path.read_bytes()
