"""Log of recoveries of an elastic run: recovery.jsonl, metrics, and the data of recovery.html.

Time lost: from the last counted step before the change to the first one after it, minus the time of a step. It is split
by the clock of the leader (the rank whose state the others continued from), and the coordinator's clock for the notice:

    replay      compute of the dropped step, at most the time of one step
    detection   rest of the time until the coordinator noticed: 0 if a connection was closed, the heartbeat for a hang
    vote        from the notice until the rank aborted the step
    regroup     forming the new generation with process groups and pipelines, plus the extra time of its first step
    copy        copying missing layers, moments and averages
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

from interlace.resilience.generation import Generation
from interlace.train.config.sections import Config
from interlace.train.report.recovery import write_page
from interlace.train.runfolder import json_lines

NAME = "recovery.jsonl"
PREFIX = "recovery/"


@dataclass
class Recovery:
    """One change of generation. Durations in seconds; times in seconds since the epoch.

    time: when its first step counted. cause: (kind, node, time of the notice, detail) of each event. bytes, transfers:
    of all layers copied; received: bytes copied to this rank.
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
        """Computes the time lost when the first step of the generation counts.

        formed: when the generation was announced. began: when training began. copying: duration of the copies.
        """
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
        slower = max(now - began - step, 0.0)  # a generation's first step also does one-time work
        self.split = {
            "detection": worked - replay,
            "vote": left - noticed,
            "regroup": max(began - left - copying, 0.0) + slower,
            "copy": copying,
            "replay": replay,
        }
        self.lost = sum(self.split.values())

    def metrics(self) -> dict[str, float]:
        """Metrics for the next line of the run."""
        if not self.split:
            return {}
        values = {f"{PREFIX}{part}(s)": seconds for part, seconds in self.split.items()}
        return values | {f"{PREFIX}lost(s)": self.lost, f"{PREFIX}copied(MiB)": self.bytes / 2**20}


class Clocks:
    """Timestamps of this rank's steps and generations."""

    def __init__(self) -> None:
        self.formed = self._began = self._copying = 0.0
        self._counted = self._step = self._gave_up = 0.0
        self._recovery: Recovery | None = None

    def halted(self) -> tuple[float, float, float]:
        """For the other ranks: time of the last counted step, its duration, and time when the next step was aborted."""
        return self._counted, self._step, self._gave_up

    def gave_up(self) -> None:
        """Marks the end of the generation on this rank."""
        self._gave_up = time.time()

    @contextlib.contextmanager
    def copying(self) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        self._copying = time.perf_counter() - begin

    def began(self, recovery: Recovery) -> None:
        """Marks the begin of training. recovery: the change that preceded it."""
        self._began, self._recovery = time.time(), recovery

    def counted(self) -> Recovery | None:
        """Marks a counted step. Returns the recovery if it is the first step of a generation."""
        now, recovery = time.time(), self._recovery
        if recovery is not None:
            recovery.close(now, self.formed, self._began, self._copying)
            self._step = now - self._began
        else:
            self._step = now - self._counted
        self._recovery, self._counted, self._copying = None, now, 0.0
        return recovery


def write_recovery(folder: Path, recovery: Recovery, before: Recovery | None, config: Config) -> None:
    """Adds a change of generation to recovery.jsonl of a run folder, on rank 0.

    before: the previous change, which is added if a lost rank 0 did not write its line.
    """
    path = folder / NAME
    half = path.exists() and path.read_bytes()[-1:] not in (b"", b"\n")
    there = [(line["generation"], line["cause"]) for line in json_lines(path)]
    with path.open("a", encoding="utf-8") as file:
        file.write("\n" if half else "")  # a half-written line of a killed rank stays on its own line
        for each in (before, recovery):
            # A resumed run also counts generations from 1; the cause tells them apart.
            if each is not None and (each.generation, [list(event) for event in each.cause]) not in there:
                file.write(json.dumps(asdict(each)) + "\n")
    write_page(folder, config.run.name, json_lines(path))
