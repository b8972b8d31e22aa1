"""PipelineError, and what becomes one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from interlace.comm.channel import CommError


class PipelineError(RuntimeError):
    """A step cannot go on: names the rank, the action and what was being waited for."""


@contextlib.contextmanager
def as_pipeline_errors() -> Iterator[None]:
    """A CommError inside is raised as a PipelineError."""
    try:
        yield
    except CommError as error:
        raise PipelineError(str(error)) from error
