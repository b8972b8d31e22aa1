"""report.html, the page of a run: config, curves, a measured step, held-out answers. One file, no network."""

from __future__ import annotations

import html
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from interlace._files import write_whole
from interlace.simulate.pictures.page import image, page, table
from interlace.train.config.load import dumps
from interlace.train.config.sections import Config
from interlace.train.report.closing import Accuracy, Answer, shown
from interlace.train.report.curves import charts, figure, number
from interlace.train.report.facts import Facts
from interlace.train.report.metrics import read_metrics
from interlace.train.report.samples import Scalings, cards, draw

NAME = "report.html"
TILES = (
    "train_loss",
    "held_out_loss",
    "best_held_out_loss",
    "steps",
    "tokens_per_second",
    "last_mfu(%)",
    "seconds_of_training",
)
"""Keys of the summary shown as tiles at the top."""


class Page:
    """Page of the run in `folder`. It is written when the run ends, also after an error or a signal."""

    def __init__(self, folder: Path, config: Config, facts: Facts) -> None:
        self.folder, self.config, self.facts = folder, config, facts

    def write(
        self,
        status: str,
        rows: Mapping[str, Any],
        *,
        answers: Sequence[Answer] = (),
        scalings: Scalings | None = None,
        counted: Sequence[Accuracy] = (),
    ) -> Path:
        """Writes report.html, and samples.png if there are answers; returns the path of the page.

        status: how the run ended, in words. rows: the summary. scalings: used to draw the media of `answers`.
        counted: the accuracies.
        """
        if answers:
            draw(answers, self.folder / "samples.png", self.config.run.name, scalings or {})
        sections = [
            self._head(status),
            _tiles(rows),
            _accuracies(counted),
            _curves(read_metrics(self.folder)),
            self._step(),
            _modules(self.facts),
            _ranks(self.facts),
            _samples(answers, scalings or {}),
            _titled("Closing numbers", table((name.replace("_", " "), shown(name, rows[name])) for name in rows)),
            _titled("Machine and versions", table(self.facts.machine.items())),
            f"<details><summary>The whole config</summary><pre>{html.escape(dumps(self.config))}</pre></details>",
        ]
        path = self.folder / NAME
        write_whole(path, page(self.config.run.name, "\n".join(filter(None, sections))))
        return path

    def files(self) -> list[Path]:
        """Paths of the existing report files."""
        places = [self.folder / name for name in (NAME, "samples.png", "timeline.png")]
        return [place for place in places if place.exists()]

    def status(self, outcome: Mapping[str, Any]) -> str:
        """Status line of the page, from the outcome of `Trainer.run`."""
        step, last = outcome["step"], self.config.train.last_step
        if not outcome["finished"]:
            name = signal.Signals(outcome["signal"]).name
            return f"Stopped by {name} after step {step:,} of {last:,}; interlace train --resume {self.folder} goes on"
        if step < last:
            return f"Ended by train.early_stop after step {step:,} of {last:,}"
        return f"Finished after {step:,} steps"

    def _head(self, status: str) -> str:
        config, facts = self.config, self.facts
        trained = sum(module.trained for module in facts.modules)
        total = sum(module.parameters for module in facts.modules)
        ranks = f"{facts.world} rank{'s' * (facts.world > 1)}"
        model = " + ".join(module.kind for module in facts.modules if module.layers is not None)
        about = (
            f"{model}; {trained:,} of {total:,} parameters trained on {config.data.dataset}, "
            f"{config.train.batch_size} {'rows' if config.data.pack else 'samples'} a step, {config.train.optimizer}, "
            f"{config.train.precision}, on {ranks}"
        )
        return (
            f"<p class=status>{html.escape(status)}</p>"
            f"<p class=quiet>{html.escape(about)}</p><p class=quiet>{html.escape(str(self.folder))}</p>"
        )

    def _step(self) -> str:
        picture = self.folder / "timeline.png"
        if not picture.exists():
            return ""
        return (
            f"<h2>A measured step</h2><p class=quiet>Step {self.config.log.trace_step}: one row per rank, grey is "
            "idle. trace.json beside this page opens in ui.perfetto.dev.</p>"
            f"<div class=wide>{image(picture.read_bytes(), 'png', 'timeline of a measured step')}</div>"
        )


def _tiles(rows: Mapping[str, Any]) -> str:
    tiles = "".join(
        f"<div class=tile><b>{html.escape(shown(name, rows[name]))}</b>{html.escape(name.replace('_', ' '))}</div>"
        for name in TILES
        if rows.get(name) is not None
    )
    return f"<div class=tiles>{tiles}</div>" if tiles else ""


def _titled(title: str, body: str) -> str:
    return f"<h2>{title}</h2>{body}" if body else ""


def _accuracies(counted: Sequence[Accuracy]) -> str:
    def share(part: float | None) -> str:
        return "" if part is None else f"{100 * part:.1f} %"

    head = ("question", "held out", "right", "always the most frequent answer", "with media of another sample")
    rows = [(each.kind, each.count, share(each.right), share(each.majority), share(each.swapped)) for each in counted]
    return _titled("Held-out questions", table(rows, head))


def _curves(lines: Sequence[Mapping[str, float]]) -> str:
    known, others = charts(lines)
    first, second = (f"<div class=charts>{''.join(map(figure, each))}</div>" for each in (known, others))
    more = f"<details><summary>{len(others)} more</summary>{second}</details>" if others else ""
    return _titled("Curves", first + more if known else "")


def _modules(facts: Facts) -> str:
    rows = []
    for name, kind, layers, parameters, trained in facts.modules:
        counts = (f"{parameters:,}", f"{trained:,}", _share(trained, parameters))
        rows.append((name, kind, "" if layers is None else layers, *counts))
    head = ("module", "class", "layers", "parameters", "trained", "")
    return _titled("Modules", table(rows, head, "numbers"))


def _share(part: int, whole: int) -> str:
    if part in (0, whole):
        return "frozen" if part == 0 else "trained"
    return f"{number(100 * part / whole)} % trained"


def _ranks(facts: Facts) -> str:
    if facts.world == 1:
        return ""
    names = list(dict.fromkeys(name for rank in facts.ranks for name in rank))
    rows = [(number, *(rank.get(name, "") for name in names)) for number, rank in enumerate(facts.ranks)]
    more = facts.world - len(facts.ranks)
    more_ranks = f"<p class=quiet>and {more:,} ranks more</p>" if more else ""
    return _titled("Which rank has what", table(rows, ("rank", *names)) + more_ranks)


def _samples(answers: Sequence[Answer], scalings: Scalings) -> str:
    return _titled("Held-out samples", f"<div class=cards>\n{cards(answers, scalings)}\n</div>" if answers else "")
