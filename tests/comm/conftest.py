"""One pool of rank processes for all tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.comm.pool import Pool


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    pool = Pool()
    yield pool
    pool.close()
