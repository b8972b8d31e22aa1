"""Smaller last batches: an epoch trains on every sample, with the loss and gradients of a plain loop."""

from __future__ import annotations

import copy
import itertools
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from interlace.run import parallelize
from interlace.train.config.load import from_table
from interlace.train.config.sections import Config
from interlace.train.data.feed import Feed, datasets
from interlace.train.data.texts import tokenizer_of
from interlace.train.job import with_steps
from interlace.train.models.build import build, build_layout, initialize, materialize
from interlace.train.observers.base import Outputs
from interlace.train.report.metrics import LOSS, read_metrics
from interlace.train.trainer import Trainer
from tests.resilience.elastic_cluster import table

COUNT, EPOCHS = 10, 2  # samples to train on
PLAIN = {
    "steps": None, "epochs": EPOCHS, "optimizer": "sgd", "momentum": 0.0, "weight_decay": 0.0, "lr": 0.1,
    "schedule": "constant", "warmup_steps": 0, "ema": None, "validate_every": 0, "validation_samples": 2,
    "microbatches": 2,
}  # fmt: skip
LAYOUTS: dict[str, dict[str, Any]] = {
    "one rank": {"ranks": 1},
    "dp 2, pp 2": {"dp": 2, "language_model": {"pp": 2}},
    "dp 3 and 2": {"vision": {"dp": 3}, "language_model": {"dp": 2}},
    "dp 4, full": {
        "placement": "shared",
        "vision": {"dp": 4, "shard": "full"},
        "language_model": {"dp": 4, "shard": "full"},
    },
}


def config_of(layout: str, batch: int, **train: Any) -> Config:
    made = table(Path("runs"), data={"held_out": 0.995}, train=PLAIN | {"batch_size": batch} | train)
    return from_table(copy.deepcopy(made | {"parallel": {"timeout": 60.0, **LAYOUTS[layout]}}))


def train(config: Config, folder: Path, stop: int | None = None, resume: bool = False) -> tuple[Trainer, list[Any]]:
    """A run with all ranks in this process; returns the dataset indices of each step, and its epoch."""
    folder.mkdir(exist_ok=True)
    tokenizer = tokenizer_of(config)
    model = build(config, tokenizer)
    parallel = parallelize(model, build_layout(config, model), balance=config.train.balance, timeout=60)
    initialize(parallel, seed=config.run.seed)
    feed = Feed.of_config(config, *datasets(config, model, tokenizer), None)
    trainer = Trainer(with_steps(config, feed.loader.batches), model, parallel, feed, Outputs(folder, quiet=True))
    given: list[tuple[int, Sequence[int]]] = []

    def note(step: int) -> None:
        given.append((trainer.place[0], feed.loader.indices(*trainer.place)))

    trainer.membership.commit = note  # type: ignore[method-assign]
    if stop is not None:
        trainer.membership.stop = lambda: trainer.step >= stop
    if resume:
        trainer.resume()
    trainer.run()
    feed.close()
    return trainer, given


def in_a_loop(config: Config, given: Sequence[tuple[int, Sequence[int]]]) -> tuple[list[float], dict[str, Any]]:
    """The losses and the weights of a plain loop over the whole model with the same batches."""
    tokenizer = tokenizer_of(config)
    model = materialize(build(config, tokenizer), seed=config.run.seed)
    model.train()
    data, _ = datasets(config, model, tokenizer)
    optimizer = torch.optim.SGD(model.parameters(), lr=config.train.lr)
    losses = []
    for epoch, indices in given:
        loss = model(**model.collate([data.sample(index, epoch) for index in indices])).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.train.clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses, dict(model.named_parameters())


CASES = list(itertools.product([(8, "llm"), (9, "per_module")], LAYOUTS))
FAST = [((8, "llm"), "one rank"), ((8, "llm"), "dp 2, pp 2"), ((9, "per_module"), "dp 4, full")]


@pytest.mark.parametrize(
    ("batch", "balance", "layout"),
    [pytest.param(*sizes, layout, marks=[pytest.mark.slow] * ((sizes, layout) not in FAST)) for sizes, layout in CASES],
)
def test_all_samples_train_as_in_a_plain_loop(tmp_path: Path, batch: int, balance: str, layout: str) -> None:
    """The last batch has 2 samples, or 1: some of the replicas have none."""
    config = config_of(layout, batch, balance=balance)
    trainer, given = train(config, tmp_path / "run")
    assert [(epoch, len(indices)) for epoch, indices in given] == [
        (epoch, size) for epoch in range(EPOCHS) for size in (batch, COUNT - batch)
    ]
    for epoch in range(EPOCHS):
        assert sorted(i for at, indices in given if at == epoch for i in indices) == list(range(COUNT))
    losses, weights = in_a_loop(config, given)
    result = [line["loss_metrics/step_loss"] for line in read_metrics(tmp_path / "run")]
    assert result == pytest.approx(losses, rel=1e-5)
    for name, parameter in trainer.parameters.items():
        torch.testing.assert_close(parameter, weights[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("stop", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_a_run_goes_on_at_any_step_and_on_other_ranks(tmp_path: Path, stop: int) -> None:
    """Before and after the smaller last batch of an epoch: the same samples follow, with the same bits."""
    config, other = (config_of(layout, 4) for layout in ("dp 2, pp 2", "one rank"))
    whole, given = train(config, tmp_path / "whole")
    assert [len(indices) for _, indices in given] == [4, 4, 2] * EPOCHS
    _, first = train(config, tmp_path / "stopped", stop)
    shutil.copytree(tmp_path / "stopped", tmp_path / "moved")
    resumed, rest = train(config, tmp_path / "stopped", resume=True)
    assert first + rest == given
    assert all(torch.equal(p, resumed.parameters[name]) for name, p in whole.parameters.items())
    moved, rest = train(other, tmp_path / "moved", resume=True)
    assert first + rest == given
    for name, parameter in whole.parameters.items():
        torch.testing.assert_close(moved.parameters[name], parameter, rtol=1e-5, atol=1e-6)
    assert read_metrics(tmp_path / "moved")[-1][LOSS] == pytest.approx(read_metrics(tmp_path / "whole")[-1][LOSS])
