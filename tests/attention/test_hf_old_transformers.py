"""The drop-in, interlace.model and interlace.parallel under transformers 4.57, installed into a separate folder."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# 4.57 and those requirements whose versions differ from transformers 5; it shares the rest with the environment.
PACKAGES = [
    "transformers>=4.57,<4.58",
    "huggingface-hub>=0.34,<1",
    "tokenizers>=0.22,<=0.23.0",
    *("requests", "charset-normalizer", "urllib3", "idna", "certifi"),
]
OUT_OF_REACH = r"(?i)connection|timed out|temporary failure|name resolution|proxy|no matching distribution"
TESTS = [
    *("tests/attention/test_hf.py", "tests/attention/test_hf_families.py", "tests/attention/test_hf_masks.py"),
    *("tests/attention/test_carrier.py", "tests/attention/test_checkpointing.py", "tests/model/test_shared.py"),
    *("tests/model/test_oracle.py", "tests/model/test_generate.py", "tests/model/test_slices.py"),
    *("tests/attention/test_hf_limits.py", "tests/model/test_packing.py"),
    *("tests/model/test_encoders.py", "tests/parallel/test_tensor.py", "tests/parallel/test_families.py"),
]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def environment(tmp_path_factory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("transformers-4.57")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "-q", "--no-deps", "--retries", "1"]
    done = subprocess.run([*pip, "--target", str(folder), *PACKAGES], capture_output=True, text=True)
    if done.returncode != 0 and re.search(OUT_OF_REACH, done.stderr):
        pytest.skip(f"pip cannot install transformers 4.57: {done.stderr.strip().splitlines()[-1]}")
    assert done.returncode == 0, done.stderr
    path = os.pathsep.join([str(folder), str(ROOT / "python"), str(ROOT)])
    return {**os.environ, "PYTHONPATH": path}


def run(environment: dict[str, str], *arguments: str) -> str:
    done = subprocess.run([sys.executable, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return done.stdout


def test_the_old_version_is_the_one_that_runs(environment):
    assert run(environment, "-c", "import transformers; print(transformers.__version__)").startswith("4.57")


def test_the_dropin_the_model_part_and_tensor_parallelism(environment):
    result = run(environment, "-m", "pytest", "-q", "-m", "not slow", "-p", "no:cacheprovider", *TESTS)
    assert " passed" in result
