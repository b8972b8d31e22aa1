"""Paths of communication: the hardware or library that moved the bytes of each kind of operation.

Logged once per kind for users; tests and benchmarks check them.
"""

from __future__ import annotations

import logging

_log = logging.getLogger("interlace.comm")


class Paths(dict[str, set[str]]):
    """Kind of operation -> the paths taken so far. Rank 0 of a group logs each path once."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self._rank = rank
        self._noted: set[tuple[str, str]] = set()

    def note(self, label: str, path: str) -> None:
        """label: the kind of operation, optionally followed by a comma and its part."""
        if (label, path) in self._noted:
            return
        self._noted.add((label, path))
        kind = label.partition(",")[0]
        paths = self.setdefault(kind, set())
        if path not in paths:
            paths.add(path)
            if self._rank == 0:
                _log.info("%s: %s", kind, path)
