"""ResilienceError and one-line error texts. Imports nothing, because supervisors start without torch."""

from __future__ import annotations


class ResilienceError(RuntimeError):
    """An elastic run cannot continue. The message gives the reason and the remedy."""
