"""report.html, the page of a run: config, curves, a measured step, held-out answers. One file, no network."""

from __future__ import annotations

import base64
import html
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from interlace.train.config.load import dumps
from interlace.train.config.sections import Config
from interlace.train.report.closing import Accuracy, Answer, shown
from interlace.train.report.curves import charts, number, svg
from interlace.train.report.facts import Facts
from interlace.train.report.metrics import read_metrics
from interlace.train.report.samples import Pixels, cards, draw
from interlace.train.runfolder import write_whole

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
        pixels: Pixels | None = None,
        counted: Sequence[Accuracy] = (),
    ) -> Path:
        """Writes report.html, and samples.png if there are answers; returns the path of the page.

        status: how the run ended, in words. rows: the summary. pixels: mean and std of each image encoder, None for
        audio; used to draw the media of `answers`. counted: the accuracies.
        """
        if answers:
            draw(answers, self.folder / "samples.png", self.config.run.name, pixels or {})
        sections = [
            self._head(status),
            _tiles(rows),
            _accuracies(counted),
            _curves(read_metrics(self.folder)),
            self._step(),
            _modules(self.facts),
            _ranks(self.facts),
            _samples(answers, pixels or {}),
            _table("Closing numbers", [(name.replace("_", " "), shown(name, rows[name])) for name in rows]),
            _table("Machine and versions", list(self.facts.machine.items())),
            f"<details><summary>The whole config</summary><pre>{html.escape(dumps(self.config))}</pre></details>",
        ]
        body = "\n".join(filter(None, sections))
        path = self.folder / NAME
        write_whole(
            path,
            f'<!doctype html>\n<html lang="en"><meta charset="utf-8">'
            f'<meta name="viewport" content="width=device-width, initial-scale=1">'
            f"<title>{html.escape(self.config.run.name)}</title>\n<style>{STYLE}</style>\n{body}\n</html>\n",
        )
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
            f"<h1>{html.escape(config.run.name)}</h1><p class=status>{html.escape(status)}</p>"
            f"<p class=quiet>{html.escape(about)}</p><p class=quiet>{html.escape(str(self.folder))}</p>"
        )

    def _step(self) -> str:
        picture = self.folder / "timeline.png"
        if not picture.exists():
            return ""
        data = base64.b64encode(picture.read_bytes()).decode()
        return (
            f"<h2>A measured step</h2><p class=quiet>Step {self.config.log.trace_step}: one row per rank, grey is "
            "idle. trace.json beside this page opens in ui.perfetto.dev.</p>"
            f'<img class=wide src="data:image/png;base64,{data}" alt="timeline of a measured step">'
        )


def _tiles(rows: Mapping[str, Any]) -> str:
    tiles = "".join(
        f"<div class=tile><b>{html.escape(shown(name, rows[name]))}</b>{html.escape(name.replace('_', ' '))}</div>"
        for name in TILES
        if rows.get(name) is not None
    )
    return f"<div class=tiles>{tiles}</div>" if tiles else ""


def _accuracies(counted: Sequence[Accuracy]) -> str:
    if not counted:
        return ""
    body = "".join(
        f"<tr><td>{html.escape(each.kind)}<td>{each.count}<td>{100 * each.right:.1f} %<td>{100 * each.majority:.1f} %"
        f"<td>{'' if each.swapped is None else f'{100 * each.swapped:.1f} %'}"
        for each in counted
    )
    head = "<tr><th>question<th>held out<th>right<th>always the most frequent answer<th>with media of another sample"
    return f"<h2>Held-out questions</h2><table>{head}{body}</table>"


def _curves(lines: Sequence[Mapping[str, float]]) -> str:
    known, others = charts(lines)
    if not known:
        return ""
    more = f"<div class=charts>{''.join(map(svg, others))}</div>" if others else ""
    more = f"<details><summary>{len(others)} more</summary>{more}</details>" if more else ""
    return f"<h2>Curves</h2><div class=charts>{''.join(map(svg, known))}</div>{more}"


def _modules(facts: Facts) -> str:
    body = "".join(
        f"<tr><td>{html.escape(each.name)}<td>{html.escape(each.kind)}<td>{'' if each.layers is None else each.layers}"
        f"<td>{each.parameters:,}<td>{each.trained:,}<td>{_share(each.trained, each.parameters)}"
        for each in facts.modules
    )
    head = "<tr><th>module<th>class<th>layers<th>parameters<th>trained<th>"
    return f"<h2>Modules</h2><table class=numbers>{head}{body}</table>"


def _share(part: int, whole: int) -> str:
    if part in (0, whole):
        return "frozen" if part == 0 else "trained"
    return f"{number(100 * part / whole)} % trained"


def _ranks(facts: Facts) -> str:
    if facts.world == 1:
        return ""
    names = list(dict.fromkeys(name for rank in facts.ranks for name in rank))
    head = "<tr><th>rank" + "".join(f"<th>{html.escape(name)}" for name in names)
    body = "".join(
        f"<tr><td>{number}" + "".join(f"<td>{html.escape(rank.get(name, ''))}" for name in names)
        for number, rank in enumerate(facts.ranks)
    )
    more = facts.world - len(facts.ranks)
    body += f"<tr><td colspan={len(names) + 1}>and {more:,} ranks more" if more else ""
    return f"<h2>Which rank has what</h2><table>{head}{body}</table>"


def _samples(answers: Sequence[Answer], pixels: Pixels) -> str:
    if not answers:
        return ""
    return f"<h2>Held-out samples</h2>\n<div class=cards>\n{cards(answers, pixels)}\n</div>"


def _table(title: str, rows: Sequence[tuple[str, str]]) -> str:
    body = "".join(f"<tr><td>{html.escape(name)}<td>{html.escape(value)}" for name, value in rows)
    return f"<h2>{html.escape(title)}</h2><table>{body}</table>" if body else ""


STYLE = """
 body { font: 15px/1.5 system-ui, sans-serif; color: #1f2430; margin: 2rem auto; max-width: 76rem; padding: 0 1rem; }
 h1 { margin-bottom: 0; } h2 { margin: 2.2rem 0 .6rem; font-size: 1.15rem; }
 .status { margin: .2rem 0 .6rem; font-size: 1.1rem; }
 .quiet { color: #555c6b; margin: .1rem 0; overflow-wrap: anywhere; }
 .tiles { display: flex; flex-wrap: wrap; gap: .8rem; margin-top: 1.4rem; }
 .tile { border: 1px solid #d9dde3; border-radius: 8px; padding: .6rem 1rem; color: #555c6b; font-size: 13px; }
 .tile b { display: block; font-size: 19px; color: #1f2430; font-weight: 600; }
 .charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(340px, 1fr)); gap: 1rem; }
 .charts svg { border: 1px solid #e6e9ee; border-radius: 8px; width: 100%; height: auto; background: white; }
 svg text { font: 11px system-ui, sans-serif; fill: #555c6b; }
 svg .title { font-size: 13px; font-weight: 600; fill: #1f2430; } svg .broken { fill: #c2435a; }
 svg .grid { stroke: #eceef1; } svg .curve { fill: none; stroke-width: 1.6; stroke-linejoin: round; }
 table { border-collapse: collapse; font-size: 14px; } th { font-weight: 600; color: #555c6b; }
 td, th { text-align: left; padding: .25rem 1.4rem .25rem 0; vertical-align: top; border-bottom: 1px solid #eceef1; }
 .numbers td:nth-child(n+3):nth-child(-n+5), .numbers th:nth-child(n+3):nth-child(-n+5) { text-align: right; }
 td { font-variant-numeric: tabular-nums; overflow-wrap: anywhere; }
 .wide { max-width: 100%; border: 1px solid #e6e9ee; border-radius: 8px; }
 .cards { display: grid; grid-template-columns: repeat(auto-fill, minmax(260px, 1fr)); gap: 1rem; }
 .card { border: 1px solid #d9dde3; border-radius: 8px; padding: .8rem; }
 .card p { margin: .35rem 0; overflow-wrap: anywhere; white-space: pre-wrap; }
 .media img { max-width: 100%; height: 96px; image-rendering: pixelated; margin-right: 4px; }
 .name { color: #555c6b; font-size: 12px; } .right { color: #1a7f37; }
 details { margin: 1.5rem 0; } summary { cursor: pointer; color: #3b6fb6; margin-bottom: .6rem; }
 pre { background: #f6f8fa; padding: .8rem; overflow-x: auto; font-size: 12px; }
"""
