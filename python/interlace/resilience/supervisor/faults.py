"""Ranks at fault among stalled ones, found from the graph of waits. Pure functions.

Most stalled ranks wait, directly or indirectly, for one rank that makes no progress. Rules, in this order:

1. A rank is at fault if its process is stopped, or if it is stalled without waiting for another rank.
2. A rank that waits for one that makes progress is only late.
3. Ranks that wait for each other in a circle look the same for a lost message and for a long one. A circle is therefore
   tolerated for `CIRCLE` heartbeats. Then the rank that stalled first is at fault; ranks that compute on a core come
   before those that do not.

A rank that computes in a lane waits for the lane's other ranks, in collectives inside its computation.
"""

from __future__ import annotations

from collections.abc import Mapping

from interlace.resilience.supervisor.watch import Stall

CIRCLE = 6.0  # heartbeats
WAITS = ("waiting", "computing in a lane")  # states in which a rank may wait for others


def culprits(stalled: Mapping[int, Stall], heartbeat: float) -> set[int]:
    """The ranks at fault. stalled: all stalled ranks; the others make progress.

    A rank that waits for a culprit, directly or indirectly, is not a culprit. O(ranks + waits).
    """
    surely = {rank for rank, stall in stalled.items() if stall.stopped or not _waits(rank, stall)}
    if surely:
        return surely
    guilty: set[int] = set()
    for circle in _circles(stalled):
        if all(stalled[rank].seconds >= CIRCLE * heartbeat for rank in circle):
            guilty.add(max(circle, key=lambda rank: (stalled[rank].at_work, stalled[rank].seconds, -rank)))
    return guilty


def _waits(rank: int, stall: Stall) -> bool:
    return stall.state in WAITS and any(other != rank for other in stall.ranks)


def _circles(stalled: Mapping[int, Stall]) -> list[set[int]]:
    """Sets of ranks that wait for each other, directly or indirectly, and for no other rank."""
    waits = {rank: {other for other in stall.ranks if other != rank} for rank, stall in stalled.items()}
    reach = {rank: reached(rank, waits) for rank in stalled}
    circles: list[set[int]] = []
    for rank in sorted(stalled):
        closed = all(other in stalled and rank in reach[other] for other in reach[rank])
        if closed and not any(rank in circle for circle in circles):
            circles.append(reach[rank] | {rank})
    return circles


def reached(rank: int, waits: Mapping[int, set[int]]) -> set[int]:
    """Ranks for which `rank` waits, directly or indirectly. waits: rank -> those that it waits for directly."""
    reachable: set[int] = set()
    rest = [rank]
    while rest:
        for other in waits.get(rest.pop(), ()):
            if other not in reachable:
                reachable.add(other)
                rest.append(other)
    return reachable
