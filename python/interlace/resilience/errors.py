"""ResilienceError, and what errors say in a line, in a module that imports nothing: supervisors start without torch."""

from __future__ import annotations


class ResilienceError(RuntimeError):
    """An elastic run cannot go on; the message says why and what to do."""


def first_line(error: BaseException, most: int = 200) -> str:
    """The first line of what an error says, of at most so many characters; its type where it says nothing."""
    return (str(error).strip() or type(error).__name__).splitlines()[0][:most]
