"""Reasons of a choice: text lines, and a chart of the runners-up."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from interlace.simulate.pictures.style import EDGE, GREY, INK, QUIET, canvas, plain
from interlace.train.auto.candidates import unsharded
from interlace.train.auto.choose import ALIKE, Decision, settings_of
from interlace.train.auto.evaluate import Outcome
from interlace.train.blame import check_picture, writing

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_SHOWN = 10
_PARTS = {"compute": "#3b6fb6", "communication": "#d9772b", "bubble": "#d5d8de"}


def lines(decision: Decision, origin: str, data: str) -> list[str]:
    """Lines on the chosen candidate, the runners-up and the basis of the choice."""
    best = decision.best
    text_lines = [f"{best.candidate}: {_seconds(best)}", *decision.notes]
    others = [each for each in decision.outcomes if each is not best]
    if others:
        near = others[0]
        text_lines.append(f"next best: {near.candidate}: {_seconds(near)}; {_against(near, best)}")
        by_world = {each.candidate.world: each for each in reversed(others)}
        for world, each in sorted(by_world.items()):
            if world != best.candidate.world and each is not near:
                text_lines.append(
                    f"best with {world} rank{'s' * (world > 1)}: {each.candidate}: {_against(each, best)}"
                )
    refused = ", ".join(f"{count} for {reason}" for reason, count in decision.refused.items())
    text_lines.append(
        f"{decision.considered} candidates, {len(decision.outcomes)} simulated with {data}"
        + (f"; refused: {refused}" if refused else "")
    )
    return [*text_lines, origin]


def _seconds(outcome: Outcome) -> str:
    parts = ", ".join(f"{name} {100 * getattr(outcome, name) / outcome.seconds:.0f} %" for name in _PARTS)
    return (
        f"{1e3 * outcome.seconds:,.1f} ms a step ({parts}), {outcome.peak / 2**30:,.2f} of "
        f"{outcome.limit / 2**30:,.2f} GiB on the fullest rank"
    )


def _against(outcome: Outcome, best: Outcome) -> str:
    """Difference in speed from the chosen candidate, and the reason against the other one."""
    part = 100 * (outcome.seconds / best.seconds - 1)
    speed = "as fast" if abs(part) < 0.05 else f"{abs(part):.1f} % {'slower' if part > 0 else 'faster'}"
    more = outcome.candidate.world - best.candidate.world
    if part < 0.05 and more > 0:
        return f"{speed}, too little for {more} more rank{'s' * (more > 1)}"
    if more == 0 and part <= 100 * ALIKE:
        plainer = settings_of(outcome.candidate) > settings_of(best.candidate)
        return f"{speed}, but with more settings" if plainer else speed
    added = {name: getattr(outcome, name) - getattr(best, name) for name in _PARTS}
    most = max(added, key=lambda name: added[name])
    return f"{speed}, from {1e3 * added[most]:,.1f} ms more {most}"


def families(decision: Decision) -> list[Outcome]:
    """The chosen candidate, then the fastest one of each other family.

    A family has one placement and one set of degrees tp, cp, pp and dp. Its members differ only in sharding, schedule,
    threads, microbatches or checkpointing.
    """
    fastest: dict[object, Outcome] = {}
    for each in (decision.best, *decision.outcomes):
        plain = unsharded(each.candidate)
        degrees = tuple((name, replace(spec, virtual=1, order="loop")) for name, spec in plain.specs)
        fastest.setdefault((plain.placement, degrees, plain.ranks), each)
    return list(fastest.values())


def draw(decision: Decision, path: Path, title: str) -> None:
    """Draws step seconds and memory (beside the limit) of the best layouts, one per family (PNG or SVG).

    Raises ConfigError for a file that cannot be written.
    """
    check_picture("--picture", path)
    shown = families(decision)[:_SHOWN]
    figure = canvas(13.0, 1.3 + 0.42 * len(shown), 110)
    left, right = figure.subplots(1, 2, width_ratios=[3, 1])
    _bars(left, shown)
    _memory(right, shown)
    figure.suptitle(title, x=0.01, y=0.995, ha="left", va="top", fontsize=11, color=INK)
    figure.tight_layout(rect=(0, 0, 1, 0.97))
    with writing("--picture", path):
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path)


def _bars(axes: Axes, shown: list[Outcome]) -> None:
    base = [0.0] * len(shown)
    for name, colour in _PARTS.items():
        width = [1e3 * getattr(each, name) for each in shown]
        axes.barh(range(len(shown)), width, left=base, color=colour, edgecolor=EDGE, label=name, height=0.72)
        base = [a + b for a, b in zip(base, width, strict=True)]
    axes.set_yticks(range(len(shown)), [_label(each, place == 0) for place, each in enumerate(shown)])
    axes.set_xlim(0, 1.12 * max(base))
    _finish(axes, "ms of a step, simulated", base, [f" {1e3 * each.seconds:,.1f}" for each in shown])


def _memory(axes: Axes, shown: list[Outcome]) -> None:
    axes.barh(range(len(shown)), [each.limit / 2**30 for each in shown], color="#eceef1", height=0.72, label="limit")
    axes.barh(range(len(shown)), [each.peak / 2**30 for each in shown], color=GREY, height=0.72, label="fullest rank")
    axes.set_yticks([])
    peaks = [each.peak / 2**30 for each in shown]
    _finish(axes, "GiB", peaks, [f" {peak:,.2f}" for peak in peaks])


def _finish(axes: Axes, unit: str, ends: list[float], numbers: list[str]) -> None:
    """Writes numbers at the ends of the bars, the unit and the legend; the first bar is at the top."""
    for place, (end, number) in enumerate(zip(ends, numbers, strict=True)):
        axes.text(end, place, number, va="center", fontsize=8, color=INK)
    axes.invert_yaxis()
    axes.set_xlabel(unit, fontsize=8, color=QUIET)
    axes.legend(fontsize=8, frameon=False, ncols=3, loc="lower left", bbox_to_anchor=(0, 1.0))
    plain(axes, 7)


def _label(outcome: Outcome, chosen: bool) -> str:
    text = str(outcome.candidate)
    if len(text) > 58:
        cut = text.rfind(", ", 0, 58)
        text = f"{text[:cut]},\n{text[cut + 2 :]}"
    return f"{text} (chosen)" if chosen else text
