"""How much a rank holds between forwards and backwards, read off its list."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from interlace.schedule.actions import Action, Op
from interlace.schedule.costs import ActivationBytes, bytes_held


@dataclass(frozen=True)
class Peak:
    """The most that a rank holds at any time: chunks, counted once for each of its stages, and bytes."""

    in_flight: int
    bytes: float


def held_after(
    actions: Sequence[Action],
    activation_bytes: ActivationBytes | None = None,
    deferred_bytes: ActivationBytes | None = None,
) -> Iterable[tuple[int, int, float]]:
    """Yields (place in `actions`, forwards held, bytes held) at each FORWARD, as it runs, and after each change.

    A FORWARD holds its activations until the BACKWARD (or BACKWARD_WEIGHT) of the same stage and chunk. One without a
    backward on this rank holds its bytes only while it runs and does not count as in flight. deferred_bytes: what takes
    the place of its activations from BACKWARD_INPUT to BACKWARD_WEIGHT (default: they stay).
    """
    bytes_of = activation_bytes or {}
    later = bytes_of if deferred_bytes is None else deferred_bytes
    released = {(a.module, a.stage, a.chunk) for a in actions if a.op is Op.BACKWARD or a.op is Op.BACKWARD_WEIGHT}
    count, size = 0, 0.0
    for place, a in enumerate(actions):
        if a.op is Op.FORWARD:
            own = bytes_held(bytes_of, a.module, a.stage, a.chunk)
            if (a.module, a.stage, a.chunk) in released:
                count += 1
                size += own
                yield place, count, size
            elif own:
                yield place, count, size + own
        elif a.op is Op.BACKWARD_INPUT and later is not bytes_of:
            size += bytes_held(later, a.module, a.stage, a.chunk)
            size -= bytes_held(bytes_of, a.module, a.stage, a.chunk)
            yield place, count, size
        elif a.op is Op.BACKWARD or a.op is Op.BACKWARD_WEIGHT:
            count -= 1
            size -= bytes_held(bytes_of if a.op is Op.BACKWARD else later, a.module, a.stage, a.chunk)
            yield place, count, size


def peak(
    actions: Sequence[Action],
    activation_bytes: ActivationBytes | None = None,
    deferred_bytes: ActivationBytes | None = None,
) -> Peak:
    """The most that the list of one rank holds. Arguments: see `held_after`."""
    most, largest = 0, 0.0
    for _, count, size in held_after(actions, activation_bytes, deferred_bytes):
        most, largest = max(most, count), max(largest, size)
    return Peak(most, largest)
