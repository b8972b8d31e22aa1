"""Training loop of one rank.

Every rank runs the same loop over the same batches. Each decodes and computes only its share:

    batch -> pipeline forward + backward -> global clip -> optimizer -> metrics, validation, checkpoint -> next step

Decisions that must be equal on all ranks (stop on SIGTERM, the checkpoint to resume from) are agreed in each step
(`launch.peers`). A checkpoint holds the full state of the loop: weights, their averages, moments, step, position in the
data, generators, validation results, loss scale and the sums of an unfinished logging window. An interrupted and
resumed run therefore repeats the uninterrupted one bit for bit.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor, nn

from interlace.model.naming import LANGUAGE_MODEL
from interlace.model.rows import ROWS
from interlace.resilience.supervisor.progress import allowing
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
from interlace.train.launch.lock import RunLock
from interlace.train.launch.peers import Peers
from interlace.train.models.build import architecture
from interlace.train.optim import Optimizer, lr_factor, schedule_length
from interlace.train.progress import Progress, StopRequest, check_goes_on
from interlace.train.report.flops import Meter, peak_here
from interlace.train.report.forecast import Forecast
from interlace.train.report.metrics import (
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
from interlace.train.report.profiler import Profiler
from interlace.train.report.terminal import Screen, TimeLeft
from interlace.train.report.trackers import Trackers
from interlace.train.watching import Averages, LossScale, Verdict

READY = 1 << 10  # larger than any signal number


class Trainer:
    """Trainer of one rank.

    `parallel` is this rank's share of `model` (`interlace.run.parallelize`, or an object with the same methods). `feed`
    supplies its samples. `folder` is the run folder, shared by all ranks, and `lock` its lock, on rank 0 only. `stop`
    is called after each step: it returns the signal that asks the run to end, or 0. `trackers` receive the metrics on
    rank 0; the caller reports the end of the run to them. `forecast` predicts steps, on rank 0 (``log.predict``).
    `stored` returns the storage locations of the initial weights (`build.stored_weights`): checkpoints leave out those
    of them that are frozen.

    For an elastic run: `commit` is called when a step's gradients and their norm are known on all ranks, and raises if
    the step must not be applied. No collective follows before the update of the step. `leaves` returns True if training
    stops after this step, so that another generation continues. `shares` returns the number of microbatches of each
    replica, given the total. `peers`: by default made here. `meter` counts FLOPs; by default it is made when training
    begins, in seconds.
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
        commit: Callable[[int], None] = lambda step: None,
        leaves: Callable[[], bool] = lambda: False,
        shares: Callable[[int], Sequence[int]] | None = None,
        peers: Peers | None = None,
        meter: Meter | None = None,
    ) -> None:
        self.config, self.model, self.parallel, self.feed, self.folder = config, model, parallel, feed, folder
        from interlace.train.models.tuning import rates  # imports transformers, which the model has loaded by now

        self.stop_requested, self.lock = stop, lock
        self.commit, self.leaves, self.shares = commit, leaves, shares
        identity = identity_of(model, architecture(config))
        self.peers = peers or Peers(config.parallel.timeout, allowance=seconds_to_write(identity))
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
        self._exchange: Any = None  # movement of these samples, for streams
        self.forecast, self._took = forecast, 0.0
        self._cut = {"microbatches": config.train.microbatches, "chunks": config.chunks()}
        self.step = 0
        self.applied = 0  # the last step that was applied: `step`, or the one before while that runs
        self.place = (0, 0)  # epoch and position of the batch of the running step
        self.owed: dict[str, float] | None = None
        """Measurements of the last step until they are processed: its line is not written, the held-out loss not
        measured. If an elastic generation ends here, the next one processes them."""
        self.beside: dict[str, float] = {}  # further values for the next line, set by the caller
        self.line: dict[str, float] | None = None
        """Last line of the metrics, with its step, on every rank: rank 0 may be lost before it has written the line."""
        self.due = False  # True if a checkpoint of the last step is due
        self.window = LogWindow()
        self._decoded = 0  # count at the last line
        self.totals = {"seconds": 0.0, "samples": 0, "tokens": 0, "waited": 0.0, "validating": 0.0, "saving": 0.0}
        self.trackers = trackers or Trackers(config, folder, {})
        self.profiler = Profiler(config.log.profile, folder, self.rank)
        self.meter = meter  # on rank 0
        self.last: dict[str, float] = {}
        self.saved_step = -1
        self.stopped = 0  # the signal that ends the run

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
            if set(progress.totals) != set(self.totals):
                raise CheckpointError(f"{path}: its progress is not that of this version of the trainer")
        except ValidationError as error:
            raise CheckpointError(f"{path}: its progress is damaged: {error.errors()[0]['msg']}") from None
        check_goes_on(progress, self.config.train, path)
        self.go_on(progress)
        self.saved_step = progress.step
        if self.averages is not None:  # averages of weights that were frozen, or not averaged, until now
            kept = read_manifest(path).tensors
            self.averages.begin_here([name for name in self.averages.held if f"optimizer.{AVERAGE}.{name}" not in kept])
        self.last.pop(BLANK, None)  # of the previous job; each job counts its own
        self.checkpoints.set_aside_after(self.step)
        self._forget_best_if_gone()
        return path

    def go_on(self, progress: Progress) -> None:
        """Restores the progress of the loop. The caller fills in weights, averages and the optimizer's state."""
        self.step = self.applied = progress.step
        self.verdict = progress.verdict
        if self.loss_scale is not None and progress.loss_scale is not None:
            self.loss_scale = progress.loss_scale
        self.feed.load_state_dict(progress.feed)
        self.window, self.totals, self.last = progress.window, progress.totals, progress.last
        self.owed, self.due, self.line = progress.owed, progress.due, progress.line

    def _forget_best_if_gone(self) -> None:
        """Drops the best validation if its checkpoint does not exist. Collective.

        This happens if ``checkpoint.best`` is new, or if a better checkpoint replaced it before the run went back to an
        earlier step.
        """
        best = self.checkpoints.folder / name_of(self.verdict.step)
        if not self.peers.on_first(f"looking for {best.name}", best.is_dir):
            self.verdict.best, self.verdict.step = None, -1

    def run(self) -> dict[str, Any]:
        """Trains to the last step (or until a stop is requested); returns the values for the summary."""
        train, every = self.config.train, self.config.checkpoint.every
        start = self.step if self.owed is None else self.step - 1  # the line of that step may be unwritten
        self.metrics = Metrics(self.folder, start=start, trackers=self.trackers) if self.rank == 0 else None
        if self.metrics is not None and self.line is not None and self.line["step"] <= start:
            self.metrics.complete(self.line)
        last = train.last_step
        self.left = TimeLeft(last, {"validation": train.validate_every, "checkpoint": every})
        epoch_steps = self.feed.loader.batches_per_epoch or 0  # unknown for a stream
        self.screen = Screen(
            last, self.step, name=self.config.run.name, epoch_steps=epoch_steps, enabled=not self.quiet
        )
        self.stopped = 0
        peaks = self.peers.exchange("adding up what the devices could compute", peak_here(self.config))
        if self.rank == 0:
            if self.meter is None:
                self.meter = Meter(self.model, peaks, recompute=train.recompute)
                if self.meter.why:
                    self.screen.say(f"interlace: no tflops and mfu: {self.meter.why}")
            self.meter.measure(peaks)
        try:
            self._after_step()  # finishes a step of the previous generation
            while not self._is_over() and not self.stopped and not self.leaves():
                if self.lock is not None and self.lock.trouble:
                    raise TrainingError(self.lock.trouble)
                self.step += 1
                began = time.perf_counter()
                with self.profiler.step(self.step):
                    self._train_step()
                self.left.step(time.perf_counter() - began)
                if not self.leaves():
                    self._after_step()
            if not self.leaves():
                with allowing("finishing a checkpoint", self.peers.timeout + self.peers.allowance):
                    self.checkpoints.finish()
        finally:
            self.profiler.close()
            self.screen.close()
            if self.metrics is not None:
                self.metrics.close()
        return {
            "step": self.step,
            "finished": self._is_over() and not self.leaves(),
            "signal": self.stopped,
            "verdict": self.verdict,
            **self.totals,
            "metrics": dict(self.last),
            "forecast": {} if self.forecast is None else self.forecast.rows(),
        }

    def _is_over(self) -> bool:
        return self.step == self.config.train.last_step or self.verdict.ends(self.config.train.early_stop)

    def _after_step(self) -> None:
        """Pending work after an applied step: its metrics line, a validation, a checkpoint."""
        every = self.config.checkpoint.every
        if self.owed is not None:
            best = self._measure(self.owed)
            self.owed = None
            self.due = bool(self.stopped or self._is_over() or (every and self.step % every == 0))
            self.due |= best and self.config.checkpoint.best is not None
        if self.due:
            with Clock() as saving, allowing("saving", self.peers.timeout + self.peers.allowance):
                self.save()
            self.due = False
            self.window.checkpoint_seconds += saving.seconds
            self.totals["saving"] += saving.seconds
            self.left.beside("checkpoint", saving.seconds)

    def _measure(self, values: dict[str, float]) -> bool:
        """Writes the measurements of a step and the further metrics. Returns True if it has the best held-out loss so
        far."""
        train = self.config.train
        every_so_often = bool(train.validate_every) and self.step % train.validate_every == 0
        measures = self.step == train.last_step or every_so_often
        # If validations may end the run, its last line must have all metrics.
        logs = self._logs(self.step) or (measures and train.early_stop is not None)
        values = values | self._measurements() if logs else {}
        if self.step == self.config.log.trace_step and self._samples:
            self._trace()  # before a validation, whose forward would replace the last timeline
        best = False
        if measures:
            with Clock() as validating:
                values |= self.validate()
            values["time_metrics/validation(s)"] = validating.seconds
            self.totals["validating"] += validating.seconds
            self.left.beside("validation", validating.seconds)
            best = self.verdict.add(self.step, values[HELD_OUT], train.early_stop)
        if logs:  # only now: a validation that lost a node is repeated, with the whole line
            self.window = LogWindow()
        if values:
            values |= self.beside
            self.beside = {}
            self.last |= values
            self.line = {"step": self.step, **values}
            if self.metrics is not None:
                self.metrics.write(self.step, values)
            self.screen.show(self.step, values, self.left.after(self.step))
        else:
            self.screen.advance(self.step, self.left.after(self.step))
        return best

    def _logs(self, step: int) -> bool:
        """True if a line is due after `step`, independent of validations."""
        return step % self.config.log.every == 0 or step == self.config.train.last_step

    def _train_step(self) -> None:
        """One optimizer step; its measurements become `owed`.

        Raises TrainingError if the loss or the gradient is not finite, and the errors of `commit`.
        """
        began = time.perf_counter()
        data = Clock()
        with data, allowing("waiting for data", self.config.parallel.timeout):
            batch = self.feed.next()
        self.place = batch.epoch, batch.position
        # Stop signals travel with the loss, so all ranks stop after the same step. So does the state of each rank's
        # checkpoint writes.
        cut = self._cut | {"microbatches": self.microbatches(batch.given)}
        scale = 1.0 if self.loss_scale is None else self.loss_scale.scale
        result = self.parallel.step(
            batch.given, **cut, place=(*self.place, self.step), note=self._note, loss_scale=scale
        )
        notes = [int(note) for note in result.notes]
        self.stopped = next((note % READY for note in notes if note % READY), 0)
        if all(note >= READY for note in notes):
            self.checkpoints.advance()
        norm = self.parallel.clip_grad_norm_(self.config.train.clip_norm * scale) / scale
        finite = math.isfinite(result.loss) and math.isfinite(norm)
        self.commit(self.step)
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
        self.applied, self.owed = self.step, values

    def microbatches(self, given: Any) -> Any:
        """Number of microbatches of a step over `given`: per replica, or with `shares` one number for each replica.

        Packed rows are microbatches themselves.
        """
        rows = isinstance(given, list) and bool(given) and isinstance(given[0], list)
        if self.shares is None:
            return None if rows else self.config.train.microbatches
        return tuple(self.shares(len(given) if rows else 0))

    def _update(self, loss: float, norm: float, finite: bool) -> float:
        """Updates the weights with the gradients of this step; returns the rate of ``train.lr``.

        Under fp16 a step whose gradients overflow is skipped. Raises TrainingError if no loss scale avoids the
        overflow.
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
        if scale != 1.0 and gradients:  # torch raises an error for an empty list, as on a rank with only frozen stages
            torch._foreach_mul_(gradients, 1.0 / scale)
        lr = self.optimizer.step(self.step)
        if self.averages is not None:
            self.averages.update()
        return lr

    def _note(self) -> float:
        """Value sent to all ranks with the loss: the signal that this rank received, plus READY if a checkpoint may
        advance."""
        return float(self.stop_requested() + (READY if self.checkpoints.ready else 0))

    def _measurements(self) -> dict[str, float]:
        """Averages of the window, pipeline metrics of the last step, and metrics of all ranks. Collective."""
        feed, before = self.feed, self._decoded
        self._decoded = feed.decoded_items
        told = of_this_rank(self.window, feed.blank_items, self._decoded - before, feed.worker_restarts)
        everyone = self.peers.exchange_all(f"measuring step {self.step}", told)
        values = self.window.metrics() | of_ranks(self.window, everyone)
        self.totals["waited"] += values.get("time_metrics/data_loading(s)", 0.0)  # of the slowest rank each time
        if self._samples:  # else the step is from a previous generation, whose pipelines are gone
            timeline = self._timeline()
            values |= pipeline_metrics(timeline) | dispatch_metrics(self.parallel, timeline.table, self._samples)
            values |= {} if self.meter is None else self.meter.metrics()
            if self._padded:
                values["data/padding(%)"] = padding(timeline.table, list(map(len, self._samples)))
            if self.forecast is not None:
                values |= self.forecast.add(self._samples, timeline, self._took, self._exchange)
        if self.loss_scale is not None:
            values |= {"fp16/loss_scale": self.loss_scale.scale, "fp16/skipped_steps": self.loss_scale.skipped}
        return values

    def validate(self) -> dict[str, float]:
        """Mean loss over the held-out samples, in nats per target token; with several sources also per source.
        Collective.

        Uses averaged weights if they are kept and ``train.ema_evaluate`` is set.
        """
        size = self.config.train.batch_size
        found: dict[str, tuple[float, int]] = {}
        averaged = self.averages is not None and self.config.train.ema_evaluate
        groups = [
            (name, [samples[start : start + size] for start in range(0, len(samples), size)])
            for name, samples in self.feed.held_out_by_source()
        ]
        every = (part for _, parts in groups for part in parts)
        self.feed.ask_held_out(every, lambda part: self.parallel.wanted(part, **self._cut))
        self.parallel.train(False)
        with self.averages.in_place() if self.averages is not None and averaged else contextlib.nullcontext():
            for name, parts in groups:
                loss, tokens = 0.0, 0
                for part in parts:
                    result = self.parallel.evaluate(part, **self._cut)
                    loss += result.loss * result.tokens
                    tokens += result.tokens
                found[name] = (loss, tokens)
        self.parallel.train(True)
        targets = sum(tokens for _, tokens in found.values())
        values = {f"{HELD_OUT}/{name}": loss / max(tokens, 1) for name, (loss, tokens) in found.items() if name}
        return {HELD_OUT: sum(loss for loss, _ in found.values()) / max(targets, 1)} | values

    def save(self) -> None:
        """Begins a checkpoint of this step, unless it exists. `run` waits until it is finished. Collective."""
        if self.saved_step == self.step:
            return
        progress = self.progress(self.peers.together).model_copy(update={"owed": None, "line": None, "due": False})
        write = self.checkpoints.begin if self.config.checkpoint.asynchronous else self.checkpoints.save
        best = -1 if self.config.checkpoint.best is None else self.verdict.step
        write(self.step, *self.state(), progress.model_dump(), best=best)
        self.saved_step = self.step

    def progress(self, gather: Callable[..., list[Any]] | None = None) -> Progress:
        """Progress of the run after the last applied step. gather: as in `Feed.state_dict`."""
        feed = self.feed.state_dict(gather)
        if self.applied < self.step:  # the batch of an aborted step is repeated
            feed |= {"epoch": self.place[0], "position": self.place[1]}
        return Progress(
            step=self.applied,
            optimizer=self.config.train.optimizer,
            momentum=self.config.train.momentum,
            verdict=self.verdict,
            loss_scale=self.loss_scale,
            schedule_steps=schedule_length(self.config.train),
            feed=feed,
            window=self.window,
            totals=self.totals,
            last=self.last,
            owed=self.owed,
            line=self.line,
            due=self.due or self.checkpoints.writing,
        )

    def state(self) -> tuple[dict[str, Tensor | Piece], dict[str, Tensor | Piece]]:
        """This rank's weights, and its optimizer state and averages, in place."""
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
