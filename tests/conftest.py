"""Settings for every test: one thread, and hypothesis without a deadline and with the same examples in every run (the
machines that run this are shared). And one pool of rank processes for all tests that want some."""

import os
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import pytest

from tests.sampling import sample

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch or a spawned process loads its OpenMP

try:
    from hypothesis import HealthCheck, settings
    from hypothesis.internal.conjecture import providers
except ImportError:
    pass  # tests/gpu runs on bare machines without it
else:
    # Without a database or a random seed, a run on a fresh clone tries what every other run tried. How long it takes to
    # draw an example says how busy the machine is.
    always: Any = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
    settings.register_profile("interlace", derandomize=True, database=None, **always)
    settings.register_profile("explore", max_examples=1000, **always)
    settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "interlace"))
    # Newer versions also draw constants that they find in the modules imported so far: under xdist, that is which tests
    # this worker happened to run before. There is no setting for it.
    if hasattr(providers, "_get_local_constants"):
        providers._get_local_constants = lambda: providers._local_constants  # none are ever added


MOST_SLOW_CASES = 5  # of one slow test; INTERLACE_EVERY_CASE=1 runs all of them


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of a slow test with many cases a sample runs: all of them take longer than a check may."""
    cases = defaultdict(list)
    for item in items:
        slow = item.get_closest_marker("slow") is not None
        cases[item.nodeid.partition("[")[0] if slow else item.nodeid].append(item)
    kept = {item for each in cases.values() for item in sample(each, MOST_SLOW_CASES)}
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = [item for item in items if item in kept]


@pytest.fixture(scope="session")
def pool() -> Iterator[Any]:
    from tests.comm.pool import Pool

    pool = Pool()
    yield pool
    pool.close()
