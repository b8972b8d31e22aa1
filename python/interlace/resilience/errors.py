"""ResilienceError and one-line error texts. Imports nothing, because supervisors start without torch."""

from __future__ import annotations


class ResilienceError(RuntimeError):
    """An elastic run cannot continue. The message gives the reason and the remedy."""


def first_line(error: BaseException, most: int = 200) -> str:
    """First line of an error message, at most `most` characters; the type name if the message is empty."""
    return (str(error).strip() or type(error).__name__).splitlines()[0][:most]
