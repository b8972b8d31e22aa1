"""What a run must know to go on, beside tensors, and what asks it to end."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from interlace.train.config import ConfigError
from interlace.train.launch.launcher import StopSignals
from interlace.train.metrics import LogWindow
from interlace.train.optim import lr_factor, schedule_length
from interlace.train.schema_train import Train
from interlace.train.watching import LossScale, Verdict


class StopRequest:
    """Remembers SIGTERM and SIGINT, so that the loop can finish its step, save and leave.

    What ends it at once is decided as in the launcher, by `StopSignals`.
    """

    def __init__(self) -> None:
        self.signals = StopSignals()
        self.previous = {number: signal.signal(number, self._note) for number in (signal.SIGTERM, signal.SIGINT)}

    @property
    def number(self) -> int:
        """The first signal that came; 0: none yet."""
        return self.signals.number

    def restore(self) -> None:
        """Puts back the handlers from before."""
        for number, handler in self.previous.items():
            signal.signal(number, handler)

    def _note(self, number: int, _frame: Any) -> None:
        if self.signals.insists(number):
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
            signal.raise_signal(number)


class Progress(BaseModel):
    """What a checkpoint says of a run beside tensors. It may come from anybody, so its types are checked."""

    model_config = ConfigDict(extra="forbid", strict=True)

    step: int
    optimizer: str
    momentum: float
    """Of sgd and muon; 0: sgd's is not kept."""
    verdict: Verdict
    loss_scale: LossScale | None
    schedule_steps: int
    """Steps over which the learning rate was planned."""
    feed: dict[str, Any]
    window: LogWindow
    totals: dict[str, int | float]
    last: dict[str, int | float]
    owed: dict[str, int | float] | None = None
    """What the last step measured, where it counts and nothing else was done after it (see `Trainer.owed`)."""
    line: dict[str, int | float] | None = None
    """The last line of the metrics, where it may not have been written (see `Trainer.line`)."""
    due: bool = False
    """Whether a checkpoint of it is due, or was begun and does not stand yet."""


def check_goes_on(progress: Progress, train: Train, path: Path) -> None:
    """Raises ConfigError when steps lie behind the run already, or would make its learning rate jump.

    What the config says of the rate itself (lr, schedule, warm-up, decay, minimum) is taken as it says now.
    """
    reached = progress.step
    if reached > train.last_step:
        raise ConfigError(
            f"--resume: {path} is of step {reached}, but train.steps = {train.steps}; raise it, or go on from "
            f"an earlier checkpoint by naming it (they lie in {path.parent})"
        )
    if progress.optimizer != train.optimizer:
        raise ConfigError(
            f"--resume: {path} has the state of optimizer = {progress.optimizer!r}, which "
            f"{train.optimizer!r} cannot go on from: keep it, or begin a new run"
        )
    if train.optimizer == "sgd" and train.momentum and not progress.momentum:
        raise ConfigError(
            f"--resume: {path} is of sgd without momentum, which train.momentum = {train.momentum:g} would begin "
            "from zeros: keep train.momentum=0, or begin a new run"
        )
    planned, now = progress.schedule_steps, schedule_length(train)
    before = lr_factor(reached + 1, train.model_copy(update={"schedule_steps": planned}))
    after = lr_factor(reached + 1, train)
    if train.schedule_steps is None and reached < train.last_step and before != after:
        raise ConfigError(
            f"--resume: the learning rate was planned over {planned} steps; over train.steps = {now} it would jump "
            f"from {train.lr * before:.3g} to {train.lr * after:.3g} at step {reached + 1}. Say which is meant: "
            f"--set train.schedule_steps={planned} keeps the plan (and its last rate beyond it), "
            f"--set train.schedule_steps={now} makes a new one"
        )
