"""Runs the ranks of one process, a thread each."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import torch

from interlace.run.errors import PipelineError


def run_threads(ranks: Sequence[int], play: Callable[[int], None], leave: Callable[[int, str], object]) -> None:
    """Run play(rank) in a thread for each rank. After all have ended, raises the error of the first rank that failed
    by itself, not because of another rank.

    leave(rank, reason): reports the failure of a rank to the ranks that wait for it.
    """
    errors: list[tuple[int, BaseException]] = []
    grad = torch.is_grad_enabled()  # one per thread

    def main(rank: int) -> None:
        try:
            with torch.set_grad_enabled(grad):
                play(rank)
        except BaseException as error:
            errors.append((rank, error))
            leave(rank, f"it raised {type(error).__name__}: {str(error)[:300]}")

    threads = [threading.Thread(target=main, args=(rank,), name=f"rank-{rank}", daemon=True) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        # The first failure makes the other ranks fail too: its error is the cause.
        raise next((error for _, error in errors if not _taken_along(error)), errors[0][1])


def _taken_along(error: BaseException) -> bool:
    return isinstance(error, PipelineError) and "lost rank" in str(error)
