"""What a run tells: ``[log]`` of a training config."""

from __future__ import annotations

import difflib
from typing import Annotated, Any

from pydantic import Field, model_validator

from interlace.train.schema_base import NotNegative, Positive, Section

TRACKERS = {"tensorboard": "torch.utils.tensorboard", "wandb": "wandb", "mlflow": "mlflow", "trackio": "trackio"}
"""Name of a tracker -> the module that it needs."""


class Profile(Section):
    """Which steps torch.profiler records: every operator and kernel, with the actions of the schedule around them."""

    start: Positive
    """The first step that is recorded; one before it warms the profiler up."""
    steps: Annotated[int, Field(gt=0, le=100)] = 3
    """How many are recorded. A file has some megabytes per step."""
    ranks: list[NotNegative] = [0]
    """The ranks that record, each into profile/rank-N.json.gz of the run folder; [] for all of them."""


class Log(Section):
    """What a run tells."""

    every: Positive = 10
    """Steps between two lines of metrics."""
    trackers: list[str] = ["tensorboard"]
    """Where metrics go besides metrics.jsonl: "tensorboard", "wandb", "mlflow", "trackio", or "package.module:Class", a
    class of one's own; [] for none. docs/watching-a-run.md says what each does."""
    tracker_options: dict[str, dict[str, Any]] = {}
    """Tracker -> settings of it, such as {wandb = {project = "reading"}}. wandb and trackio: what their init takes;
    mlflow: experiment, tracking_uri, run_name and tags; a class of one's own: what it likes."""
    peak_tflops: Annotated[float, Field(gt=0.0)] | None = None
    """What a rank's device could compute at most, in 1e12 operations per second, which mfu(%) is a share of; by default
    what is known of the GPU. Of others, and of CPUs, there is tflops alone."""
    trace_step: NotNegative = 20
    """The step whose measured actions become trace.json and timeline.png; 0 measures none."""
    profile: Profile | None = None
    """Record some steps operator by operator."""
    predict: bool = False
    """Before the first step, time each kind of layer and the links between ranks (some seconds), write costs.json, and
    tell how long a step should take beside how long it took."""
    samples: NotNegative = 16
    """How many held-out samples the page report.html shows."""
    max_new_tokens: Positive = 48
    """Longest generated answer on the page and in the accuracy, in tokens."""
    accuracy_samples: NotNegative = 512
    """At most so many held-out questions of each kind (the digits, chats whose records have a ``kind``) are answered at
    the end, with their media and with those of another sample, to count the right answers; 0 counts none."""

    @model_validator(mode="after")
    def _trackers_are_known(self) -> Log:
        for name in self.trackers:
            if name not in TRACKERS and not all(name.partition(":")):
                close = difflib.get_close_matches(name, TRACKERS, n=1)
                hint = f"did you mean {close[0]!r}?" if close else "a class of one's own is 'package.module:Class'"
                raise ValueError(f"trackers: there is none called {name!r} ({', '.join(TRACKERS)}); {hint}")
            if self.trackers.count(name) > 1:
                raise ValueError(f"trackers names {name!r} twice")
        for name in self.tracker_options:
            if name not in self.trackers:
                raise ValueError(
                    f"tracker_options has settings of {name!r}, which log.trackers = {self.trackers} does not name"
                )
        return self
