"""Trackers: TensorBoard, wandb, mlflow, trackio, or a user's class.

Rank 0 feeds them. Each tracker has its own thread and queue, so that a library that waits for the network does not
block training. A tracker that fails, or falls too far behind, is reported once and switched off. metrics.jsonl always
has every number.

The state of a tracker (its id of the run, the last step logged there) is stored in the run folder as
``trackers/NAME.json``. A resumed run continues the same tracked run. If it resumes from an earlier checkpoint, it
repeats some steps. A tracker that can take points back (`takes_back`) gets those steps again. Any other tracker keeps
the old points, and a message says so: the repeated steps are bit-identical only if nothing of the run was changed.
Steps that a tracker missed (it was switched off, or not named then) are sent when the run resumes.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import json
import logging
import math
import netrc
import os
import queue
import re
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlparse

from interlace._files import write_whole
from interlace._hints import nearest
from interlace._text import one_line
from interlace.train.config.load import ConfigError, imported
from interlace.train.config.log import TRACKERS
from interlace.train.config.sections import Config
from interlace.train.launch import launcher

BEHIND = 1000  # logged steps that a tracker may be behind
CLOSING_SECONDS = {"finished": 60.0, "stopped": 10.0, "failed": 10.0}  # maximum wait at the end of a run


@dataclass
class TrackedRun:
    """Run data passed to a tracker.

    name: of the experiment. folder: of this run. config: all of it, as plain tables. step: the step that the run
    resumes from; 0 for a new run. options: ``[log.tracker_options.NAME]``. before: the metrics of the steps up to it,
    one table per logged step. tracked: the last step that the tracker has; the steps after it, up to `step`, are sent
    after `begin`. A tracker that starts from scratch sets it to 0. kept: state of the tracker, as JSON values, kept in
    the run folder between resumes. say: prints a line for the user.
    """

    name: str
    folder: Path
    config: dict[str, Any]
    step: int
    options: dict[str, Any]
    before: Callable[[], list[dict[str, float]]] = list
    tracked: int = 0
    kept: dict[str, Any] = field(default_factory=dict)
    say: Callable[[str], None] = lambda line: launcher.say(f"interlace: {line}")


class Tracker(Protocol):
    """Destination of a run's metrics. All calls come from one thread. Any call may raise, which ends the tracking.

    A user's class has these methods and is created without arguments. With a true attribute `takes_back` it gets all
    steps after the one that the run resumes from, including those that it got before.
    """

    def begin(self, run: TrackedRun) -> None:
        """Begins or resumes the run."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Logs the metrics of a step, by name. Steps only grow."""

    def show(self, summary: Mapping[str, Any], files: Sequence[Path]) -> None:
        """Logs the closing numbers and the report files (report.html, samples.png)."""

    def close(self, status: str) -> None:
        """Ends the run: "finished", "stopped" (by a signal, to be resumed later) or "failed"."""


def made(config: Config, *, source: str = "config") -> dict[str, Tracker]:
    """Trackers of a config by name. Raises ConfigError for trackers that cannot be used here."""
    trackers: dict[str, Tracker] = {}
    for name in config.log.trackers:
        trackers[name], known = _tracker_of(name, f"{source}: log.trackers")
        for key in config.log.tracker_options.get(name, {}):
            if known is not None and key not in known:
                wrong = (
                    f" has no key {key!r}; {nearest(key, known)}" if known else f": {name} takes no options; remove it"
                )
                raise ConfigError(f"{source}: [log.tracker_options.{name}]{wrong}")
    return trackers


def _tracker_of(name: str, where: str) -> tuple[Tracker, Collection[str] | None]:
    """Tracker and its known options; None if it takes any. Raises ConfigError."""
    if name in TRACKERS:
        try:
            library = importlib.import_module(TRACKERS[name])
        except Exception as error:  # for example a TypeError from an incompatible version of another library
            hint = f"it cannot be imported: {one_line(error, None)}"
            if isinstance(error, ModuleNotFoundError) and error.name == name:  # packages have the names of the trackers
                hint = f"{name} is not installed: pip install {name}"
            raise ConfigError(f"{where}: {name!r}: {hint}, or take {name!r} out of log.trackers") from None
        derived = DERIVED.get(name)
        known = OPTIONS[name] if derived is None else inspect.signature(library.init).parameters.keys() - derived
        return KINDS[name](), known
    class_ = imported(name, where)
    missing = [method for method in ("begin", "log", "show", "close") if not callable(getattr(class_, method, None))]
    if not isinstance(class_, type) or missing:
        what = f"lacks the method {missing[0]}" if missing else "is no class"
        raise ConfigError(f"{where}: {name!r} {what}; a tracker is a class with begin, log, show and close")
    try:
        return class_(), None
    except Exception as error:
        raise ConfigError(f"{where}: {name!r} cannot be made without arguments: {error}") from None


class Trackers:
    """All trackers of a run, on rank 0; empty on the other ranks."""

    def __init__(self, config: Config, folder: Path, found: Mapping[str, Tracker]) -> None:
        self.config, self.folder, self.found = config, folder, found
        self.threads: list[_Thread] = []

    def begin(self, step: int, before: Callable[[], list[dict[str, float]]] = list) -> None:
        """Begins or resumes the run at `step`; `before` returns the metrics up to it."""
        table = self.config.model_dump(exclude_none=True)
        for name, tracker in self.found.items():
            options = dict(self.config.log.tracker_options.get(name, {}))
            run = TrackedRun(self.config.run.name, self.folder.absolute(), table, step, options, before)
            self.threads.append(_Thread(name, tracker, run))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Queues the metrics of a step without blocking."""
        for thread in self.threads:
            thread.put(partial(thread.log, step, values))

    def show(self, summary: Mapping[str, Any], files: Sequence[Path]) -> None:
        """Queues the closing numbers and files."""
        for thread in self.threads:
            thread.put(partial(thread.tracker.show, summary, files))

    def close(self, status: str) -> None:
        """Closes the trackers, unless closed already, and waits for them up to `CLOSING_SECONDS`."""
        for thread in self.threads:
            thread.put(partial(thread.tracker.close, status))
            thread.put(None)
        deadline = time.monotonic() + CLOSING_SECONDS[status]
        for thread in self.threads:
            thread.join(deadline)
        self.threads = []


class _Thread:
    """Thread and queue of one tracker."""

    def __init__(self, name: str, tracker: Tracker, run: TrackedRun) -> None:
        self.name, self.tracker, self.run = name, tracker, run
        self.waiting: queue.Queue[Callable[[], None] | None] = queue.Queue(BEHIND)
        self.off = False
        self.last = 0
        self.place = run.folder / "trackers" / f"{name.replace(':', '.')}.json"
        self.thread = threading.Thread(target=self._work, name=f"tracker-{name}", daemon=True)
        self.thread.start()
        self.put(self._begin)

    def _begin(self) -> None:
        run, takes_back = self.run, getattr(self.tracker, "takes_back", False)
        if run.step and self.place.exists():
            table = json.loads(self.place.read_text(encoding="utf-8"))
            run.kept, run.tracked = dict(table["kept"]), int(table["last"])
        if run.tracked > run.step and not takes_back:
            run.say(
                f"the run goes on from step {run.step}, and the tracker {self.name} keeps what it was told before of "
                f"steps {run.step + 1} to {run.tracked}; metrics.jsonl has them as they are trained now"
            )
        self.tracker.begin(run)
        self.last = min(run.tracked, run.step) if takes_back else run.tracked
        for line in run.before() if self.last < run.step else ():
            self.log(int(line["step"]), {name: value for name, value in line.items() if name != "step"})
        self._keep()

    def log(self, step: int, values: Mapping[str, float]) -> None:
        if step > self.last:
            self.tracker.log(step, values)
            self.last = step
            self._keep()

    def _keep(self) -> None:
        self.place.parent.mkdir(exist_ok=True)
        write_whole(self.place, json.dumps({"last": self.last, "kept": self.run.kept}))

    def put(self, work: Callable[[], None] | None) -> None:
        """Queues `work`; None ends the thread."""
        try:
            if not self.off:
                self.waiting.put_nowait(work)
        except queue.Full:
            self._switch_off(f"it is {BEHIND} logged steps behind")

    def join(self, deadline: float) -> None:
        if self.off:
            return
        self.thread.join(max(deadline - time.monotonic(), 0.0))
        if self.thread.is_alive():
            self._switch_off("it does not end in time, and may lack what it was told last")

    def _work(self) -> None:
        while not self.off and (work := self.waiting.get()) is not None:
            try:
                work()
            except (Exception, SystemExit) as error:
                self._switch_off(f"{type(error).__name__}: {one_line(error, 300)}")

    def _switch_off(self, reason: str) -> None:
        if not self.off:
            self.off = True
            launcher.say_error(
                f"interlace: the tracker {self.name} is switched off, metrics.jsonl has all numbers: {reason}"
            )


def finite(values: Mapping[str, float]) -> dict[str, float]:
    """Finite values only: some trackers reject a whole step for one value that is not finite."""
    return {name: float(value) for name, value in values.items() if math.isfinite(value)}


# ---------------------------------------------------------------------- trackers known by name

# No tracker asks for a login: wandb without a key writes to disk; mlflow and trackio are local unless their options or
# environment variables say otherwise. Each library is imported only if the config names it.


class TensorBoard:
    """Event files in the run folder. Events of a killed run after the resumed step are hidden."""

    takes_back = True

    def begin(self, run: TrackedRun) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.board = SummaryWriter(str(run.folder / "tensorboard"), purge_step=run.step + 1 if run.step else None)
        self.step = run.step

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self.board.add_scalar(name, value, step)
        self.board.flush()
        self.step = step

    def show(self, summary: Mapping[str, Any], files: Sequence[Path]) -> None:
        from matplotlib.image import imread

        table = "".join(f"| {name} | {value} |\n" for name, value in summary.items())
        self.board.add_text("summary", f"| | |\n|---|---|\n{table}", self.step)
        for file in files:
            if file.suffix == ".png":
                self.board.add_image(file.stem, imread(str(file))[:, :, :3], self.step, dataformats="HWC")

    def close(self, status: str) -> None:
        self.board.close()


class Wandb:
    """Weights & Biases, with one id for all resumes of a run; offline if no key is configured.

    The server decides how to treat steps that it receives again. Offline, each resume writes a new folder, and a killed
    run loses what it had not written yet. Each folder therefore begins with all earlier metrics, and the newest one is
    complete.
    """

    takes_back = True

    def begin(self, run: TrackedRun) -> None:
        import wandb

        run.kept.setdefault("id", f"{run.folder.parent.name}-{run.folder.name}".replace(":", "-")[:128])
        options = {"project": run.name, "name": run.folder.name, **run.options}
        place = run.folder / "wandb" / "latest-run"
        mode = options.pop("mode", None) or os.environ.get("WANDB_MODE")
        if mode is None and not _has_wandb_key(wandb.Settings().base_url):
            mode = "offline"
            run.say(f"wandb has no key (wandb login), so it writes to disk: wandb sync {place} sends the run")

        init = partial(
            wandb.init,
            dir=str(run.folder),
            id=run.kept["id"],
            resume="allow",
            config=run.config,
            settings=wandb.Settings(silent=True, console="off", init_timeout=30),
            **options,
        )
        try:
            self.run = init(mode=mode)
        except Exception as error:
            if mode not in (None, "online"):
                raise
            wandb.teardown()
            reason = one_line(error)
            run.say(f"wandb cannot be reached, so it writes to disk: wandb sync {place} sends it ({reason})")
            self.run = init(mode="offline")
        if self.run.offline:
            run.tracked = 0
        else:
            run.say(f"wandb: {self.run.url}")
            if run.tracked > run.step:
                again = f"steps {run.step + 1} to {run.tracked} again"
                run.say(
                    f"the run goes on from step {run.step}, and wandb is sent {again}; its server may keep what it "
                    "has of them; metrics.jsonl has them as they are trained now"
                )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self.run.log(dict(values), step=step)

    def show(self, summary: Mapping[str, Any], files: Sequence[Path]) -> None:
        import wandb

        self.run.summary.update(dict(summary))
        for file in files:
            kind = wandb.Image if file.suffix == ".png" else wandb.Html
            self.run.summary[file.stem] = kind(str(file))

    def close(self, status: str) -> None:
        self.run.finish(exit_code=0 if status == "finished" else 1)


def _has_wandb_key(server: str) -> bool:
    """True if wandb can log in without asking: a key in a variable or in the file written by `wandb login`."""
    if any(os.environ.get(name) for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE")):
        return True
    host = urlparse(server).hostname
    for place in (os.environ.get("NETRC"), "~/.netrc", "~/_netrc"):
        with contextlib.suppress(OSError, netrc.NetrcParseError):
            if place and host and netrc.netrc(os.path.expanduser(place)).authenticators(host):
                return True
    return False


class Mlflow:
    """One mlflow run for all resumes of a run; by default in ``mlflow.db`` in the folder of all runs."""

    def begin(self, run: TrackedRun) -> None:
        for name in ("mlflow", "alembic"):  # they log every table that they create
            logging.getLogger(name).setLevel(logging.WARNING)
        from mlflow import MlflowClient
        from mlflow.entities import Param

        folder = Path(run.config["run"]["folder"]).absolute()
        uri = run.options.get("tracking_uri") or os.environ.get("MLFLOW_TRACKING_URI")
        self.client = MlflowClient(uri or f"sqlite:///{folder / 'mlflow.db'}")
        if "run_id" in run.kept:
            self.id = run.kept["run_id"]
            self.client.update_run(self.id, status="RUNNING")
            return
        name = run.options.get("experiment", run.name)
        experiment = self.client.get_experiment_by_name(name)
        place = None if uri else (folder / "mlartifacts" / name).as_uri()
        number = experiment.experiment_id if experiment else self.client.create_experiment(name, place)
        tags = {"interlace.folder": str(run.folder), **run.options.get("tags", {})}
        made = self.client.create_run(number, tags=tags, run_name=run.options.get("run_name", run.folder.name))
        self.id = run.kept["run_id"] = made.info.run_id
        parameters = [Param(plain(key), str(value)[:500]) for key, value in _flat(run.config)]
        for start in range(0, len(parameters), 100):  # maximum of one call
            self.client.log_batch(self.id, params=parameters[start : start + 100])
        if not uri:
            run.say(f"mlflow: mlflow ui --backend-store-uri sqlite:///{folder / 'mlflow.db'}")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        points = [Metric(plain(name), value, now, step) for name, value in finite(values).items()]
        self.client.log_batch(self.id, metrics=points)

    def show(self, summary: Mapping[str, Any], files: Sequence[Path]) -> None:
        self.client.log_dict(self.id, dict(summary), "summary.json")
        for file in files:
            self.client.log_artifact(self.id, str(file))

    def close(self, status: str) -> None:
        self.client.set_terminated(self.id, {"finished": "FINISHED", "stopped": "KILLED"}.get(status, "FAILED"))


def plain(name: str) -> str:
    """Name for mlflow, without brackets and percent signs: throughput(samples/s) -> throughput_samples_per_s."""
    unit = re.sub(r"\(([^)]*)\)", lambda found: "_" + found[1].replace("%", "percent").replace("/", "_per_"), name)
    return re.sub(r"[^\w./ -]", "_", unit)


def _flat(table: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        name = f"{path}.{key}" if path else str(key)
        if isinstance(value, Mapping):
            yield from _flat(value, name)
        else:
            yield name, value


class Trackio:
    """trackio, local unless its options name a Space or a server; `trackio show` opens it."""

    def begin(self, run: TrackedRun) -> None:
        import trackio

        options = {"project": run.name, "auto_log_gpu": False, "auto_log_cpu": False, **run.options}
        self.run = trackio.init(
            name=run.folder.name, config=run.config, resume="allow" if run.step else "never", embed=False, **options
        )
        self.step = run.step

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self.run.log(finite(values), step=step)
        self.step = step

    def show(self, summary: Mapping[str, Any], files: Sequence[Path]) -> None:
        import trackio

        pictures = {file.stem: trackio.Image(str(file)) for file in files if file.suffix == ".png"}
        if pictures:
            self.run.log(pictures, step=self.step)

    def close(self, status: str) -> None:
        self.run.finish()


KINDS: Mapping[str, type[Tracker]] = {"tensorboard": TensorBoard, "wandb": Wandb, "mlflow": Mlflow, "trackio": Trackio}
DERIVED = {
    "wandb": {"dir", "id", "config", "resume", "settings"},
    "trackio": {"name", "config", "resume", "settings", "embed"},
}
"""Arguments of the library's ``init`` that follow from the run. The config may set the others."""
OPTIONS = {"tensorboard": (), "mlflow": ("experiment", "tracking_uri", "run_name", "tags")}
"""Keys that the config may set, of the other trackers."""
