"""Activation memory of a rank between forwards and backwards, computed from its action list."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from interlace.schedule.actions import Action, Op
from interlace.schedule.costs import ActivationBytes, bytes_held


@dataclass(frozen=True)
class Peak:
    """Peak of a rank: chunks, counted once per stage, and bytes."""

    in_flight: int
    bytes: float


def held_after(
    actions: Sequence[Action],
    activation_bytes: ActivationBytes | None = None,
    deferred_bytes: ActivationBytes | None = None,
) -> Iterable[tuple[int, int, float]]:
    """Yields (index in `actions`, forwards held, bytes held) during each FORWARD, and after each change.

    A FORWARD holds its activations until the BACKWARD (or BACKWARD_WEIGHT) of the same stage and chunk. A FORWARD
    without a backward on this rank holds its bytes only while it runs, and does not count as in flight.

    deferred_bytes: bytes that replace its activations from BACKWARD_INPUT to BACKWARD_WEIGHT (default: the same bytes).
    """
    bytes_of = activation_bytes or {}
    deferred_of = bytes_of if deferred_bytes is None else deferred_bytes
    released = {(a.module, a.stage, a.chunk) for a in actions if a.op is Op.BACKWARD or a.op is Op.BACKWARD_WEIGHT}
    count, size = 0, 0.0
    for index, a in enumerate(actions):
        if a.op is Op.FORWARD:
            chunk_bytes = bytes_held(bytes_of, a.module, a.stage, a.chunk)
            if (a.module, a.stage, a.chunk) in released:
                count += 1
                size += chunk_bytes
                yield index, count, size
            elif chunk_bytes:
                yield index, count, size + chunk_bytes
        elif a.op is Op.BACKWARD_INPUT and deferred_of is not bytes_of:
            size += bytes_held(deferred_of, a.module, a.stage, a.chunk)
            size -= bytes_held(bytes_of, a.module, a.stage, a.chunk)
            yield index, count, size
        elif a.op is Op.BACKWARD or a.op is Op.BACKWARD_WEIGHT:
            count -= 1
            size -= bytes_held(bytes_of if a.op is Op.BACKWARD else deferred_of, a.module, a.stage, a.chunk)
            yield index, count, size


def peak(
    actions: Sequence[Action],
    activation_bytes: ActivationBytes | None = None,
    deferred_bytes: ActivationBytes | None = None,
) -> Peak:
    """Peak of the list of one rank. Arguments: see `held_after`."""
    forwards, peak_bytes = 0, 0.0
    for _, count, size in held_after(actions, activation_bytes, deferred_bytes):
        forwards, peak_bytes = max(forwards, count), max(peak_bytes, size)
    return Peak(forwards, peak_bytes)
