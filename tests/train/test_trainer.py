"""The training loop: exact resumption, stopping on request, its written metrics, refusals."""

from __future__ import annotations

import json
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from interlace.train.checkpoint import checkpoints as ck
from interlace.train.checkpoint import folder as checkpointfolder
from interlace.train.config.load import ConfigError
from interlace.train.errors import TrainingError
from interlace.train.models.tuning import rates
from interlace.train.observers.base import Outputs
from interlace.train.observers.saving import Saving
from interlace.train.optim import Optimizer, lr_factor
from interlace.train.progress import stop_request
from interlace.train.report.metrics import BLANK, HELD_OUT, LOSS, read_metrics
from interlace.train.trainer import Trainer
from tests.train.one_process import OneProcess, ToyModel, toy_config, toy_feed
from tests.train.trainer import VARYING


def _trainer(folder: Path, *overrides: str, stop_after: int | None = None, model: Any = None) -> Trainer:
    folder.mkdir(exist_ok=True)
    config = toy_config(*overrides)
    model = model or ToyModel()
    torch.manual_seed(config.run.seed)  # dropout makes the global generator part of the state
    trainer = Trainer(config, model, OneProcess(model), toy_feed(config), Outputs(folder, quiet=True))
    if stop_after is not None:
        trainer.membership.stop = lambda: trainer.step >= stop_after
    return trainer


def test_steps_get_their_place_and_validation_uses_batch_slices(tmp_path: Path) -> None:
    trainer = _trainer(tmp_path, "train.steps=7")
    sizes: list[int] = []
    real = trainer.parallel.evaluate

    def evaluate(samples: list[Any], **cut: Any) -> Any:
        sizes.append(len(samples))
        assert cut == {"microbatches": 2, "chunks": {}}
        return real(samples, **cut)

    trainer.parallel.evaluate = evaluate
    trainer.run()
    # 22 samples make 6 batches of at most 4; 8 held-out samples make 2, measured after steps 5 and 7.
    assert trainer.parallel.places == [(i // 6, i % 6, i + 1) for i in range(7)]
    assert sizes == 2 * [4, 4]


def _curve(folder: Path) -> list[dict[str, float]]:
    """The metrics except those that depend on the clock."""
    return [{k: v for k, v in line.items() if not k.startswith(VARYING)} for line in read_metrics(folder)]


@pytest.mark.parametrize("log_every", [1, 5])
@pytest.mark.parametrize("stops", [(1,), (7,), (4, 9)])
def test_interrupted_run_repeats_the_uninterrupted_bit_for_bit(
    tmp_path: Path, stops: tuple[int, ...], log_every: int
) -> None:
    every = f"log.every={log_every}"
    whole = _trainer(tmp_path / "whole", every)
    outcome = whole.run()
    assert outcome["finished"] and outcome["step"] == 12
    for i, stop in enumerate([*stops, None]):
        part = _trainer(tmp_path / "parts", every, stop_after=stop)
        if i:
            torch.manual_seed(99)  # the state of a new process differs from that of the run
            part.resume()
        outcome = part.run()
        assert outcome["finished"] == (stop is None)
    assert _curve(tmp_path / "parts") == _curve(tmp_path / "whole")
    assert len(_curve(tmp_path / "whole")) == (12 if log_every == 1 else 3)
    for name, parameter in whole.parameters.items():
        assert torch.equal(parameter, part.parameters[name]), name
    for name, tensor in whole.optimizer.state().items():
        assert torch.equal(tensor, part.optimizer.state()[name]), name


def test_training_goes_on_while_a_checkpoint_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The writer waits until two more steps are done; the checkpoint has the state before them."""
    whole = _trainer(tmp_path / "whole")
    whole.run()
    training = _trainer(tmp_path / "run")
    further, real = threading.Event(), ck.write_tensors

    def write(*args: Any) -> Any:
        assert further.wait(60)
        return real(*args)

    def step() -> Any:
        if training.step == 7:
            assert training.checkpoints.writing and not (tmp_path / "run" / "checkpoints" / "step-00000004").exists()
            further.set()
        if training.step == 8:
            raise KeyboardInterrupt
        return Trainer._train_step(training)

    monkeypatch.setattr(ck, "write_tensors", write)
    training._train_step = step  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        training.run()
    while training.checkpoints.writing:
        training.checkpoints.advance()
    resumed = _trainer(tmp_path / "run")
    assert resumed.resume().name == "step-00000004"
    resumed.run()
    assert _curve(tmp_path / "run") == _curve(tmp_path / "whole")
    for name, parameter in whole.parameters.items():
        assert torch.equal(parameter, resumed.parameters[name]), name


def test_killed_run_resumes_from_last_checkpoint_identically(tmp_path: Path) -> None:
    _trainer(tmp_path / "whole").run()
    killed = _trainer(tmp_path / "killed")

    def save() -> None:
        if killed.step == 8:
            killed.checkpoints.finish()  # the previous one, even on a slow disk
            raise KeyboardInterrupt
        Saving.save(killed.saving)

    killed.saving.save = save  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        killed.run()
    assert read_metrics(tmp_path / "killed")[-1]["step"] == 8
    with (tmp_path / "killed" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 9, "loss_metr')  # cut in the middle of a line
    resumed = _trainer(tmp_path / "killed")
    assert resumed.resume().name == "step-00000004"
    resumed.run()
    assert _curve(tmp_path / "killed") == _curve(tmp_path / "whole")


def test_torn_newest_checkpoint_is_passed_over(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpointfolder, "LATE_SECONDS", 0.0)
    _trainer(tmp_path / "whole").run()
    _trainer(tmp_path / "torn", stop_after=9).run()
    file = next((tmp_path / "torn" / "checkpoints" / "step-00000009").glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:100])
    resumed = _trainer(tmp_path / "torn")
    assert resumed.resume().name == "step-00000008"
    assert file.name in capfd.readouterr().err
    resumed.run()
    assert _curve(tmp_path / "torn") == _curve(tmp_path / "whole")


def test_finished_run_resumes_only_with_a_consistent_schedule(tmp_path: Path) -> None:
    def rates(folder: Path) -> list[float]:
        return [line["lr"] for line in read_metrics(folder)]

    _trainer(tmp_path / "run").run()
    before = rates(tmp_path / "run")
    with pytest.raises(ConfigError) as refused:
        _trainer(tmp_path / "run", "train.steps=24").resume()
    for part in ("planned over 12 steps", "from 0.001 to 0.00584 at step 13", "train.schedule_steps=12 keeps the plan"):
        assert part in str(refused.value), refused.value
    kept = _trainer(tmp_path / "run", "train.steps=15", "train.schedule_steps=12")
    kept.resume()
    assert kept.run()["finished"]
    assert rates(tmp_path / "run") == before + 3 * [before[-1]]  # no jump: it stays at its last value
    anew = _trainer(tmp_path / "run", "train.steps=24", "train.schedule_steps=24")
    anew.resume()
    assert anew.step == 15 and lr_factor(16, anew.config.train) == lr_factor(16, toy_config("train.steps=24").train)


def test_changes_of_steps_that_move_no_rate_are_let_through(tmp_path: Path) -> None:
    _trainer(tmp_path / "warm", stop_after=2).run()
    warm = _trainer(tmp_path / "warm", "train.steps=100")
    warm.resume()  # still warming up
    _trainer(tmp_path / "flat", "train.min_lr_ratio=1.0").run()
    flat = _trainer(tmp_path / "flat", "train.min_lr_ratio=1.0", "train.steps=14")
    flat.resume()
    assert flat.run()["step"] == 14
    with pytest.raises(ConfigError, match=r"over train.steps = 16 it would jump"):
        _trainer(tmp_path / "flat", "train.min_lr_ratio=0.5", "train.steps=16").resume()


def test_steps_that_the_run_has_passed_are_refused(tmp_path: Path) -> None:
    _trainer(tmp_path / "run", stop_after=9).run()
    with pytest.raises(
        ConfigError, match=r"step-00000009 is of step 9, but train.steps = 5; raise it, or go on from an"
    ):
        _trainer(tmp_path / "run", "train.steps=5").resume()
    finished = _trainer(tmp_path / "run", "train.steps=9")
    finished.resume()
    outcome = finished.run()
    assert (outcome["step"], outcome["finished"], outcome["signal"]) == (9, True, 0)


def test_a_stop_names_its_signal(tmp_path: Path) -> None:
    trainer = _trainer(tmp_path / "run")
    trainer.membership.stop = lambda: signal.SIGTERM if trainer.step == 4 else 0
    outcome = trainer.run()
    assert (outcome["step"], outcome["finished"], outcome["signal"]) == (4, False, 15)


def test_a_run_folder_that_another_job_has_ends_the_run(tmp_path: Path) -> None:
    from interlace.train.launch import lock

    trainer = _trainer(tmp_path / "run")
    with lock.take(tmp_path / "run") as held:
        trainer.outputs.lock = held
        trainer.checkpoints.check = held.check
        with (
            lock.take(tmp_path / "run", take_over=True),
            pytest.raises(TrainingError, match="was taken over by process"),
        ):
            trainer.run()
    assert not (tmp_path / "run" / "checkpoints").exists() or ck.complete(tmp_path / "run" / "checkpoints") == []


def test_items_read_as_blank_are_counted(tmp_path: Path) -> None:
    trainer = _trainer(tmp_path / "run", stop_after=4)
    trainer.run()
    trainer.feed.train.blank_items = 3
    trainer.membership.stop = lambda: 0
    assert trainer.run()["metrics"][BLANK] == 3
    assert [BLANK in line for line in read_metrics(tmp_path / "run")] == [False] * 4 + [True] * 8


@pytest.mark.parametrize(
    "change",
    [
        {"step": 3},
        {"step": "4"},
        {"feed": {}},
        {"feed": 3},
        {"window": {"add": 1}},
        {"totals": {}},
        {"last": {"x": "y"}},
        {"schedule_steps": None},
        {"extra": 1},
    ],
    ids=str,
)
def test_a_checkpoint_whose_progress_is_damaged_is_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    """By an editor of the format: its checksums are valid."""
    trainer = _trainer(tmp_path / "run", stop_after=4)
    with pytest.MonkeyPatch.context() as patch:
        pack = ck._pack
        patch.setattr(ck, "_pack", lambda value: pack({**value, **change} if "feed" in value else value))
        trainer.run()
    with pytest.raises((ck.CheckpointError, ConfigError)):
        _trainer(tmp_path / "run").resume()


def test_refusals_on_resume(tmp_path: Path) -> None:
    _trainer(tmp_path / "run", stop_after=4).run()
    with pytest.raises(ck.CheckpointError, match=r"another model.*language_model.embed.weight is float32\[32, 8\]"):
        _trainer(tmp_path / "run", model=ToyModel(width=6)).resume()
    with pytest.raises(ConfigError, match="batch_size"):
        _trainer(tmp_path / "run", "train.batch_size=8").resume()
    with pytest.raises(ConfigError, match="is whole"):
        _trainer(tmp_path / "empty").resume()


def test_files_metrics_and_learning(tmp_path: Path) -> None:
    outcome = _trainer(tmp_path / "run", "train.steps=60", "log.every=10", "log.trace_step=3").run()
    lines = read_metrics(tmp_path / "run")
    curve = [line[LOSS] for line in lines if LOSS in line]
    assert len(curve) == 6 and curve[-1] < curve[0]
    assert {
        "lr",
        "grad_norm",
        "throughput(tps)",
        "throughput(samples/s)",
        "bubble(%)",
        "busy(%)/language_model",
    } <= set(lines[-1])
    assert {"memory/max_active(GiB)", "time_metrics/data_loading(%)"} <= set(lines[-1])
    assert [line["step"] for line in lines if HELD_OUT in line] == list(range(5, 61, 5))
    assert json.loads((tmp_path / "run" / "trace.json").read_text())
    assert (tmp_path / "run" / "timeline.png").stat().st_size > 1000
    assert outcome["samples"] == 220 and outcome["metrics"][LOSS] == lines[-1][LOSS]
    names = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert names == ["step-00000056", "step-00000060"]


def test_non_finite_loss_ends_the_run_before_the_update(tmp_path: Path) -> None:
    trainer = _trainer(tmp_path / "run")
    before = {name: parameter.clone() for name, parameter in trainer.parameters.items()}
    real = trainer.parallel.clip_grad_norm_
    trainer.parallel.clip_grad_norm_ = lambda limit: float("nan") * real(limit)
    with pytest.raises(TrainingError, match=r"step 1: the loss is .* gradient norm nan.*Lower train.lr"):
        trainer.run()
    assert all(torch.equal(before[name], parameter) for name, parameter in trainer.parameters.items())


def test_stop_request_stores_the_signal_second_ctrl_c_raises() -> None:
    previous = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    with stop_request() as request:
        assert not request.number
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)  # process managers repeat the signal: the save continues
        signal.raise_signal(signal.SIGINT)
        assert request.number == signal.SIGTERM
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert previous == (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT))


def test_warmup_and_cosine() -> None:
    train = toy_config("train.steps=110", "train.warmup_steps=10", "train.min_lr_ratio=0.2").train
    factors = [lr_factor(step, train) for step in range(1, 111)]
    assert factors[0] == pytest.approx(0.1) and factors[9] == 1.0
    assert factors[59] == pytest.approx(0.6)  # half way down: mean of 1 and 0.2
    assert factors[-1] == pytest.approx(0.2)
    assert factors[:10] == sorted(factors[:10]) and factors[9:] == sorted(factors[9:], reverse=True)
    assert lr_factor(1, toy_config("train.warmup_steps=0").train) > 0.98
    assert lr_factor(12, toy_config("train.warmup_steps=12").train) == 1.0


def test_optimizer_equals_plain_adamw_with_groups() -> None:
    """Against torch's AdamW with the decay and rates written out by hand."""
    config = toy_config("train.weight_decay=0.3", "model.language_model.lr=0.02")
    ours, theirs = ToyModel(), ToyModel()
    optimizer = Optimizer(ours.named_parameters(), config, rates(config, ours))
    matrices = [p for p in theirs.parameters() if p.dim() > 1]
    vectors = [p for p in theirs.parameters() if p.dim() <= 1]
    reference = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.3}, {"params": vectors, "weight_decay": 0.0}], betas=(0.9, 0.95)
    )
    sample = toy_feed(config).next().samples[0]
    for step in (1, 2, 3):
        for model in (ours, theirs):
            model.eval().loss_sum(sample).backward()
        for group in reference.param_groups:
            group["lr"] = 0.02 * step / 3
        reference.step()
        reference.zero_grad()
        assert optimizer.step(step) == pytest.approx(1e-2 * step / 3)
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


def test_parameters_without_gradient_keep_weight_and_state() -> None:
    model = ToyModel()
    optimizer = Optimizer(model.named_parameters(), toy_config(), rates(toy_config(), model))
    sample = toy_feed(toy_config()).next().samples[0]
    model.loss_sum(sample).backward()
    optimizer.step(1)
    before = {name: tensor.clone() for name, tensor in optimizer.state().items()}
    weights = {name: parameter.clone() for name, parameter in model.named_parameters()}
    model.language_model["mix"].weight.grad = None
    model.language_model["embed"].weight.grad = torch.ones_like(model.language_model["embed"].weight)
    optimizer.step(2)
    after = optimizer.state()
    assert torch.equal(after["step.language_model.mix.weight"], before["step.language_model.mix.weight"])
    assert torch.equal(model.language_model["mix"].weight, weights["language_model.mix.weight"])
    assert not torch.equal(model.language_model["embed"].weight, weights["language_model.embed.weight"])
