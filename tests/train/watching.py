"""Helpers of test_watching.py and of other tests."""

from __future__ import annotations

from pathlib import Path

import torch

from interlace.train.observers.base import Outputs
from interlace.train.report.metrics import HELD_OUT
from interlace.train.trainer import Trainer
from tests.train.one_process import OneProcess, ToyModel, toy_config, toy_feed


def trainer_of(folder: Path, *overrides: str, held_out: list[float] | None = None, stop: int | None = None) -> Trainer:
    """held_out: results of validations, one per step."""
    folder.mkdir(exist_ok=True)
    config, model = toy_config(*overrides), ToyModel()
    torch.manual_seed(config.run.seed)
    trainer = Trainer(config, model, OneProcess(model), toy_feed(config), Outputs(folder, quiet=True))
    if held_out is not None:
        trainer.validation.losses = lambda: {HELD_OUT: held_out[trainer.step - 1]}  # type: ignore[method-assign]
    if stop is not None:
        trainer.membership.stop = lambda: trainer.step >= stop
    return trainer
