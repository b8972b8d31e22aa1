"""Settings for every test: one thread, and hypothesis without a deadline and with the same examples in every run (the
machines that run this are shared). And one pool of rank processes, and one folder of trials, for all tests."""

import gc
import os
import shutil
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import pytest

from tests.sampling import sample
from tests.trials import FOLDER, share_trials

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


MOST_SLOW_CASES = 2  # of one test; INTERLACE_EVERY_CASE=1 runs all of them, and tests marked every_case


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of a slow test with many cases a sample runs, and tests marked `every_case` do not: all take longer than a check
    may."""
    cases = defaultdict(list)
    for item in items:
        if item.get_closest_marker("every_case") and not os.environ.get("INTERLACE_EVERY_CASE"):
            continue
        slow = item.get_closest_marker("slow") is not None
        cases[item.nodeid.partition("[")[0] if slow else item.nodeid].append(item)
    kept = {item for each in cases.values() for item in sample(each, MOST_SLOW_CASES)}
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = [item for item in items if item in kept]


def pytest_configure(config: pytest.Config) -> None:
    if FOLDER not in os.environ:  # the workers of a run inherit it
        folder = os.environ[FOLDER] = tempfile.mkdtemp(prefix="interlace-trials-")
        config.add_cleanup(lambda: (os.environ.pop(FOLDER), shutil.rmtree(folder, ignore_errors=True)))


def pytest_collection_finish() -> None:
    """What has been imported stays: the collector need not look through half a million objects again and again."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    gc.unfreeze()


@pytest.fixture(autouse=True)
def shared_trials() -> None:
    """Before each test, as `interlace.train.build.build` keeps answers in the folder of its config from then on."""
    share_trials()


@pytest.fixture(scope="session")
def pool() -> Iterator[Any]:
    from tests.comm.pool import Pool

    pool = Pool()
    yield pool
    pool.close()
