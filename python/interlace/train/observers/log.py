"""Log of a run: the lines of metrics.jsonl, of the trackers and of the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from interlace.train.observers.base import Line, Observer, Taken
from interlace.train.progress import Progress
from interlace.train.report.metrics import LogWindow, Metrics
from interlace.train.report.terminal import Screen, TimeLeft
from interlace.train.report.trackers import Trackers

if TYPE_CHECKING:
    from interlace.train.trainer import Trainer


class Log(Observer):
    """Writes each line, after all observers that add to it.

    Only rank 0 writes; the others keep the line in `Progress`, since rank 0 may be lost before it has written it.
    """

    def __init__(self, trainer: Trainer, left: TimeLeft) -> None:
        self.config, self.feed, self.outputs = trainer.config, trainer.feed, trainer.outputs
        self.rank, self.left = trainer.rank, left
        self.metrics: Metrics | None = None
        self.screen: Screen | None = None

    def begin(self, progress: Progress) -> None:
        start = progress.step if progress.owed is None else progress.step - 1  # that step's line may be unwritten
        if self.rank == 0:
            folder = self.outputs.folder
            trackers = self.outputs.trackers or Trackers(self.config, folder, {})
            self.metrics = Metrics(folder, start=start, trackers=trackers)
            if progress.line is not None and progress.line["step"] <= start:
                self.metrics.complete(progress.line)
        self.screen = Screen(
            self.config.train.last_step,
            progress.step,
            name=self.config.run.name,
            epoch_steps=self.feed.loader.batches_per_epoch or 0,  # unknown for a stream
            enabled=self.rank == 0 and not self.outputs.quiet,
        )

    def after_step(self, taken: Taken, progress: Progress) -> None:
        self.left.step(taken.seconds)

    def measure(self, line: Line, progress: Progress) -> None:
        assert self.screen is not None, "begin was not called"
        if line.logged:  # only now: a validation that lost a node is repeated, with the whole line
            progress.window = LogWindow()
        if line.values:
            progress.last |= line.values
            progress.line = {"step": line.step, **line.values}
            if self.metrics is not None:
                self.metrics.write(line.step, line.values)
            self.screen.show(line.step, line.values, self.left.after(line.step))
        else:
            self.screen.advance(line.step, self.left.after(line.step))

    def close(self) -> None:
        if self.screen is not None:
            self.screen.close()
        if self.metrics is not None:
            self.metrics.close()
