"""PipelineError."""

from __future__ import annotations


class PipelineError(RuntimeError):
    """A step cannot go on: names the rank, the action and what was being waited for."""
