"""Ranks as threads of one process: a shared condition, and the set of ranks that have left."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from interlace.comm.process.errors import CommError


class ThreadRanks:
    """Shared state of ranks that are threads.

    changed: condition; held while shared state is read or written, and notified on changes.
    gone: rank -> reason for leaving, in the order in which ranks left. Waits for these ranks fail.
    called: global numbers of the ranks (in the whole job), used in error messages; default: their local numbers.
    """

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
        """Waits until `missing` returns no ranks; returns the ranks still missing after `timeout` seconds.

        Returns an empty sequence at once if none is missing. `changed` must be held.

        Raises CommError if a missing rank, or `rank` itself, has left.
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
