"""``interlace simulate step``: one step of a config's schedule, played against the costs of its layers.

With ``--costs``, or with ``parallel.links``, the simulation includes messages, sums of gradients, gathers of weights
and the optimizer, and plays all replicas.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import TYPE_CHECKING

from interlace.train.blame import writing
from interlace.train.commands.planning import large
from interlace.train.commands.planning.costs import Priced, load_priced, nominal_size
from interlace.train.commands.planning.layout import counted_noun
from interlace.train.config.load import blaming
from interlace.train.config.sections import Config
from interlace.train.models.costs import budget_loads
from interlace.train.scheduling import chunk_costs, chunk_sizes, step_schedule

if TYPE_CHECKING:
    from interlace.costs.links import Links
    from interlace.layout import Layout
    from interlace.model import MultimodalModel
    from interlace.schedule import Schedule
    from interlace.simulate import Timeline


def step(options: argparse.Namespace) -> int:
    """Simulates the config's schedule with the costs; writes timeline.png and trace.json.

    For hundreds of ranks, and for samples of different lengths: see `large`.
    """
    priced = load_priced(options)
    config, costs = priced.config, priced.costs
    varied = options.spread is not None
    own = own_layout(config, priced.model, priced.source, whole=costs.links is not None or varied)
    if varied or own.world > large.RANKS:
        return large.simulate(priced, own, options)
    with blaming(f"{priced.source}: [parallel]"):  # unsupported lanes
        timeline = played(priced, own)
    timeline.name = f"{config.run.name}, {config.parallel.schedule}, simulated"
    with writing("--out", options.out):
        options.out.mkdir(parents=True, exist_ok=True)
        timeline.write_trace(options.out / "trace.json")
        timeline.plot(options.out / "timeline.png")
    layout = f"{counted_noun(timeline.num_ranks, 'rank')}, {counted_noun(priced.microbatches, 'microbatch')}"
    print(f"{config.run.name}: {layout}, placement {config.parallel.placed}, schedule {config.parallel.schedule}")
    busy = ", ".join(f"{name} {100 * share:.0f} %" for name, share in timeline.utilization.items())
    print(f"iteration {1e3 * timeline.makespan:,.1f} ms, bubble {100 * timeline.bubble:.0f} %, busy: {busy}")
    print(costs.origin)
    print(f"wrote {options.out / 'timeline.png'} and {options.out / 'trace.json'} (open it in https://ui.perfetto.dev)")
    return 0


def own_layout(config: Config, model: MultimodalModel, source: str, *, whole: bool = False) -> Layout:
    """The config's own layout. It covers one replica of the whole model if replicas are uniform and `whole` is False.

    Raises ConfigError for a layout that training would reject.
    """
    from interlace.run.lanes import check_stages
    from interlace.train.models.build import build_layout

    layout = build_layout(config, model, source=source, replicas=1 if config.uniform() and not whole else None)
    with blaming(f"{source}: [parallel]"):
        check_stages(model, layout)
    return layout


def played(priced: Priced, layout: Layout) -> Timeline:
    """The timeline of a step with `priced.microbatches` on each replica of the language model in the config."""
    from interlace.run import stage_durations
    from interlace.simulate import simulate as play

    config, model, costs = priced.config, priced.model, priced.costs
    schedule = step_schedule(config, model, layout, priced.microbatches)
    if costs.links is not None:
        return _with_everything(priced, schedule, costs.links)
    of_chunk = chunk_costs(config, layout, costs.modules, priced.microbatches)
    return play(schedule, stage_durations(model, layout, of_chunk, recompute=config.train.recompute))


def _with_everything(priced: Priced, schedule: Schedule, links: Links) -> Timeline:
    """The timeline of a step with messages, sums, gathers and the optimizer, for chunks of the config's mixture."""
    from interlace.estimate.predict import Traffic, predict
    from interlace.train.device import AUTOCAST

    config, model = priced.config, priced.model
    layout, loads = schedule.graph.layout, budget_loads(config, model)
    shares = chunk_sizes(config, layout, priced.microbatches)
    sizes = [nominal_size(loads[chunk.module], shares[chunk.module]) for chunk in schedule.table.chunks]
    rows, precision = config.parallel.sequence_parallel, AUTOCAST[config.train.precision]
    traffic = Traffic.of(model, layout, sequence_parallel=rows, autocast=precision)
    features = {}  # per encoder: feature rows per row of the table
    for edge in schedule.table.edges:
        mine = sum(size.rows for size, c in zip(sizes, schedule.table.chunks, strict=True) if c.module == edge.producer)
        each = traffic.row_bytes[edge.producer][-1] / traffic.feature_bytes if traffic.feature_bytes else 0.0
        features[edge.producer] = mine * each / max(int(edge.pieces[:, 4].sum()), 1)
    estimate, traffic = large.of_any_size(priced.costs, loads), replace(traffic, rows_of=features)
    return predict(schedule, estimate, sizes, links, traffic, recompute=config.train.recompute)
