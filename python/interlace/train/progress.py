"""Progress of a run, kept beside tensors in a checkpoint, and decisions from outside the loop: signals, membership."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from interlace.train.config.load import ConfigError
from interlace.train.config.train import Train
from interlace.train.launch.launcher import StopSignals, handling
from interlace.train.launch.peers import Peers
from interlace.train.optim import lr_factor, schedule_length
from interlace.train.report.metrics import LogWindow
from interlace.train.watching import LossScale, Verdict


@contextmanager
def stop_request() -> Iterator[StopSignals]:
    """Records SIGTERM and SIGINT, so that the loop can finish its step, save and exit.

    `StopSignals` decides which signals exit at once, as in the launcher.
    """
    signals = StopSignals()

    def note(number: int) -> None:
        if signals.insists(number):
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
            signal.raise_signal(number)

    with handling(note):
        yield signals


@dataclass
class Membership:
    """Decisions of other ranks and of the user about the steps of a rank. This one is for a fixed run.

    stop: called after each step; returns the signal that asks the run to end, or 0. peers: all ranks; by default made
    by the trainer.
    """

    stop: Callable[[], int] = lambda: 0
    peers: Peers | None = None

    def commit(self, step: int) -> None:
        """Called when a step's gradients and their norm are known on all ranks. Raises if the step must not be applied.

        No collective follows before the update of the step.
        """

    def leaves(self) -> bool:
        """True if training stops after this step, so that another generation continues."""
        return False

    def microbatches(self, rows: int, count: int) -> int | tuple[int, ...] | None:
        """Number of microbatches of a step: of each replica, or one number for each.

        rows: number of packed rows, which are microbatches themselves (then None); 0 if rows are not packed. count: of
        the config, for each replica.
        """
        return None if rows else count


class Progress(BaseModel):
    """Progress of a run after its last applied step: everything beside tensors that a resumed run needs.

    Part of checkpoints, which may come from untrusted sources, so types are checked. `feed` is filled for a checkpoint.
    """

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
    """Measurements of the last step until its line is written. If an elastic generation ends here, the next one writes
    the line, measures the held-out loss and saves."""
    line: dict[str, int | float] | None = None
    """Last line of the metrics, with its step, on every rank: rank 0 may be lost before it has written the line."""
    due: bool = False
    """True if a checkpoint of this step is due, or was begun and is not finished."""

    @classmethod
    def at_start(cls, train: Train) -> Progress:
        """Progress of a run that has taken no step."""
        return cls(
            step=0,
            optimizer=train.optimizer,
            momentum=train.momentum,
            verdict=Verdict(),
            loss_scale=LossScale() if train.precision == "fp16" else None,
            schedule_steps=schedule_length(train),
            feed={},
            window=LogWindow(),
            totals={"seconds": 0.0, "samples": 0, "tokens": 0, "waited": 0.0, "validating": 0.0, "saving": 0.0},
            last={},
        )

    def going_on(self, train: Train) -> Progress:
        """This progress under the settings `train`, which may differ from those of the saved run."""
        now = Progress.at_start(train)
        scale = now.loss_scale and (self.loss_scale or now.loss_scale)
        kept = {name: getattr(now, name) for name in ("optimizer", "momentum", "schedule_steps")}
        return self.model_copy(update=kept | {"loss_scale": scale})

    def is_over(self, train: Train) -> bool:
        """True if the last step is taken, or early stopping ends the run."""
        return self.step == train.last_step or self.verdict.ends(train.early_stop)


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
