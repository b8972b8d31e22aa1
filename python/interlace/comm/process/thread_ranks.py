"""Ranks as threads of one process: a shared condition, and the set of ranks that have left."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from interlace.comm.process.errors import CommError


class ThreadRanks:
    """Shared state of ranks that are threads.

    changed: condition; held while shared state is read or written, and notified on changes.
    departed: rank -> reason for leaving, in the order in which ranks left. Waits for these ranks fail.
    global_ranks: global numbers of the ranks (in the whole job), used in error messages; default: their local numbers.
    """

    def __init__(self, world: int, global_ranks: Sequence[int] | None = None) -> None:
        if world < 1:
            raise ValueError(f"world must be at least 1, got {world}")
        self.world, self.global_ranks = world, range(world) if global_ranks is None else global_ranks
        self.changed = threading.Condition()
        self.departed: dict[int, str] = {}

    def leave(self, rank: int, reason: str) -> None:
        with self.changed:
            self.departed.setdefault(rank, reason)
            self.changed.notify_all()

    def wait_for(
        self, rank: int, operation: object, missing: Callable[[], Sequence[int]], timeout: float
    ) -> Sequence[int]:
        """Waits until `missing` returns no ranks; returns the ranks still missing after `timeout` seconds.

        Returns an empty sequence at once if none is missing. `changed` must be held.

        Raises CommError if a missing rank, or `rank` itself, has left.
        """
        deadline = time.monotonic() + timeout
        while missing_ranks := missing():
            if (left := next((peer for peer in self.departed if peer in missing_ranks), None)) is not None:
                other = self.global_ranks[left]
                text = f"rank {self.global_ranks[rank]}, {operation}: lost rank {other} ({self.departed[left]})"
                raise CommError(text, [other])
            if rank in self.departed:
                raise CommError(f"rank {self.global_ranks[rank]}, {operation}: {self.departed[rank]}")
            if (seconds := deadline - time.monotonic()) <= 0:
                return missing_ranks
            self.changed.wait(seconds)
        return ()
