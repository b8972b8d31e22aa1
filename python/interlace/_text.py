"""Errors as one line of text, for messages that quote them."""

from __future__ import annotations


def one_line(error: BaseException, most: int | None = 200) -> str:
    """The message of an error on one line, at most `most` characters; the type name if the message is empty."""
    return " ".join(str(error).split())[:most] or type(error).__name__


def first_line(error: BaseException, most: int = 200) -> str:
    """The first line of an error message, at most `most` characters; the type name if the message is empty."""
    return (str(error).strip() or type(error).__name__).splitlines()[0][:most]
