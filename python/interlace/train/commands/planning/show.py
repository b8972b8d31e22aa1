"""``interlace plan show``: a config's own layout with the memory of its ranks, and cuts of its model into ranks.

`layout` shows the layout. The cuts are chains of all layers, with and without frozen awareness; `step` simulates a step
of each. If all modules have one dp, these figures are of one replica of the whole model; else of the whole run.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import TYPE_CHECKING

from interlace.train.commands.planning import large
from interlace.train.commands.planning import layout as layouts
from interlace.train.commands.planning.costs import Priced, load_priced
from interlace.train.commands.planning.layout import counted_noun
from interlace.train.commands.planning.step import own_layout, played
from interlace.train.config.load import ConfigError
from interlace.train.scheduling import chunk_counts

if TYPE_CHECKING:
    from rich.console import Console

    from interlace.layout import Layout, Stage
    from interlace.model import MultimodalModel
    from interlace.simulate import Simulated, Timeline

MOST_SHOWN = 64
"""Maximum ranks of a cut that are printed."""


def show(options: argparse.Namespace) -> int:
    """Prints the config's layout with the memory of its ranks, and the cuts with and without frozen awareness."""
    from interlace.train.commands.tables import console_of
    from interlace.train.models.tuning import rates, summary

    if options.data is not None and options.json:
        raise ConfigError("--data draws a picture and says what is in it: leave out --json")
    priced = load_priced(options)
    config, model, source = priced.config, priced.model, priced.source
    if options.data is not None:
        from interlace.train.commands.planning import dispatched

        for line in dispatched.show(priced, options.data):
            print(line)
    own = own_layout(config, model, source)
    ranks = options.ranks or own.world
    candidates = _chains(priced, ranks, needed=options.ranks is not None)
    if own.world == ranks and config.parallel.placed == "chain" and not options.profile:
        candidates["frozen-aware"] = own  # equal except for the cut at ties
    elif own.world == ranks:
        candidates[f"config ({config.parallel.placed})"] = own
    facts = layouts.of_config(priced)
    if options.picture is not None:
        layouts.draw(facts, options.picture)
    if options.json:
        print(facts.to_json())
        return 0
    console = console_of(140)
    layouts.show(facts, console)
    if options.picture is not None:
        console.print(f"wrote {options.picture}")
    for line in summary(model, rates(config, model)):
        console.print(line)
    console.print()
    timelines: dict[str, Timeline | Simulated] = {}
    verdicts = []
    for name, candidate in candidates.items():
        try:
            timelines[name] = timeline = _timeline(priced, candidate, facts)
        except ValueError as error:  # above parallel.activation_memory
            verdicts.append(f"{name}: {error}")
            continue
        verdicts.append(f"{name}: iteration {1e3 * timeline.makespan:,.1f} ms, bubble {100 * timeline.bubble:.0f} %")
    _show_cuts(priced, candidates, timelines, console)
    for line in (*verdicts, priced.costs.origin):
        console.print(line)
    if own is candidates.get("frozen-aware"):
        console.print("the config's own placement, a chain, is the frozen-aware cut")
    if {"frozen-aware", "frozen-unaware"} <= set(timelines):
        rounds = chunk_counts(config, candidates["frozen-aware"], priced.microbatches)["language_model"]
        console.print(_comparison(model, candidates, timelines, rounds))
    return 0


def _timeline(priced: Priced, candidate: Layout, facts: layouts.LayoutFacts) -> Timeline | Simulated:
    """A step of `candidate`. facts: of the config's own layout, whose weights are used again if they are cut alike.

    Raises ValueError if a rank holds more than parallel.activation_memory.
    """
    if candidate.world <= large.RANKS:
        return played(priced, candidate)
    alike = all(candidate.spec(name).tp == facts.layout.spec(name).tp for name in candidate.modules)
    weights = facts.weights if alike else None
    return large.drawn_step(priced, candidate, 0.0, weights)[1]


def _show_cuts(
    priced: Priced,
    candidates: Mapping[str, Layout],
    timelines: Mapping[str, Timeline | Simulated],
    console: Console,
) -> None:
    """Prints one line per rank of each cut in `timelines`."""
    from interlace.train.commands.tables import table_of

    config, microbatches = priced.config, priced.microbatches
    ranks = next(iter(candidates.values())).world
    title = f"{config.run.name}: {counted_noun(ranks, 'rank')}, {counted_noun(microbatches, 'microbatch')}"
    columns = ("cut", "rank", "stages", "parameters", "1F+1B ms", "of the step")
    table = table_of(title, *columns, left=("cut", "stages"))
    for name, timeline in timelines.items():
        candidate = candidates[name]
        busy, rounds = timeline.busy_per_rank, chunk_counts(config, candidate, microbatches)["language_model"]
        for rank in range(min(candidate.world, MOST_SHOWN)):
            stages = candidate.of_rank(rank)
            table.add_row(
                name if rank == 0 else "",
                str(rank),
                ", ".join(f"{stage.module}[{stage.start}:{stage.stop}]" for stage in stages),
                f"{sum(_parameters(priced.model, stage) for stage in stages) / 1e6:,.2f} M",
                f"{1e3 * busy[rank] / rounds:,.2f}",
                f"{100 * busy[rank] / timeline.makespan:.0f} %",
            )
        table.add_section()
    console.print(table)
    if ranks > MOST_SHOWN:
        console.print(f"ranks {MOST_SHOWN} to {ranks - 1}: interlace simulate step draws all of them")


def _chains(priced: Priced, ranks: int, *, needed: bool) -> dict[str, Layout]:
    """The chain of all layers cut into `ranks` with and without frozen awareness.

    With lanes there may be more ranks than layers. Then the result is empty, or an error if `needed`.
    """
    from interlace.layout import Layout

    model, costs, recompute = priced.model, priced.costs.modules, priced.config.train.recompute
    try:
        return {
            name: Layout.balanced(model, ranks, costs=costs, frozen_aware=aware, recompute=recompute)
            for name, aware in (("frozen-aware", True), ("frozen-unaware", False))
        }
    except ValueError as error:
        if not needed:
            return {}
        raise ConfigError(f"{priced.source}: {error}") from None


def _comparison(
    model: MultimodalModel,
    candidates: Mapping[str, Layout],
    timelines: Mapping[str, Timeline | Simulated],
    microbatches: int,
) -> str:
    """Speedup from frozen awareness, in a sentence; if there is no speedup, the reason."""
    aware, unaware = (timelines[name] for name in ("frozen-aware", "frozen-unaware"))
    ratio = unaware.makespan / aware.makespan
    if abs(ratio - 1) >= 0.01:
        return f"frozen-aware is predicted to be {ratio:.2f}x as fast as frozen-unaware"
    if not any(not layer.trainable for name in model.modules_order() for layer in model.layers(name)):
        return "frozen-aware and frozen-unaware are equally fast: no layer of this model is frozen"
    if candidates["frozen-aware"] == candidates["frozen-unaware"]:
        return "frozen-aware and frozen-unaware are the same cut: what is frozen would move less than one layer here"
    slowest = 1e3 * max(aware.busy_per_rank) / microbatches
    return (
        f"frozen-aware and frozen-unaware are equally fast although they cut differently: the slowest rank of both is "
        f"busy for {slowest:,.2f} ms per microbatch, and moving one more layer would not make it faster"
    )


def _parameters(model: MultimodalModel, stage: Stage) -> int:
    return sum(layer.parameters for layer in model.layers(stage.module)[stage.start : stage.stop])
