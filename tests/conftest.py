"""Settings for every test: one thread, and hypothesis without a deadline (the machines that run this are shared). And
one pool of rank processes for all tests that want some."""

import os
from collections.abc import Iterator
from typing import Any

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch or a spawned process loads its OpenMP

try:
    from hypothesis import settings
except ImportError:
    pass  # tests/gpu runs on bare machines without it
else:
    # Without a database or a random seed, a run on a fresh clone tries what every other run tried.
    settings.register_profile("interlace", deadline=None, derandomize=True, database=None)
    settings.register_profile("explore", deadline=None, max_examples=1000)
    settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "interlace"))


@pytest.fixture(scope="session")
def pool() -> Iterator[Any]:
    from tests.comm.pool import Pool

    pool = Pool()
    yield pool
    pool.close()
