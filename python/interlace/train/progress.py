"""Progress of a run, kept beside tensors in a checkpoint, and signals that end a run."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from interlace.train.config.load import ConfigError
from interlace.train.config.train import Train
from interlace.train.launch.launcher import StopSignals
from interlace.train.optim import lr_factor, schedule_length
from interlace.train.report.metrics import LogWindow
from interlace.train.watching import LossScale, Verdict


class StopRequest:
    """Records SIGTERM and SIGINT, so that the loop can finish its step, save and exit.

    `StopSignals` decides which signals exit at once, as in the launcher.
    """

    def __init__(self) -> None:
        self.signals = StopSignals()
        self.previous = {number: signal.signal(number, self._note) for number in (signal.SIGTERM, signal.SIGINT)}

    @property
    def number(self) -> int:
        """First signal received; 0: none yet."""
        return self.signals.number

    def restore(self) -> None:
        """Restores the previous handlers."""
        for number, handler in self.previous.items():
            signal.signal(number, handler)

    def _note(self, number: int, _frame: Any) -> None:
        if self.signals.insists(number):
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
            signal.raise_signal(number)


class Progress(BaseModel):
    """Progress of a run in a checkpoint, beside tensors. Checkpoints may come from untrusted sources, so types are
    checked."""

    model_config = ConfigDict(extra="forbid", strict=True)

    step: int
    optimizer: str
    momentum: float
    """Momentum of sgd and muon; 0: sgd keeps none."""
    verdict: Verdict
    loss_scale: LossScale | None
    schedule_steps: int
    """Steps of the learning-rate schedule."""
    feed: dict[str, Any]
    window: LogWindow
    totals: dict[str, int | float]
    last: dict[str, int | float]
    owed: dict[str, int | float] | None = None
    """Measurements of the last step, if the step counts and nothing else was done after it (see `Trainer.owed`)."""
    line: dict[str, int | float] | None = None
    """Last line of the metrics, if it may be unwritten (see `Trainer.line`)."""
    due: bool = False
    """True if a checkpoint of this step is due, or was begun and is not finished."""


def check_goes_on(progress: Progress, train: Train, path: Path) -> None:
    """Raises ConfigError if a run cannot resume from this progress.

    Reasons: it is past train.steps, its optimizer state does not fit, or its learning rate would jump.

    The rate's own settings (lr, schedule, warm-up, decay, minimum) are taken from the present config.
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
