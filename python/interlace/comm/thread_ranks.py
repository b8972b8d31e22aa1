"""What threads that play ranks in one process share: a condition to wait on, and who of them has given up."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from interlace.comm.transports.base import CommError


class ThreadRanks:
    """changed: held while anything shared is read or written, and notified then. gone: why nobody should wait for a
    rank, in the order in which they left."""

    def __init__(self, world: int) -> None:
        if world < 1:
            raise ValueError(f"world must be at least 1, got {world}")
        self.world = world
        self.changed = threading.Condition()
        self.gone: dict[int, str] = {}

    def leave(self, rank: int, why: str) -> None:
        with self.changed:
            self.gone.setdefault(rank, why)
            self.changed.notify_all()

    def wait_for(self, rank: int, what: object, missing: Callable[[], Sequence[int]], timeout: float) -> Sequence[int]:
        """The ranks that are still `missing` after `timeout` seconds; none, at once, when none is. `changed` is held.

        Raises CommError when one that is missing has given up, or `rank` itself has.
        """
        deadline = time.monotonic() + timeout
        while absent := missing():
            if (left := next((peer for peer in self.gone if peer in absent), None)) is not None:
                raise CommError(f"rank {rank}, {what}: lost rank {left} ({self.gone[left]})")
            if rank in self.gone:
                raise CommError(f"rank {rank}, {what}: {self.gone[rank]}")
            if (seconds := deadline - time.monotonic()) <= 0:
                return absent
            self.changed.wait(seconds)
        return ()
