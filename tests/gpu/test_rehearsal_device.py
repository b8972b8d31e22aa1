"""Training on the rehearsal device: no failures that a CPU can show; a step waits for the GPU only where required."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from typing import Any

import pytest

from tests import rehearsal
from tests.train.whole_families import MODELS

pytestmark = pytest.mark.skipif(shutil.which(os.environ.get("CXX", "c++")) is None, reason="needs a C++ compiler")

STEP = {
    # Loss and gradient norm: they decide whether the update is made.
    "read copy to the host run/execute/gradients.py:totals": 1,
    # A logged step reads its seconds from the GPU; other steps do not.
    "wait synchronize train/device.py:finish": 1,
}
"""All waits for the GPU in a training step. Avoid new entries: each is a wait in every step."""

VALIDATION = {"read copy to the host run/execute/gradients.py:totals": 1}  # the loss
FAST = ("modules", "internvl")
TOLD_GRIDS = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")
"""Encoders with code of their own that reads the grids of pictures: docs/on-a-gpu.md."""
ON_CUDA_ONLY = ("qwen3_vl_moe",)  # counts experts in int32, which torch's CPU kernels cannot


def waits(table: dict[str, int]) -> dict[str, int]:
    return {key: count for key, count in table.items() if not key.startswith(("event ", "stream "))}


@pytest.fixture(scope="module")
def found() -> Any:
    return rehearsal.run("steps", *FAST)


def test_the_device_does_as_a_gpu_does(found: Any) -> None:
    assert [name for name, right in found["device"].items() if not right] == []


@pytest.mark.parametrize("name", FAST)
def test_a_step_waits_for_the_gpu_once(found: Any, name: str) -> None:
    parts = found[name]
    assert len(parts["step"]) == 6 and len(parts["validation"]) == 3
    assert all(waits(table) == STEP for table in parts["step"]), parts["step"]
    assert all(waits(table) == VALIDATION for table in parts["validation"]), parts["validation"]


@pytest.mark.parametrize("name", FAST)
def test_checkpoints_resume_and_answers_run(found: Any, name: str) -> None:
    """A checkpoint reads every tensor; answers are those of the CPU."""
    parts = found[name]
    assert len(parts["checkpoint"]) == 3 and len(parts["resume"]) == 1 and parts["generation"]
    copied = "read copy to the host train/checkpoint/checkpoints.py"
    assert all({key.partition(":")[0] for key in waits(table)} == {copied} for table in parts["checkpoint"])
    assert ("HuggingFace's generate" in parts) == (name != "modules")


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in MODELS if name not in (*FAST, *ON_CUDA_ONLY)])
def test_every_family_trains_and_answers(name: str) -> None:
    parts = rehearsal.run("steps", name)[name]
    for part, expected in (("step", STEP), ("validation", VALIDATION)):
        assert len(parts[part]) == (6 if part == "step" else 3)
        for table in parts[part]:
            own = {key: count for key, count in waits(table).items() if key not in expected}
            assert waits(table).items() >= expected.items()
            assert not own or name in TOLD_GRIDS, own


@pytest.mark.slow
def test_the_tests_of_gpus_pass() -> None:
    environment = os.environ | {"INTERLACE_GPU_TESTS_ON": rehearsal.NAME}
    files = [f"tests/gpu/test_{name}.py" for name in ("trainer", "offload", "comm", "attention")]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", *files],
        cwd=rehearsal.ROOT, env=environment, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-6000:]
