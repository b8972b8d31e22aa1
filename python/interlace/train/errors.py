"""Error of a run that cannot continue; a separate module, so that fast-starting code can import it alone."""

from __future__ import annotations


class TrainingError(RuntimeError):
    """Training cannot continue. The message gives the reason and a remedy."""
