"""PipelineError, and conversion of the channel's errors to it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from interlace.comm.process.errors import CommError


class PipelineError(RuntimeError):
    """A step cannot continue: names the rank, the action and the awaited message or collective."""


def wait_of(error: BaseException | None) -> CommError | None:
    """The CommError behind `error` that lists the ranks waited for without success; None if there is no such cause."""
    while error is not None:
        if isinstance(error, CommError) and error.missing:
            return error
        error = error.__cause__ or error.__context__
    return None


@contextlib.contextmanager
def as_pipeline_errors() -> Iterator[None]:
    """Converts a CommError raised inside to a PipelineError with the same message."""
    try:
        yield
    except CommError as error:
        raise PipelineError(str(error)) from error
