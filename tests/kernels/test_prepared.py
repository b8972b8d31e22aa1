"""Prepared launches: grids and arguments equal those that Triton binds, without a GPU."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from bench.triton_versions import ROOT, environment


@pytest.mark.slow
def test_prepared_launches_are_those_of_the_first_call():
    pytest.importorskip("triton")
    import triton

    process = subprocess.run(
        [sys.executable, "-m", "tests.kernels.stub_launches"],
        cwd=ROOT,
        env=environment(triton.__version__),
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stderr[-3000:]
    report = json.loads(process.stdout.splitlines()[-1])
    assert report["launches"] > 100 and report["different"] == {}
