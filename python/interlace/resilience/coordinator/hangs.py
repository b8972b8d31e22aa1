"""Hanging nodes, from the stalled ranks that supervisors report."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from interlace.resilience.generation import Generation, Noticed
from interlace.resilience.supervisor.faults import CIRCLE, WAITS, culprits
from interlace.resilience.supervisor.watch import Stall

Report = Callable[..., None]
"""Logs an event: report(event, key=value, ...)."""
SURE = 0.5  # seconds that a suspected rank has to make progress


class Removal(NamedTuple):
    """A node that is lost or must be removed, and the reason. failed: one of its ranks ended with its own error."""

    node: str
    kind: Noticed
    why: str
    failed: bool = False


class Hangs:
    """Suspected ranks of a run. report: logs an event.

    false_alarms: number of suspected ranks that made progress before they were removed.
    """

    def __init__(self, heartbeat: float, report: Report) -> None:
        self._heartbeat, self._report_event = heartbeat, report
        self.false_alarms = 0
        self._suspects: dict[tuple[str, int], float] = {}

    def slept(self, seconds: float) -> None:
        """Excludes seconds in which the coordinator was not running."""
        for suspect in self._suspects:
            self._suspects[suspect] += seconds

    def hung(self, stalls: Mapping[str, Sequence[Stall]], generation: Generation | None, now: float) -> list[Removal]:
        """Nodes with a rank that was at fault for `SURE` seconds. Progress before that counts as a false alarm."""
        guilty = _stalls_at_fault(stalls, generation, self._heartbeat)
        for suspect in [suspect for suspect in self._suspects if suspect not in guilty]:
            del self._suspects[suspect]
            node, local_rank = suspect
            if node in stalls and all(stall.local_rank != local_rank for stall in stalls[node]):
                self.false_alarms += 1
                self._report_event("false alarm", node=node, local_rank=local_rank)
        removals: dict[str, Removal] = {}
        for suspect, stall in guilty.items():
            if now - self._suspects.setdefault(suspect, now) >= SURE:
                node, local_rank = suspect
                doing = "its process is stopped" if stall.stopped else f"{stall.state} {stall.what}".strip()
                why = f"rank {local_rank} of the node made no progress for {stall.seconds:.1f} s ({doing})"
                removals.setdefault(node, Removal(node, "hang", why))
        for suspect in [suspect for suspect in self._suspects if suspect[0] in removals]:
            del self._suspects[suspect]
        return list(removals.values())


def _stalls_at_fault(
    stalls: Mapping[str, Sequence[Stall]], generation: Generation | None, heartbeat: float
) -> dict[tuple[str, int], Stall]:
    """(node, local rank) -> stall, of the ranks at fault."""
    of_generation: dict[int, tuple[tuple[str, int], Stall]] = {}
    guilty: dict[tuple[str, int], Stall] = {}
    for node, each in stalls.items():
        for stall in each:
            suspect = (node, stall.local_rank)
            # Waits can be resolved only for ranks of this generation. Others count by state and duration alone.
            if generation is not None and node in generation.nodes and stall.generation == generation.number:
                of_generation[generation.ranks_of(node)[stall.local_rank]] = suspect, stall
            elif stall.stopped or stall.state not in WAITS or stall.seconds >= CIRCLE * heartbeat:
                guilty[suspect] = stall
    for rank in culprits({rank: stall for rank, (_, stall) in of_generation.items()}, heartbeat):
        guilty[of_generation[rank][0]] = of_generation[rank][1]
    return guilty
