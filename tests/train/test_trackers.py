"""Trackers: the calls to each library, the failures that they survive, and refusals before training."""

from __future__ import annotations

import importlib.util
import json
import math
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from interlace.train.config.load import ConfigError
from interlace.train.config.sections import Config
from interlace.train.observers.base import Outputs
from interlace.train.report import trackers
from interlace.train.report.metrics import LOSS, read_metrics
from interlace.train.report.trackers import plain
from interlace.train.trainer import Trainer
from tests.train.one_process import OneProcess, ToyModel, toy_config, toy_feed

LOSSES = {LOSS: 0.5, "throughput(samples/s)": 3.0, "odd": math.nan}


def config_of(*names: str, **options: Any) -> Config:
    config = toy_config(f"log.trackers={json.dumps(names)}")
    return config.model_copy(update={"log": config.log.model_copy(update={"tracker_options": options})})


class Recorded:
    """Records all calls to it and to its results."""

    def __init__(self, calls: list[Any], name: str) -> None:
        self.calls, self.name = calls, name

    def __getattr__(self, name: str) -> Recorded:
        if name.startswith("__"):
            raise AttributeError(name)
        return Recorded(self.calls, f"{self.name}.{name}")

    def __call__(self, *values: Any, **named: Any) -> Recorded:
        self.calls.append((self.name, values, named))
        return self


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Replacements of wandb, mlflow and trackio."""
    made: list[Any] = []

    def init(
        entity: Any = None, project: Any = None, name: Any = None, mode: Any = None, tags: Any = None, **ours: Any
    ) -> Any:
        made.append(("wandb.init", (), {"project": project, "name": name, "mode": mode, "tags": tags, **ours}))
        run = Recorded(made, "wandb.run")
        run.offline, run.url, run.summary = mode == "offline", "https://wandb/run", {}
        return run

    wandb: Any = ModuleType("wandb")
    wandb.init, wandb.teardown = init, lambda: None
    wandb.Settings = lambda **given: SimpleNamespace(base_url="https://api.wandb.ai", **given)
    wandb.Image = wandb.Html = lambda path: path

    def start(project: Any, name: Any = None, resume: Any = None, space_id: Any = None, **ours: Any) -> Any:
        made.append(("trackio.init", (), {"project": project, "name": name, "resume": resume, "space_id": space_id}))
        return Recorded(made, "trackio.run")

    trackio: Any = ModuleType("trackio")
    trackio.init, trackio.Image = start, lambda path: path
    client = Recorded(made, "mlflow")
    client.create_run = lambda *values, **named: (
        made.append(("mlflow.create_run", values, named)) or SimpleNamespace(info=SimpleNamespace(run_id="run-7"))
    )
    mlflow: Any = ModuleType("mlflow")
    mlflow.MlflowClient = lambda uri: made.append(("mlflow", (uri,), {})) or client
    entities: Any = ModuleType("mlflow.entities")
    entities.Metric = lambda name, value, _, step: (name, value, step)
    entities.Param = lambda name, value: (name, value)
    for module in (wandb, trackio, mlflow, entities):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_IDENTITY_TOKEN_FILE", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", "/nowhere")
    monkeypatch.setenv("HOME", "/nowhere")
    yield made


def told(config: Config, folder: Path, steps: range, status: str = "finished", start: int = 0) -> None:
    """A job that logs `steps`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "samples.png").write_bytes(b"")
    all_of_it = trackers.Trackers(config, folder, trackers.made(config))
    all_of_it.begin(start, lambda: [{"step": step, LOSS: 9.0} for step in range(1, start + 1)])
    for step in steps:
        all_of_it.log(step, LOSSES)
    all_of_it.show({"steps": 3}, [folder / "samples.png"])
    all_of_it.close(status)


def of(calls: list[Any], name: str) -> list[Any]:
    return [(values, named) for called, values, named in calls if called == name]


def test_wandb_resumes_one_run_id_and_is_offline_without_a_key(
    tmp_path: Path, calls: list[Any], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    config = config_of("wandb", wandb={"project": "reading", "tags": ["a"]})
    told(config, tmp_path / "toy" / "run", range(1, 7))
    told(config, tmp_path / "toy" / "run", range(5, 8), "stopped", start=4)
    first, second = (named for _, named in of(calls, "wandb.init"))
    assert first["id"] == second["id"] == "toy-run" and first["resume"] == "allow" and first["project"] == "reading"
    assert first["mode"] == "offline" and first["config"]["train"]["steps"] == 12 and first["tags"] == ["a"]
    # On disk a new folder begins with all that was logged, and steps after the checkpoint are logged again.
    assert [named["step"] for _, named in of(calls, "wandb.run.log")] == [*range(1, 7), *range(1, 5), 5, 6, 7]
    assert [named for _, named in of(calls, "wandb.run.finish")] == [{"exit_code": 0}, {"exit_code": 1}]
    assert "wandb has no key" in capfd.readouterr().out
    calls.clear()
    monkeypatch.setenv("WANDB_API_KEY", "k" * 40)
    told(config, tmp_path / "toy" / "run", range(5, 8), start=4)
    assert [named["mode"] for _, named in of(calls, "wandb.init")] == [None]
    assert [named["step"] for _, named in of(calls, "wandb.run.log")] == [5, 6, 7]  # its server drops duplicates


def test_mlflow_goes_on_in_one_run_without_doubled_points(tmp_path: Path, calls: list[Any]) -> None:
    config = config_of("mlflow", mlflow={"experiment": "reading"})
    told(config, tmp_path / "toy" / "run", range(1, 7), "failed")
    told(config, tmp_path / "toy" / "run", range(5, 9), start=4)
    assert of(calls, "mlflow")[0][0][0].endswith("runs/mlflow.db") and len(of(calls, "mlflow.create_run")) == 1
    assert of(calls, "mlflow.update_run") == [(("run-7",), {"status": "RUNNING"})]
    batches = [named["metrics"] for _, named in of(calls, "mlflow.log_batch") if "metrics" in named]
    assert [batch[0][2] for batch in batches] == list(range(1, 9))
    assert [name for name, *_ in batches[0]] == [LOSS, "throughput_samples_per_s"]  # without a number there is no point
    assert [values for values, _ in of(calls, "mlflow.set_terminated")] == [("run-7", "FAILED"), ("run-7", "FINISHED")]
    parameters = {name for _, named in of(calls, "mlflow.log_batch") for name, _ in named.get("params", ())}
    assert "train.lr" in parameters


def test_trackio_goes_on_in_one_run(tmp_path: Path, calls: list[Any]) -> None:
    config = config_of("trackio")
    told(config, tmp_path / "toy" / "run", range(1, 7))
    told(config, tmp_path / "toy" / "run", range(5, 9), start=4)
    assert [(named["name"], named["resume"]) for _, named in of(calls, "trackio.init")] == [
        ("run", "never"),
        ("run", "allow"),
    ]
    assert [named["step"] for _, named in of(calls, "trackio.run.log")] == [1, 2, 3, 4, 5, 6, 6, 7, 8, 8]


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("loss_metrics/held_out_loss", "loss_metrics/held_out_loss"),
        ("busy(%)/vision", "busy_percent/vision"),
        ("throughput(samples/s)", "throughput_samples_per_s"),
        ("memory/max_active(GiB)", "memory/max_active_GiB"),
    ],
)
def test_names_for_mlflow(name: str, wanted: str) -> None:
    assert plain(name) == wanted


def test_tensorboard_curve_is_right_after_kill_and_resume(tmp_path: Path) -> None:
    from matplotlib.image import imsave
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config = config_of("tensorboard")
    for steps, start in ((range(1, 7), 0), (range(5, 9), 4)):
        tracking = trackers.Trackers(config, tmp_path, trackers.made(config))
        tracking.begin(start)
        for step in steps:
            tracking.log(step, {LOSS: step + 0.5 * start})
        imsave(tmp_path / "samples.png", [[0.0, 1.0]])
        tracking.show({"steps": 8}, [tmp_path / "samples.png", tmp_path / "report.html"])
        tracking.close("finished")
    events = EventAccumulator(str(tmp_path / "tensorboard"), purge_orphaned_data=True)
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars(LOSS)] == [
        (1, 1), (2, 2), (3, 3), (4, 4), (5, 7), (6, 8), (7, 9), (8, 10)
    ]  # fmt: skip
    assert events.Images("samples") and events.Tensors("summary/text_summary")


class Own:
    """A custom tracker as users write it."""

    made: list[Own] = []
    fails = ""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.made.append(self)

    def begin(self, run: trackers.TrackedRun) -> None:
        run.kept["seen"] = [*run.kept.get("seen", []), run.step]
        self.run = run
        if self.fails == "begin":
            raise SystemExit("no network")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        if self.fails == "log":
            raise OSError(28, "No space left on device")
        self.calls.append(step)

    def show(self, summary: Mapping[str, Any], files: Any) -> None:
        self.calls.append(dict(summary))

    def close(self, status: str) -> None:
        self.calls.append(status)


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Own]]:
    monkeypatch.setattr(Own, "made", [])
    monkeypatch.setattr(Own, "fails", "")
    yield Own


NAME = f"{__name__}:Own"


def test_custom_tracker_gets_all_calls_and_keeps_its_state(tmp_path: Path, own: type[Own]) -> None:
    config = config_of(NAME, **{NAME: {"anything": 1}})
    told(config, tmp_path, range(1, 4))
    told(config, tmp_path, range(3, 6), "stopped", start=2)
    first, second = own.made[-2:]
    assert first.calls == [1, 2, 3, {"steps": 3}, "finished"] and second.calls == [4, 5, {"steps": 3}, "stopped"]
    assert second.run.kept == {"seen": [0, 2]} and second.run.options == {"anything": 1}
    assert second.run.folder == tmp_path and second.run.config["train"]["steps"] == 12
    assert [line["step"] for line in second.run.before()] == [1, 2]


@pytest.mark.parametrize("where", ["begin", "log"])
def test_failing_tracker_is_switched_off_with_one_warning(
    tmp_path: Path, own: type[Own], where: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(own, "fails", where)
    config = config_of(NAME)
    model = ToyModel()
    tracking = trackers.Trackers(config, tmp_path, trackers.made(config))
    trainer = Trainer(
        config, model, OneProcess(model), toy_feed(config), Outputs(tmp_path, trackers=tracking, quiet=True)
    )
    assert trainer.run()["finished"]
    tracking.close("finished")
    assert [line["step"] for line in read_metrics(tmp_path)] == list(range(1, 13))
    output = capfd.readouterr().err
    assert output.count("switched off") == 1 and ("no network" in output or "No space left on device" in output)


def test_a_tracker_that_waits_for_ever_keeps_nobody(
    tmp_path: Path, own: type[Own], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    never = threading.Event()
    monkeypatch.setattr(own, "log", lambda self, step, values: never.wait(60))
    monkeypatch.setattr(trackers, "CLOSING_SECONDS", {"finished": 0.05})
    config = config_of(NAME)
    tracking = trackers.Trackers(config, tmp_path, trackers.made(config))
    tracking.begin(0)
    for step in range(1, 10):
        tracking.log(step, LOSSES)
    tracking.close("finished")
    assert "does not end in time" in capfd.readouterr().err
    never.set()


def test_one_that_falls_too_far_behind_is_switched_off(
    tmp_path: Path, own: type[Own], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    never = threading.Event()
    monkeypatch.setattr(own, "begin", lambda self, run: never.wait(60))
    monkeypatch.setattr(trackers, "BEHIND", 5)
    config = config_of(NAME)
    tracking = trackers.Trackers(config, tmp_path, trackers.made(config))
    tracking.begin(0)
    for step in range(1, 10):
        tracking.log(step, LOSSES)
    never.set()
    tracking.close("finished")
    assert capfd.readouterr().err.count("is 5 logged steps behind") == 1


@pytest.mark.parametrize(
    ("names", "options", "message"),
    [
        (["nowhere_to_be_found:Class"], {}, "cannot import nowhere_to_be_found: No module named"),
        (["json:NoClass"], {}, "json has no 'NoClass'; valid: "),
        (["json:JSONDecoder"], {}, "lacks the method begin"),
        (["json:dumps"], {}, "lacks the method begin"),
        (["tensorboard"], {"tensorboard": {"dir": "x"}}, "tensorboard takes no options"),
        (["wandb"], {"wandb": {"projct": "x"}}, "has no key 'projct'; did you mean 'project'?"),
        (["wandb"], {"wandb": {"id": "x"}}, "has no key 'id'"),
    ],
)
def test_what_cannot_track_is_refused(calls: list[Any], names: list[str], options: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=r"^config: ") as refused:
        trackers.made(config_of(*names, **options))
    assert message in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "mlflow", "trackio"])
def test_a_missing_package_is_named_with_what_to_install(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setattr(trackers.importlib, "import_module", lambda module: _missing(module))
    with pytest.raises(ConfigError, match=f"{name} is not installed: pip install {name}, or take '{name}' out"):
        trackers.made(config_of(name))


def _missing(module: str) -> Any:
    package = module.rpartition(".")[2]  # torch.utils.tensorboard belongs to torch; its import does not
    raise ModuleNotFoundError(f"No module named {package!r}", name=package)


def test_what_fails_while_it_is_imported_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_that_is_broken.py").write_text("class Own:\n    def log(self:\n")
    (tmp_path / "mlflow.py").write_text("raise TypeError('Descriptors cannot be created directly.\\nDowngrade it')\n")
    monkeypatch.delitem(sys.modules, "mlflow", raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name, said in (
        ("own_that_is_broken:Own", "'own_that_is_broken:Own': cannot import own_that_is_broken: "),
        ("mlflow", "'mlflow': it cannot be imported: Descriptors cannot be created directly. Downgrade it, or take"),
    ):
        with pytest.raises(ConfigError, match=r"^config: log\.trackers") as refused:
            trackers.made(config_of(name))
        assert said in str(refused.value) and "\n" not in str(refused.value)


def test_kept_points_are_reported_and_missed_points_resent(
    tmp_path: Path, own: type[Own], calls: list[Any], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    config = config_of(NAME)
    told(config, tmp_path, range(1, 7))
    told(config, tmp_path, range(5, 8), "stopped", start=4)
    output = capfd.readouterr().out
    assert "goes on from step 4" in output and f"{NAME} keeps what it was told before of steps 5 to 6" in output
    told(config, tmp_path, range(12, 14), start=11)  # as if it was disabled after step 7
    assert [step for each in own.made for step in each.calls if isinstance(step, int)] == list(range(1, 14))
    assert "keeps what" not in capfd.readouterr().out
    monkeypatch.setenv("WANDB_API_KEY", "k" * 40)
    late = config_of("wandb")
    told(late, tmp_path, range(5, 7), start=4)  # it was not configured before
    told(late, tmp_path, range(6, 8), start=5)
    told(late, tmp_path, range(10, 11), start=9)
    assert [named["step"] for _, named in of(calls, "wandb.run.log")] == [1, 2, 3, 4, 5, 6, 6, 7, 8, 9, 10]
    assert "wandb is sent steps 6 to 6 again" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("log.trackers=['wanb']", "there is none called 'wanb' (tensorboard, wandb, mlflow, trackio); did you mean"),
        ("log.trackers=['wandb', 'wandb']", "names 'wandb' twice"),
        (
            "log.tracker_options={wandb={}}",
            "has settings of 'wandb', which log.trackers = ['tensorboard'] does not name",
        ),
        ("log.tensorboard=true", "[log] has no key 'tensorboard'"),
        ("log.profile={start=0}", "log.profile.start"),
        ("log.profile={start=13}", "log.profile.start = 13, but the run has 12 steps"),
        ("log.profile={start=1, ranks=[0, 1]}", "log.profile.ranks = [0, 1], but the run has 1 ranks"),
        ("log.profile={start=1, ranks='all'}", "log.profile.ranks should be a valid list"),
        ("log.profile={start=1, rank=[0]}", "[log.profile] has no key 'rank'; did you mean 'ranks'?"),
    ],
)
def test_bad_settings_are_one_line(override: str, message: str) -> None:
    from tests.train.one_process import TABLE

    table = json.loads(json.dumps(TABLE))
    del table["log"]["trackers"]
    from interlace.train.config import load as configs

    with pytest.raises(ConfigError) as refused:
        configs.from_table(table, [override])
    assert message in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["wandb", "mlflow", "trackio"])
def test_the_real_package(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed: pip install {name} to try it")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    config = config_of(name)
    config = config.model_copy(update={"run": config.run.model_copy(update={"folder": str(tmp_path)})})
    monkeypatch.setattr(trackers, "CLOSING_SECONDS", {"finished": 120.0, "stopped": 120.0})
    off: list[str] = []
    monkeypatch.setattr(trackers._Thread, "_switch_off", lambda self, reason: off.append(reason))
    folder = tmp_path / "toy" / "run"
    folder.mkdir(parents=True)
    for steps, start, status in ((range(1, 4), 0, "stopped"), (range(3, 6), 2, "finished")):
        tracking = trackers.Trackers(config, folder, trackers.made(config))
        tracking.begin(start)
        for step in steps:
            tracking.log(step, {LOSS: 1.0 / step, "busy(%)/vision": 1.0})
        tracking.close(status)
    assert off == []
    assert json.loads((folder / "trackers" / f"{name}.json").read_text())["last"] == 5
