"""Selection of a checkpoint and its weights for answers and exports: those that gave the held-out loss."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from interlace.train.checkpoint.checkpoints import load_parameters
from interlace.train.checkpoint.folder import name_of, step_of
from interlace.train.config.load import ConfigError
from interlace.train.report import finished
from interlace.train.selection import choose
from tests.train.one_process import ToyModel
from tests.train.watching import trainer_of

LOSSES = [9.0, 4.0, 9.0, 5.0, 9.0, 6.0]
BOTH = ["train.ema=0.5", "checkpoint.best=loss", "train.steps=6", "train.validate_every=2", "checkpoint.every=6"]


def test_the_best_checkpoint_and_averages_are_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = trainer_of(tmp_path, *BOTH, held_out=LOSSES)
    trainer.run()
    assert trainer.averages is not None
    config, identity = trainer.config, trainer.checkpoints.identity
    chosen = choose(config, tmp_path)
    assert (step_of(chosen.path), chosen.averaged) == (2, True)
    assert chosen.words == "the least held-out loss, averaged weights"
    last = choose(config, tmp_path, step=6)
    assert (step_of(last.path), last.words) == (6, "averaged weights")
    model = ToyModel(seed=5)
    assert load_parameters(last.path, model, identity, averaged=True) == 6
    assert all(torch.equal(p, trainer.averages.held[name]) for name, p in model.named_parameters())
    raw = choose(config, tmp_path, step=6, raw=True)
    assert (raw.averaged, raw.words) == (False, "weights that are not averaged")
    load_parameters(raw.path, model, identity, averaged=raw.averaged)
    assert all(torch.equal(p, trainer.parameters[name]) for name, p in model.named_parameters())

    monkeypatch.setattr(finished, "build", lambda *_, **__: ToyModel(seed=5))
    monkeypatch.setattr(finished, "materialize", lambda *_, **__: None)
    monkeypatch.setattr("interlace.train.selection.architecture", lambda *_: {})
    monkeypatch.setattr("interlace.train.selection.identity_of", lambda *_: identity)
    load_parameters(chosen.path, model, identity, averaged=True)
    reported = finished.load_whole(config, tmp_path, None, "toy.toml")
    assert all(torch.equal(p, model.get_parameter(name)) for name, p in reported.named_parameters())

    shutil.rmtree(tmp_path / "checkpoints" / name_of(2))
    assert step_of(choose(config, tmp_path).path) == 6  # the best one was removed
    with pytest.raises(ConfigError, match=r"--step 2: .* has no checkpoint of that step; it has 6"):
        choose(config, tmp_path, step=2)


def test_weights_are_taken_as_they_are_where_validations_do_so(tmp_path: Path) -> None:
    plain = trainer_of(tmp_path, "train.ema=0.5", "train.ema_evaluate=false", "train.steps=4")
    plain.run()
    chosen = choose(plain.config, tmp_path)
    assert (step_of(chosen.path), chosen.averaged, chosen.words) == (4, False, "weights that are not averaged")
    without = trainer_of(tmp_path / "without", "train.steps=4")
    without.run()
    assert choose(without.config, tmp_path / "without").words == ""
    with pytest.raises(ConfigError, match=r"--raw: .* has no averaged weights \(train.ema\): omit --raw"):
        choose(without.config, tmp_path / "without", raw=True)
