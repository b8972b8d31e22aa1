"""Where a run's numbers go besides metrics.jsonl: TensorBoard, wandb, mlflow, trackio, or a class of the user's own.

Rank 0 tells them. Each has a thread of its own, because a library that waits for a network would have the training
wait with it: what there is to log is put into a queue, and a tracker that fails, or that falls too far behind, is told
of once and switched off. metrics.jsonl has every number whatever becomes of trackers.

What a tracker has to remember of a run (the id of it there, the last step that it was told) lies in the run folder as
``trackers/NAME.json``. A run that goes on goes on there too. Where it was killed and went back to a checkpoint it comes
by some steps again: a tracker that can take points back does so, any other is not told of those steps twice, keeps what
it has of them, and a line says so: they repeat bit for bit only where nothing of the run was changed. Steps that a
tracker misses (it was switched off, or was not named then) it is told when the run goes on.
"""

from __future__ import annotations

import importlib
import json
import math
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from interlace.train.config import ConfigError, imported, nearest
from interlace.train.launch import launcher
from interlace.train.runfolder import write_whole
from interlace.train.schema import Config
from interlace.train.schema_log import TRACKERS

BEHIND = 1000  # logged steps that a tracker may be behind
CLOSING_SECONDS = {"finished": 60.0, "stopped": 10.0, "failed": 10.0}  # that the end of a run waits for its trackers


@dataclass
class TrackedRun:
    """What a tracker is told of a run.

    name: of the experiment. folder: of this run. config: all of it, as plain tables. step: the run goes on from; 0 if
    it begins. options: ``[log.tracker_options.NAME]``. before: the metrics of the steps up to it, one table a logged
    step. told: the last step that the tracker was told before; those after it, up to `step`, it is told once it has
    begun. One that begins anew sets it to 0. kept: what the tracker has put there, of JSON, when the run began or last
    went on; it stays in the run folder. say: a line for the user.
    """

    name: str
    folder: Path
    config: dict[str, Any]
    step: int
    options: dict[str, Any]
    before: Callable[[], list[dict[str, float]]] = list
    told: int = 0
    kept: dict[str, Any] = field(default_factory=dict)
    say: Callable[[str], None] = lambda line: launcher.say(f"interlace: {line}")


class Tracker(Protocol):
    """One place that a run's numbers go to. All calls come from one thread; any may raise, which ends the tracking.

    A class of one's own has these methods and is made without arguments. With an attribute `takes_back` that is true it
    is told all steps after the one that a run goes on from, also those that it was told before.
    """

    def begin(self, run: TrackedRun) -> None:
        """The run begins, or goes on."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """The metrics of a logged step, by name. Steps only grow."""

    def show(self, summary: Mapping[str, Any], files: Sequence[Path]) -> None:
        """The closing numbers, and the files that show the run (report.html, samples.png)."""

    def close(self, status: str) -> None:
        """The run has ended: "finished", "stopped" (by a signal, to go on later) or "failed"."""


def check(config: Config, *, source: str = "config") -> None:
    """Raises ConfigError for trackers that cannot be used here: before anything is made or trained."""
    made(config, source=source)


def made(config: Config, *, source: str = "config") -> dict[str, Tracker]:
    """The trackers of a config by name. Raises ConfigError as `check`."""
    found: dict[str, Tracker] = {}
    for name in config.log.trackers:
        options = config.log.tracker_options.get(name, {})
        tracker, known = _tracker_of(name, f"{source}: log.trackers")
        unknown = [key for key in options if known is not None and key not in known]
        if unknown:
            if not known:
                raise ConfigError(f"{source}: [log.tracker_options.{name}]: {name} takes no options; remove it")
            raise ConfigError(
                f"{source}: [log.tracker_options.{name}] has no key {unknown[0]!r}; {nearest(unknown[0], known)}"
            )
        found[name] = tracker
    return found


def _tracker_of(name: str, where: str) -> tuple[Tracker, set[str] | None]:
    """A tracker, and the options that it knows; None: it takes any. Raises ConfigError."""
    from interlace.train import trackers_known

    if name in TRACKERS:
        try:
            library = importlib.import_module(TRACKERS[name])
        except Exception as error:  # such as a TypeError of another library, of a version that does not fit
            hint = f"it cannot be imported: {' '.join(str(error).split()) or type(error).__name__}"
            if isinstance(error, ModuleNotFoundError) and error.name == name:  # packages are called as trackers are
                hint = f"{name} is not installed: pip install {name}"
            raise ConfigError(f"{where}: {name!r}: {hint}, or take {name!r} out of log.trackers") from None
        kind = trackers_known.KINDS[name]
        return kind(), kind.options(library)
    found = imported(name, where)
    missing = [method for method in ("begin", "log", "show", "close") if not callable(getattr(found, method, None))]
    if not isinstance(found, type) or missing:
        what = f"lacks the method {missing[0]}" if missing else "is no class"
        raise ConfigError(f"{where}: {name!r} {what}; a tracker is a class with begin, log, show and close")
    try:
        return found(), None
    except Exception as error:
        raise ConfigError(f"{where}: {name!r} cannot be made without arguments: {error}") from None


class Trackers:
    """All trackers of a run, on rank 0; none on the others."""

    def __init__(self, config: Config, folder: Path, found: Mapping[str, Tracker]) -> None:
        self.config, self.folder = config, folder
        self.threads = [_Thread(name, tracker) for name, tracker in found.items()]

    def begin(self, step: int, before: Callable[[], list[dict[str, float]]] = list) -> None:
        """The run begins, or goes on from `step`; `before` gives the metrics up to it."""
        table = self.config.model_dump(exclude_none=True)
        for thread in self.threads:
            options = dict(self.config.log.tracker_options.get(thread.name, {}))
            thread.begin(TrackedRun(self.config.run.name, self.folder.absolute(), table, step, options, before))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """The metrics of a step; nobody waits for it."""
        for thread in self.threads:
            thread.put(lambda thread=thread: thread.log(step, values))  # type: ignore[misc]

    def show(self, summary: Mapping[str, Any], files: Sequence[Path]) -> None:
        """The closing numbers and files."""
        for thread in self.threads:
            thread.put(lambda thread=thread: thread.tracker.show(summary, files))  # type: ignore[misc]

    def close(self, status: str) -> None:
        """Tell them that the run has ended, if nobody has yet, and wait for them, but not for long."""
        for thread in self.threads:
            thread.put(lambda thread=thread: thread.tracker.close(status))  # type: ignore[misc]
            thread.put(None)
        deadline = time.monotonic() + CLOSING_SECONDS[status]
        for thread in self.threads:
            thread.join(deadline)
        self.threads = []


class _Thread:
    """The thread of one tracker, and what waits there to be told."""

    def __init__(self, name: str, tracker: Tracker) -> None:
        self.name, self.tracker = name, tracker
        self.waiting: queue.Queue[Callable[[], None] | None] = queue.Queue(BEHIND)
        self.off = False
        self.thread: threading.Thread | None = None
        self.last = 0
        self.place = Path()
        self.run: TrackedRun | None = None

    def begin(self, run: TrackedRun) -> None:
        self.run = run
        self.place = run.folder / "trackers" / f"{self.name.replace(':', '.')}.json"
        self.thread = threading.Thread(target=self._work, name=f"tracker-{self.name}", daemon=True)
        self.thread.start()
        self.put(self._begin)

    def _begin(self) -> None:
        assert self.run is not None
        run, takes_back = self.run, getattr(self.tracker, "takes_back", False)
        if run.step and self.place.exists():
            table = json.loads(self.place.read_text(encoding="utf-8"))
            run.kept, run.told = dict(table["kept"]), int(table["last"])
        if run.told > run.step and not takes_back:
            run.say(
                f"the run goes on from step {run.step}, and the tracker {self.name} keeps what it was told before of "
                f"steps {run.step + 1} to {run.told}; metrics.jsonl has them as they are trained now"
            )
        self.tracker.begin(run)
        self.last = min(run.told, run.step) if takes_back else run.told
        for line in run.before() if self.last < run.step else ():
            self.log(int(line["step"]), {name: value for name, value in line.items() if name != "step"})
        self._keep()

    def log(self, step: int, values: Mapping[str, float]) -> None:
        if step > self.last:
            self.tracker.log(step, values)
            self.last = step
            self._keep()

    def _keep(self) -> None:
        assert self.run is not None
        self.place.parent.mkdir(exist_ok=True)
        write_whole(self.place, json.dumps({"last": self.last, "kept": self.run.kept}))

    def put(self, work: Callable[[], None] | None) -> None:
        """Have `work` done, after all before it; None ends the thread."""
        if self.off or self.thread is None:
            return
        try:
            self.waiting.put_nowait(work)
        except queue.Full:
            self._switch_off(f"it is {BEHIND} logged steps behind")

    def join(self, deadline: float) -> None:
        if self.thread is None or self.off:
            return
        self.thread.join(max(deadline - time.monotonic(), 0.0))
        if self.thread.is_alive():
            self._switch_off("it does not end in time, and may lack what it was told last")

    def _work(self) -> None:
        while not self.off and (work := self.waiting.get()) is not None:
            try:
                work()
            except (Exception, SystemExit) as error:
                reason = " ".join(str(error).split()) or type(error).__name__
                self._switch_off(f"{type(error).__name__}: {reason[:300]}")

    def _switch_off(self, reason: str) -> None:
        if not self.off:
            self.off = True
            launcher.say_error(
                f"interlace: the tracker {self.name} is switched off, metrics.jsonl has all numbers: {reason}"
            )


def finite(values: Mapping[str, float]) -> dict[str, float]:
    """Those of the values that are numbers: some trackers refuse a whole step for one that is none."""
    return {name: float(value) for name, value in values.items() if math.isfinite(value)}
