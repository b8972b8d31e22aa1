"""How much a rank holds between forwards and backwards, read off its list."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from interlace.schedule.actions import Action, Op


@dataclass(frozen=True)
class Peak:
    """The most that a rank holds at any time: microbatches per stage summed over its stages, and bytes."""

    in_flight: int
    bytes: float


def held_after(
    actions: Sequence[Action], activation_bytes: Mapping[tuple[str, int], float] | None = None
) -> Iterable[tuple[int, int, float]]:
    """Yields (place in `actions`, forwards held, bytes held) at each FORWARD, as it runs, and after each release.

    A FORWARD holds its activations until the BACKWARD (or BACKWARD_WEIGHT) of the same stage and microbatch. One
    without a backward on this rank holds its bytes only while it runs and does not count as in flight.
    """
    bytes_of = activation_bytes or {}
    released = {
        (a.module, a.stage, a.microbatch, a.part) for a in actions if a.op is Op.BACKWARD or a.op is Op.BACKWARD_WEIGHT
    }
    count, size = 0, 0.0
    for place, a in enumerate(actions):
        if a.op is Op.FORWARD:
            own = bytes_of.get((a.module, a.stage), 0.0)
            if (a.module, a.stage, a.microbatch, a.part) in released:
                count += 1
                size += own
                yield place, count, size
            elif own:
                yield place, count, size + own
        elif a.op is Op.BACKWARD or a.op is Op.BACKWARD_WEIGHT:
            count -= 1
            size -= bytes_of.get((a.module, a.stage), 0.0)
            yield place, count, size


def peak(actions: Sequence[Action], activation_bytes: Mapping[tuple[str, int], float] | None = None) -> Peak:
    """The most that the list of one rank holds."""
    most, largest = 0, 0.0
    for _, count, size in held_after(actions, activation_bytes):
        most, largest = max(most, count), max(largest, size)
    return Peak(most, largest)
