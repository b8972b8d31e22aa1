"""Messages between ranks: small values as JSON. Their form is checked before use, and nothing is executed."""

from __future__ import annotations

import json
from typing import Any


class OtherOperation(ValueError):
    """A peer sent a message of another operation."""


def encode(operation: str, value: object) -> bytes:
    """Encodes a JSON-serializable value; `operation` is its name."""
    return json.dumps([operation, value]).encode()


def decode(raw: bytes, operation: str, like: object) -> Any:
    """The value of a message.

    like: this rank's own value. The message must have the same types in the same places, and the same keys and lengths.

    Raises:
        OtherOperation: a message of another operation. ValueError: damaged, or of another form. Both quote the peer's
            message.
    """
    try:
        peer_operation, value = json.loads(raw)
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"sent an unreadable message ({error})") from error
    if peer_operation != operation:
        raise OtherOperation(
            f"is in {peer_operation[:200]}" if isinstance(peer_operation, str) else "sent an unreadable message"
        )
    if not _same_form(like, value):
        raise ValueError("sent a message of another form: run the same version of the program on all ranks")
    return value


def _same_form(own: object, other: object) -> bool:
    if type(own) is not type(other):
        return False
    if isinstance(own, dict) and isinstance(other, dict):
        return own.keys() == other.keys() and all(_same_form(own[key], other[key]) for key in own)
    if isinstance(own, list) and isinstance(other, list):
        return len(own) == len(other) and all(map(_same_form, own, other))
    return True
