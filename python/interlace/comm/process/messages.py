"""Messages between ranks: small values as JSON. Their form is checked before use, and nothing is executed."""

from __future__ import annotations

import json
from typing import Any


class Elsewhere(ValueError):
    """A peer sent a message of another operation."""


def encode(what: str, value: Any) -> bytes:
    """Encodes a JSON-serializable value; `what` names the operation."""
    return json.dumps([what, value]).encode()


def decode(raw: bytes, what: str, like: Any) -> Any:
    """The value of a message.

    like: this rank's own value. The message must have the same types in the same places, and the same keys and lengths.

    Raises:
        Elsewhere: a message of another operation. ValueError: damaged, or of another form. Both quote the peer's
            message.
    """
    try:
        theirs, value = json.loads(raw)
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"says what cannot be read ({error})") from error
    if theirs != what:
        raise Elsewhere(f"is in {theirs[:200]}" if isinstance(theirs, str) else "says what cannot be read")
    if not _alike(like, value):
        raise ValueError("says something of another form: do the ranks run one version of the program?")
    return value


def _alike(mine: Any, theirs: Any) -> bool:
    if type(mine) is not type(theirs):
        return False
    if isinstance(mine, dict):
        return mine.keys() == theirs.keys() and all(_alike(mine[key], theirs[key]) for key in mine)
    if isinstance(mine, list):
        return len(mine) == len(theirs) and all(map(_alike, mine, theirs))
    return True
