"""PipelineError, and the channel's errors as such."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from interlace.comm.channel import CommError


class PipelineError(RuntimeError):
    """A step cannot go on: names the rank, the action and what was being waited for."""


def wait_of(error: BaseException | None) -> CommError | None:
    """What caused `error` and says for which ranks this one waited in vain; None where that is not the cause."""
    while error is not None:
        if isinstance(error, CommError) and error.waited:
            return error
        error = error.__cause__ or error.__context__
    return None


@contextlib.contextmanager
def as_pipeline_errors() -> Iterator[None]:
    """A CommError inside becomes a PipelineError in the same words."""
    try:
        yield
    except CommError as error:
        raise PipelineError(str(error)) from error
