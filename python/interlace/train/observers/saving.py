"""Saving: the steps after which a checkpoint is written."""

from __future__ import annotations

from typing import TYPE_CHECKING

from interlace.resilience.supervisor.progress import allowing
from interlace.train.errors import TrainingError
from interlace.train.observers.base import Line, Observer
from interlace.train.progress import Progress
from interlace.train.report.metrics import Clock
from interlace.train.report.terminal import TimeLeft

if TYPE_CHECKING:
    from interlace.train.trainer import Trainer


class Saving(Observer):
    """Begins a checkpoint every ``checkpoint.every`` steps, at the best validation if asked for, and at the end."""

    def __init__(self, trainer: Trainer, left: TimeLeft) -> None:
        self.trainer, self.config, self.checkpoints, self.left = trainer, trainer.config, trainer.checkpoints, left
        self.patience = trainer.peers.timeout + trainer.peers.allowance  # seconds

    def begin(self, progress: Progress) -> None:
        if progress.due and progress.owed is None:  # left over by the previous generation
            self._save_due(progress)

    def before_step(self, step: int) -> None:
        lock = self.trainer.outputs.lock
        if lock is not None and lock.trouble:
            raise TrainingError(lock.trouble)

    def measure(self, line: Line, progress: Progress) -> None:
        settings = self.config.checkpoint
        progress.owed = None  # the line is written
        progress.due = bool(line.stopped) or progress.is_over(self.config.train)
        progress.due |= bool(settings.every) and line.step % settings.every == 0
        progress.due |= line.best and settings.best is not None
        if progress.due:
            self._save_due(progress)

    def at_end(self) -> None:
        with allowing("finishing a checkpoint", self.patience):
            self.checkpoints.finish()

    def _save_due(self, progress: Progress) -> None:
        with Clock() as saving, allowing("saving", self.patience):
            self.save()
        progress.due = False
        progress.window.checkpoint_seconds += saving.seconds
        progress.totals["saving"] += saving.seconds
        self.left.beside("checkpoint", saving.seconds)

    def save(self) -> None:
        """Begins a checkpoint of the last step. `at_end` waits until it is finished. Collective."""
        progress = self.trainer.snapshot(self.trainer.peers.together).model_copy(
            update={"owed": None, "line": None, "due": False}
        )
        write = self.checkpoints.begin if self.config.checkpoint.asynchronous else self.checkpoints.save
        best = -1 if self.config.checkpoint.best is None else progress.verdict.step
        write(progress.step, *self.trainer.state(), progress.model_dump(), best=best)
