"""Items of a dataset that cannot be read: counters, and blanks in their place."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from typing import TypeVar

from interlace.modalities.errors import DecodeError

MOST_BLANK = 8  # items read as blank
MOST_BLANK_SHARE = 0.01  # share of items read as blank; beyond both limits the data count as lost, not damaged
FAILED_LATER = "failed after it was verified"
COUNTING = threading.Lock()  # media are decoded by the prefetch thread and by compute threads
Loaded = TypeVar("Loaded")
log = logging.getLogger("interlace.data")


class Reading:
    """Mixin that records unusable files of a dataset, and items that became unreadable."""

    def __init__(self) -> None:
        self.failures: dict[str, str] = {}
        """File -> reason, for unreadable files. Such files are left out of every sample."""
        self.read_items = 0
        """Number of items that this process has read for samples."""
        self.blank_items = 0
        """Number of these that became unreadable and were replaced by blanks."""
        self.noted: list[tuple[str, str]] | None = None
        """List of lost items (source, why), kept by a producer for the trainer to count; None in the trainer."""

    def read_or_blank(self, source: str, load: Callable[[], Loaded], blank: Callable[[], Loaded]) -> Loaded:
        """Result of `load`, or `blank` if the file fails. Files were verified before the run. A later failure (a disk
        fault, a deleted file) must not change the sample sequence, because other ranks do not see it. It is logged and
        counted.

        Raises DecodeError when that happens too often: the model would learn answers to blank media.
        """
        with COUNTING:
            self.read_items += 1
        try:
            return load()
        except (DecodeError, OSError) as error:
            self.lost(source, str(error))
            return blank()

    def lost(self, source: str, why: str) -> None:
        """Counts one item that became unreadable. Raises DecodeError when there are too many."""
        with COUNTING:
            self.blank_items += 1
            if self.noted is not None:
                self.noted.append((source, why))
                return
            first = source not in self.failures
            self.failures[source] = f"{FAILED_LATER}: {why}"
            lost, read = self.blank_items, self.read_items
        if first:
            log.error("%s can no longer be read, blank used instead: %s", source, why)
        if lost > max(MOST_BLANK, MOST_BLANK_SHARE * read):
            raise DecodeError(
                f"{lost} of {read} items that were verified before the run can no longer be read, the last "
                f"{source}: {why}; bring the files back and go on with --resume"
            )

    def lost_lately(self) -> list[str]:
        """The first item that became unreadable, in words; empty: none."""
        return [f"{path}: {why}" for path, why in self.failures.items() if why.startswith(FAILED_LATER)][:1]

    def took(self, read: int, lost: Iterable[tuple[str, str]]) -> None:
        """Counts the items that a producer has read for this process, and those of them that are blank (source, why).

        Raises DecodeError like `read_or_blank`."""
        with COUNTING:
            self.read_items += read
        for source, why in lost:
            self.lost(source, why)
