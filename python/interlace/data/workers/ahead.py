"""Read-ahead thread: makes batches in order, ahead of the consumer."""

from __future__ import annotations

import queue
import threading
from abc import ABC, abstractmethod
from typing import Any

LONGEST = 600.0  # seconds to wait for the parts of one batch before an error
CLOSING = 10.0  # seconds for the thread to end; a thread that hangs in a read ends with the process


class AheadThread(ABC):
    """Runs `_run`, which fills a queue of at most `depth` batches; an exception of `_run` is queued as well."""

    def __init__(self, depth: int, *arguments: Any) -> None:
        self._queue: queue.Queue[list[Any] | BaseException] = queue.Queue(maxsize=depth)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, args=arguments, name="interlace-prefetch", daemon=True)
        self._thread.start()

    @abstractmethod
    def _run(self, *arguments: Any) -> None:
        """Makes batches until `_stopping` is set."""

    def _put(self, item: list[Any] | BaseException) -> None:
        while not self._stopping.is_set():
            try:
                self._queue.put(item, timeout=0.1)
                return
            except queue.Full:
                continue

    def get(self) -> list[Any]:
        """The next batch. Raises the exception of `_run`, and TimeoutError when no batch arrives for too long."""
        try:
            item = self._queue.get(timeout=2 * LONGEST)  # longer than a producer's own timeout, whose error says more
        except queue.Empty:
            raise TimeoutError(
                f"waited {2 * LONGEST:g} s for the next batch: the thread that reads the data ahead hangs; is the "
                "storage still there? Go on from the last checkpoint with --resume"
            ) from None
        if isinstance(item, BaseException):
            raise item
        return item

    def close(self) -> None:
        """Stops the thread and waits for it, but not for a hung one."""
        self._stopping.set()
        self._thread.join(CLOSING)
