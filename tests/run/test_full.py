"""shard = "full" between processes: named layouts train as one process does, gathered once or layer by layer."""

from __future__ import annotations

import pytest

from tests.comm.pool import Pool
from tests.run.full import CASES, train

SLOW = set(CASES) - {"dp 2 x tp 2", "sets of 2, one gathers once"}


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n in SLOW)) for n in CASES])
def test_four_processes_train_as_one_does(name: str, pool: Pool) -> None:
    outcomes = pool.run(4, train, name)
    assert (raised := [o.value for o in outcomes if o.kind == "raised"]) == [], "\n".join(raised)
    assert [o.value for o in outcomes] == [CASES[name].layers] * 4
