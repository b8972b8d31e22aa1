"""StepResult: what a step says."""

from __future__ import annotations

from collections.abc import Sequence


class StepResult(float):
    """The loss of a step (mean cross entropy over the valid targets of the whole batch, nats), with its circumstances.

    The same on every rank. tokens: valid targets of the batch; microbatches: chunks of a replica of the language model,
    of the one that has most. notes: what each rank noted, by rank.
    """

    tokens: int
    microbatches: int
    notes: tuple[float, ...]

    def __new__(cls, loss: float, tokens: int, microbatches: int, notes: Sequence[float] = ()) -> StepResult:
        result = super().__new__(cls, loss)
        result.tokens, result.microbatches, result.notes = tokens, microbatches, tuple(notes)
        return result

    def __getnewargs__(self) -> tuple[float, int, int, tuple[float, ...]]:  # type: ignore[override]
        return float(self), self.tokens, self.microbatches, self.notes

    @property
    def loss(self) -> float:
        """The loss as a plain number."""
        return float(self)
