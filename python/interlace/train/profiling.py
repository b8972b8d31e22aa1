"""Some steps recorded by torch.profiler (``log.profile``), for https://ui.perfetto.dev.

What the executor does stands in the recording under the names of its actions, such as F:vision/0@3, with the operators
and kernels of each inside. Recording slows a step down, so such steps count for no throughput. A recording that fails
ends nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from interlace.train.launch import launcher
from interlace.train.schema_log import Profile


class Profiler:
    """The recording of this rank, if ``log.profile`` says so."""

    def __init__(self, profile: Profile | None, folder: Path, rank: int) -> None:
        self.profile = profile
        self.path = folder / "profile" / f"rank-{rank}.json.gz"
        self.records = profile is not None and (not profile.ranks or rank in profile.ranks)
        self._running: Any = None

    def slows(self, step: int) -> bool:
        """Whether `step` is slower on any rank because it is recorded, or warms the profiler up; alike on all ranks."""
        return self.profile is not None and self.profile.start - 1 <= step < self.profile.start + self.profile.steps

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Around a step: begins and ends the recording where this is the one."""
        if self.records and self._running is None and self.slows(step):
            self._try(lambda: self._begin(step))
        yield
        if self._running is not None:
            self._try(self._next)

    def close(self) -> None:
        """Writes what there is, where a run ends before its recording does."""
        if self._running is not None:
            self._try(self._running.stop)
            self._running = None

    def _begin(self, step: int) -> None:
        """Records from `step` on: a run that goes on among the steps to record has what is left of them."""
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
        self._running.step()
        self._left -= 1
        if not self._left:
            self.close()

    def _write(self, recording: Any) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        recording.export_chrome_trace(str(self.path))
        launcher.say(f"interlace: recorded {self.path}: open it in https://ui.perfetto.dev")

    def _try(self, work: Any) -> None:
        try:
            work()
        except Exception as error:
            self.records, self._running = False, None
            reason = " ".join(str(error).split()) or type(error).__name__
            launcher.say_error(f"interlace: no steps are recorded (log.profile): {reason[:300]}")
