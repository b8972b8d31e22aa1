"""Measurements of steps: throughput, pipeline, memory, FLOPs and forecast; and the trace of one step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from interlace.model.naming import LANGUAGE_MODEL
from interlace.model.rows import ROWS
from interlace.run.parallel_model import ParallelModel
from interlace.simulate import Timeline
from interlace.train.launch import launcher
from interlace.train.launch.peers import Peers
from interlace.train.observers.base import Line, Observer, Taken, is_logged
from interlace.train.observers.profiler import Profiler
from interlace.train.progress import Progress
from interlace.train.report.flops import Meter, peak_here
from interlace.train.report.metrics import (
    EPOCHS,
    computed_tokens,
    dispatch_metrics,
    of_ranks,
    of_this_rank,
    padding,
    pipeline_metrics,
)

if TYPE_CHECKING:
    from interlace.train.trainer import Trainer


class Measurements(Observer):
    """Sums of the steps in `Progress`, and their averages in each logged line."""

    def __init__(self, trainer: Trainer, profiler: Profiler) -> None:
        self.config, self.model, self.parallel, self.feed = (
            trainer.config,
            trainer.model,
            trainer.parallel,
            trainer.feed,
        )
        self.peers, self.outputs, self.profiler = trainer.peers, trainer.outputs, profiler
        self._padded = trainer.model.packing.get(LANGUAGE_MODEL) == ROWS
        self._decoded = 0  # count at the last line

    def begin(self, progress: Progress) -> None:
        peaks = self.peers.exchange("adding up what the devices could compute", peak_here(self.config))
        if self.peers.rank == 0:
            if self.outputs.meter is None:
                self.outputs.meter = Meter(self.model, peaks, recompute=self.config.train.recompute)
                if self.outputs.meter.why and not self.outputs.quiet:
                    launcher.note(f"no tflops and mfu: {self.outputs.meter.why}")
            self.outputs.meter.measure(peaks)

    def after_step(self, taken: Taken, progress: Progress) -> None:
        batch, result = taken.batch, taken.result
        values = {"lr": taken.lr}
        timed = not self.profiler.slows(taken.step)
        if taken.finite:
            values |= {"grad_norm": taken.norm, "loss_metrics/step_loss": result.loss}
            if is_logged(taken.step, self.config):
                values |= {f"{EPOCHS}{name}": times for name, times in self.feed.epochs(batch).items()}
            progress.window.add(
                loss=result.loss,
                targets=result.tokens,
                read_tokens=batch.tokens,
                samples=len(batch.samples),
                computed=computed_tokens(batch.samples, dict(self.model.encoders.items())),
                data=taken.data_seconds,
                seconds=taken.seconds,
                moved=batch.moved,
                room=0 if batch.rows is None else len(batch.rows) * (self.config.data.max_tokens or 0),
                timed=timed,
                sources=batch.sources,
            )
            if self.outputs.meter is not None and result.table is not None and timed:
                self.outputs.meter.add(batch.samples, result.table, taken.seconds)
        progress.totals["seconds"] += taken.seconds
        progress.totals["samples"] += len(batch.samples)
        progress.totals["tokens"] += batch.tokens
        progress.owed = values

    def measure(self, line: Line, progress: Progress) -> None:
        if not line.logged:
            return
        feed, before = self.feed, self._decoded
        self._decoded = feed.decoded_items
        of_rank = of_this_rank(progress.window, feed.blank_items, self._decoded - before, feed.worker_restarts)
        everyone = self.peers.exchange(f"measuring step {line.step}", of_rank)
        values = progress.window.metrics() | of_ranks(progress.window, everyone)
        progress.totals["waited"] += values.get("time_metrics/data_loading(s)", 0.0)  # of the slowest rank each time
        if line.taken is not None:
            values |= self._of_pipeline(line.taken)
        if (scaling := progress.loss_scale) is not None:
            values |= {"fp16/loss_scale": scaling.scale, "fp16/skipped_steps": scaling.skipped}
        line.values |= values

    def _of_pipeline(self, taken: Taken) -> dict[str, float]:
        """Metrics of the pipeline in this step. Collective."""
        samples, timeline = list(taken.batch.samples), timeline_of(self.parallel, self.peers, taken.step)
        values = pipeline_metrics(timeline)
        if timeline.table is not None:
            values |= dispatch_metrics(self.parallel, timeline.table, samples)
        values |= {} if self.outputs.meter is None else self.outputs.meter.metrics()
        if self._padded and timeline.table is not None:
            values["data/padding(%)"] = padding(timeline.table, list(map(len, samples)))
        if self.outputs.forecast is not None:
            computing = taken.seconds - taken.data_seconds
            values |= self.outputs.forecast.add(samples, timeline, computing, taken.batch.exchange)
        return values


class Trace(Observer):
    """trace.json and timeline.png of the step ``log.trace_step``."""

    def __init__(self, trainer: Trainer) -> None:
        self.config, self.parallel, self.peers = trainer.config, trainer.parallel, trainer.peers
        self.folder = trainer.outputs.folder

    def measure(self, line: Line, progress: Progress) -> None:
        if line.step != self.config.log.trace_step or line.taken is None:
            return
        timeline = timeline_of(self.parallel, self.peers, line.step)
        if self.peers.rank == 0:
            timeline.name = f"{self.config.run.name}, step {line.step}, measured"
            timeline.write_trace(self.folder / "trace.json")
            timeline.plot(self.folder / "timeline.png")


def timeline_of(parallel: ParallelModel, peers: Peers, step: int) -> Timeline:
    """Timeline of the last step. Collective."""
    with peers.waiting(f"gathering the timeline of step {step}"):
        return parallel.timeline()
