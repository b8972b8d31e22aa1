"""Who is at fault among ranks that stand still: from who waits for whom. Pure functions.

Most of them wait, in the end, for one that does not move. In that order:

1. A rank whose process is stopped, or that stands still though it waits for nobody, is at fault.
2. A rank that waits for one that moves is only late.
3. Ranks that wait for each other in a circle look the same whether a message is lost or merely long. So a circle is
   left alone for `CIRCLE` heartbeats; then the rank that stood still first is at fault. Ranks that compute on a core
   come before those that do not.

Computing in a lane counts as waiting for the lane's other ranks: its collectives do.
"""

from __future__ import annotations

from collections.abc import Mapping

from interlace.resilience.watch import Stall

CIRCLE = 6.0  # heartbeats
WAITS = ("waiting", "computing in a lane")  # states in which a rank may wait for others


def culprits(stalled: Mapping[int, Stall], heartbeat: float) -> set[int]:
    """The ranks at fault. stalled: all that stand still, by rank; the others move.

    Whoever waits for a culprit, over however many ranks, is none. O(ranks + waits).
    """
    surely = {rank for rank, stall in stalled.items() if stall.stopped or not _waits(rank, stall)}
    if surely:
        return surely
    found: set[int] = set()
    for circle in _circles(stalled):
        if all(stalled[rank].seconds >= CIRCLE * heartbeat for rank in circle):
            found.add(max(circle, key=lambda rank: (stalled[rank].at_work, stalled[rank].seconds, -rank)))
    return found


def _waits(rank: int, stall: Stall) -> bool:
    return stall.state in WAITS and any(other != rank for other in stall.ranks)


def _circles(stalled: Mapping[int, Stall]) -> list[set[int]]:
    """Sets of ranks that all reach each other over waits and nobody else: nothing outside of them can set them free."""
    waits = {rank: {other for other in stall.ranks if other != rank} for rank, stall in stalled.items()}
    reach = {rank: reached(rank, waits) for rank in stalled}
    circles: list[set[int]] = []
    for rank in sorted(stalled):
        closed = all(other in stalled and rank in reach[other] for other in reach[rank])
        if closed and not any(rank in circle for circle in circles):
            circles.append(reach[rank] | {rank})
    return circles


def reached(rank: int, waits: Mapping[int, set[int]]) -> set[int]:
    """Whom `rank` waits for, directly or through others. waits: rank -> those that it waits for itself."""
    found: set[int] = set()
    rest = [rank]
    while rest:
        for other in waits.get(rest.pop(), ()):
            if other not in found:
                found.add(other)
                rest.append(other)
    return found
