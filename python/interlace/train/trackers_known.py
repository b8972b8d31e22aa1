"""The trackers that are known by name, each with its own library, which is imported only where the config names it.

None of them asks for a login: wandb without a key writes to disk, mlflow and trackio are local unless their options
or variables say otherwise.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import netrc
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

from interlace.train.trackers import TrackedRun, finite


class TensorBoard:
    """Event files in the run folder. What a killed run wrote after the step that it goes on from is hidden."""

    takes_back = True

    @staticmethod
    def options(library: Any) -> set[str]:
        """What its options may be."""
        return set()

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
    """Weights & Biases, under one id however often the run goes on; on disk alone where no key is configured.

    What its server makes of steps that it is sent again is its own business. On disk a folder is written each time a
    run goes on, and what a killed run had not written yet is lost: so the folder begins with all that was logged
    before, and the newest has the run.
    """

    takes_back = True
    OURS = ("dir", "id", "config", "resume", "settings")

    @classmethod
    def options(cls, library: Any) -> set[str]:
        """What `wandb.init` takes, but for what follows from the run."""
        return {name for name in inspect.signature(library.init).parameters if name not in cls.OURS}

    def begin(self, run: TrackedRun) -> None:
        import wandb

        run.kept.setdefault("id", f"{run.folder.parent.name}-{run.folder.name}".replace(":", "-")[:128])
        options = {"project": run.name, "name": run.folder.name, **run.options}
        place = run.folder / "wandb" / "latest-run"
        mode = options.pop("mode", None) or os.environ.get("WANDB_MODE")
        if mode is None and not _has_wandb_key(wandb.Settings().base_url):
            mode = "offline"
            run.say(f"wandb has no key (wandb login), so it writes to disk: wandb sync {place} sends the run")

        def init(mode: str | None) -> Any:
            return wandb.init(
                dir=str(run.folder),
                id=run.kept["id"],
                resume="allow",
                config=run.config,
                mode=mode,
                settings=wandb.Settings(silent=True, console="off", init_timeout=30),
                **options,
            )

        try:
            self.run = init(mode)
        except Exception as error:
            if mode not in (None, "online"):
                raise
            wandb.teardown()
            reason = " ".join(str(error).split())[:200]
            run.say(f"wandb cannot be reached, so it writes to disk: wandb sync {place} sends it ({reason})")
            self.run = init("offline")
        if self.run.offline:
            run.told = 0
        else:
            run.say(f"wandb: {self.run.url}")
            if run.told > run.step:
                again = f"steps {run.step + 1} to {run.told} again"
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
    """Whether wandb can log in without asking: a key in a variable or in the file where `wandb login` puts it."""
    if any(os.environ.get(name) for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE")):
        return True
    host = urlparse(server).hostname
    for place in (os.environ.get("NETRC"), "~/.netrc", "~/_netrc"):
        with contextlib.suppress(OSError, netrc.NetrcParseError):
            if place and host and netrc.netrc(os.path.expanduser(place)).authenticators(host):
                return True
    return False


class Mlflow:
    """An mlflow run, one however often the run goes on: by default in ``mlflow.db`` in the folder of all runs."""

    @staticmethod
    def options(library: Any) -> set[str]:
        """What its options may be."""
        return {"experiment", "tracking_uri", "run_name", "tags"}

    def begin(self, run: TrackedRun) -> None:
        for name in ("mlflow", "alembic"):  # they tell every table that they make
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
        for start in range(0, len(parameters), 100):  # as many as a call may have
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
    """A name for mlflow, which takes no brackets and percents: throughput(samples/s) -> throughput_samples_per_s."""
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
    """trackio, on this machine unless its options name a Space or a server: `trackio show` opens it."""

    OURS = ("name", "config", "resume", "settings", "embed")

    @classmethod
    def options(cls, library: Any) -> set[str]:
        """What `trackio.init` takes, but for what follows from the run."""
        return {name for name in inspect.signature(library.init).parameters if name not in cls.OURS}

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


KINDS: Mapping[str, Any] = {"tensorboard": TensorBoard, "wandb": Wandb, "mlflow": Mlflow, "trackio": Trackio}
"""Name -> its class, which has also ``options``: what the config may set."""
