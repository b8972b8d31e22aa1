"""Which ranks of a node stand still: their progress pages, and what /proc says of the processes.

A rank stands still when its page has not changed for a heartbeat while it is not idle with leave. That is said of those
that wait for others, too: who is at fault is found by the coordinator, which sees all nodes
(`interlace.resilience.faults`). One that computes is left alone for longer, `WORKING` heartbeats, as long as its
process uses a core or waits for one: an action may be long, and a machine busy.

Time counts only while this process looks: what kept the supervisor from running kept the ranks, too.
"""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from interlace.resilience.progress import Progress, ProgressReader, State

WORKING = 12.0  # heartbeats that an action may take while its process is at work
STARTING = 600.0  # seconds in which a rank has to write its page for the first time
BUSY = 0.1  # of a core, by which a process that computes is told from one that hangs with helper threads
LOOKS = 20.0  # per heartbeat
LONGEST_PAUSE = 0.25  # seconds between two looks


@dataclass(frozen=True)
class Stall:
    """A rank that stands still: local_rank; generation that its numbers refer to; what it does and waits for; whether
    its process is stopped (SIGSTOP, a debugger); since when, in seconds; whether its process uses a core, other
    than for a wait."""

    local_rank: int
    generation: int
    state: State
    ranks: tuple[int, ...]
    stopped: bool
    seconds: float
    what: str
    at_work: bool = False

    def to_table(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_table(cls, table: dict[str, Any]) -> Stall:
        """Raises ValueError."""
        try:
            return cls(
                int(table["local_rank"]),
                int(table["generation"]),
                table["state"],
                tuple(map(int, table["ranks"])),
                bool(table["stopped"]),
                float(table["seconds"]),
                str(table["what"]),
                bool(table["at_work"]),
            )
        except (TypeError, KeyError) as error:
            raise ValueError(f"this is no stall of a rank ({type(error).__name__}: {error})") from error


@dataclass(frozen=True)
class Look:
    """A process at one moment: its state in /proc ("R" runs or may run, "T" is stopped, "" unknown), and seconds of CPU
    that all of its threads have used."""

    state: str
    cpu: float


class Watched:
    """What is known of one rank. Pure: it is told what was seen."""

    def __init__(self, local_rank: int, heartbeat: float) -> None:
        self.local_rank, self.heartbeat = local_rank, heartbeat
        self._counter, self._still, self._worked = -1, 0.0, 0.0
        self._look = Look("", 0.0)

    def see(self, page: Progress, look: Look, seconds: float) -> Stall | None:
        """A look at the rank, `seconds` after the one before; the stall, where it stands still for too long."""
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
    """The ranks of one node: their pages by path, and their processes."""

    def __init__(self, pages: list[Path], heartbeat: float) -> None:
        self.pause = min(heartbeat / LOOKS, LONGEST_PAUSE)
        self._readers = [ProgressReader(path) for path in pages]
        self._ranks = [Watched(place, heartbeat) for place in range(len(pages))]

    def look(self, processes: list[int], seconds: float) -> list[Stall]:
        """Who stands still. processes: id of each rank's. seconds: since the last look; of a pause that was much longer
        than `pause` this process slept itself."""
        seconds = min(seconds, 2 * self.pause)
        found = []
        for reader, rank, process in zip(self._readers, self._ranks, processes, strict=True):
            page = reader.read()
            if (stall := rank.see(page, look_at(process, page.thread), seconds)) is not None:
                found.append(stall)
        return found

    def close(self) -> None:
        for reader in self._readers:
            reader.close()


def look_at(process: int, thread: int) -> Look:
    """What /proc says of a process, and of its thread that trains (0: not known yet)."""
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
