"""Settings for every test: one thread; hypothesis without a deadline (shared machines) and with fixed examples.

All tests share one pool of rank processes and one folder of probe results.
"""

import gc
import os
import shutil
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.sampling import sample
from tests.trials import FOLDER, share_trials

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch or a spawned process loads its OpenMP
# Processes that tests start import tests.digits.
_PATHS = [os.environ.get("PYTHONPATH"), str(Path(__file__).parents[1])]
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, _PATHS))

try:
    from hypothesis import HealthCheck, settings
    from hypothesis.internal.conjecture import providers
except ImportError:
    pass  # tests/gpu runs on bare machines without it
else:
    # Without a database or a random seed, a run on a fresh clone tests the same examples as every other run.
    # The time to draw an example depends on the load of the machine, so that check is off.
    always: Any = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
    settings.register_profile("interlace", derandomize=True, database=None, **always)
    settings.register_profile("explore", max_examples=1000, **always)
    settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "interlace"))
    # Newer versions also draw constants found in the modules imported so far. Under xdist, that depends on
    # the tests that this worker ran before. There is no setting to disable it.
    if hasattr(providers, "_get_local_constants"):
        providers._get_local_constants = lambda: providers._local_constants  # blocks later additions


MOST_SLOW_CASES = 2  # of one test; INTERLACE_EVERY_CASE=1 runs all of them, and tests marked every_case


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Samples slow tests with many cases, and skips tests marked `every_case`.

    All of them take longer than a check may.
    """
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
    if FOLDER not in os.environ:  # inherited by the workers of a run
        folder = os.environ[FOLDER] = tempfile.mkdtemp(prefix="interlace-trials-")
        config.add_cleanup(lambda: (os.environ.pop(FOLDER), shutil.rmtree(folder, ignore_errors=True)))


def pytest_collection_finish() -> None:
    """Freezes imported objects, so that the garbage collector does not scan half a million of them repeatedly."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    gc.unfreeze()


@pytest.fixture(autouse=True)
def shared_trials() -> None:
    """Resets the folder of probe results before each test.

    `interlace.train.models.build.build` changes it to the folder of its config.
    """
    share_trials()


@pytest.fixture(scope="session")
def pool() -> Iterator[Any]:
    from tests.comm.pool import Pool

    pool = Pool()
    yield pool
    pool.close()
