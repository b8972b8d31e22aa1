"""Roll call of ranks that detect a loss at different times: the rank that holds the store waits for the last one."""

from __future__ import annotations

import os
import signal
import time

import torch.distributed as dist

from interlace.comm.process.abort_reports import AbortReports, reason_of
from tests.distributed.workers import run_ranks

TIMEOUT = 3.0


def _notice(rank: int) -> str:
    """Rank 1 dies while the others wait for it. Rank 0 notices at once, the last rank after its own timeout."""
    assert dist.group.WORLD is not None
    roll = AbortReports(dist.group.WORLD, "test")
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep({0: 0.0, 2: TIMEOUT / 2, 3: 2 * TIMEOUT}[rank])
    words, _ = roll.trace(reason_of(RuntimeError("connection reset by peer"), TIMEOUT), [1], TIMEOUT)
    roll.leave(words, TIMEOUT)
    return words


def test_rank_0_stays_until_all_who_live_have_asked() -> None:
    results = run_ranks(4, _notice)
    assert results[1] == ("died", -signal.SIGKILL)
    for rank in (0, 2, 3):
        kind, words = results[rank]
        assert kind == "returned" and words.startswith("lost rank 1 "), (rank, kind, words)
