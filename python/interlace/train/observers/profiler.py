"""Recording of some steps by torch.profiler (``log.profile``), for https://ui.perfetto.dev.

Each action of the executor is a range with the action's name, such as F:vision/0@3, around its operators and kernels.
Recording slows a step down, so such steps are left out of throughput. A failed recording does not end the run.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from interlace._text import one_line
from interlace.train.config.log import Profile
from interlace.train.launch import launcher
from interlace.train.observers.base import Observer, Taken
from interlace.train.progress import Progress


class Profiler(Observer):
    """Recording of this rank, if ``log.profile`` selects it."""

    def __init__(self, profile: Profile | None, folder: Path, rank: int) -> None:
        self.profile = profile
        self.path = folder / "profile" / f"rank-{rank}.json.gz"
        self.records = profile is not None and (not profile.ranks or rank in profile.ranks)
        self._running: torch.profiler.profile | None = None

    def slows(self, step: int) -> bool:
        """True if `step` is recorded on any rank, or warms the profiler up. Equal on all ranks."""
        return self.profile is not None and self.profile.start - 1 <= step < self.profile.start + self.profile.steps

    def before_step(self, step: int) -> None:
        if self.records and self._running is None and self.slows(step):
            self._try(lambda: self._start(step))

    def after_step(self, taken: Taken, progress: Progress) -> None:
        if self._running is not None:
            self._try(self._next)

    def close(self) -> None:
        """Writes a partial recording if the run ends early."""
        if self._running is not None:
            self._try(self._running.stop)
            self._running = None

    def _start(self, step: int) -> None:
        """Records from `step` on. A run that resumes within the range records the rest of it."""
        assert self.profile is not None
        warmup = int(step < self.profile.start)
        active = self.profile.start + self.profile.steps - step - warmup
        activities = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self._left = active + warmup
        self._running = torch.profiler.profile(
            activities=activities,
            schedule=torch.profiler.schedule(wait=0, warmup=warmup, active=active, repeat=1),
            on_trace_ready=self._write,
            record_shapes=True,
        )
        self._running.start()

    def _next(self) -> None:
        assert self._running is not None
        self._running.step()
        self._left -= 1
        if not self._left:
            self.close()

    def _write(self, recording: torch.profiler.profile) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        recording.export_chrome_trace(str(self.path))
        launcher.say(f"interlace: recorded {self.path}: open it in https://ui.perfetto.dev")

    def _try(self, work: Callable[[], object]) -> None:
        try:
            work()
        except Exception as error:
            self.records, self._running = False, None
            launcher.say_error(f"interlace: no steps are recorded (log.profile): {one_line(error, 300)}")
