"""Saving: the steps after which a checkpoint is written."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from interlace.resilience.supervisor.progress import allowing
from interlace.train.checkpoint.checkpoints import Checkpoints
from interlace.train.checkpoint.pieces import Piece
from interlace.train.config.sections import Config
from interlace.train.errors import TrainingError
from interlace.train.launch.peers import Peers
from interlace.train.observers.base import Line, Observer, Outputs
from interlace.train.progress import Progress
from interlace.train.report.metrics import Clock
from interlace.train.report.terminal import TimeLeft

Pieces = dict[str, Tensor | Piece]


class Saving(Observer):
    """Begins a checkpoint every ``checkpoint.every`` steps, at the best validation if asked for, and at the end.

    state: returns this rank's weights and its other state, in place. snapshot: returns the progress of the run, with
    the place of its data; collective.
    """

    def __init__(
        self,
        config: Config,
        checkpoints: Checkpoints,
        peers: Peers,
        outputs: Outputs,
        left: TimeLeft,
        state: Callable[[], tuple[Pieces, Pieces]],
        snapshot: Callable[[], Progress],
    ) -> None:
        self.config, self.checkpoints, self.peers, self.outputs, self.left = config, checkpoints, peers, outputs, left
        self.state, self.snapshot = state, snapshot

    def begin(self, progress: Progress) -> None:
        if progress.due and progress.owed is None:  # left over by the previous generation
            self._save_due(progress)

    def before_step(self, step: int) -> None:
        lock = self.outputs.lock
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
        with allowing("finishing a checkpoint", self.peers.timeout + self.peers.allowance):
            self.checkpoints.finish()

    def _save_due(self, progress: Progress) -> None:
        with Clock() as saving, allowing("saving", self.peers.timeout + self.peers.allowance):
            self.save()
        progress.due = False
        progress.window.checkpoint_seconds += saving.seconds
        progress.totals["saving"] += saving.seconds
        self.left.beside("checkpoint", saving.seconds)

    def save(self) -> None:
        """Begins a checkpoint of the last step. `at_end` waits until it is finished. Collective."""
        progress = self.snapshot().model_copy(update={"owed": None, "line": None, "due": False})
        write = self.checkpoints.begin if self.config.checkpoint.asynchronous else self.checkpoints.save
        best = -1 if self.config.checkpoint.best is None else progress.verdict.step
        write(progress.step, *self.state(), progress.model_dump(), best=best)
