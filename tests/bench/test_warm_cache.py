"""Triton's cache, filled here for a Hopper GPU, packed, and unpacked elsewhere: nothing is recompiled."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from bench.triton_versions import ROOT, VERSIONS, environment

FILL = """
from bench import warm_cache
from bench.compile_worker import Configuration, calls
warm_cache.install()
for call in calls(Configuration(90, dtype="bfloat16", part="ranks")):
    call.run()
"""
TOOLS = 'import triton; n = triton.knobs.nvidia; print(n.ptxas.path, getattr(n, "ptxas_blackwell", n.ptxas).path)'


def run(environment: dict[str, str], *command: str) -> str:
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def kernels(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("__grp__*"))


def wheel(folder: Path) -> None:
    """A wheel of a module `carried`."""
    about = "carried-1.0.dist-info"
    with zipfile.ZipFile(folder / "carried-1.0-py3-none-any.whl", "w") as made:
        made.writestr("carried.py", "")
        made.writestr(f"{about}/METADATA", "Metadata-Version: 2.1\nName: carried\nVersion: 1.0\n")
        made.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        made.writestr(f"{about}/RECORD", f"carried.py,,\n{about}/METADATA,,\n{about}/WHEEL,,\n{about}/RECORD,,\n")


def refusing(tool: str, folder: Path) -> str:
    """A stub of a tool that prints its version, which is part of the keys, and compiles nothing."""
    path = folder / Path(tool).name
    path.write_text(f'#!/bin/sh\n[ "$1" = --version ] && exec {tool} --version\nexit 1\n')
    path.chmod(0o755)
    return str(path)


@pytest.mark.slow
def test_nothing_is_compiled_where_the_pack_lies(tmp_path):
    made, pack, there = tmp_path / "made", tmp_path / "pack", tmp_path / "there"
    (pack / "wheels").mkdir(parents=True)
    variables = environment(VERSIONS[0]) | {"PYTHON": sys.executable}
    run(variables | {"TRITON_CACHE_DIR": str(made)}, sys.executable, "-c", FILL)
    assert {"__grp__copy_kernel.json", "__grp__reduce_ranks_kernel.json"} <= set(kernels(made))

    wheel(pack / "wheels")
    run(variables, "bash", "bench/pack_gpu.sh", "pack_cache", str(made), str(pack))
    with tarfile.open(pack / "triton.tar.xz") as packed:
        [group] = [name for name in packed.getnames() if name.endswith("__grp__copy_kernel.json")]
        assert str(tmp_path).encode() not in packed.extractfile(group).read()
    made.rename(tmp_path / "gone")
    output = run(variables, "bash", "bench/pack_gpu.sh", "unpack", str(pack), str(there))
    assert "another build" not in output and (there / "site" / "carried.py").exists()
    (pack / "triton.build").write_text("another\n")
    output = run(variables, "bash", "bench/pack_gpu.sh", "unpack", str(pack), str(tmp_path / "elsewhere"))
    assert "Triton is another build here" in output

    ptxas, blackwell = run(variables, sys.executable, "-c", TOOLS).split()
    poisoned = {"TRITON_PTXAS_PATH": refusing(ptxas, tmp_path)}
    poisoned["TRITON_PTXAS_BLACKWELL_PATH"] = refusing(blackwell, tmp_path)
    before = kernels(there / "triton")
    run(variables | poisoned | {"TRITON_CACHE_DIR": str(there / "triton")}, sys.executable, "-c", FILL)
    assert kernels(there / "triton") == before == kernels(tmp_path / "gone")
    empty = variables | poisoned | {"TRITON_CACHE_DIR": str(tmp_path / "empty")}
    refused = subprocess.run([sys.executable, "-c", FILL], cwd=ROOT, env=empty, capture_output=True, text=True)
    assert refused.returncode != 0 and "ptxas" in refused.stderr.lower()
