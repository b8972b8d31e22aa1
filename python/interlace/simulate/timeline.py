"""Timeline: start and finish of every action of a step, simulated or measured, and derived statistics."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from interlace.schedule.actions import COMPUTE, Action
from interlace.schedule.costs import ActivationBytes
from interlace.schedule.memory import peak
from interlace.schedule.table import StepTable
from interlace.simulate.trace import trace_events, write_events


class Record(NamedTuple):
    """One action of one rank; times in seconds on a clock that all ranks share."""

    rank: int
    action: Action
    start: float
    finish: float


@dataclass
class Timeline:
    """Times of all actions of a step.

    actions, start, finish: per rank, in order of execution; seconds. A RECV begins when the rank reaches it, so it
        includes the waiting. A SEND is only the posting. A REDUCE_GRAD lasts from the moment the rank reaches it to its
        end and overlaps later actions. So does a DISPATCH, until the data of the next step has arrived.
    table: table of the step, if known; pictures then number chunks within their replica.
    planning: per rank, (start, finish) of tables of later steps that a helper thread computed meanwhile.
    """

    actions: list[list[Action]]
    start: list[list[float]]
    finish: list[list[float]]
    name: str = ""
    table: StepTable | None = None
    planning: list[list[tuple[float, float]]] = field(default_factory=list)

    @property
    def num_ranks(self) -> int:
        return len(self.actions)

    def records(self) -> Iterator[Record]:
        """All records, rank by rank in the order of execution."""
        for rank, actions in enumerate(self.actions):
            for action, start, finish in zip(actions, self.start[rank], self.finish[rank]):
                yield Record(rank, action, start, finish)

    @cached_property
    def begin(self) -> float:
        """Start of the first action."""
        return min((times[0] for times in self.start if times), default=0.0)

    @cached_property
    def makespan(self) -> float:
        """Seconds from the start of the first action to the finish of the last."""
        return max((max(times) for times in self.finish if times), default=self.begin) - self.begin

    @cached_property
    def busy(self) -> dict[tuple[int, str], float]:
        """(rank, module) -> seconds of compute."""
        total = defaultdict[tuple[int, str], float](float)
        for rank, action, start, finish in self.records():
            if action.op in COMPUTE:
                total[rank, action.module] = total[rank, action.module] + finish - start
        return dict(total)

    @property
    def busy_per_rank(self) -> tuple[float, ...]:
        """Seconds of compute of each rank."""
        total = [0.0] * self.num_ranks
        for (rank, _), seconds in self.busy.items():
            total[rank] += seconds
        return tuple(total)

    @property
    def busy_per_module(self) -> dict[str, float]:
        """Seconds of compute of each module, summed over ranks."""
        total = defaultdict[str, float](float)
        for (_, module), seconds in self.busy.items():
            total[module] += seconds
        return dict(total)

    @property
    def utilization(self) -> dict[str, float]:
        """Per module, the share of time in which its ranks compute it, 0 to 1."""
        ranks = Counter(module for _, module in self.busy)
        return {
            module: seconds / (ranks[module] * self.makespan) if self.makespan else 0.0
            for module, seconds in self.busy_per_module.items()
        }

    @property
    def bubble(self) -> float:
        """Share of all ranks' time without compute, 0 to 1."""
        area = self.num_ranks * self.makespan
        return 1.0 - sum(self.busy_per_rank) / area if area else 0.0

    @property
    def peak_in_flight(self) -> tuple[int, ...]:
        """Per rank, the most forwards whose backward has not run yet, summed over its stages."""
        return tuple(peak(actions).in_flight for actions in self.actions)

    def peak_memory(self, activation_bytes: ActivationBytes) -> tuple[float, ...]:
        """Per rank, the most bytes held. activation_bytes: per (module, stage, chunk), or (module, stage) for all."""
        return tuple(peak(actions, activation_bytes).bytes for actions in self.actions)

    def number(self, chunk: int) -> int:
        """Index of `chunk` within its replica if the table is known; else `chunk` itself."""
        return chunk if self.table is None else self.table.chunks[chunk].index

    def write_trace(self, path: str | Path) -> None:
        """Writes a trace for https://ui.perfetto.dev or chrome://tracing (JSON)."""
        write_events(trace_events(self), path)

    def plot(self, path: str | Path, *, title: str | None = None) -> None:
        """Writes a picture (PNG): one row per rank, one colour per module."""
        from interlace.simulate.pictures.timeline import plot

        plot(self, path, title=title)
