"""StepResult: the result of a step; and exchange of the times of its actions between ranks."""

from __future__ import annotations

import json
from collections.abc import Sequence

from interlace.comm.channels.base import Channel
from interlace.run.errors import PipelineError
from interlace.schedule import Schedule, StepTable
from interlace.simulate import Timeline


class StepResult(float):
    """The loss of a step (mean cross entropy over the valid targets of the whole batch, nats), with further results.

    The same on every rank. tokens: valid targets of the batch; microbatches: most chunks of any replica of the language
    model. notes: the note of each rank, by rank. table: assignment of samples to chunks.
    """

    tokens: int
    microbatches: int
    notes: tuple[float, ...]
    table: StepTable | None

    def __new__(
        cls,
        loss: float,
        tokens: int,
        microbatches: int,
        notes: Sequence[float] = (),
        table: StepTable | None = None,
    ) -> StepResult:
        result = super().__new__(cls, loss)
        result.tokens, result.microbatches, result.notes, result.table = tokens, microbatches, tuple(notes), table
        return result

    def __getnewargs__(self) -> tuple[float, int, int, tuple[float, ...], StepTable | None]:  # type: ignore[override]
        return float(self), self.tokens, self.microbatches, self.notes, self.table

    @property
    def loss(self) -> float:
        """The loss as a plain number."""
        return float(self)


Spans = Sequence[tuple[float, float]]
"""(start, finish), in seconds."""


def gathered(channel: Channel, schedule: Schedule, times: Spans, planning: Spans) -> tuple[list[Spans], list[Spans]]:
    """Times of the actions of each rank, and of its planning for later steps. Collective. times, planning: of here."""
    everyone, planned = list[Spans](), list[Spans]()
    mine = json.dumps([times, planning])  # text, because `exchange` wants values of one form and ranks differ in length
    for rank, text in enumerate(channel.exchange(mine, "timeline")):
        try:
            theirs, ahead = ([(float(start), float(finish)) for start, finish in spans] for spans in json.loads(text))
            if len(theirs) != (count := len(schedule.of_rank(rank))):
                raise ValueError(f"{len(theirs)} actions, expected {count}")
            if any(not start <= finish for start, finish in theirs + ahead):
                raise ValueError("an action finishes before its start")
        except (TypeError, ValueError) as error:
            raise PipelineError(f"rank {rank} sent an invalid timeline: {error}") from error
        everyone.append(theirs)
        planned.append(ahead)
    return everyone, planned


def measured(schedule: Schedule, table: StepTable, times: Sequence[Spans], planning: Sequence[Spans]) -> Timeline:
    """The timeline of a step of `schedule`. The schedule may have been made for another table of the same form.

    times: of the actions of each rank. planning: the same of its planning for later steps.
    """
    starts = [[start for start, _ in mine] for mine in times]
    finishes = [[finish for _, finish in mine] for mine in times]
    return Timeline(schedule.actions, starts, finishes, table=table, planning=[list(mine) for mine in planning])
