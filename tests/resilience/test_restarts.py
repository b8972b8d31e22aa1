"""Runs of dummy ranks whose coordinator is killed and started again: every step is decided once, alike on all."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest

from interlace.resilience.settings import Settings
from tests.resilience.cluster import Mortal, cluster, vote_on_steps

SETTINGS = Settings(nodes=4, faults=1, min_nodes=1, heartbeat=2.0, gather=60.0, patience=6.0)


def in_the_end(run: Mortal, steps: int) -> None:
    assert run.end() == 0, run.journal()[-5:]
    run.check_votes(steps)
    assert all(len(processes) == 1 for processes in run.ranks().values())
    assert run.journal("end")[-1]["why"] == "trained to the end" and run.journal("false alarm") == []


@pytest.mark.parametrize("seed", range(2))
def test_a_coordinator_that_is_killed_again_and_again(tmp_path: Path, seed: int) -> None:
    """At random moments, between votes and in them, away for a moment or longer: nobody is lost, and processes stay."""
    steps, draw = 60, random.Random(seed)
    with cluster(tmp_path, SETTINGS, (vote_on_steps, steps, 0.04), 4, Mortal) as run:
        run.until(lambda: len(run.ranks()) == 4, "four nodes that train")
        before = run.ranks()
        for _ in range(5):
            time.sleep(draw.random() * 0.3)
            run.kill_coordinator()
            time.sleep(draw.random() * 0.3)
            run.start_coordinator()
        in_the_end(run, steps)
        assert run.ranks() == before and run.journal("lost") == []
        assert len(run.journal("taken up")) == 5
