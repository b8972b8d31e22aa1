"""Faults in lanes of several ranks: the committed table of a sweep, and a replayed sample of it."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path

import pytest

from tests.distributed import lane_faults
from tests.distributed.lane_faults import KINDS, LAYOUTS, WORLD, Fault

TABLE = json.loads((Path(__file__).parent / "lane_faults.json").read_text())
ROWS = TABLE["rows"]


def test_table_covers_every_layout_fault_kind_and_rank() -> None:
    assert len(ROWS) == TABLE["faults"] >= 100 and TABLE["troubled"] == sum(bool(row["trouble"]) for row in ROWS) == 0
    result = {(row["layout"], row["kind"], row["victim"]) for row in ROWS}
    assert result == set(itertools.product(LAYOUTS, KINDS, range(WORLD)))
    assert {"compute", "send", "receive", "wait"} | {"lane: post", "lane: take"} <= {row["event"] for row in ROWS}
    assert all(row["seconds"] < 2 * TABLE["timeout"] + lane_faults.SLACK for row in ROWS)


@pytest.mark.parametrize(
    ("text", "ranks"),
    [
        ("rank 0, RECV a[0] chunk 1: lost rank 3 (its process, 9, ended)", {3}),
        ("rank 0: lost ranks 1, 2 (no answer); first symptom: rank 0, x: lost rank 3 (it died)", {1, 2}),
        ("rank 0, x: no answer from rank 1 within 3 s", set()),
    ],
)
def test_whom_a_message_calls_lost(text: str, ranks: set[int]) -> None:
    assert lane_faults.lost_in(text) == ranks


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_sample_of_the_table_ends_as_it_says(layout: str) -> None:
    """After schedule changes a fault happens at another event, and must still end well."""
    loss, events = lane_faults.undisturbed(layout)
    rng = random.Random(7)
    for kind in (*KINDS, "kill"):
        row = rng.choice([row for row in ROWS if (row["layout"], row["kind"]) == (layout, kind)])
        fault = Fault(layout, kind, row["victim"], row["point"] % len(events[row["victim"]]))
        outcome = lane_faults.run(fault, loss)
        assert not outcome.trouble, (fault, outcome)
