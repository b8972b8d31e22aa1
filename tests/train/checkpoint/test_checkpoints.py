"""Checkpoints: atomic, verified, refused for another model, and readable under another layout."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn

from interlace.train import runfolder
from interlace.train.checkpoint import checkpoints as ck
from interlace.train.checkpoint import folder as checkpointfolder
from interlace.train.checkpoint.identity import identity_of
from interlace.train.checkpoint.storage import MANIFEST
from interlace.train.errors import TrainingError


@pytest.fixture(autouse=True)
def nothing_is_late(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (ck, checkpointfolder):
        monkeypatch.setattr(module, "LATE_SECONDS", 0.0)


ARCHITECTURE = {"language_model": {"architecture": "LlamaForCausalLM", "config": {"hidden_size": 4}}}


def _model(width: int = 4) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(width, 3), nn.Linear(3, 2))


def _checkpoints(folder: Path, model: nn.Module, keep: int = 2) -> ck.Checkpoints:
    return ck.Checkpoints(folder, keep=keep, identity=identity_of(model, ARCHITECTURE))


def _save(store: ck.Checkpoints, step: int, model: nn.Module) -> Path:
    optimizer = {f"exp_avg.{n}": torch.full_like(p, step) for n, p in model.named_parameters()}
    return store.save(step, dict(model.named_parameters()), optimizer, {"loader": {"at": step}})


class Gate:
    """Blocks writers until it opens."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.opened = threading.Event()
        real = ck.write_tensors

        def write(*args: Any) -> Any:
            assert self.opened.wait(60)
            return real(*args)

        monkeypatch.setattr(ck, "write_tensors", write)


def _begin(store: ck.Checkpoints, step: int, model: nn.Module) -> None:
    optimizer = {f"exp_avg.{n}": torch.full_like(p, step) for n, p in model.named_parameters()}
    store.begin(step, dict(model.named_parameters()), optimizer, {"loader": {"at": step}})


def test_weights_may_change_while_they_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, other = _model(), _model()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    store, gate = _checkpoints(tmp_path, model), Gate(monkeypatch)
    _begin(store, 3, model)
    torch.rand(5)  # nor the later state of the generators
    drawn_later = torch.rand(3)
    for parameter in model.parameters():
        parameter.data.fill_(9.0)
    assert store.writing and not store.ready and checkpointfolder.complete(tmp_path) == []
    gate.opened.set()
    store.finish()
    assert not store.writing
    [path] = checkpointfolder.complete(tmp_path)
    store.load(path, dict(other.named_parameters()), {})
    for was, parameter in zip(before, other.parameters(), strict=True):
        assert torch.equal(was, parameter)
    torch.rand(5)
    assert torch.equal(torch.rand(3), drawn_later)


def test_the_next_checkpoint_waits_for_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = _model()
    store, gate = _checkpoints(tmp_path, model), Gate(monkeypatch)
    _begin(store, 1, model)
    threading.Timer(0.2, gate.opened.set).start()
    _begin(store, 2, model)
    assert [path.name for path in checkpointfolder.complete(tmp_path)] == ["step-00000001"]
    store.finish()
    assert len(checkpointfolder.complete(tmp_path)) == 2


def test_checkpoint_write_errors_are_raised_in_finish(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = _model()
    store = _checkpoints(tmp_path, model)
    _save(store, 1, model)
    for name in ("write_tensors", "digest"):  # this rank's part, and rank 0's afterwards
        with monkeypatch.context() as patch:

            def full(*_: Any) -> Any:
                raise OSError(28, "No space left on device")

            patch.setattr(ck, name, full)
            _begin(store, 2, model)
            with pytest.raises(TrainingError, match=r"checkpoint step-00000002: rank 0: .*No space left on device"):
                store.finish()
        assert not store.writing
        assert [path.name for path in checkpointfolder.complete(tmp_path)] == ["step-00000001"]
    _save(store, 2, model)
    assert len(checkpointfolder.complete(tmp_path)) == 2


DIES_WRITING = """
import os, signal, sys, time
from pathlib import Path
from tests.train.checkpoint import test_checkpoints as t
model = t._model()
store = t._checkpoints(Path(sys.argv[1]), model)
t._save(store, 1, model)
def die(path, tensors):
    path.write_bytes(b"0" * 1000)
    os.kill(os.getpid(), signal.SIGKILL)
t.ck.write_tensors = die
t._begin(store, 2, model)
time.sleep(60)
"""


def test_a_kill_while_writing_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", DIES_WRITING, str(tmp_path)], env=environment, timeout=600)
    assert done.returncode == -signal.SIGKILL
    assert list(tmp_path.glob(".step-00000002.*.tmp/*.safetensors"))
    model = _model()
    store = _checkpoints(tmp_path, model)
    path = store.newest()
    assert path is not None and path.name == "step-00000001"
    _save(store, 2, model)
    assert not list(tmp_path.glob(".step-*"))  # left by the dead writer


def test_round_trip_is_exact_and_restores_generators(tmp_path: Path) -> None:
    model = _model()
    store = _checkpoints(tmp_path, model)
    path = _save(store, 7, model)
    drawn = random.random(), numpy.random.rand(3), torch.rand(3)
    other = _model()
    for parameter in other.parameters():
        parameter.data.zero_()
    state = {f"exp_avg.{n}": torch.zeros_like(p) for n, p in other.named_parameters()}
    progress = store.load(path, dict(other.named_parameters()), state)
    assert progress == {"loader": {"at": 7}, "step": 7}
    for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    assert all(bool((tensor == 7).all()) for tensor in state.values())
    again = random.random(), numpy.random.rand(3), torch.rand(3)
    assert drawn[0] == again[0] and (drawn[1] == again[1]).all() and torch.equal(drawn[2], again[2])


def test_part_of_the_parameters_can_be_loaded(tmp_path: Path) -> None:
    """A rank that holds a slice loads its slice: keys are global names."""
    model = _model()
    path = _save(_checkpoints(tmp_path, model), 1, model)
    part = {"1.weight": torch.zeros(2, 3)}
    _checkpoints(tmp_path, model).load(path, part, {})
    assert torch.equal(part["1.weight"], model[1].weight)


def test_retention_keeps_the_last_and_no_drafts_stay(tmp_path: Path) -> None:
    model = _model()
    store = _checkpoints(tmp_path, model, keep=2)
    for step in (1, 2, 3, 4):
        _save(store, step, model)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000003", "step-00000004"]


def test_a_crash_while_writing_leaves_the_previous_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = _model()
    store = _checkpoints(tmp_path, model)
    first = _save(store, 1, model)

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    for stage in ("write_tensors", "write_synced"):
        with monkeypatch.context() as patch:
            patch.setattr(ck, stage, full)
            with pytest.raises(TrainingError, match=r"checkpoint step-00000002: rank 0: OSError: .* No space"):
                _save(store, 2, model)
        assert ck.newest(tmp_path) == first
    assert _save(store, 2, model) == ck.newest(tmp_path)
    assert not list(tmp_path.glob(".*"))


def _truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-5])


def _flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(bytes(data))


@pytest.mark.parametrize("harm", [_truncate, _flip, Path.unlink])
@pytest.mark.parametrize("victim", ["*.safetensors", MANIFEST])
def test_torn_checkpoint_is_named_and_the_previous_used(
    tmp_path: Path, harm: object, victim: str, capfd: pytest.CaptureFixture[str]
) -> None:
    model = _model()
    store = _checkpoints(tmp_path, model)
    first, second = _save(store, 1, model), _save(store, 2, model)
    file = next(second.glob(victim))
    harm(file)  # type: ignore[operator]
    assert store.newest() == first
    output = capfd.readouterr().err
    assert output.startswith("interlace: checkpoint ") and file.name in output and output.count("\n") == 1
    assert store.newest() == first and not capfd.readouterr().err  # set aside: reported once
    with pytest.raises(ck.CheckpointError, match=r"no checkpoint at .*found: step-00000001"):
        store.newest(second)
    _save(store, 2, model)
    assert store.newest() == second


def test_checkpoint_of_another_model_is_refused_with_a_diff(tmp_path: Path) -> None:
    path = _save(_checkpoints(tmp_path, _model()), 1, _model())
    wide = _model(8)
    store = ck.Checkpoints(
        tmp_path,
        keep=1,
        identity=identity_of(
            wide, {"language_model": {"architecture": "LlamaForCausalLM", "config": {"hidden_size": 8}}}
        ),
    )
    with pytest.raises(ck.CheckpointError) as error:
        store.load(path, dict(wide.named_parameters()), {})
    assert "another model" in str(error.value)
    assert "model.language_model.config.hidden_size is 4 in the checkpoint, 8 in the config" in str(error.value)
    assert "0.weight is float32[3, 4] in the checkpoint, float32[3, 8]" in str(error.value)


def test_going_on_from_an_earlier_step_sets_later_ones_aside(tmp_path: Path) -> None:
    model = _model()
    store = _checkpoints(tmp_path, model, keep=5)
    paths = [_save(store, step, model) for step in (1, 2, 3)]
    assert store.newest(paths[0]) == paths[0]
    store.set_aside_after(1)
    assert store.newest() == paths[0]
    assert (tmp_path / "step-00000003.superseded").is_dir()
    (tmp_path / "step-00000001.torn").mkdir()
    (tmp_path / "step-00000002.torn").mkdir()
    _save(store, 2, model)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["step-00000001", "step-00000002", "step-00000002.torn", "step-00000003.superseded"]


def test_a_crash_while_replacing_brings_the_old_one_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = _model()
    run = tmp_path / "run"
    store = _checkpoints(run / "checkpoints", model)
    path = _save(store, 3, model)
    real = Path.rename

    def dies(source: Path, target: Path) -> Path:
        if source.name.startswith(".step-00000003.") and source.name.endswith(".tmp"):
            raise KeyboardInterrupt
        return real(source, target)

    monkeypatch.setattr(Path, "rename", dies)
    with pytest.raises(KeyboardInterrupt):
        _save(store, 3, model)
    monkeypatch.undo()
    assert not path.exists() and runfolder.has_checkpoint(run)
    assert store.newest() == path
    _save(store, 3, model)
    assert [left.name for left in store.folder.iterdir()] == ["step-00000003"]
