"""The static gate: kernels compile for GPUs that are not here, use their tensor cores, and spill nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

ROOT = Path(__file__).parents[2]
DOTS = ("forward_kernel", "query_gradient_kernel", "key_gradient_kernel")
OTHERS = ("delta_kernel", "merge_kernel", "sum_kernel")
TENSOR_CORES = {80: "mma", 90: "wgmma", 100: "tcgen"}
SHARED_MEMORY = {80: 101_376, 90: 232_448, 100: 232_448}  # bytes per program; 80: of 8.6, 8.9 and 12.0, the least


def report(architecture: int, head_dim: int, dtype: str) -> dict[str, dict[str, int]]:
    """What every kernel uses, as compiled by a process that does not interpret."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT / "python"), str(ROOT)])
    arguments = [str(architecture), str(head_dim), dtype]
    process = subprocess.run(
        [sys.executable, "-m", "tests.kernels.compile_worker", *arguments],
        cwd=ROOT, env=environment, capture_output=True, text=True,
    )  # fmt: skip
    assert process.returncode == 0, process.stderr[-4000:]
    return json.loads(process.stdout)


def check(architecture: int, head_dim: int, dtype: str = "bfloat16") -> None:
    kernels = report(architecture, head_dim, dtype)
    assert set(kernels) == {*DOTS, *OTHERS, *(f"{name} with softcap" for name in DOTS)}
    for name, used in kernels.items():
        where = f"{name}, sm_{architecture}, head dimension {head_dim}, {dtype}: {used}"
        assert used["spills"] == 0, where
        assert used["shared"] <= SHARED_MEMORY[architecture], where
        if name.startswith(DOTS) and dtype != "float32":
            assert used[TENSOR_CORES[architecture]] > 0, where


@pytest.mark.parametrize("head_dim", [64, 128])
def test_hopper(head_dim):
    check(90, head_dim)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("head_dim", [16, 64, 72, 96, 128, 256])
@pytest.mark.parametrize("architecture", [80, 90, 100])
def test_every_architecture(architecture, head_dim, dtype):
    check(architecture, head_dim, dtype)


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("architecture", [80, 90, 100])
def test_float32(architecture, head_dim):
    check(architecture, head_dim, "float32")


def test_an_interpreting_process_refuses_to_compile():
    environment = {
        **os.environ,
        "TRITON_INTERPRET": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT / "python"), str(ROOT)]),
    }
    process = subprocess.run(
        [sys.executable, "-m", "tests.kernels.compile_worker", "90", "64", "bfloat16"],
        cwd=ROOT, env=environment, capture_output=True, text=True,
    )  # fmt: skip
    assert process.returncode != 0 and "TRITON_INTERPRET" in process.stderr
