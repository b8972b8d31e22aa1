"""The training loop of one rank.

Every rank runs the same loop over the same batches, each decoding and computing only its share:

    batch -> pipeline forward + backward -> global clip -> optimizer -> metrics, validation, checkpoint -> next step

What must be decided alike (stop on SIGTERM, which checkpoint to go on from) is agreed between the ranks each step
(`launch.peers`). A checkpoint holds all that the loop's future depends on: weights, their averages, moments, step,
place in the data, generators, what validations have said, the scale of losses, the sums of an unfinished logging
window; so an interrupted and resumed run repeats the uninterrupted one bit for bit.
"""

from __future__ import annotations

import contextlib
import math
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, ValidationError
from torch import Tensor, nn

from interlace.model.naming import LANGUAGE_MODEL
from interlace.model.rows import ROWS
from interlace.train import device as devices
from interlace.train import runfolder
from interlace.train.build import architecture
from interlace.train.checkpoint.base import Stored
from interlace.train.checkpoint.checkpoints import AVERAGE, Checkpoints, seconds_to_write
from interlace.train.checkpoint.folder import name_of
from interlace.train.checkpoint.identity import canonical_names, identity_of
from interlace.train.checkpoint.pieces import Piece, pieces_of
from interlace.train.checkpoint.storage import CheckpointError, read_manifest
from interlace.train.config import ConfigError
from interlace.train.errors import TrainingError
from interlace.train.feed import Feed
from interlace.train.flops import Meter, peak_here
from interlace.train.forecast import Forecast
from interlace.train.launch.launcher import StopSignals
from interlace.train.launch.lock import RunLock
from interlace.train.launch.peers import Peers
from interlace.train.metrics import (
    BLANK,
    EPOCHS,
    HELD_OUT,
    LOSS,
    Clock,
    LogWindow,
    Metrics,
    computed_tokens,
    dispatch_metrics,
    of_ranks,
    of_this_rank,
    padding,
    pipeline_metrics,
    read_metrics,
)
from interlace.train.optim import Optimizer, lr_factor, schedule_length
from interlace.train.profiling import Profiler
from interlace.train.schema import Config
from interlace.train.screen import Screen, TimeLeft
from interlace.train.trackers import Trackers
from interlace.train.watching import Averages, LossScale, Verdict

READY = 1 << 10  # more than any signal's number


class StopRequest:
    """Remembers SIGTERM and SIGINT, so that the loop can finish its step, save and leave.

    What ends it at once is decided as in the launcher, by `StopSignals`.
    """

    def __init__(self) -> None:
        self.signals = StopSignals()
        self.previous = {number: signal.signal(number, self._note) for number in (signal.SIGTERM, signal.SIGINT)}

    @property
    def number(self) -> int:
        """The first signal that came; 0: none yet."""
        return self.signals.number

    def restore(self) -> None:
        """Puts back the handlers from before."""
        for number, handler in self.previous.items():
            signal.signal(number, handler)

    def _note(self, number: int, _frame: Any) -> None:
        if self.signals.insists(number):
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
            signal.raise_signal(number)


class Progress(BaseModel):
    """What a checkpoint says of a run beside tensors. It may come from anybody, so its types are checked."""

    model_config = ConfigDict(extra="forbid", strict=True)

    step: int
    optimizer: str
    momentum: float
    """Of sgd and muon; 0: sgd's is not kept."""
    verdict: Verdict
    loss_scale: LossScale | None
    schedule_steps: int
    """Steps over which the learning rate was planned."""
    feed: dict[str, Any]
    window: LogWindow
    totals: dict[str, int | float]
    last: dict[str, int | float]


class Trainer:
    """One rank of a run.

    `parallel` is this rank's share of `model` (`interlace.run.parallelize`, or anything with its methods); `feed` its
    samples; `folder` the run folder, shared by all ranks, and `lock` its lock, on the rank that has it (0). `stop` is
    asked after each step: the signal that wants the run to end, 0 for none. `trackers` are told on rank 0, and of the
    run's end by who made them. `forecast` predicts steps, on rank 0 (``log.predict``). `stored` says where weights lie
    that the run began with (`build.stored_weights`): checkpoints leave out those of them that are frozen.
    """

    def __init__(
        self,
        config: Config,
        model: nn.Module,
        parallel: Any,
        feed: Feed,
        folder: Path,
        *,
        stop: Callable[[], int] = lambda: 0,
        lock: RunLock | None = None,
        trackers: Trackers | None = None,
        forecast: Forecast | None = None,
        quiet: bool = False,
        stored: Stored = dict,
    ) -> None:
        self.config, self.model, self.parallel, self.feed, self.folder = config, model, parallel, feed, folder
        from interlace.train.tuning import rates  # with the library of models, which the model has loaded by now

        self.stop_requested, self.lock = stop, lock
        identity = identity_of(model, architecture(config))
        self.peers = Peers(config.parallel.timeout, allowance=seconds_to_write(identity))
        self.rank = self.peers.rank
        self.quiet = quiet or self.rank != 0
        canonical = canonical_names(model)
        self.parameters = {canonical[name]: parameter for name, parameter in parallel.named_parameters()}
        self.regions = {canonical[name]: region for name, region in parallel.regions().items()}
        self.optimizer = Optimizer(self.parameters.items(), config, rates(config, model))
        self.averages = None if config.train.ema is None else Averages(self.parameters, config.train.ema)
        self.verdict = Verdict()
        self.loss_scale = LossScale() if config.train.precision == "fp16" else None
        self.checkpoints = Checkpoints(
            runfolder.checkpoints_of(folder),
            keep=config.checkpoint.keep,
            identity=identity,
            peers=self.peers,
            check=lock.check if lock is not None else lambda: None,
            stored=stored,
            frozen={name for name, parameter in model.named_parameters() if not parameter.requires_grad},
        )
        whole: Any = model
        self._encoders, self._padded = whole.encoders, whole.packing.get(LANGUAGE_MODEL) == ROWS
        self._samples: list[Any] = []  # of the last step
        self._exchange: Any = None  # what of them had travelled, of streams
        self.forecast, self._took = forecast, 0.0
        self._cut = {"microbatches": config.train.microbatches, "chunks": config.chunks()}
        self.step = 0
        self.window = LogWindow()
        self._decoded = 0  # items, at the last line
        self.totals = {"seconds": 0.0, "samples": 0, "tokens": 0, "waited": 0.0, "validating": 0.0, "saving": 0.0}
        self.trackers = trackers or Trackers(config, folder, {})
        self.profiler = Profiler(config.log.profile, folder, self.rank)
        self.meter: Meter | None = None  # of rank 0
        self.last: dict[str, float] = {}
        self.saved_step = -1
        self.stopped = 0  # the signal that ends the run

    def resume(self, at: Path | None = None) -> Path:
        """Goes on from checkpoint `at`, or from the newest one in the run folder that is whole.

        Raises ConfigError when the config does not let the run go on from there, CheckpointError when the checkpoint
        cannot be used.
        """
        path = self.checkpoints.newest(at)
        if path is None:
            raise ConfigError(f"no checkpoint in {self.checkpoints.folder} is whole; start the run without --resume")
        table = self.checkpoints.load(path, *self._state())
        try:
            progress = Progress.model_validate(table)
            if set(progress.totals) != set(self.totals):
                raise CheckpointError(f"{path}: its progress is not that of this version of the trainer")
        except ValidationError as error:
            raise CheckpointError(f"{path}: its progress is damaged: {error.errors()[0]['msg']}") from None
        self._check_goes_on(progress, path)
        self.step = self.saved_step = progress.step
        self.verdict = progress.verdict
        if self.loss_scale is not None and progress.loss_scale is not None:
            self.loss_scale = progress.loss_scale
        if self.averages is not None:  # those of weights that were frozen, or not averaged, until now
            kept = read_manifest(path).tensors
            self.averages.begin_here([name for name in self.averages.held if f"optimizer.{AVERAGE}.{name}" not in kept])
        self.feed.load_state_dict(progress.feed)
        self.window = progress.window
        self.totals, self.last = progress.totals, progress.last
        self.last.pop(BLANK, None)  # of the job before; each counts its own
        self.checkpoints.set_aside_after(self.step)
        self._forget_best_if_gone()
        return path

    def _forget_best_if_gone(self) -> None:
        """The best validation counts only with its checkpoint, which is not there when ``checkpoint.best`` is new, or
        when a better one had taken its place before the run went back to an earlier step. Collective."""
        best = self.checkpoints.folder / name_of(self.verdict.step)
        if not self.peers.on_first(f"looking for {best.name}", best.is_dir):
            self.verdict.best, self.verdict.step = None, -1

    def _check_goes_on(self, progress: Progress, path: Path) -> None:
        """Raises ConfigError when steps lie behind the run already, or would make its learning rate jump.

        What the config says of the rate itself (lr, schedule, warm-up, decay, minimum) is taken as it says now.
        """
        train, reached = self.config.train, progress.step
        if reached > train.last_step:
            raise ConfigError(
                f"--resume: {path} is of step {reached}, but train.steps = {train.steps}; raise it, or go on from "
                f"an earlier checkpoint by naming it (they lie in {path.parent})"
            )
        if progress.optimizer != train.optimizer:
            raise ConfigError(
                f"--resume: {path} has the state of optimizer = {progress.optimizer!r}, which "
                f"{train.optimizer!r} cannot go on from: keep it, or begin a new run"
            )
        if train.optimizer == "sgd" and train.momentum and not progress.momentum:
            raise ConfigError(
                f"--resume: {path} is of sgd without momentum, which train.momentum = {train.momentum:g} would begin "
                "from zeros: keep train.momentum=0, or begin a new run"
            )
        planned, now = progress.schedule_steps, schedule_length(train)
        before = lr_factor(reached + 1, train.model_copy(update={"schedule_steps": planned}))
        after = lr_factor(reached + 1, train)
        if train.schedule_steps is None and reached < train.last_step and before != after:
            raise ConfigError(
                f"--resume: the learning rate was planned over {planned} steps; over train.steps = {now} it would jump "
                f"from {train.lr * before:.3g} to {train.lr * after:.3g} at step {reached + 1}. Say which is meant: "
                f"--set train.schedule_steps={planned} keeps the plan (and its last rate beyond it), "
                f"--set train.schedule_steps={now} makes a new one"
            )

    def run(self) -> dict[str, Any]:
        """Trains to the last step (or until asked to stop); returns what the summary needs."""
        train, log, every = self.config.train, self.config.log, self.config.checkpoint.every
        metrics = Metrics(self.folder, start=self.step, trackers=self.trackers) if self.rank == 0 else None
        last = train.last_step
        left = TimeLeft(last, {"validation": train.validate_every, "checkpoint": every})
        epoch_steps = self.feed.loader.batches_per_epoch or 0  # of a stream nobody knows
        screen = Screen(last, self.step, name=self.config.run.name, epoch_steps=epoch_steps, enabled=not self.quiet)
        self.stopped = 0
        peaks = self.peers.exchange("adding up what the devices could compute", peak_here(self.config))
        if self.rank == 0:
            self.meter = Meter(self.model, peaks, recompute=train.recompute)
            if self.meter.why:
                screen.say(f"interlace: no tflops and mfu: {self.meter.why}")
        try:
            while self.step < last and not self.stopped and not self.verdict.ends(train.early_stop):
                if self.lock is not None and self.lock.trouble:
                    raise TrainingError(self.lock.trouble)
                self.step += 1
                began = time.perf_counter()
                with self.profiler.step(self.step):
                    values = self._train_step()
                every_so_often = bool(train.validate_every) and self.step % train.validate_every == 0
                measures = self.step == last or every_so_often
                # Where validations may end the run, its last line has all there is to say.
                if self._logs(self.step) or (measures and train.early_stop is not None):
                    values |= self._measurements()
                    self.window = LogWindow()
                else:
                    values = {}
                left.step(time.perf_counter() - began)
                if self.step == log.trace_step:
                    self._trace()  # before a validation, whose pass over the model would be the last
                best = False
                if measures:
                    with Clock() as validating:
                        values |= self.validate()
                    values["time_metrics/validation(s)"] = validating.seconds
                    self.totals["validating"] += validating.seconds
                    left.beside("validation", validating.seconds)
                    best = self.verdict.add(self.step, values[HELD_OUT], train.early_stop)
                if values:
                    self.last |= values
                    if metrics is not None:
                        metrics.write(self.step, values)
                    screen.show(self.step, values, left.after(self.step))
                else:
                    screen.advance(self.step, left.after(self.step))
                due = (every and self.step % every == 0) or (best and self.config.checkpoint.best is not None)
                if self.stopped or self.step == last or due or self.verdict.ends(train.early_stop):
                    with Clock() as saving:
                        self.save()
                    self.window.checkpoint_seconds += saving.seconds
                    self.totals["saving"] += saving.seconds
                    left.beside("checkpoint", saving.seconds)
            self.checkpoints.finish()
        finally:
            self.profiler.close()
            screen.close()
            if metrics is not None:
                metrics.close()
        finished = self.step == last or self.verdict.ends(train.early_stop)
        return {
            "step": self.step,
            "finished": finished,
            "signal": self.stopped,
            "verdict": self.verdict,
            **self.totals,
            "metrics": dict(self.last),
            "forecast": {} if self.forecast is None else self.forecast.rows(),
        }

    def _logs(self, step: int) -> bool:
        """Whether a line is due after `step`, whatever is measured there."""
        return step % self.config.log.every == 0 or step == self.config.train.last_step

    def _train_step(self) -> dict[str, float]:
        """One optimizer step. Raises TrainingError when the loss or the gradient is not a number."""
        began = time.perf_counter()
        data = Clock()
        with data:
            batch = self.feed.next()
        place = (batch.epoch, batch.position, self.step)
        # With the loss all ranks learn which of them were asked to stop, and so they stop after the same step.
        # Likewise whether all have come to the end of what they write of a checkpoint.
        cut = self._cut if batch.rows is None else self._cut | {"microbatches": None}  # the rows are microbatches
        scale = 1.0 if self.loss_scale is None else self.loss_scale.scale
        result = self.parallel.step(batch.given, **cut, place=place, note=self._note, loss_scale=scale)
        notes = [int(note) for note in result.notes]
        self.stopped = next((note % READY for note in notes if note % READY), 0)
        if all(note >= READY for note in notes):
            self.checkpoints.advance()
        norm = self.parallel.clip_grad_norm_(self.config.train.clip_norm * scale) / scale
        finite = math.isfinite(result.loss) and math.isfinite(norm)
        values = {"lr": self._update(result.loss, norm, finite)}
        if self._logs(self.step):  # else the next step waits for the optimizer's work, on its own clock
            devices.finish()
        seconds, timed = time.perf_counter() - began, not self.profiler.slows(self.step)
        if finite:
            values |= {"grad_norm": norm, "loss_metrics/step_loss": result.loss}
            if self._logs(self.step):
                values |= {f"{EPOCHS}{name}": times for name, times in self.feed.epochs(batch).items()}
            self.window.add(
                loss=result.loss,
                targets=result.tokens,
                read_tokens=batch.tokens,
                samples=len(batch.samples),
                computed=computed_tokens(batch.samples, self._encoders),
                data=data.seconds,
                seconds=seconds,
                moved=batch.moved,
                room=0 if batch.rows is None else len(batch.rows) * (self.config.data.max_tokens or 0),
                timed=timed,
                sources=batch.sources,
            )
            if self.meter is not None and timed:
                self.meter.add(batch.samples, result.table, seconds)
        self.totals["seconds"] += seconds
        self.totals["samples"] += len(batch.samples)
        self.totals["tokens"] += batch.tokens
        self._samples, self._took = list(batch.samples), seconds - data.seconds
        self._exchange = batch.exchange
        return values

    def _update(self, loss: float, norm: float, finite: bool) -> float:
        """Train the weights with the gradients of this step; returns ``train.lr``'s rate of it.

        Under fp16 a step whose gradients overflow is left out. Raises TrainingError for one that no scale helps.
        """
        scaling = self.loss_scale
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
        if scale != 1.0 and gradients:  # a rank of frozen stages has none, of which torch makes an error
            torch._foreach_mul_(gradients, 1.0 / scale)
        lr = self.optimizer.step(self.step)
        if self.averages is not None:
            self.averages.update()
        return lr

    def _note(self) -> float:
        """What the others learn with the loss: the signal that this rank got, and READY if a checkpoint may advance."""
        return float(self.stop_requested() + (READY if self.checkpoints.ready else 0))

    def _measurements(self) -> dict[str, float]:
        """The window's averages, the last step's pipeline, what every rank told. Collective."""
        feed, before = self.feed, self._decoded
        self._decoded = feed.decoded_items
        told = of_this_rank(self.window, feed.blank_items, self._decoded - before, feed.worker_restarts)
        everyone = self.peers.exchange_all(f"measuring step {self.step}", told)
        timeline = self._timeline()
        values = self.window.metrics() | of_ranks(self.window, everyone) | pipeline_metrics(timeline)
        values |= dispatch_metrics(self.parallel, timeline.table, self._samples)
        self.totals["waited"] += values.get("time_metrics/data_loading(s)", 0.0)  # of the slowest rank each time
        values |= {} if self.meter is None else self.meter.metrics()
        if self._padded:
            values["data/padding(%)"] = padding(timeline.table, list(map(len, self._samples)))
        if self.forecast is not None:
            values |= self.forecast.add(self._samples, timeline, self._took, self._exchange)
        if self.loss_scale is not None:
            values |= {"fp16/loss_scale": self.loss_scale.scale, "fp16/skipped_steps": self.loss_scale.skipped}
        return values

    def validate(self) -> dict[str, float]:
        """Mean loss over the held-out samples, in nats per target token; of several sources that over each one's, too.
        Collective.

        With averaged weights, where they are kept and ``train.ema_evaluate`` says so.
        """
        size = self.config.train.batch_size
        found: dict[str, tuple[float, int]] = {}
        averaged = self.averages is not None and self.config.train.ema_evaluate
        self.parallel.train(False)
        with self.averages.in_place() if self.averages is not None and averaged else contextlib.nullcontext():
            for name, samples in self.feed.held_out_by_source():
                loss, tokens = 0.0, 0
                for start in range(0, len(samples), size):
                    result = self.parallel.evaluate(samples[start : start + size], **self._cut)
                    loss += result.loss * result.tokens
                    tokens += result.tokens
                found[name] = (loss, tokens)
        self.parallel.train(True)
        targets = sum(tokens for _, tokens in found.values())
        values = {f"{HELD_OUT}/{name}": loss / max(tokens, 1) for name, (loss, tokens) in found.items() if name}
        return {HELD_OUT: sum(loss for loss, _ in found.values()) / max(targets, 1)} | values

    def save(self) -> None:
        """Begins a checkpoint of this step, unless there is one; `run` does not end before it stands. Collective."""
        if self.saved_step == self.step:
            return
        progress = Progress(
            step=self.step,
            optimizer=self.config.train.optimizer,
            momentum=self.config.train.momentum,
            verdict=self.verdict,
            loss_scale=self.loss_scale,
            schedule_steps=schedule_length(self.config.train),
            feed=self.feed.state_dict(self.peers.together),
            window=self.window,
            totals=self.totals,
            last=self.last,
        )
        write = self.checkpoints.begin if self.config.checkpoint.asynchronous else self.checkpoints.save
        best = -1 if self.config.checkpoint.best is None else self.verdict.step
        write(self.step, *self._state(), progress.model_dump(), best=best)
        self.saved_step = self.step

    def _state(self) -> tuple[dict[str, Tensor | Piece], dict[str, Tensor | Piece]]:
        """What this rank holds of the weights, and of the optimizer's state and averages, in place."""
        state, regions = self.optimizer.state(), self.optimizer.regions(self.regions)
        if self.averages is not None:
            state |= {f"{AVERAGE}.{name}": average for name, average in self.averages.held.items()}
            regions |= {f"{AVERAGE}.{name}": self.regions[name] for name in self.averages.held if name in self.regions}
        return pieces_of(self.parameters, self.regions), pieces_of(state, regions)

    def _timeline(self) -> Any:
        with self.peers.waiting(f"gathering the timeline of step {self.step}"):
            return self.parallel.timeline()

    def _trace(self) -> None:
        timeline = self._timeline()
        if self.rank == 0:
            timeline.name = f"{self.config.run.name}, step {self.step}, measured"
            timeline.write_trace(self.folder / "trace.json")
            timeline.plot(self.folder / "timeline.png")


__all__ = ["BLANK", "HELD_OUT", "LOSS", "StopRequest", "Trainer", "TrainingError", "read_metrics"]
