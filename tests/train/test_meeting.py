"""Before the first step: a slow rank is waited for, one that gives no sign of life is named, nothing waits for long."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from interlace.train import launch
from interlace.train.meeting import Meeting

SCRIPT = """
import os, signal, sys, time
import torch.distributed as dist
from interlace.train.meeting import Meeting
rank, lost = int(os.environ["RANK"]), int(sys.argv[1])
meeting = Meeting(rank, 3, 2.0)
assert dist.get_world_size() == 3
if rank == 1:
    time.sleep(5)  # longer than the timeout, but alive
assert meeting.gather("a slow start", [rank]) == [[0], [1], [2]]
if rank == lost:
    time.sleep(1.5)  # the others have heard of the round before
    os.kill(os.getpid(), signal.SIGSTOP)
try:
    meeting.gather("fetching the data", rank)
except RuntimeError as error:
    print(f"{type(error).__name__}: {error}", flush=True)
os._exit(0)
"""


def _start(script: str, world: int, *arguments: str, ranks: range) -> list[subprocess.Popen[str]]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **launch.rendezvous(world)}
    environment.pop(launch.LAUNCHER, None)
    return [
        subprocess.Popen(
            [sys.executable, "-c", script, *arguments],
            env={**environment, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in ranks
    ]


@pytest.mark.parametrize("lost", [0, 2])
def test_a_slow_rank_is_waited_for_and_a_hung_one_is_named(lost: int) -> None:
    processes = _start(SCRIPT, 3, str(lost), ranks=range(3))
    try:
        said = {rank: processes[rank].communicate(timeout=90)[0] for rank in range(3) if rank != lost}
        # Rank 0 holds the store: when it stops, torch itself may wait for ever, and the timer ends the others.
        words = "no answer within 2 s" if lost == 0 else "lost rank 2 (no sign of life for 2 s)"
        for rank, text in said.items():
            assert "fetching the data" in text and words in text, (rank, text)
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def test_a_rank_that_never_comes_is_missed_within_the_timeout() -> None:
    body = "import os\nfrom interlace.train.meeting import Meeting\ntry: Meeting(int(os.environ['RANK']), 2, 2.0)\n"
    body += "except RuntimeError as error: print(error, flush=True)\nos._exit(0)"
    for rank in range(2):
        (process,) = _start(body, 2, ranks=range(rank, rank + 1))
        said = process.communicate(timeout=90)[0]
        assert f"rank {rank}, meeting the other 1 ranks: " in said and "raise parallel.timeout" in said, said


def test_alone_there_is_nobody_to_wait_for() -> None:
    meeting = Meeting(0, 1, 0.01)
    assert meeting.gather("a test", "x") == ["x"]
    with meeting.bounded("a test"):
        time.sleep(0.02)
    meeting.close()
