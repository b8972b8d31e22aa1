"""A rank's connection to the coordinator's store, which is made anew when the coordinator is started again.

A store that is gone is seen by the thread that asks it, where the connection is closed. Where a machine is gone without
a word, the rank's supervisor notices, and says so in a file beside the rank's page: a thread here then shuts the
connections down, at which whoever waits for an answer fails.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from interlace.comm.connections import cut_to
from interlace.resilience.environment import AWAY
from interlace.resilience.errors import ResilienceError, first_line

SERVES = "serves"  # key of the store, once it is filled: which run's coordinator serves it, and its how manieth start
LOOK = 0.25  # seconds between two looks for the supervisor's word
ATTEMPT = 10.0  # seconds that one attempt to connect may take


class Link:
    """store: torch's, of the coordinator that is there now. tell_again: what a new store is told first.

    Args:
        address: host:port of the store. patience: seconds in which the coordinator may be started again; 0: it cannot
            be. timeout: seconds for the store to be there at first, and of its own waits. page: the rank's progress
            page, beside which its supervisor says that the coordinator is gone.

    Raises ResilienceError when no store answers.
    """

    def __init__(self, address: str, patience: float, timeout: float, page: Path) -> None:
        self.address, self.patience, self._timeout = address, patience, timeout
        self.tell_again: Callable[[dist.Store], None] = lambda store: None
        self._lock = threading.Lock()
        self._gone = ""  # why there is no store any more
        host, _, port = address.rpartition(":")
        try:
            self._place = host, int(port)
            self.store = self._connect(timeout)
            self._run, self._start = self._served(self.store, time.monotonic() + timeout)
        except (RuntimeError, ValueError) as error:
            raise ResilienceError(
                f"no coordinator's store answers at {address!r} within {timeout:g} s ({first_line(error)}): is "
                "`interlace coordinator` running, and reachable from this node?"
            ) from error
        if patience > 0:
            told = Path(f"{page}{AWAY}")
            threading.Thread(target=self._heed, args=(told,), name="coordinator away", daemon=True).start()

    @property
    def longest(self) -> float:
        """Seconds that `renew` takes at most."""
        return self.patience + 2 * ATTEMPT

    def renew(self, lost: dist.Store, why: str) -> None:
        """Waits for the store of a coordinator that was started again, after `lost` did not answer, for a reason.

        From any thread: where another has waited meanwhile, there is nothing to do. Raises ResilienceError that says
        what was waited for.
        """
        with self._lock:
            if self.store is not lost:
                return
            if not self._gone:
                self._gone = self._renew(why)
            if self._gone:
                raise ResilienceError(self._gone)

    def _renew(self, why: str) -> str:
        """Why it did not come to a new store; "" where it did."""
        again = "resume from the last checkpoint"
        if not self.patience:
            return f"the coordinator's store does not answer ({why}). The run cannot outlive its coordinator: {again}"
        deadline = time.monotonic() + self.patience
        while time.monotonic() < deadline:
            try:
                socket.create_connection(self._place, timeout=1.0).close()  # torch waits long, and prints much
                store = self._connect(ATTEMPT)
                run, start = self._served(store, time.monotonic() + ATTEMPT)
                if run != self._run:
                    return f"another run's coordinator answers at {self.address} (its --state is another): {again}"
                if start == self._start:
                    return f"the connection to the coordinator's store was lost ({why}), and it was not started again"
                self.tell_again(store)
            except (OSError, dist.DistError):
                time.sleep(0.1)
                continue
            self.store, self._start = store, start
            return ""
        return (
            f"the coordinator at {self.address} is gone ({why}), and was not started again within {self.patience:g} s "
            f"(resilience.coordinator_patience): {again}"
        )

    def _connect(self, seconds: float) -> dist.TCPStore:
        store = dist.TCPStore(*self._place, None, False, timedelta(seconds=seconds), wait_for_workers=False)
        store.set_timeout(timedelta(seconds=self._timeout))
        return store

    def _served(self, store: dist.Store, deadline: float) -> tuple[str, int]:
        """(run, start) of the coordinator, once it has filled its store. Raises dist.DistError."""
        while not store.check([SERVES]):
            if time.monotonic() > deadline:
                raise dist.DistError("it does not say whose it is")
            time.sleep(0.01)
        run, _, start = store.get(SERVES).decode(errors="replace").partition(" ")
        return run, int(start)

    def _heed(self, told: Path) -> None:
        """Shuts down what goes to a start of the coordinator that the supervisor says is gone, once for each."""
        heeded = 0
        while True:
            time.sleep(LOOK)
            with contextlib.suppress(OSError, ValueError):
                gone = int(told.read_text())
                if gone > heeded:
                    heeded = gone
                    with self._lock:  # who has noticed alone is making a new connection, which is to stay
                        if gone >= self._start:
                            cut_to(*self._place)
