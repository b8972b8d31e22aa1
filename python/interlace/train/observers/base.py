"""Observer protocol of the trainer, and the values that it passes to observers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from interlace.run.execute.result import StepResult
from interlace.train.config.sections import Config
from interlace.train.data.feed import Batch
from interlace.train.launch.lock import RunLock
from interlace.train.progress import Progress
from interlace.train.report.flops import Meter
from interlace.train.report.forecast import Forecast
from interlace.train.report.trackers import Trackers


@dataclass(frozen=True)
class Taken:
    """A training step of this rank, after its update.

    norm: of the gradients, before clipping. finite: False if loss or norm is not; the update was then skipped (fp16).
    lr: rate of ``train.lr``. data_seconds: wait for the batch. seconds: duration of the step, with this wait.
    """

    step: int
    batch: Batch
    result: StepResult
    norm: float
    finite: bool
    lr: float
    data_seconds: float
    seconds: float


@dataclass
class Line:
    """Metrics of a step, while observers add to them.

    logged: the line has the averages of the window. values: empty if the step writes no line. taken: the step, if it
    ran here; None if it ran in a previous generation, whose pipelines are gone. stopped: the signal that ends the run,
    or 0. best: the held-out loss is the best so far.
    """

    step: int
    logged: bool
    values: dict[str, float]
    taken: Taken | None
    stopped: int
    best: bool = False


class Observer:
    """Observer of the steps of one rank. All methods do nothing by default.

    Every rank has the same observers in the same order, so `begin`, `measure` and `at_end` may be collective. State
    that a resumed run needs belongs into `Progress`.
    """

    def begin(self, progress: Progress) -> None:
        """Before the first step of a job or a generation."""

    def before_step(self, step: int) -> None:
        """Before a step. An error ends the run."""

    def after_step(self, taken: Taken, progress: Progress) -> None:
        """After the update of a step. Not collective: peers may be lost."""

    def measure(self, line: Line, progress: Progress) -> None:
        """After a step, unless the generation ended with it: then the next generation calls it for this step.

        A call that fails is repeated there as well, by all observers.
        """

    def at_end(self) -> None:
        """After the last step, unless another generation follows."""

    def close(self) -> None:
        """Releases resources, also after an error."""


@dataclass
class Outputs:
    """Outputs of a run on this rank.

    folder: the run folder, shared by all ranks. quiet: no terminal output. The others are for rank 0 only. lock: of the
    folder. trackers: receive the metrics; the caller reports the end of the run to them. forecast: predicts steps
    (``log.predict``). meter: counts FLOPs; by default it is made when training begins, in seconds.
    """

    folder: Path
    lock: RunLock | None = None
    trackers: Trackers | None = None
    forecast: Forecast | None = None
    meter: Meter | None = None
    quiet: bool = False


def is_logged(step: int, config: Config) -> bool:
    """True if a line of metrics is due after `step`, independent of validations."""
    return step % config.log.every == 0 or step == config.train.last_step


def is_validated(step: int, config: Config) -> bool:
    """True if the held-out loss is measured after `step`."""
    every = config.train.validate_every
    return step == config.train.last_step or (bool(every) and step % every == 0)
