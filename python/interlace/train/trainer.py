"""Training loop of one rank.

Every rank runs the same loop over the same batches. Each decodes and computes only its share:

    batch -> pipeline forward + backward -> global clip -> optimizer -> observers -> next step

Observers (`interlace.train.observers`) write metrics, validate and save. Decisions that must be equal on all ranks
(stop on SIGTERM, the checkpoint to resume from) are agreed in each step (`launch.peers`). A checkpoint holds the full
state of the loop: weights, their averages, moments, generators, and `Progress`. An interrupted and resumed run
therefore repeats the uninterrupted one bit for bit.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor

from interlace.model import MultimodalModel
from interlace.resilience.supervisor.progress import allowing
from interlace.run.parallel_model import ParallelModel
from interlace.train import device as devices
from interlace.train import runfolder
from interlace.train.checkpoint.base import Stored
from interlace.train.checkpoint.checkpoints import AVERAGE, Checkpoints, seconds_to_write
from interlace.train.checkpoint.folder import name_of
from interlace.train.checkpoint.identity import canonical_names, identity_of
from interlace.train.checkpoint.pieces import Piece, pieces_of
from interlace.train.checkpoint.storage import CheckpointError, read_manifest
from interlace.train.config.load import ConfigError
from interlace.train.config.sections import Config
from interlace.train.data.feed import Feed
from interlace.train.errors import TrainingError
from interlace.train.launch.peers import Peers
from interlace.train.models.build import architecture
from interlace.train.observers.base import Line, Observer, Outputs, Taken, is_logged, is_validated
from interlace.train.observers.log import Log
from interlace.train.observers.measurements import Measurements, Trace
from interlace.train.observers.profiler import Profiler
from interlace.train.observers.saving import Saving
from interlace.train.observers.validation import Validation
from interlace.train.optim import Optimizer, lr_factor
from interlace.train.progress import Membership, Progress, check_goes_on
from interlace.train.report.metrics import BLANK, Clock
from interlace.train.report.terminal import TimeLeft
from interlace.train.watching import Averages

READY = 1 << 10  # larger than any signal number


class Trainer:
    """Trainer of one rank.

    `parallel` is this rank's share of `model` (`interlace.run.parallelize`, or an object with the same methods). `feed`
    supplies its samples. `stored` returns the storage locations of the initial weights (`build.stored_weights`):
    checkpoints leave out those of them that are frozen. `further`: observers that add to the lines of the metrics.
    """

    def __init__(
        self,
        config: Config,
        model: MultimodalModel,
        parallel: ParallelModel,
        feed: Feed,
        outputs: Outputs,
        membership: Membership | None = None,
        *,
        stored: Stored = dict,
        further: Sequence[Observer] = (),
    ) -> None:
        from interlace.train.models.tuning import rates  # imports transformers, which the model has loaded by now

        self.config, self.model, self.parallel, self.feed, self.outputs = config, model, parallel, feed, outputs
        self.membership = membership or Membership()
        identity = identity_of(model, architecture(config))
        peers = self.membership.peers or Peers(config.parallel.timeout, allowance=seconds_to_write(identity))
        self.peers, self.rank = peers, peers.rank
        canonical = canonical_names(model)
        self.parameters = {canonical[name]: parameter for name, parameter in parallel.named_parameters()}
        self.regions = {canonical[name]: region for name, region in parallel.regions().items()}
        self.optimizer = Optimizer(self.parameters.items(), config, rates(config, model))
        self.averages = None if config.train.ema is None else Averages(self.parameters, config.train.ema)
        self.checkpoints = make_checkpoints(config, model, identity, outputs, peers, stored)
        self.progress = Progress.at_start(config.train)
        self.step = 0  # the running step, which is `progress.step` once it is applied
        self.place = (0, 0)  # epoch and position of the batch of the running step
        self.stopped = 0  # the signal that ends the run
        self._taken: Taken | None = None  # the last step of this job
        left = TimeLeft(
            config.train.last_step, {"validation": config.train.validate_every, "checkpoint": config.checkpoint.every}
        )
        profiler = Profiler(config.log.profile, outputs.folder, self.rank)
        self.validation, self.saving = Validation(self, left), Saving(self, left)
        self.observers: list[Observer] = [
            Measurements(self, profiler),
            Trace(self),  # before the validation, which replaces the last timeline
            self.validation,
            *further,
            Log(self, left),
            self.saving,
            profiler,
        ]

    def resume(self, at: Path | None = None) -> Path:
        """Resumes from checkpoint `at`, or from the newest complete one in the run folder.

        Raises ConfigError if the config does not allow the run to resume from there, CheckpointError if the checkpoint
        cannot be used.
        """
        path = self.checkpoints.newest(at)
        if path is None:
            raise ConfigError(f"no checkpoint in {self.checkpoints.folder} is whole; start the run without --resume")
        table = self.checkpoints.load(path, *self.state())
        try:
            progress = Progress.model_validate(table)
            if set(progress.totals) != set(self.progress.totals):
                raise CheckpointError(f"{path}: its progress is not that of this version of the trainer")
        except ValidationError as error:
            raise CheckpointError(f"{path}: its progress is damaged: {error.errors()[0]['msg']}") from None
        check_goes_on(progress, self.config.train, path)
        self.go_on(progress)
        if self.averages is not None:  # averages of weights that were frozen, or not averaged, until now
            kept = read_manifest(path).tensors
            self.averages.begin_here([name for name in self.averages.held if f"optimizer.{AVERAGE}.{name}" not in kept])
        self.progress.last.pop(BLANK, None)  # of the previous job; each job counts its own
        self.checkpoints.set_aside_after(self.step)
        self._forget_best_if_gone()
        return path

    def go_on(self, progress: Progress) -> None:
        """Restores the progress of the loop. The caller fills in weights, averages and the optimizer's state."""
        self.progress = progress.going_on(self.config.train)
        self.step = progress.step
        self.feed.load_state_dict(progress.feed, new_order=self.config.data.of_earlier_version)

    def _forget_best_if_gone(self) -> None:
        """Drops the best validation if its checkpoint does not exist. Collective.

        This happens if ``checkpoint.best`` is new, or if a better checkpoint replaced it before the run went back to an
        earlier step.
        """
        verdict = self.progress.verdict
        best = self.checkpoints.folder / name_of(verdict.step)
        if not self.peers.on_first(f"looking for {best.name}", best.is_dir):
            verdict.best, verdict.step = None, -1

    def run(self) -> dict[str, Any]:
        """Trains to the last step (or until a stop is requested); returns the values for the summary."""
        train, leaves = self.config.train, self.membership.leaves
        self.stopped, self._taken = 0, None
        try:
            for each in self.observers:
                each.begin(self.progress)
            self._measure()  # a step of the previous generation
            while not self.progress.is_over(train) and not self.stopped and not leaves():
                for each in self.observers:
                    each.before_step(self.step + 1)
                self.step += 1
                self._train_step()
                if not leaves():
                    self._measure()
            if not leaves():
                for each in self.observers:
                    each.at_end()
        finally:
            for each in self.observers:
                each.close()
        return {
            "step": self.step,
            "finished": self.progress.is_over(train) and not leaves(),
            "signal": self.stopped,
            "verdict": self.progress.verdict,
            **self.progress.totals,
            "metrics": dict(self.progress.last),
            "forecast": {} if self.outputs.forecast is None else self.outputs.forecast.rows(),
        }

    def _measure(self) -> None:
        """Metrics, validation and checkpoint of the last step, unless they are done."""
        step, owed = self.progress.step, self.progress.owed
        if owed is None:
            return
        # If validations may end the run, its last line must have all metrics.
        ends = is_validated(step, self.config) and self.config.train.early_stop is not None
        logged = is_logged(step, self.config) or ends
        line = Line(step, logged, dict(owed) if logged else {}, self._taken, self.stopped)
        for each in self.observers:
            each.measure(line, self.progress)

    def _train_step(self) -> None:
        """One optimizer step.

        Raises TrainingError if the loss or the gradient is not finite, and the errors of `Membership.commit`.
        """
        began = time.perf_counter()
        data = Clock()
        with data, allowing("waiting for data", self.config.parallel.timeout):
            batch = self.feed.next()
        self.place = batch.epoch, batch.position
        rows = 0 if batch.rows is None else len(batch.rows)
        scaling = self.progress.loss_scale
        scale = 1.0 if scaling is None else scaling.scale
        # Stop signals travel with the loss, so all ranks stop after the same step. So does the state of each rank's
        # checkpoint writes.
        result = self.parallel.step(
            batch.given,
            microbatches=self.membership.microbatches(rows, self.config.train.microbatches),
            chunks=self.config.chunks(),
            place=(*self.place, self.step),
            note=self._note,
            loss_scale=scale,
        )
        notes = [int(note) for note in result.notes]
        self.stopped = next((note % READY for note in notes if note % READY), 0)
        if all(note >= READY for note in notes):
            self.checkpoints.advance()
        norm = self.parallel.clip_grad_norm_(self.config.train.clip_norm * scale) / scale
        finite = math.isfinite(result.loss) and math.isfinite(norm)
        self.membership.commit(self.step)
        lr = self._update(result.loss, norm, finite)
        if is_logged(self.step, self.config):  # else the next step waits for the optimizer's work, on its own clock
            devices.finish()
        seconds = time.perf_counter() - began
        self._taken = Taken(self.step, batch, result, norm, finite, lr, data.seconds, seconds)
        self.progress.step = self.step
        for each in self.observers:
            each.after_step(self._taken, self.progress)

    def _update(self, loss: float, norm: float, finite: bool) -> float:
        """Updates the weights with the gradients of this step; returns the rate of ``train.lr``.

        Under fp16 a step whose gradients overflow is skipped. Raises TrainingError if no loss scale avoids the
        overflow.
        """
        scaling = self.progress.loss_scale
        scale = 1.0 if scaling is None else scaling.scale
        if scaling is not None:
            scaling.took(finite)
        if not finite and (scaling is None or scaling.lost):
            raise TrainingError(
                f"step {self.step}: the loss is {loss}, the gradient norm {norm}; the weights are as before "
                "this step. Lower train.lr or raise train.warmup_steps and go on from the last checkpoint"
            )
        if not finite:
            self.optimizer.zero_grad()
            return self.config.train.lr * lr_factor(self.step, self.config.train)
        gradients = [p.grad for p in self.parameters.values() if p.grad is not None]
        if scale != 1.0 and gradients:  # torch raises an error for an empty list, as on a rank with only frozen stages
            torch._foreach_mul_(gradients, 1.0 / scale)
        lr = self.optimizer.step(self.step)
        if self.averages is not None:
            self.averages.update()
        return lr

    def _note(self) -> float:
        """Value sent to all ranks with the loss: the signal that this rank received, plus READY if a checkpoint may
        advance."""
        return float(self.membership.stop() + (READY if self.checkpoints.ready else 0))

    def snapshot(self, gather: Callable[..., list[Any]] | None = None) -> Progress:
        """Copy of the progress of the run after the last applied step. gather: as in `Feed.state_dict`."""
        feed = self.feed.state_dict(gather)
        if self.progress.step < self.step:  # the batch of an aborted step is repeated
            feed |= {"epoch": self.place[0], "position": self.place[1]}
        due = self.progress.due or self.checkpoints.writing
        return self.progress.model_copy(update={"feed": feed, "due": due}, deep=True)

    def state(self) -> tuple[dict[str, Tensor | Piece], dict[str, Tensor | Piece]]:
        """This rank's weights, and its optimizer state and averages, in place."""
        state, regions = self.optimizer.state(), self.optimizer.regions(self.regions)
        if self.averages is not None:
            state |= {f"{AVERAGE}.{name}": average for name, average in self.averages.held.items()}
            regions |= {f"{AVERAGE}.{name}": self.regions[name] for name in self.averages.held if name in self.regions}
        return pieces_of(self.parameters, self.regions), pieces_of(state, regions)


def make_checkpoints(
    config: Config, model: MultimodalModel, identity: dict[str, Any], outputs: Outputs, peers: Peers, stored: Stored
) -> Checkpoints:
    """The checkpoints of a run. identity: of the model, from `identity_of`. stored: as in `Trainer`."""
    return Checkpoints(
        runfolder.checkpoints_of(outputs.folder),
        keep=config.checkpoint.keep,
        identity=identity,
        peers=peers,
        check=outputs.lock.check if outputs.lock is not None else lambda: None,
        stored=stored,
        frozen={name for name, parameter in model.named_parameters() if not parameter.requires_grad},
    )
