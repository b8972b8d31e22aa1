"""The terminal of rank 0: a line for every logged step, and where somebody watches live a bar below them."""

from __future__ import annotations

import contextlib
import errno
import sys
from collections.abc import Iterator, Mapping

from interlace.train.launch.launcher import mute
from interlace.train.metrics import BUSY, HELD_OUT, LOSS

MEMORY = 0.95  # of a step's time in the running mean: the last twenty or so steps decide


class TimeLeft:
    """How long a run will still take: its steps, and the validations and checkpoints that are yet to come, each as long
    as they took in this job.

    last: the last step. every: what comes beside steps ("validation", "checkpoint") -> the steps between two; 0: at the
    last step alone.
    """

    def __init__(self, last: int, every: Mapping[str, int]) -> None:
        self.last, self.every = last, dict(every)
        self._step: float | None = None
        self._steps = 0
        self._beside: dict[str, tuple[float, int]] = {}

    def step(self, seconds: float) -> None:
        """A step took so long. The first of a job warms up and counts no longer once there is a second."""
        self._steps += 1
        if self._step is None or self._steps == 2:
            self._step = seconds
        else:
            weight = max(1.0 - MEMORY, 1.0 / (self._steps - 1))  # of few steps the plain mean
            self._step += weight * (seconds - self._step)

    def beside(self, what: str, seconds: float) -> None:
        """A validation or a checkpoint took so long."""
        total, count = self._beside.get(what, (0.0, 0))
        self._beside[what] = total + seconds, count + 1

    def after(self, step: int) -> float | None:
        """Seconds from the end of `step` to that of the last one; None before there was any."""
        if self._step is None:
            return None
        left = (self.last - step) * self._step
        for what, (total, count) in self._beside.items():
            every = self.every.get(what, 0)
            due = self.last // every - step // every if every else 0
            due += step < self.last and (not every or self.last % every > 0)
            left += due * total / count
        return left


class Screen:
    """What is said of a run while it trains.

    steps: the last one; start: the one it goes on from. epoch_steps: of how many steps an epoch is made.
    """

    def __init__(self, steps: int, start: int, *, name: str, epoch_steps: int = 0, enabled: bool = True) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn
        from rich.text import Text

        class Rate(ProgressColumn):
            def render(self, task: Task) -> Text:
                return Text(rate(task.speed))

        class Terminal(Console):
            def on_broken_pipe(self) -> None:  # rich would exit the process
                raise BrokenPipeError(errno.EPIPE, "nobody reads the output")

        self.console = Terminal(quiet=not enabled, highlight=False, soft_wrap=not sys.stdout.isatty())
        self.live = enabled and self.console.is_terminal
        self.name, self.steps, self.epoch_steps = name, steps, epoch_steps
        self.progress = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            Rate(),
            TextColumn("{task.fields[place]}"),
            console=self.console,
            disable=not self.live,
        )
        self.task = self.progress.add_task(name, total=steps, completed=start, place="")
        if self.live:
            with self._surviving():
                self.progress.start()

    def say(self, line: str) -> None:
        """A line that stays."""
        with self._surviving():
            self.console.print(line, markup=False)

    def advance(self, step: int, left: float | None) -> None:
        """Moves the bar. left: seconds to the end."""
        self.progress.update(self.task, completed=step, place=self._place(step, left).removeprefix(" · "))

    def show(self, step: int, values: Mapping[str, float], left: float | None) -> None:
        """The numbers of a logged step."""
        self.advance(step, left)
        place = "" if self.live else self._place(step, left)  # which the bar says
        self.say(" · ".join([f"{self.name} {step}/{self.steps}{place}", *_numbers(values)]))

    def _place(self, step: int, left: float | None) -> str:
        """How far the run is, in passes over the data where there is a whole one, and how long it will go on."""
        epoch = ""
        if self.epoch_steps and self.steps >= self.epoch_steps:
            epoch = f" · epoch {step / self.epoch_steps:.1f} of {self.steps / self.epoch_steps:.3g}"
        return f"{epoch} · {duration(left)} left" if left is not None and step < self.steps else epoch

    def close(self) -> None:
        """Ends the live line."""
        if self.live:
            with self._surviving():
                self.progress.stop()

    @contextlib.contextmanager
    def _surviving(self) -> Iterator[None]:
        """Training does not end because nobody watches: a terminal or pipe that is gone switches the screen off."""
        try:
            yield
        except OSError:
            self.console.quiet, self.live = True, False
            mute()


def _numbers(values: Mapping[str, float]) -> Iterator[str]:
    """What of the metrics a line has."""
    loss = [f"loss {values[LOSS]:.3f}"] if LOSS in values else []
    loss += [f"held-out {values[HELD_OUT]:.3f}"] if HELD_OUT in values else []  # never an old one
    if loss:
        yield " ".join(loss)
    if "throughput(tps)" in values:
        yield f"{values['throughput(tps)']:,.0f} tok/s"
        rate = values["throughput(samples/s)"]
        yield f"{rate:,.0f} samples/s" if rate >= 10 else f"{rate:.2g} samples/s"
    if "mfu(%)" in values:
        yield f"MFU {values['mfu(%)']:.0f}%"
    if values.get("time_metrics/data_loading(%)", 0.0) >= 1.0:
        yield f"waits {values['time_metrics/data_loading(%)']:.0f}% for data"
    busy = [f"{name.removeprefix(BUSY)} {value:.0f}%" for name, value in values.items() if name.startswith(BUSY)]
    if busy:
        yield f"busy {' '.join(busy)}"
        yield f"bubble {values['bubble(%)']:.0f}%"
    if "memory/max_active(GiB)" in values:
        yield f"{values['memory/max_active(GiB)']:.2f} GiB"


def rate(steps: float | None) -> str:
    """Of steps per second, in the larger of the two units; "" while it is not known."""
    if not steps:
        return ""
    return f"{steps:.3g} steps/s" if steps >= 1 else f"{1 / steps:.3g} s/step"


def duration(seconds: float) -> str:
    """In hours, minutes and seconds: 1:02:03, 2:03."""
    whole = round(seconds)
    hours, minutes = whole // 3600, whole // 60 % 60
    return f"{hours}:{minutes:02d}:{whole % 60:02d}" if hours else f"{minutes}:{whole % 60:02d}"
