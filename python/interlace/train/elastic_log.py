"""What failures, joins and leaves cost an elastic run: recovery.jsonl, metrics, and what recovery.html shows.

The time lost is what lies between the last step that counted before and the first one after, less what that step takes.
It is split by the clock of the rank whose state the others went on from, and the coordinator's for the notice:

    replay      of the step that did not count: what of it had been computed, as far as a step takes so long
    detection   from there until the coordinator noticed: nothing where a connection was closed, the heartbeat in a hang
    vote        from the notice until the rank had given the step up
    regroup     until the ranks had met anew, with process groups and pipelines, and what their first step took longer
    copy        of layers, moments and averages that were missing
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from interlace.resilience.generation import Generation
from interlace.train.schema import Config

NAME = "recovery.jsonl"
PARTS = ("detection", "vote", "regroup", "copy", "replay")
PREFIX = "recovery/"


@dataclass
class Recovery:
    """One change of generation. Seconds; times since the epoch.

    time: when the first step of it counted. cause: (kind, node, when it was noticed, detail) of each event. bytes,
    transfers: of all layers copied; received: of those that came to this rank.
    """

    generation: int
    kind: str
    cause: list[tuple[str, str, float, str]]
    pipelines: list[list[str]]
    microbatches: int
    halted: tuple[float, float, float] = (0.0, 0.0, 0.0)
    time: float = 0.0
    step: int = 0
    bytes: int = 0
    received: int = 0
    transfers: int = 0
    lost: float = 0.0
    split: dict[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, generation: Generation, microbatches: int) -> Recovery:
        return cls(
            generation.number,
            generation.kind,
            [(event.kind, event.node, event.time, event.detail) for event in generation.cause],
            [list(pipeline) for pipeline in generation.pipelines],
            microbatches,
        )

    def close(self, now: float, formed: float, began: float, copying: float) -> None:
        """The first step of the generation counts now; the generation was announced at `formed`, training `began`."""
        self.time = now
        counted, step, gave_up = self.halted
        if not counted:  # the run has just begun
            return
        aborted = gave_up > counted
        noticed = min((at for _, _, at, _ in self.cause), default=formed)
        noticed = min(max(noticed, counted), formed) if aborted else counted
        worked = noticed - counted
        replay = min(worked, step)
        left = min(max(gave_up, noticed), began) if aborted else noticed
        slower = max(now - began - step, 0.0)  # a generation's first step makes what later ones find made
        self.split = {
            "detection": worked - replay,
            "vote": left - noticed,
            "regroup": max(began - left - copying, 0.0) + slower,
            "copy": copying,
            "replay": replay,
        }
        self.lost = sum(self.split.values())

    def metrics(self) -> dict[str, float]:
        """For the next line of the run's metrics."""
        if not self.split:
            return {}
        values = {f"{PREFIX}{part}(s)": seconds for part, seconds in self.split.items()}
        return values | {f"{PREFIX}lost(s)": self.lost, f"{PREFIX}copied(MiB)": self.bytes / 2**20}


class Clocks:
    """When what happened on this rank."""

    def __init__(self) -> None:
        self.formed = self._began = self._copying = 0.0
        self._counted = self._step = self._gave_up = 0.0
        self._recovery: Recovery | None = None

    def halted(self) -> tuple[float, float, float]:
        """For the others: when the last step counted, how long it took, when the one after it was given up."""
        return self._counted, self._step, self._gave_up

    def gave_up(self) -> None:
        """The generation is over for this rank."""
        self._gave_up = time.time()

    @contextlib.contextmanager
    def copying(self) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        self._copying = time.perf_counter() - begin

    def began(self, recovery: Recovery) -> None:
        """Training begins; `recovery` is what came before."""
        self._began, self._recovery = time.time(), recovery

    def counted(self) -> Recovery | None:
        """A step counts; what the generation's beginning has cost, when it is its first one."""
        now, recovery = time.time(), self._recovery
        if recovery is not None:
            recovery.close(now, self.formed, self._began, self._copying)
            self._step = now - self._began
        else:
            self._step = now - self._counted
        self._recovery, self._counted, self._copying = None, now, 0.0
        return recovery


class Recoveries:
    """The file of a run folder that has a line for each change of generation; written by rank 0."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.path = folder, folder / NAME

    def add(self, recovery: Recovery, before: Recovery | None, config: Config) -> None:
        """Adds a change, and the one before it where a rank 0 before this one was lost with its line."""
        from interlace.train.page_recovery import write_page

        half = self.path.exists() and self.path.read_bytes()[-1:] not in (b"", b"\n")
        there = [(line["generation"], line["cause"]) for line in self.read()]
        with self.path.open("a", encoding="utf-8") as file:
            file.write("\n" if half else "")  # what a killed rank left half written takes no other along
            for each in (before, recovery):
                # Its cause tells it from that of a run that this one goes on from, which counted from 1, too.
                if each is not None and (each.generation, [list(event) for event in each.cause]) not in there:
                    file.write(json.dumps(asdict(each)) + "\n")
        write_page(self.folder, config.run.name, self.read())

    def read(self) -> list[dict[str, Any]]:
        """The lines, but for one that a killed rank left half written."""
        found = []
        for line in self.path.read_text(encoding="utf-8").splitlines() if self.path.exists() else ():
            with contextlib.suppress(ValueError):
                found.append(json.loads(line))
        return found
