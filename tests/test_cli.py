"""Command line, end to end on tiny models: output, files and failures."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from interlace.cli import main
from interlace.comm.transports import capabilities
from interlace.train.report.metrics import read_metrics
from tests.cli import TINY

ROOT = Path(__file__).parents[1]


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.toml"
    path.write_text(TINY.format(folder=tmp_path))
    return path


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Runs the program in the test process and restores the torch settings that it changes."""
    for variable in ("RANK", "WORLD_SIZE", "INTERLACE_LAUNCHER"):
        monkeypatch.delenv(variable, raising=False)
    deterministic, threads = torch.are_deterministic_algorithms_enabled(), torch.get_num_threads()
    yield
    torch.use_deterministic_algorithms(deterministic)
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a finished run of two ranks; its output is discarded."""
    folder = tmp_path_factory.mktemp("trained")
    config = folder / "tiny.toml"
    config.write_text(TINY.format(folder=folder))
    process = _start("train", config)
    assert process.stdout is not None
    assert any(line.startswith("run folder: ") for line in iter(process.stdout.readline, ""))
    process.stdout.close()
    code = process.wait(timeout=600)
    assert code == 0, (_folder(config) / "logs" / "rank-0.log").read_text()
    return _folder(config)


def _environment() -> dict[str, str]:
    path = os.pathsep.join([str(ROOT / "python"), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}


def _start(*arguments: object, module: str = "interlace", **environment: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", module, *map(str, arguments)]
    environment = _environment() | environment
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, cwd=ROOT
    )


def _folder(config: Path) -> Path:
    return (config.parent / "tiny" / "latest").resolve()


def _curve(folder: Path) -> list[Any]:
    return [(line["step"], line["loss_metrics/global_avg_loss"]) for line in read_metrics(folder)]


def _wait_for(check: Any, process: subprocess.Popen[str], seconds: float = 600.0) -> None:
    deadline = time.monotonic() + seconds
    while not check():
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            raise AssertionError(f"it never came to pass; output: {process.communicate()[0]}")
        time.sleep(0.02)


def _ranks(launcher: int) -> dict[int, int]:
    """rank -> process id of the launcher's children."""
    result = {}
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if int((path / "stat").read_text().rsplit(")", 1)[1].split()[1]) == launcher:
                variables = (path / "environ").read_bytes().split(b"\0")
                result[next(int(v[5:]) for v in variables if v.startswith(b"RANK="))] = int(path.name)
        except (OSError, StopIteration, ValueError):
            continue
    return result


def test_help_and_wrong_options_answer_without_loading_torch(capfd: pytest.CaptureFixture[str]) -> None:
    code = "import sys; from interlace.cli import main\ntry: main(['--help'])\nexcept SystemExit: pass\n"
    code += "assert 'torch' not in sys.modules and 'rich' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], env=_environment(), capture_output=True, text=True, check=True)
    code = "import sys; from interlace.cli import main\nassert main(['train', 'missing.toml']) == 2\n"
    code += "assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], env=_environment(), capture_output=True, check=True)
    for command in ("train", "generate", "doctor", "mask", "plan", "simulate"):
        assert command in done.stdout
    assert main([]) == 0
    assert "simulate" in capfd.readouterr().out
    with pytest.raises(SystemExit) as error:
        main(["trian"])
    assert error.value.code == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["train", "{}", "--set", "train.stesp=3"],
            "interlace: --set train.stesp=3: [train] has no key 'stesp'; did you",
        ),
        (["train", "missing.toml"], "interlace: missing.toml: cannot read the config: No such file"),
        (["train"], "interlace: train needs a config"),
        (["train", "{}", "--resume"], "no run with a checkpoint under"),
        (["train", "{}", "--set", "model.vision.config.hiden_size=3"], "did you mean 'hidden_size'?"),
        (["train", "{}", "--set", "parallel.language_model.pp=9", "--set", "parallel.ranks=1"], "only 2 layers"),
        (["plan", "{}", "--ranks", "99"], "cannot cut"),
        (["mask", "{}", "--samples", "0"], "--samples 0: at least 1"),
        (["mask", "{}", "--out", "{}/mask.png"], "tiny.toml/mask.png: cannot write there: "),
        (["simulate", "{}", "--tflops", "1", "--out", "{}"], "tiny.toml: cannot write there: "),
        (["train", "{}", "--set", "model.language_model.config.vocab_size=9"], "raise it to 264"),
        (["train", "{}", "--set", "train.steps=many"], "train.steps should be a valid integer"),
        (
            ["train", "{}", "--set", "train.lr=inf"],
            "train.lr should be less than or equal to 1000000, not the float inf",
        ),
        (
            ["train", "{}", "--set", "model.language_model.config.num_hidden_layers=0"],
            "must be between 1 and 10,000, not",
        ),
        (
            ["train", "{}", "--set", "log.trackers=['nowhere_at_all:Tracker']"],
            "log.trackers = 'nowhere_at_all:Tracker': cannot import nowhere_at_all: No module named 'nowhere_at_all'",
        ),
        (["train", "{}", "--take-over"], "--take-over is for going on in a run folder; name it with --resume"),
        (["generate", "nowhere"], "nowhere: no such run folder"),
    ],
)
def test_errors_of_users_are_one_line(
    tiny: Path, arguments: list[str], message: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    assert main([argument.format(tiny) for argument in arguments]) == 2
    output = capfd.readouterr().err
    assert message in output and "Traceback" not in output and len(output.strip().splitlines()) == 1


def test_ranks_that_do_not_match_are_refused(
    tiny: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.delenv("INTERLACE_LAUNCHER", raising=False)
    assert main(["train", str(tiny)]) == 2
    assert "[parallel] asks for 2 ranks" in (output := capfd.readouterr().err) and "but 3 were started" in output


def test_training_writes_its_run_folder_with_stdout_closed(trained: Path) -> None:
    for name in ("config.toml", "trace.json", "timeline.png", "mask.png", "report.html", "samples.png"):
        assert (trained / name).stat().st_size > 100, name
    assert {path.name for path in (trained / "checkpoints").iterdir()} == {"step-00000004", "step-00000006"}
    summary = json.loads((trained / "summary.json").read_text())
    assert summary["steps"] == 6 and 0 <= summary["digit_accuracy"] <= 1
    assert summary["uniform_byte_baseline"] == pytest.approx(5.545, abs=1e-3)
    assert not (trained / "run.lock").exists()


def test_one_rank_trains_what_two_do(
    trained: Path, tiny: Path, in_process: None, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", str(tiny), "--set", "parallel.ranks=1", "--set", "log.samples=0"]) == 0
    output = capfd.readouterr().out
    assert re.search(r"held out loss .* nats per token", output) and "unigram byte baseline" in output
    one, two = _curve(_folder(tiny)), _curve(trained)
    assert [step for step, _ in one] == [step for step, _ in two] == list(range(1, 7))
    assert [loss for _, loss in one] == pytest.approx([loss for _, loss in two], rel=1e-4)


def test_prompts_of_a_class_of_ones_own_are_not_guessed(
    trained: Path, in_process: None, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", str(trained), "--text", "x"]) == 2
    assert "the prompts of data.dataset = 'tests.digits:Digits' are not known here" in capfd.readouterr().err


@pytest.mark.slow
def test_resumed_run_locks_its_folder_and_stops_on_sigterm(
    trained: Path, tmp_path: Path, in_process: None, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = Path(shutil.copytree(trained, tmp_path / "run"))
    before = _curve(folder)
    settings = ["train.steps=4000", "train.schedule_steps=6", "train.validate_every=0", "checkpoint.every=0"]
    process = _start("train", "--resume", folder, *(word for each in settings for word in ("--set", each)))
    _wait_for(lambda: _curve(folder)[-1][0] > 8, process)
    assert main(["train", "--resume", str(folder)]) == 2  # a second job must not use the same folder
    assert f"{folder} is in use by process {process.pid} on " in capfd.readouterr().err
    process.send_signal(signal.SIGTERM)
    output = process.communicate(timeout=600)[0]
    assert process.returncode == 143 and "going on from" in output, output
    stopped = int(re.search(r"stopped after step (\d+) of 4000; saved", output).group(1))  # type: ignore[union-attr]
    assert f"Stopped by SIGTERM after step {stopped:,} of 4,000" in (folder / "report.html").read_text()
    assert (folder / "checkpoints" / f"step-{stopped:08d}").is_dir() and not (folder / "run.lock").exists()
    curve = _curve(folder)
    assert curve[:6] == before and [step for step, _ in curve] == list(range(1, stopped + 1))


@pytest.mark.slow
def test_killed_rank_is_named_and_the_run_goes_on_exactly(tiny: Path) -> None:
    """kill -9 of a rank, then --resume, then SIGTERM to the launcher: the loss curve equals that of an unbroken run.

    The launcher of the unbroken run is killed: its ranks save, release the folder and leave nothing else behind.
    """
    steps = ["--set", "train.steps=4000", "--set", "checkpoint.every=5", "--set", "train.validate_every=0"]
    settings = [*steps, "--set", "log.samples=0", "--set", "log.accuracy_samples=0"]
    process = _start("train", tiny, *settings)
    _wait_for(lambda: list(tiny.parent.glob("tiny/*/checkpoints/step-*")), process)
    os.kill(_ranks(process.pid)[1], signal.SIGKILL)
    output = process.communicate(timeout=600)[0]
    assert process.returncode == 1
    assert "interlace: rank 1 was killed by SIGKILL (signal 9)" in output, output
    assert "stopped the other ranks (0)" in output and "--resume" in output

    folder = _folder(tiny)
    reached = max(step for step, _ in _curve(folder))
    process = _start("train", "--resume", folder)
    _wait_for(lambda: max(step for step, _ in _curve(folder)) > reached + 3, process)
    process.send_signal(signal.SIGTERM)
    output = process.communicate(timeout=600)[0]
    assert process.returncode == 143 and "going on from" in output, output
    assert not (folder / "run.lock").exists()
    stopped = int(re.search(r"stopped after step (\d+) of 4000; saved", output).group(1))  # type: ignore[union-attr]
    assert (folder / "checkpoints" / f"step-{stopped:08d}").is_dir()
    broken = _curve(folder)
    assert [step for step, _ in broken] == list(range(1, stopped + 1))

    temporary = tiny.parent / "temporary"
    temporary.mkdir()
    process = _start("train", tiny, *settings, "--set", "run.name=whole", TMPDIR=str(temporary))
    whole = tiny.parent / "whole" / "latest"

    def far_enough() -> bool:
        return (whole / "metrics.jsonl").exists() and len(read_metrics(whole)) > stopped + 1

    _wait_for(far_enough, process)
    ranks = _ranks(process.pid)
    process.kill()
    process.communicate(timeout=600)
    deadline = time.monotonic() + 600
    while (whole / "run.lock").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not (whole / "run.lock").exists() and _curve(whole)[:stopped] == broken
    while any(Path(f"/proc/{rank}").exists() for rank in ranks.values()) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert [path.name for path in temporary.iterdir() if path.name.startswith("interlace")] == []


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_to_a_torchrun_rank_saves_and_fails_the_job(tiny: Path, number: int) -> None:
    settings = ["--set", "train.steps=4000", "--set", "train.validate_every=0", "--set", "log.samples=0"]
    torchrun = ["--standalone", "--nproc-per-node", 2, "-m", "interlace", "train", tiny, *settings]
    process = _start(*torchrun, module="torch.distributed.run")
    _wait_for(lambda: (_folder(tiny) / "checkpoints").exists(), process)
    folder = _folder(tiny)
    os.kill(_ranks(process.pid)[1], number)
    output = process.communicate(timeout=600)[0]
    assert process.returncode == 1 and f"exitcode  : {128 + number}" in output, output
    stopped = int(re.search(r"stopped after step (\d+) of 4000; saved", output).group(1))  # type: ignore[union-attr]
    said = f"Stopped by {signal.Signals(number).name} after step {stopped:,} of 4,000"
    assert said in (folder / "report.html").read_text()
    assert (folder / "checkpoints" / f"step-{stopped:08d}").is_dir() and not (folder / "run.lock").exists()


def test_closed_stdout_is_no_error_for_a_printing_command() -> None:
    process = _start("doctor")
    assert process.stdout is not None
    process.stdout.close()
    assert process.wait(timeout=600) == 0


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, pytest.param(1, marks=pytest.mark.every_case)])
def test_a_rank_that_hangs_ends_the_run_within_the_timeout(tiny: Path, victim: int) -> None:
    settings = ["--set", "train.steps=4000", "--set", "parallel.timeout=40", "--set", "checkpoint.every=5"]
    process = _start("train", tiny, *settings)  # on a busy machine ranks start seconds apart
    _wait_for(lambda: list(tiny.parent.glob("tiny/*/checkpoints/step-*")), process)
    os.kill(_ranks(process.pid)[victim], signal.SIGSTOP)
    output = process.communicate(timeout=600)[0]
    assert process.returncode == 1, output
    # Waiting for rank 0 at the ends of a step has a timeout 1.5 times as long: rank 0 may first wait for another rank.
    seconds = "40" if victim else "(40|60)"
    words = rf"its last output: rank {1 - victim}, .*lost rank {victim} \(no answer within {seconds}[.0-9]* s"
    assert re.search(words, output), output
    assert f"interlace: rank {victim} hung" in output and "--resume" in output


def test_a_refused_resume_leaves_the_runs_config(
    trained: Path, tmp_path: Path, in_process: None, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = Path(shutil.copytree(trained, tmp_path / "run"))
    config = folder / "config.toml"
    before = config.read_bytes()
    settings = ["parallel.ranks=1", "log.samples=0", "log.accuracy_samples=0"]
    resume = ["train", "--resume", str(folder), *(word for each in settings for word in ("--set", each))]
    for setting, words in (
        ("model.vision.config.num_hidden_layers=3", "is a checkpoint of another model"),
        ("train.batch_size=4", "the saved loader state has batch_size = 8, this run 4"),
        ("train.steps=5", "is of step 6, but train.steps = 5; raise it, or go on from an earlier checkpoint"),
        ("train.steps=9", "--set train.schedule_steps=6 keeps the plan"),
    ):
        capfd.readouterr()
        assert main([*resume, "--set", setting]) == 2
        assert words in capfd.readouterr().err
        assert config.read_bytes() == before and not list(folder.glob(".config*"))
        assert not (folder / "run.lock").exists()
    assert main([*resume, "--set", "train.steps=7", "--set", "train.schedule_steps=6"]) == 0
    assert "steps = 7" in config.read_text() and [step for step, _ in _curve(folder)] == list(range(1, 8))


def test_mask_plan_and_simulate_draw(tiny: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["mask", str(tiny), "--out", str(tmp_path / "m.png"), "--samples", "2"]) == 0
    assert (tmp_path / "m.png").stat().st_size > 1000
    assert main(["plan", str(tiny), "--ranks", "2", "--tflops", "1", "--set", "model.language_model.freeze=true"]) == 0
    output = capfd.readouterr().out
    assert "frozen-aware" in output and "language_model[" in output and "tokens per microbatch" in output
    assert main(["simulate", str(tiny), "--out", str(tmp_path), "--microbatches", "4", "--profile"]) == 0
    assert "timed on this machine" in capfd.readouterr().out
    assert (tmp_path / "timeline.png").stat().st_size > 1000 and json.loads((tmp_path / "trace.json").read_text())


def test_doctor_says_what_is_on_and_why_the_rest_is_off(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    output = capfd.readouterr().out
    for part in ("python", "triton", "attention: cpu", "shm", "gloo", "nccl", "cuda", "apt", "interlace._core"):
        assert part in output
    assert "training can run here" in output
    assert "Error:" not in output and "…" not in output  # readable reasons, none truncated
    transports = capabilities()
    for name, result in transports.items():
        assert re.search(rf"{'off' if result.missing else 'on'}\W+{name}\W", output), name
    listed = [name for name in re.findall(r"(?:on|off)\W+(\w+)\W", output) if name in transports]
    assert listed == list(transports)  # best first, in order of choice
    assert re.search(r"on\W+attention: cpu\W+runs on cpu, instruction set (amx|avx512|avx2|baseline)\W", output)
    if not torch.cuda.is_available():
        assert "the Gluon kernel runs on Hopper GPUs, not on cpu" in output


@pytest.mark.slow
def test_the_large_example_can_be_planned(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(ROOT / "configs" / "vlm_8b_example.toml"), "--tflops", "400"]) == 0
    output = capfd.readouterr().out
    assert "8 ranks" in output and "iteration" in output
    ratio = re.search(r"frozen-aware is predicted to be ([0-9.]+)x as fast as frozen-unaware", output)
    assert ratio is not None and float(ratio.group(1)) > 1.1, output


def test_plan_says_why_frozen_awareness_brings_nothing(tiny: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for freeze, reason in ((False, "no layer of this model is frozen"), (True, "are the same cut")):
        arguments = ["--tflops", "1", "--ranks", "4", "--set", f"model.vision.freeze={str(freeze).lower()}"]
        assert main(["plan", str(tiny), *arguments]) == 0
        assert reason in capfd.readouterr().out.replace("\n", " ")
