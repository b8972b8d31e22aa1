"""Hang detection: stalled ranks of a node, from their progress pages and from /proc.

A rank is stalled if its page has not changed for a heartbeat, unless it is in an allowed idle period. Ranks that wait
for others are included; the coordinator sees all nodes and finds the rank at fault (`resilience.supervisor.faults`). A
rank that computes gets `WORKING` heartbeats while its process uses a core or waits for one, because an action may be
long and the machine busy.

Time in which the supervisor was suspended is not counted, because the ranks were probably suspended too.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from interlace.resilience.supervisor.progress import Progress, ProgressReader, State

WORKING = 12.0  # heartbeats that an action may take while its process is at work
STARTING = 600.0  # seconds in which a rank has to write its page for the first time
BUSY = 0.1  # share of a core that distinguishes a computing process from a hung one with helper threads
LOOKS = 20.0  # polls per heartbeat
LONGEST_PAUSE = 0.25  # longest polling interval, seconds


@dataclass(frozen=True)
class Stall:
    """A stalled rank.

    generation: the one to which rank numbers refer. state, what: current activity. ranks: ranks that it waits for.
    stopped: whether its process is stopped (SIGSTOP, a debugger). seconds: time since its last progress.
    at_work: whether its process uses a core, other than for a wait.
    """

    local_rank: int
    generation: int
    state: State
    ranks: tuple[int, ...]
    stopped: bool
    seconds: float
    what: str
    at_work: bool = False


@dataclass(frozen=True)
class Look:
    """Sample of a process.

    state: its state in /proc ("R" running or runnable, "T" stopped, "" unknown). cpu: CPU seconds of all its threads.
    """

    state: str
    cpu: float


class Watched:
    """Stall detection for one rank. Pure: samples are passed in."""

    def __init__(self, local_rank: int, heartbeat: float) -> None:
        self.local_rank, self.heartbeat = local_rank, heartbeat
        self._counter, self._still, self._worked = -1, 0.0, 0.0
        self._look = Look("", 0.0)

    def see(self, page: Progress, look: Look, seconds: float) -> Stall | None:
        """Adds a sample taken `seconds` after the previous one; returns the stall, if any."""
        if page.counter != self._counter:
            self._counter, self._still, self._worked = page.counter, 0.0, 0.0
        else:
            self._still += seconds
            self._worked += look.cpu - self._look.cpu
        self._look = look
        if self._still < self._patience(page, look):
            return None
        stopped = look.state in ("T", "t")
        what = page.what if page.state == "idle" else ""
        at_work = page.state != "waiting" and self._at_work(look)  # a wait may poll
        return Stall(self.local_rank, page.generation, page.state, page.ranks, stopped, self._still, what, at_work)

    def _patience(self, page: Progress, look: Look) -> float:
        if look.state in ("T", "t") or page.state == "waiting":
            return self.heartbeat
        if page.state == "idle":
            return max(self.heartbeat, page.allowed)
        if page.state == "starting":
            return STARTING
        return self.heartbeat * (WORKING if self._at_work(look) else 1.0)

    def _at_work(self, look: Look) -> bool:
        return look.state == "R" or self._worked > BUSY * self._still


class Watch:
    """Stall detection for the ranks of one node. pages: paths of their progress pages."""

    def __init__(self, pages: list[Path], heartbeat: float) -> None:
        self.pause = min(heartbeat / LOOKS, LONGEST_PAUSE)
        self._readers = [ProgressReader(path) for path in pages]
        self._ranks = [Watched(place, heartbeat) for place in range(len(pages))]

    def look(self, processes: list[int], seconds: float) -> list[Stall]:
        """Stalled ranks.

        processes: process id of each rank. seconds: time since the last call. It is capped, because in an interval much
        longer than `pause` this process was suspended itself.
        """
        seconds = min(seconds, 2 * self.pause)
        stalls = []
        for reader, rank, process in zip(self._readers, self._ranks, processes, strict=True):
            page = reader.read()
            if (stall := rank.see(page, look_at(process, page.thread), seconds)) is not None:
                stalls.append(stall)
        return stalls

    def close(self) -> None:
        for reader in self._readers:
            reader.close()


def look_at(process: int, thread: int) -> Look:
    """Sample of a process and of its training thread (0: not known yet) from /proc."""
    whole = _stat(Path(f"/proc/{process}/stat"))
    if whole is None:
        return Look("", 0.0)
    state, cpu = whole
    if state not in ("T", "t") and thread and (own := _stat(Path(f"/proc/{process}/task/{thread}/stat"))) is not None:
        state = own[0]
    return Look(state, cpu)


def _stat(path: Path) -> tuple[str, float] | None:
    try:
        fields = path.read_text().rsplit(")", 1)[1].split()
        return fields[0], (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    except (OSError, IndexError, ValueError):
        return None  # gone, or a system without /proc
