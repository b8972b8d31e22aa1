"""Validation: the held-out loss, and the verdict on it."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from interlace.train.observers.base import Line, Observer, is_validated
from interlace.train.progress import Progress
from interlace.train.report.metrics import HELD_OUT, Clock
from interlace.train.report.terminal import TimeLeft

if TYPE_CHECKING:
    from interlace.train.trainer import Trainer


class Validation(Observer):
    """Measures the held-out loss every ``train.validate_every`` steps and after the last one."""

    def __init__(self, trainer: Trainer, left: TimeLeft) -> None:
        self.config, self.parallel, self.feed = trainer.config, trainer.parallel, trainer.feed
        self.averages, self.left = trainer.averages, left

    def measure(self, line: Line, progress: Progress) -> None:
        if not is_validated(line.step, self.config):
            return
        with Clock() as validating:
            line.values |= self.losses()
        line.values["time_metrics/validation(s)"] = validating.seconds
        progress.totals["validating"] += validating.seconds
        self.left.beside("validation", validating.seconds)
        line.best = progress.verdict.add(line.step, line.values[HELD_OUT], self.config.train.early_stop)

    def losses(self) -> dict[str, float]:
        """Mean loss over the held-out samples, in nats per target token; with several sources also per source.
        Collective.

        Uses averaged weights if they are kept and ``train.ema_evaluate`` is set.
        """
        train, averages = self.config.train, self.averages
        count, chunks, size = train.microbatches, self.config.chunks(), train.batch_size
        losses: dict[str, tuple[float, int]] = {}
        groups = [
            (name, [samples[start : start + size] for start in range(0, len(samples), size)])
            for name, samples in self.feed.held_out_by_source()
        ]
        every = (part for _, parts in groups for part in parts)
        self.feed.ask_held_out(every, lambda part: self.parallel.wanted(part, microbatches=count, chunks=chunks))
        self.parallel.train(False)
        with averages.in_place() if averages is not None and train.ema_evaluate else contextlib.nullcontext():
            for name, parts in groups:
                loss, tokens = 0.0, 0
                for part in parts:
                    result = self.parallel.evaluate(part, microbatches=count, chunks=chunks)
                    loss += result.loss * result.tokens
                    tokens += result.tokens
                losses[name] = (loss, tokens)
        self.parallel.train(True)
        targets = sum(tokens for _, tokens in losses.values())
        values = {f"{HELD_OUT}/{name}": loss / max(tokens, 1) for name, (loss, tokens) in losses.items() if name}
        return {HELD_OUT: sum(loss for loss, _ in losses.values()) / max(targets, 1)} | values
