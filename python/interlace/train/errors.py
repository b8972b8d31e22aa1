"""The error of a run that cannot go on, in a module of its own: whatever starts fast imports nothing else for it."""

from __future__ import annotations


class TrainingError(RuntimeError):
    """Training cannot go on; the message says why and what to try."""
