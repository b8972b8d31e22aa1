"""Selection of a checkpoint of a run, and of its weights: the step asked for, the best or the newest."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from pydantic import ValidationError

from interlace.train import runfolder
from interlace.train.checkpoint import checkpoints
from interlace.train.checkpoint import folder as checkpointfolder
from interlace.train.checkpoint.identity import identity_of
from interlace.train.checkpoint.storage import read_manifest
from interlace.train.config.load import ConfigError
from interlace.train.config.sections import Config
from interlace.train.models.build import architecture, stored_weights
from interlace.train.watching import Verdict

if TYPE_CHECKING:
    from interlace.model import MultimodalModel


class Chosen(NamedTuple):
    """A selected checkpoint.

    averaged: use its averages (``train.ema``) in place of the weights.
    words: reason for this checkpoint and its weights, for a log line that names its step; "" if there was no choice.
    """

    path: Path
    averaged: bool
    words: str


def choose(
    config: Config, folder: Path, *, at: Path | None = None, step: int | None = None, raw: bool = False
) -> Chosen:
    """The checkpoint `at`, or that of `step`. Default: the best of the run in `folder`, else the newest.

    The best exists if the run keeps it (``checkpoint.best``). Selects the averages if the checkpoint has them and the
    held-out loss is measured with them, but not with `raw`. Raises ConfigError if there is no such checkpoint, and for
    `raw` if a run keeps no averages.
    """
    if raw and config.train.ema is None:
        raise ConfigError(f"--raw: {folder} has no averaged weights (train.ema): omit --raw")
    words = []
    path = _of_step(folder, step) if at is None and step is not None else at
    if path is None:
        path = checkpointfolder.newest(runfolder.checkpoints_of(folder))
        if path is None:
            raise ConfigError(f"no complete checkpoint in {runfolder.checkpoints_of(folder)}")
        if config.checkpoint.best is not None and (best := _best(path)) is not None:
            path = best
            words.append("the least held-out loss")
    keeps = config.train.ema is not None
    averaged = keeps and not raw and config.train.ema_evaluate and _has_averages(path)
    if keeps:
        words.append("averaged weights" if averaged else "weights that are not averaged")
    return Chosen(path, averaged, ", ".join(words))


def fill(config: Config, model: MultimodalModel, chosen: Chosen, *, source: str = "config") -> int:
    """Fills the whole model of a run's config in this process with the chosen weights; returns their step.

    Weights that a checkpoint leaves to the folders named in the config are read from there. All weights are fp32
    afterwards, also those stored in bf16, because nothing is computed under autocast here. Raises ConfigError and
    CheckpointError.
    """
    stored = partial(stored_weights, config, model, source=source)
    identity = identity_of(model, architecture(config))
    step = checkpoints.load_parameters(chosen.path, model, identity, averaged=chosen.averaged, stored=stored)
    model.float()
    return step


def _of_step(folder: Path, step: int) -> Path:
    path = runfolder.checkpoints_of(folder) / checkpointfolder.name_of(step)
    if not path.is_dir():
        steps = [checkpointfolder.step_of(each) for each in checkpointfolder.complete(path.parent)]
        have = ", ".join(map(str, sorted(steps))) or "none"
        raise ConfigError(f"--step {step}: {folder} has no checkpoint of that step; it has {have}")
    return path


def _has_averages(path: Path) -> bool:
    start = f"optimizer.{checkpoints.AVERAGE}."
    return any(key.startswith(start) for key in read_manifest(path).tensors)


def _best(newest: Path) -> Path | None:
    """The checkpoint that the newest one records as the best, if it exists."""
    table = checkpoints.read_json(newest, read_manifest(newest), "progress")
    try:
        step = Verdict.model_validate(table.get("verdict") if isinstance(table, dict) else None).step
    except ValidationError as error:
        raise checkpoints.CheckpointError(
            f"{newest}: its progress is damaged: {error.errors()[0]['msg']}; choose another with --step"
        ) from None
    path = newest.with_name(checkpointfolder.name_of(step))
    return path if step >= 0 and path.is_dir() else None
