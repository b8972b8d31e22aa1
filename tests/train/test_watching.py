"""Averaged weights, fp16 loss scaling, the best checkpoint and early stopping. A resumed run keeps their state."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from interlace.layout import Layout, ParallelSpec
from interlace.run import parallelize
from interlace.train.checkpoint import folder as checkpointfolder
from interlace.train.config.load import ConfigError
from interlace.train.config.train import EarlyStop
from interlace.train.device import compile_layers
from interlace.train.errors import TrainingError
from interlace.train.observers.base import Outputs
from interlace.train.report.metrics import HELD_OUT, LOSS, read_metrics
from interlace.train.trainer import Trainer
from interlace.train.watching import GROWS_AFTER, LossScale, Verdict
from tests.tiny import random_microbatches, tiny_mllm
from tests.train.one_process import OneProcess, ToyModel, toy_config, toy_feed
from tests.train.trainer import VARYING
from tests.train.watching import trainer_of


def lines_of(folder: Path) -> list[dict[str, float]]:
    return [{k: v for k, v in line.items() if not k.startswith(VARYING)} for line in read_metrics(folder)]


def saved_steps(folder: Path) -> list[int]:
    return sorted(checkpointfolder.step_of(path) for path in checkpointfolder.complete(folder / "checkpoints"))


# ---------------------------------------------------------------------- averages


def test_averages_match_a_plain_loop_and_serve_validation(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, "train.ema=0.75", "train.steps=5", "train.validate_every=1")
    averages = {name: parameter.detach().clone() for name, parameter in trainer.parameters.items()}
    plain = ToyModel().eval()
    result: list[float] = []
    real = trainer.optimizer.step

    def step(number: int) -> float:
        rate = real(number)
        for name, parameter in trainer.parameters.items():
            averages[name] = 0.75 * averages[name] + 0.25 * parameter.detach()
        plain.load_state_dict(averages)
        held_out = trainer.feed.held_out
        tokens = sum(len(sample.labels) for sample in held_out)
        result.append(sum(plain.loss_sum(sample).item() for sample in held_out) / tokens)
        return rate

    trainer.optimizer.step = step  # type: ignore[method-assign]
    trainer.run()
    assert trainer.averages is not None
    for name, average in trainer.averages.held.items():
        torch.testing.assert_close(average, averages[name], rtol=1e-6, atol=1e-7)
    assert [line[HELD_OUT] for line in read_metrics(tmp_path)] == pytest.approx(result, rel=1e-5)
    weights = {name: parameter.detach().clone() for name, parameter in trainer.parameters.items()}
    trainer.validation.losses()
    assert all(torch.equal(parameter, weights[name]) for name, parameter in trainer.parameters.items())
    plain.load_state_dict(weights)
    held_out = trainer.feed.held_out
    tokens = sum(len(sample.labels) for sample in held_out)
    trainer.validation.config = toy_config("train.ema=0.75", "train.ema_evaluate=false")
    assert trainer.validation.losses()[HELD_OUT] == pytest.approx(
        sum(plain.loss_sum(s).item() for s in held_out) / tokens, rel=1e-5
    )


def test_averages_enabled_on_resume_start_from_loaded_weights(tmp_path: Path) -> None:
    trainer_of(tmp_path, stop=4).run()
    later = trainer_of(tmp_path, "train.ema=0.9")
    later.resume()
    assert later.averages is not None
    assert all(torch.equal(later.averages.held[name], parameter) for name, parameter in later.parameters.items())


def test_averages_of_unfrozen_weights_start_from_those_weights(tmp_path: Path) -> None:
    def part(opened: bool) -> Trainer:
        config, model = toy_config("train.ema=0.9"), ToyModel()
        model.language_model["mix"].requires_grad_(opened)
        (tmp_path / "run").mkdir(exist_ok=True)
        return Trainer(config, model, OneProcess(model), toy_feed(config), Outputs(tmp_path / "run", quiet=True))

    first = part(False)
    first.membership.stop = lambda: first.step >= 4
    first.run()
    later = part(True)
    assert first.averages is not None and later.averages is not None
    for average in later.averages.held.values():
        average.fill_(7.0)  # values of a rank before it reads the checkpoint
    later.resume()
    opened = later.averages.held.keys() - first.averages.held.keys()
    assert len(opened) == 2 and all(torch.equal(later.averages.held[n], later.parameters[n]) for n in opened)
    assert all(torch.equal(average, later.averages.held[name]) for name, average in first.averages.held.items())


# ---------------------------------------------------------------------- resumption

ALL = ["train.ema=0.9", "train.precision=fp16", "train.early_stop={patience=3, min_delta=0.01}", "checkpoint.best=loss"]
ALL += ["train.optimizer=muon", "train.validate_every=2"]
LOSSES = [9.0, 4.0, 9.0, 3.0, 9.0, 2.995, 9.0, 2.999, 9.0, 3.5, 9.0, 9.0]  # ends after step 10: 3.0 is hardly improved


@pytest.mark.parametrize("stops", [(1,), (5,), (6, 9)])
def test_an_interrupted_run_repeats_the_unbroken_one(tmp_path: Path, stops: tuple[int, ...]) -> None:
    whole = trainer_of(tmp_path / "whole", *ALL, held_out=LOSSES)
    overflowing(whole, {3, 8})
    outcome = whole.run()
    assert outcome["finished"] and outcome["step"] == 10 and LOSS in outcome["metrics"]
    for number, stop in enumerate([*stops, None]):
        part = trainer_of(tmp_path / "parts", *ALL, held_out=LOSSES, stop=stop)
        overflowing(part, {3, 8})
        if number:
            torch.manual_seed(99)
            part.resume()
        outcome = part.run()
        assert outcome["finished"] == (stop is None)
    assert lines_of(tmp_path / "parts") == lines_of(tmp_path / "whole")
    assert part.progress.verdict == whole.progress.verdict and part.progress.loss_scale == whole.progress.loss_scale
    scale = whole.progress.loss_scale
    assert scale is not None and scale.skipped == 2 and scale.scale == 2.0**14
    assert part.averages is not None and whole.averages is not None
    for name, parameter in whole.parameters.items():
        assert torch.equal(parameter, part.parameters[name]), name
        assert torch.equal(whole.averages.held[name], part.averages.held[name]), name
    for name, tensor in whole.optimizer.state().items():
        assert torch.equal(tensor, part.optimizer.state()[name]), name
    again = trainer_of(tmp_path / "parts", *ALL, held_out=LOSSES)
    again.resume()
    assert again.run()["step"] == 10  # a run that was stopped early is finished


def overflowing(trainer: Trainer, steps: set[int]) -> None:
    """Makes the gradients of these steps overflow."""
    real = trainer.parallel.clip_grad_norm_

    def clip(limit: float) -> float:
        if trainer.step in steps:
            for parameter in trainer.parameters.values():
                parameter.grad = torch.full_like(parameter, math.inf)
        return float(real(limit))

    trainer.parallel.clip_grad_norm_ = clip


def test_another_optimizer_cannot_go_on(tmp_path: Path) -> None:
    trainer_of(tmp_path, stop=4).run()
    with pytest.raises(ConfigError, match="has the state of optimizer = 'adamw', which 'sgd' cannot go on from"):
        trainer_of(tmp_path, "train.optimizer=sgd").resume()


def test_momentum_that_a_run_had_not_is_refused(tmp_path: Path) -> None:
    trainer_of(tmp_path, "train.optimizer=sgd", "train.momentum=0.0", stop=4).run()
    with pytest.raises(ConfigError, match=r"is of sgd without momentum, .* keep train.momentum=0, or begin"):
        trainer_of(tmp_path, "train.optimizer=sgd").resume()
    trainer_of(tmp_path, "train.optimizer=sgd", "train.momentum=0.0").resume()


def test_a_best_loss_without_its_checkpoint_is_forgotten(tmp_path: Path) -> None:
    """The best loss was measured in step 2, when its checkpoint was not requested."""
    losses = [9.0, 3.0, 9.0, 5.0, 9.0, 4.0, 9.0, 6.0]
    options = ["train.validate_every=2", "checkpoint.every=5", "train.steps=8"]
    trainer_of(tmp_path, *options, held_out=losses, stop=5).run()
    later = trainer_of(tmp_path, *options, "checkpoint.best=loss", held_out=losses)
    later.resume()
    outcome = later.run()
    assert (outcome["verdict"].best, outcome["verdict"].step) == (4.0, 6) and 6 in saved_steps(tmp_path)
    again = trainer_of(tmp_path, *options, "checkpoint.best=loss", held_out=losses)
    again.resume()
    assert again.progress.verdict.step == 6


# ---------------------------------------------------------------------- fp16


def test_a_rank_without_gradients_takes_its_step(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, "train.precision=fp16")
    trainer.parameters = {}  # all weights of this rank are frozen
    trainer._update(1.0, 1.0, True)


def test_a_window_of_steps_that_are_left_out_has_no_loss(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, "train.precision=fp16", "train.steps=6", "log.every=2")
    overflowing(trainer, {3, 4})
    outcome = trainer.run()
    lines = read_metrics(tmp_path)
    assert [LOSS in line for line in lines if "lr" in line] == [True, False, True]
    assert ["throughput(tps)" in line for line in lines if "lr" in line] == [True, False, True]
    assert outcome["metrics"][LOSS] > 0.0


def test_a_step_that_overflows_changes_nothing_but_the_scale(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, "train.precision=fp16", "train.steps=3")
    overflowing(trainer, {2})
    kept: dict[int, dict[str, torch.Tensor]] = {}
    real = trainer._train_step

    def step() -> Any:
        values = real()
        kept[trainer.step] = {name: parameter.detach().clone() for name, parameter in trainer.parameters.items()}
        return values

    trainer._train_step = step  # type: ignore[method-assign]
    trainer.run()
    assert all(torch.equal(kept[1][name], kept[2][name]) for name in kept[1])
    assert not all(torch.equal(kept[2][name], kept[3][name]) for name in kept[1])
    lines = read_metrics(tmp_path)
    assert [line["fp16/loss_scale"] for line in lines] == [2.0**16, 2.0**15, 2.0**15]
    assert [line["fp16/skipped_steps"] for line in lines] == [0, 1, 1]
    assert ["grad_norm" in line for line in lines] == [True, False, True]


def test_gradients_that_no_scale_helps_end_the_run(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, "train.precision=fp16", "train.steps=100")
    overflowing(trainer, set(range(101)))
    with pytest.raises(TrainingError, match=r"step 27: .* gradient norm .* Lower train.lr"):
        trainer.run()


def test_the_scale_grows_after_many_good_steps() -> None:
    scale = LossScale()
    for _ in range(GROWS_AFTER):
        scale.took(True)
    assert scale == LossScale(scale=2.0**17) and not scale.lost
    scale.took(False)
    assert scale == LossScale(scale=2.0**16, skipped=1)


def test_gradients_follow_the_loss_scale_and_fp16_matches_fp32() -> None:
    def gradients(scale: float, autocast: torch.dtype | None = None) -> tuple[float, dict[str, torch.Tensor]]:
        mllm = tiny_mllm()
        layout = Layout.from_specs(mllm, {name: ParallelSpec() for name in mllm.modules_order()})
        parallel = parallelize(mllm, layout, transport="local", autocast=autocast)
        result = parallel.step(random_microbatches(mllm, "all"), loss_scale=scale)
        norm = parallel.clip_grad_norm_(math.inf)
        assert norm == pytest.approx(sum(float(p.grad.square().sum()) for p in used(mllm)) ** 0.5, rel=1e-5)
        return result.loss, {name: p.grad for name, p in mllm.named_parameters() if p.grad is not None}

    def used(mllm: Any) -> list[Any]:
        return [parameter for parameter in mllm.parameters() if parameter.grad is not None]

    loss, expected = gradients(1.0)
    scaled_loss, scaled = gradients(1024.0)
    assert scaled_loss == loss and all(torch.equal(scaled[name], 1024 * expected[name]) for name in expected)
    half_loss, half = gradients(2.0**14, torch.float16)
    assert half_loss == pytest.approx(loss, rel=1e-2)
    for name, gradient in expected.items():
        if name.endswith("k_proj.bias"):  # softmax is invariant to it: its gradient is rounding noise
            continue
        error = (half[name] / 2.0**14 - gradient).norm() / gradient.norm().clamp_min(1e-6)
        assert error < 0.05, (name, error)


# ---------------------------------------------------------------------- verdicts


def test_the_best_checkpoint_stays_beside_the_newest(tmp_path: Path) -> None:
    losses = [9.0, 5.0, 9.0, 4.0, 9.0, 4.5, 9.0, 4.25, 9.0, math.nan, 9.0, 5.0]
    options = ["train.validate_every=2", "checkpoint.best=loss", "checkpoint.every=3", "checkpoint.keep=1"]
    trainer = trainer_of(tmp_path, *options, held_out=losses)
    seen: list[tuple[int, list[int]]] = []
    real = trainer.checkpoints._retain

    def retain(step: int) -> None:
        real(step)
        seen.append((step, saved_steps(tmp_path)))

    trainer.checkpoints._retain = retain  # type: ignore[method-assign]
    trainer.run()
    assert seen == [(2, [2]), (3, [2, 3]), (4, [4]), (6, [4, 6]), (9, [4, 9]), (12, [4, 12])]
    assert trainer.progress.verdict == Verdict(best=4.0, step=4, mark=4.0, waited=4)


def test_what_counts_as_better() -> None:
    early = EarlyStop(patience=2, min_delta=0.5)
    verdict = Verdict()
    told = [
        (verdict.add(step, loss, early), verdict.ends(early)) for step, loss in enumerate([3.0, 2.8, 2.4, 2.0, 2.0])
    ]
    assert told == [(True, False), (True, False), (True, False), (True, False), (False, True)]
    assert not verdict.ends(None) and verdict.step == 3
    assert Verdict().add(1, math.nan, None) is False


# ---------------------------------------------------------------------- compiled layers


def test_compiling_where_it_cannot_be_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("\nno g++ here\nand so on")

    monkeypatch.setattr(torch, "compile", broken)
    with pytest.raises(
        ConfigError, match=r"run.toml: train.compile = true, but .* work here: no g\+\+ here. A CPU needs"
    ):
        compile_layers(None, torch.device("cpu"), source="run.toml")


@pytest.mark.slow
def test_compiled_layers_match_eager_without_recompilation(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs: list[Any] = []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward  # the default backend takes minutes

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    models = [tiny_mllm(encoders=("vision",), layers=1) for _ in range(2)]
    plain, compiled = (
        parallelize(mllm, Layout.from_specs(mllm, {n: ParallelSpec() for n in mllm.modules_order()}, ranks=1))
        for mllm in models
    )
    compile_layers(compiled, torch.device("cpu"))
    counts = []
    for seed in range(10):
        batch = random_microbatches(models[0], "all", count=2, seed=seed)
        assert compiled.step(batch).loss == pytest.approx(plain.step(batch).loss, rel=1e-6)
        counts.append(len(graphs))
    assert counts[-1] == counts[4] < 16
    assert compiled.evaluate(batch).loss == pytest.approx(plain.evaluate(batch).loss, rel=1e-6)
    for ours, theirs in zip(*(mllm.parameters() for mllm in models), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-5, atol=1e-6)
