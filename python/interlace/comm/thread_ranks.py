"""What threads that play ranks in one process share: a condition to wait on, and who of them has given up."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from interlace.comm.transports.base import CommError


class ThreadRanks:
    """changed: held while anything shared is read or written, and notified then. gone: why nobody should wait for a
    rank, in the order in which they left. called: the numbers of the ranks in the whole job, by which errors call
    them; default: those that they have here."""

    def __init__(self, world: int, called: Sequence[int] | None = None) -> None:
        if world < 1:
            raise ValueError(f"world must be at least 1, got {world}")
        self.world, self.called = world, range(world) if called is None else called
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
                other = self.called[left]
                text = f"rank {self.called[rank]}, {what}: lost rank {other} ({self.gone[left]})"
                raise CommError(text, [other])
            if rank in self.gone:
                raise CommError(f"rank {self.called[rank]}, {what}: {self.gone[rank]}")
            if (seconds := deadline - time.monotonic()) <= 0:
                return absent
            self.changed.wait(seconds)
        return ()
