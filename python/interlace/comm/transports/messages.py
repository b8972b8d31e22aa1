"""Small values that ranks tell each other: JSON, whose form is checked before it is used. Nothing is ever executed."""

from __future__ import annotations

import json
from typing import Any


class Elsewhere(ValueError):
    """A peer speaks of something else."""


def encode(what: str, value: Any) -> bytes:
    """A message of what JSON can hold; `what` names the occasion."""
    return json.dumps([what, value]).encode()


def decode(raw: bytes, what: str, like: Any) -> Any:
    """The value of a message.

    like: this rank's own value, which has the same types in the same places, keys and lengths.

    Raises:
        Elsewhere: a message of another occasion. ValueError: damaged, or of another form. Both say what a peer says.
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
