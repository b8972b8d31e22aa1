"""ResilienceError, in a module that imports nothing: supervisors start without torch."""

from __future__ import annotations


class ResilienceError(RuntimeError):
    """An elastic run cannot go on; the message says why and what to do."""
