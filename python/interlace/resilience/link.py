"""Connection of a rank to the coordinator's store, renewed after a coordinator restart.

If the connection is closed, the requesting thread gets an error at once. If the coordinator's machine disappears
silently, the supervisor detects it and writes a file beside the rank's progress page. A thread here then shuts down the
connections, so that pending requests fail.
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

from interlace._text import first_line
from interlace.comm.channels.connections import cut_to
from interlace.resilience.environment import AWAY
from interlace.resilience.errors import ResilienceError

SERVES = "serves"  # key of a filled store: run and start number of the coordinator that serves it
LOOK = 0.25  # seconds between two checks of the supervisor's file
ATTEMPT = 10.0  # timeout of one connection attempt, seconds


class Link:
    """Renewable connection to the coordinator's store.

    store: torch store of the current coordinator. publish_again: callback that first fills a new store.

    Args:
        address: host:port of the store.
        patience: seconds allowed for a coordinator restart; 0: no restart.
        timeout: seconds for the first connection, and for the store's own waits.
        page: progress page of the rank. The supervisor reports a lost coordinator in a file beside it.

    Raises ResilienceError if no store answers.
    """

    def __init__(self, address: str, patience: float, timeout: float, page: Path) -> None:
        self.address, self.patience, self._timeout = address, patience, timeout
        self.publish_again: Callable[[dist.Store], None] = lambda store: None
        self._lock = threading.Lock()
        self._failure = ""  # reason why the store is lost for good
        host, _, port = address.rpartition(":")
        try:
            self._endpoint = host, int(port)
            self.store = self._connect(timeout)
            self._run, self._start = self._served(self.store, time.monotonic() + timeout)
        except (RuntimeError, ValueError) as error:
            raise ResilienceError(
                f"no coordinator's store answers at {address!r} within {timeout:g} s ({first_line(error)}): check that "
                "`interlace coordinator` runs and is reachable from this node"
            ) from error
        if patience > 0:
            report = Path(f"{page}{AWAY}")
            threading.Thread(target=self._heed, args=(report,), name="coordinator away", daemon=True).start()

    @property
    def longest(self) -> float:
        """Longest duration of `renew`, seconds."""
        return self.patience + 2 * ATTEMPT

    def renew(self, failed_store: dist.Store, reason: str) -> None:
        """Waits for the store of a restarted coordinator after `failed_store` failed because of `reason`.

        Callable from any thread. It is a no-op if another thread has already renewed the store. Raises ResilienceError
        with the reason.
        """
        with self._lock:
            if self.store is not failed_store:
                return
            if not self._failure:
                self._failure = self._renew(reason)
            if self._failure:
                raise ResilienceError(self._failure)

    def _renew(self, reason: str) -> str:
        """Connects to a new store. Returns the reason of failure, "" on success."""
        advice = "resume from the last checkpoint"
        if not self.patience:
            return f"the coordinator's store does not answer ({reason}). The run cannot continue without it: {advice}"
        deadline = time.monotonic() + self.patience
        while time.monotonic() < deadline:
            try:
                socket.create_connection(self._endpoint, timeout=1.0).close()  # torch waits longer and logs more
                store = self._connect(ATTEMPT)
                run, start = self._served(store, time.monotonic() + ATTEMPT)
                if run != self._run:
                    return f"the coordinator at {self.address} belongs to another run (another --state): {advice}"
                if start == self._start:
                    return f"the connection to the coordinator's store was lost ({reason}), and it was not restarted"
                self.publish_again(store)
            except (OSError, dist.DistError):
                time.sleep(0.1)
                continue
            self.store, self._start = store, start
            return ""
        return (
            f"the coordinator at {self.address} was lost ({reason}) and not restarted within {self.patience:g} s "
            f"(resilience.coordinator_patience): {advice}"
        )

    def _connect(self, seconds: float) -> dist.TCPStore:
        store = dist.TCPStore(*self._endpoint, None, False, timedelta(seconds=seconds), wait_for_workers=False)
        store.set_timeout(timedelta(seconds=self._timeout))
        return store

    def _served(self, store: dist.Store, deadline: float) -> tuple[str, int]:
        """Waits until the coordinator has filled its store; returns its (run, start). Raises dist.DistError."""
        while not store.check([SERVES]):
            if time.monotonic() > deadline:
                raise dist.DistError("the store does not name its run")
            time.sleep(0.01)
        run, _, start = store.get(SERVES).decode(errors="replace").partition(" ")
        return run, int(start)

    def _heed(self, watched: Path) -> None:
        """Shuts down connections to a coordinator start that the supervisor reports as lost, once per start."""
        heeded = 0
        while True:
            time.sleep(LOOK)
            with contextlib.suppress(OSError, ValueError):
                gone = int(watched.read_text())
                if gone > heeded:
                    heeded = gone
                    with self._lock:  # `renew` may have made a new connection already: keep it
                        if gone >= self._start:
                            cut_to(*self._endpoint)
