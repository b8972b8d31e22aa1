"""StepResult: the result of a step; and exchange of the times of its actions between ranks."""

from __future__ import annotations

from collections.abc import Sequence

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


def as_text(times: Sequence[tuple[float, float]]) -> str:
    """(start, finish) pairs as text for `times_of`."""
    return " ".join(f"{start!r} {finish!r}" for start, finish in times)


def times_of(text: str, rank: int, count: int) -> list[tuple[float, float]]:
    """The start and finish of each of `count` actions, from the text that `rank` sent."""
    try:
        numbers = [float(word) for word in text.split()]
        spans = list(zip(numbers[::2], numbers[1::2], strict=True))
        if len(spans) != count or any(not start <= finish for start, finish in spans):
            raise ValueError(f"{len(spans)} actions, expected {count}, each with its start before its finish")
    except ValueError as error:
        raise PipelineError(f"rank {rank} sent an invalid timeline: {error}") from error
    return spans


def measured(
    schedule: Schedule,
    table: StepTable,
    times: Sequence[Sequence[tuple[float, float]]],
    planning: Sequence[Sequence[tuple[float, float]]] = (),
) -> Timeline:
    """The timeline of a step of `schedule`. The schedule may have been made for another table of the same form.

    times: (start, finish) of the actions of each rank, in seconds. planning: the same of its planning for later steps.
    """
    starts = [[start for start, _ in mine] for mine in times]
    finishes = [[finish for _, finish in mine] for mine in times]
    return Timeline(schedule.actions, starts, finishes, table=table, planning=[list(mine) for mine in planning])
