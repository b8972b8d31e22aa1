"""warm_up: compiles the kernels that later calls need, and is a no-op on a CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch

from bench.triton_versions import ROOT
from interlace.attention import warm_up


def refuse(line: str) -> None:
    raise AssertionError(line)


def test_nothing_is_compiled_for_a_cpu():
    heads = dict(q_heads=4, kv_heads=2, head_dim=64)
    assert warm_up(**heads, device="cpu", progress=refuse) == 0
    assert warm_up(**heads, device="cpu", dtype=torch.float64, progress=refuse) == 0


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["triton", "gluon"])
def test_later_calls_compile_nothing(backend, tmp_path):
    pytest.importorskip("triton")
    variables = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": f"{ROOT / 'python'}:{ROOT}"}
    variables.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-m", "tests.attention.stub_gpu", backend]
    done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    kernels = {"forward_kernel", "query_gradient_kernel", "key_gradient_kernel"}
    needed = {"gluon_" * (backend == "gluon") + kernel for kernel in kernels}
    needed |= {"merge_kernel", "delta_kernel", "sum_kernel"}
    assert needed <= set(result["warmed"]) and len(result["warmed"]) == result["number"]
    number = result["number"]
    assert result["lines"] == [f"compiling attention kernels {each}/{number}" for each in range(1, number + 1)]
    assert result["called"] == result["checked"] == []
