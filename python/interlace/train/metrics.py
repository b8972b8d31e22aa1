"""What a run tells: metrics.jsonl, TensorBoard, and the terminal (rich), all from the same numbers.

Names follow torchtitan where it has one (``loss_metrics/global_avg_loss``, ``throughput(tps)``,
``time_metrics/data_loading(%)``, ``memory/max_active(GiB)``); ours are ``throughput(samples/s)``, ``bubble(%)``,
``busy(%)/<module>`` and ``loss_metrics/held_out_loss``.
"""

from __future__ import annotations

import contextlib
import errno
import json
import resource
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

import torch

from interlace.train.launch.launcher import mute

LOSS = "loss_metrics/global_avg_loss"
HELD_OUT = "loss_metrics/held_out_loss"


class LogWindow:
    """Sums since the last logged step; part of a checkpoint, so that a resumed run logs the same averages."""

    def __init__(self) -> None:
        self.loss_sum = 0.0
        self.tokens = 0
        self.samples = 0
        self.read_tokens = 0
        self.data_seconds = 0.0
        self.seconds = 0.0

    def add(self, *, loss: float, tokens: int, samples: int, read_tokens: int, data: float, seconds: float) -> None:
        """One step: mean `loss` over `tokens` targets, `samples` with `read_tokens` LLM tokens, times in seconds."""
        self.loss_sum += loss * tokens
        self.tokens += tokens
        self.samples += samples
        self.read_tokens += read_tokens
        self.data_seconds += data
        self.seconds += seconds

    def metrics(self) -> dict[str, float]:
        """The averages of the window under their metric names; none where every step was left out (fp16)."""
        if not self.tokens:
            return {}
        seconds = max(self.seconds, 1e-9)
        return {
            LOSS: self.loss_sum / self.tokens,
            "throughput(tps)": self.read_tokens / seconds,
            "throughput(samples/s)": self.samples / seconds,
            "time_metrics/data_loading(s)": self.data_seconds,
            "time_metrics/data_loading(%)": 100.0 * self.data_seconds / seconds,
        }


class Metrics:
    """Writer of one run's metrics (rank 0). Going on at step `start` drops what a killed run wrote after it."""

    def __init__(self, folder: Path, *, start: int, tensorboard: bool) -> None:
        self.path = folder / "metrics.jsonl"
        _drop_after(self.path, start)
        self.file: TextIO = self.path.open("a", encoding="utf-8")
        self.board: Any = None
        if tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self.board = SummaryWriter(str(folder / "tensorboard"), purge_step=start + 1 if start else None)

    def write(self, step: int, values: dict[str, float]) -> None:
        """One line of JSON and one point per curve."""
        self.file.write(json.dumps({"step": step, **values}) + "\n")
        self.file.flush()
        if self.board is not None:
            for name, value in values.items():
                self.board.add_scalar(name, value, step)
            self.board.flush()

    def close(self) -> None:
        """Closes the files."""
        self.file.close()
        if self.board is not None:
            self.board.close()


class Screen:
    """The terminal of rank 0: a live line when it is one, else a line for every logged step."""

    def __init__(self, steps: int, start: int, *, name: str, enabled: bool = True) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        class Terminal(Console):
            def on_broken_pipe(self) -> None:  # rich would exit the process
                raise BrokenPipeError(errno.EPIPE, "nobody reads the output")

        self.console = Terminal(quiet=not enabled, highlight=False, soft_wrap=not sys.stdout.isatty())
        self.live = enabled and self.console.is_terminal
        self.name, self.steps = name, steps
        self.progress = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TextColumn("{task.fields[text]}"),
            TimeRemainingColumn(),
            console=self.console,
            disable=not self.live,
        )
        self.task = self.progress.add_task(name, total=steps, completed=start, text="")
        if self.live:
            with self._surviving():
                self.progress.start()

    def say(self, line: str) -> None:
        """A line that stays."""
        with self._surviving():
            self.console.print(line, markup=False)

    def advance(self, step: int) -> None:
        """Moves the bar."""
        self.progress.update(self.task, completed=step)

    def show(self, step: int, values: dict[str, float]) -> None:
        """The numbers of a logged step."""
        held_out = f" held-out {values[HELD_OUT]:.3f}" if HELD_OUT in values else ""  # never an old one
        busy = " ".join(
            f"{name.removeprefix('busy(%)/')} {value:.0f}%"
            for name, value in values.items()
            if name.startswith("busy(%)/")
        )
        text = f"loss {values[LOSS]:.3f}{held_out}" if LOSS in values else held_out.strip()
        if "throughput(tps)" in values:
            text += f" · {values['throughput(tps)']:,.0f} tok/s · {values['throughput(samples/s)']:.0f} samples/s"
        if busy:
            text += f" · busy {busy} · bubble {values['bubble(%)']:.0f}%"
        if "memory/max_active(GiB)" in values:
            text += f" · {values['memory/max_active(GiB)']:.2f} GiB"
        self.progress.update(self.task, completed=step, text=text)
        if not self.live:
            self.say(f"{self.name} {step}/{self.steps} · {text}")

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


def memory_gib() -> float:
    """Peak memory of this process: of its GPU when it uses one, else its resident set. GiB."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        return torch.cuda.max_memory_allocated() / 2**30
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**30 if sys.platform == "darwin" else 2**20)


def free_memory() -> int | None:
    """Bytes of host memory that this process could have, as Linux tells; None where nobody tells.

    What is available on the machine, or what is left of the limit of this process's container where that is less.
    """
    found = []
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        found.append(1024 * int(next(line.split()[1] for line in lines if line.startswith("MemAvailable:"))))
        groups = Path("/sys/fs/cgroup")
        for limit, used in (
            ("memory.max", "memory.current"),
            ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
        ):
            with contextlib.suppress(OSError, ValueError):  # "max" is no limit
                found.append(int((groups / limit).read_text()) - int((groups / used).read_text()))
    return min(found, default=None)


def pipeline_metrics(timeline: Any) -> dict[str, float]:
    """Per-module busy time and bubble of a measured step, in percent of its duration."""
    values = {f"busy(%)/{name}": 100.0 * share for name, share in timeline.utilization.items()}
    values["bubble(%)"] = 100.0 * timeline.bubble
    return values


class Clock:
    """``with clock: ...`` adds up seconds."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __enter__(self) -> Clock:
        self.began = time.perf_counter()
        return self

    def __exit__(self, *error: object) -> None:
        self.seconds += time.perf_counter() - self.began


def _drop_after(path: Path, step: int) -> None:
    if not path.exists():
        return
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            if json.loads(line)["step"] <= step:
                kept.append(line)
        except (ValueError, KeyError, TypeError):
            continue  # a line that a killed run left half written
    draft = path.with_name(f".{path.name}.tmp")  # a run that is killed here must not lose its curve
    draft.write_text("".join(line + "\n" for line in kept), encoding="utf-8")
    draft.replace(path)
