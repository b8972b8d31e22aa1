"""[log] of a training config: metrics, traces and reports."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, model_validator

from interlace._hints import close
from interlace.train.config.base import NotNegative, Positive, Section

TRACKERS = {"tensorboard": "torch.utils.tensorboard", "wandb": "wandb", "mlflow": "mlflow", "trackio": "trackio"}
"""Tracker -> module that it needs."""


class Profile(Section):
    """Steps recorded by torch.profiler: every operator and kernel, with the actions of the schedule around them."""

    start: Positive
    """First recorded step. The step before it warms up the profiler."""
    steps: Annotated[int, Field(gt=0, le=100)] = 3
    """Number of recorded steps. A file takes some megabytes per step."""
    ranks: list[NotNegative] = [0]
    """Ranks that record, each into profile/rank-N.json.gz of the run folder. []: all ranks."""


class Log(Section):
    """Metrics, traces and reports of a run."""

    every: Positive = 10
    """Steps between two lines of metrics."""
    trackers: list[str] = ["tensorboard"]
    """Destinations of metrics besides metrics.jsonl: "tensorboard", "wandb", "mlflow", "trackio", or
    "package.module:Class" for a class of your own. []: none. See docs/watching-a-run.md."""
    tracker_options: dict[str, dict[str, Any]] = {}
    """Tracker -> its settings, such as {wandb = {project = "reading"}}. The tracker must be in ``trackers``. wandb and
    trackio: arguments of their init. mlflow: experiment, tracking_uri, run_name and tags. A class of your own: any
    keys."""
    peak_tflops: Annotated[float, Field(gt=0.0)] | None = None
    """Peak speed of a rank's device [10^12 operations per second], the base of mfu(%). Default: the known value of the
    GPU. Without a value (other GPUs, CPUs) only tflops is logged."""
    trace_step: NotNegative = 20
    """Step to measure for trace.json and timeline.png. 0: none."""
    profile: Profile | None = None
    """Records some steps operator by operator."""
    predict: bool = False
    """Before the first step, time each kind of layer and the links between ranks (some seconds), and write costs.json.
    The predicted step time is then logged beside the measured one."""
    samples: NotNegative = 16
    """Number of held-out samples in report.html."""
    max_new_tokens: Positive = 48
    """Maximum length of a generated answer in the report and in the accuracy [tokens]."""
    accuracy_samples: NotNegative = 512
    """Maximum number of held-out questions of each kind to answer at the end, to count correct answers. Kinds: those
    that the records of chats have as ``kind``. Each question is answered with its own media and, as a control, with
    those of another sample. 0: none."""

    @model_validator(mode="after")
    def _trackers_are_known(self) -> Log:
        for name in self.trackers:
            if name not in TRACKERS and not all(name.partition(":")):
                hint = close(name, TRACKERS) or "a class of one's own is 'package.module:Class'"
                raise ValueError(f"trackers: there is none called {name!r} ({', '.join(TRACKERS)}); {hint}")
            if self.trackers.count(name) > 1:
                raise ValueError(f"trackers names {name!r} twice")
        for name in self.tracker_options:
            if name not in self.trackers:
                raise ValueError(
                    f"tracker_options has settings of {name!r}, which log.trackers = {self.trackers} does not name"
                )
        return self
