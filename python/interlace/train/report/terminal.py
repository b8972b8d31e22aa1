"""Terminal output of rank 0: one line per logged step, and a live progress bar if stdout is a terminal."""

from __future__ import annotations

import contextlib
import errno
import sys
from collections.abc import Iterator, Mapping

from interlace.train.launch.launcher import mute
from interlace.train.report.metrics import BUSY, HELD_OUT, LOSS

MEMORY = 0.95  # weight of the past in the running mean of a step's time: about the last twenty steps decide


class TimeLeft:
    """Remaining time of a run: its steps, validations and checkpoints, each with the mean time measured in this job.

    last: the last step. every: kind of event ("validation", "checkpoint") -> steps between two; 0: only at the last
    step.
    """

    def __init__(self, last: int, every: Mapping[str, int]) -> None:
        self.last, self.every = last, dict(every)
        self._step: float | None = None
        self._steps = 0
        self._beside: dict[str, tuple[float, int]] = {}

    def step(self, seconds: float) -> None:
        """Adds the duration of a step. The first step of a job (warm-up) is dropped once there is a second one."""
        self._steps += 1
        if self._step is None or self._steps == 2:
            self._step = seconds
        else:
            weight = max(1.0 - MEMORY, 1.0 / (self._steps - 1))  # plain mean of the first steps
            self._step += weight * (seconds - self._step)

    def beside(self, what: str, seconds: float) -> None:
        """Adds the duration of a validation or a checkpoint."""
        total, count = self._beside.get(what, (0.0, 0))
        self._beside[what] = total + seconds, count + 1

    def after(self, step: int) -> float | None:
        """Seconds from the end of `step` to the end of the last one; None before the first measured step."""
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
    """Terminal view of a run while it trains.

    steps: the last step; start: the step that the run continues from. epoch_steps: steps of an epoch.
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
        """Prints a permanent line."""
        with self._surviving():
            self.console.print(line, markup=False)

    def advance(self, step: int, left: float | None) -> None:
        """Moves the bar. left: seconds to the end."""
        self.progress.update(self.task, completed=step, place=self._place(step, left).removeprefix(" · "))

    def show(self, step: int, values: Mapping[str, float], left: float | None) -> None:
        """Prints the metrics of a logged step."""
        self.advance(step, left)
        place = "" if self.live else self._place(step, left)  # the bar shows it
        self.say(" · ".join([f"{self.name} {step}/{self.steps}{place}", *_numbers(values)]))

    def _place(self, step: int, left: float | None) -> str:
        """Progress in epochs, if the run has a whole one, and the remaining time."""
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
        """Switches the screen off when stdout is closed, so that training goes on."""
        try:
            yield
        except OSError:
            self.console.quiet, self.live = True, False
            mute()


def _numbers(values: Mapping[str, float]) -> Iterator[str]:
    """Parts of a terminal line."""
    loss = [f"loss {values[LOSS]:.3f}"] if LOSS in values else []
    loss += [f"held-out {values[HELD_OUT]:.3f}"] if HELD_OUT in values else []  # only of this step, never an older one
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
    """Rate in steps per second or seconds per step, in the larger unit; "" if unknown."""
    if not steps:
        return ""
    return f"{steps:.3g} steps/s" if steps >= 1 else f"{1 / steps:.3g} s/step"


def duration(seconds: float) -> str:
    """Duration in hours, minutes and seconds: 1:02:03, 2:03."""
    whole = round(seconds)
    hours, minutes = whole // 3600, whole // 60 % 60
    return f"{hours}:{minutes:02d}:{whole % 60:02d}" if hours else f"{minutes}:{whole % 60:02d}"
