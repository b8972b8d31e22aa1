"""Closing report of rank 0: summary, answers to held-out samples, page and accuracy, after the last step.

A failed part is left out and logged in one line. It does not make the run a failed one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from interlace._text import one_line
from interlace.model import MultimodalModel
from interlace.train.config.sections import Config
from interlace.train.launch import launcher
from interlace.train.models.build import build, materialize
from interlace.train.models.media_specs import kinds, pixels
from interlace.train.report import closing as report
from interlace.train.report.metrics import BLANK, HELD_OUT, LOSS, free_memory
from interlace.train.report.page import Page
from interlace.train.selection import choose, fill

if TYPE_CHECKING:
    from interlace.data import Tokenizer
    from interlace.train.job import Job

MOST_OF_FREE = 0.8
"""Share of the host's free memory that the whole model may use for the closing report."""


@dataclass(frozen=True)
class Ended:
    """A run after its last step, on rank 0. outcome: values of `Trainer.run`."""

    job: Job
    outcome: dict[str, Any]
    page: Page

    def rows(self) -> dict[str, Any]:
        """Results of the run: the closing table."""
        job, outcome = self.job, self.outcome
        metrics, seconds = outcome["metrics"], max(outcome["seconds"], 1e-9)
        rows: dict[str, Any] = {
            "data": job.feed.held_out_data.name,
            "parameters": sum(parameter.numel() for parameter in job.parallel.mllm.parameters()),
            "steps": outcome["step"],
            "train_loss": metrics.get(LOSS),
            "held_out_loss": metrics.get(HELD_OUT),
            "seconds_of_training": seconds,
            "samples_per_second": outcome["samples"] / seconds,
            "tokens_per_second": outcome["tokens"] / seconds,
            "seconds_waiting_for_data": outcome["waited"],
            "seconds_of_validation": outcome["validating"],
            "seconds_of_saving": outcome["saving"],
            "run_folder": str(self.page.folder),
        }
        # These cover the steps since the second-last line; the speeds above cover the whole run.
        rows |= {f"last_{name}": value for name, value in metrics.items() if name.startswith(("tflops", "mfu", "hfu"))}
        rows |= outcome["forecast"] | {"items_read_as_blank": metrics.get(BLANK)}
        best = -1 if job.config.checkpoint.best is None else outcome["verdict"].step
        if best >= 0:
            rows |= {"best_step": best, "best_held_out_loss": outcome["verdict"].best}
        # No loss if fp16 skipped every step or nothing was logged yet. No held-out loss before a validation.
        return {name: value for name, value in rows.items() if value is not None}


def stop(run: Ended) -> None:
    """Reports a run that a signal ended: the page without answers, so that the run exits quickly."""
    with optional("the page"):
        rows = run.rows()
        run.page.write(run.page.status(run.outcome), rows)
        run.job.trackers.show(rows, run.page.files())
    run.job.trackers.close("stopped")
    steps = run.job.config.train.steps
    launcher.say(f"stopped after step {run.outcome['step']} of {steps}; saved in {run.page.folder}")


def close(run: Ended) -> None:
    """Reports a finished run: summary, answers, page, accuracy, table; then closes the trackers.

    The training summary is written first. Later failures do not make the run a failed one.
    """
    job, page = run.job, run.page
    config, tokenizer, trackers = job.config, job.tokenizer, job.trackers
    held_out, folder = job.feed.held_out_data, page.folder
    rows = run.rows()
    report.write_summary(folder, rows)
    with optional("the baselines"):
        baselines = job.feed.baselines(tokenizer.vocab_size)
        rows |= {f"{name}_baseline": nats for name, nats in baselines.items()}
    counts = bool(held_out.questions()) and config.log.accuracy_samples > 0
    shown: dict[str, Any] = {}
    if config.log.samples or counts:
        with optional("the answers to held-out samples"):
            check_room(job.parallel.mllm)
            whole = load_whole(config, folder, tokenizer, job.source)
            shown["counted"] = report.accuracies(whole, held_out, tokenizer, config) if counts else []
            for each in shown["counted"]:
                rows |= each.rows()
            if config.log.samples:
                picks = report.spread_by_kind(held_out, config.log.samples)
                shown["answers"] = report.answers_to([held_out.sample(i, 0) for i in picks], whole, tokenizer, config)
                shown["scalings"] = {
                    name: (kind, pixels(config, whole, name) if whole.encoders[name].images is not None else None)
                    for name, kind in kinds(whole).items()
                }
    with optional("the answers in summary.json"):
        report.write_summary(folder, rows)
    with optional("the page"):
        page.write(page.status(run.outcome), rows, **shown)
    trackers.show(rows, page.files())
    trackers.close("finished")
    with contextlib.suppress(OSError, SystemExit):  # stdout was closed
        report.print_summary(rows, f"{config.run.name}: trained")


def check_room(model: MultimodalModel) -> None:
    """Raises MemoryError if the whole model does not fit into the free memory of this machine.

    Ranks held only pieces of it. Without this check Linux would kill the process.
    """
    size, free = sum(parameter.nbytes for parameter in model.parameters()), free_memory()
    if free is not None and size > MOST_OF_FREE * free:
        raise MemoryError(
            f"the whole model has {size / 2**30:,.1f} GiB of weights, and of this machine's memory {free / 2**30:,.1f} "
            "GiB are free; interlace generate answers where there is more"
        )


def load_whole(config: Config, folder: Path, tokenizer: Tokenizer, source: str) -> MultimodalModel:
    """The whole model in this process, with the weights that `choose` selects: the run's best checkpoint or its newest.

    Uses averaged weights if the held-out loss was measured with them.
    """
    model = build(config, tokenizer, source=source)
    materialize(model, seed=config.run.seed)
    fill(config, model, choose(config, folder), source=source)
    return model


@contextlib.contextmanager
def optional(what: str) -> Iterator[None]:
    """Lets the closing report continue without `what` if it fails, and logs this in one line."""
    try:
        yield
    except Exception as error:
        why = one_line(error, None)
        launcher.say_error(f"interlace: training is done and saved; the closing report lacks {what}: {why}")
