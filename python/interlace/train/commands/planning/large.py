"""``interlace simulate step`` for hundreds of ranks and more, or for samples of different lengths: all replicas.

All data are arrays without an object per action, so 10,240 ranks take seconds. Pictures draw ranks in groups
(`interlace.simulate.pictures.overview`). The trace contains some ranks in full. Benchmark: ``python -m bench.scale``.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from interlace.train.blame import writing
from interlace.train.config.load import ConfigError, blaming
from interlace.train.config.sections import Config
from interlace.train.models.costs import Load, budget_loads
from interlace.train.scheduling import samples_to_ranks, step_schedule

if TYPE_CHECKING:
    from interlace.costs.links import Links
    from interlace.costs.step import Costs
    from interlace.layout import Layout
    from interlace.model import MultimodalModel
    from interlace.plan.memory import WeightSize
    from interlace.run import Lengths
    from interlace.schedule import Schedule
    from interlace.simulate import Simulated
    from interlace.train.commands.planning import costs as pricing

RANKS = 256  # larger worlds are drawn in groups
FILES = ("timeline.html", "timeline.png", "trace.json")

Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Samples:
    """Sizes of a batch, without its data. lengths: for `step_table`. rows: module -> [n], rows that pass through the
    module's layers. pairs: module -> [n], query-key pairs there."""

    lengths: Lengths
    rows: Mapping[str, Floats]
    pairs: Mapping[str, Floats]


def drawn_samples(config: Config, model: MultimodalModel, spread: float) -> Samples:
    """A batch of the config with lognormal lengths of texts and media. spread: sigma; the mean is given by the config's
    budgets (`budget_loads`). Deterministic for a seed of the run."""
    from interlace.estimate.sample_sizes import causal_pairs
    from interlace.run import Lengths

    count = config.train.batch_size
    loads = budget_loads(config, model)
    each = count / config.parallel.replicas("language_model") / config.train.microbatches  # samples of a microbatch
    rng = np.random.default_rng(config.run.seed)
    rows, pairs, read = {}, {}, {}
    for name, load in loads.items():
        factor = np.exp(spread * rng.standard_normal(count) - spread * spread / 2)
        rows[name] = load.tokens / each * factor
        if name == "language_model":
            rows[name] = np.maximum(np.rint(rows[name]), 1.0)
            pairs[name] = causal_pairs(rows[name])
        else:
            pairs[name] = rows[name] * load.keys
            downsample = config.model.encoders()[name].downsample
            least = 1.0 if load.tokens else 0.0
            read[name] = np.maximum(np.rint(rows[name] / downsample), least).astype(np.int64)
    tokens = rows["language_model"].astype(np.int64)
    return Samples(Lengths(tokens, tokens, read), rows, pairs)


def play(
    config: Config,
    model: MultimodalModel,
    layout: Layout,
    samples: Samples,
    costs: Costs,
    links: Links,
    microbatches: int,
    weights: Sequence[WeightSize] | None = None,
) -> tuple[Schedule, Simulated]:
    """The config's schedule for a step over `samples`, with start and finish of each action.

    weights: the result of `interlace.estimate.traced.weights_of`, if known.
    """
    from interlace.estimate.predict import predict_arrays
    from interlace.estimate.sample_sizes import counted_traffic, sizes_of_samples
    from interlace.run.tables.batch import table_of

    assigner, dispatcher = samples_to_ranks(config, layout, model)
    table = table_of(
        layout, samples.lengths, assigner, dispatcher, microbatches=microbatches, chunks=config.chunks() or None
    )
    timed = None if assigner is None else assigner.options(table)
    schedule = step_schedule(config, model, layout, microbatches, table, timed)
    sizes = sizes_of_samples(table, samples.rows, samples.pairs, samples.lengths.targets)
    rows_cut = config.parallel.sequence_parallel
    traffic = counted_traffic(model, layout, sequence_parallel=rows_cut, weights=weights)
    simulated = predict_arrays(schedule, costs, sizes, links, traffic, recompute=config.train.recompute, optimizer=True)
    return schedule, simulated


def write(schedule: Schedule, simulated: Simulated, folder: Path, title: str) -> tuple[str, ...]:
    """Writes page, picture and trace. Returns one line for each of three groups of ranks, the busiest first."""
    from interlace.simulate.groups import RankGroups, Utilisation, spread_over
    from interlace.simulate.pictures.overview import plot_overview, write_overview
    from interlace.simulate.sampled_trace import write_sampled_trace

    groups = RankGroups.of(schedule.graph.layout)
    used = Utilisation.of(schedule, simulated, groups)
    folder.mkdir(parents=True, exist_ok=True)
    page, picture, trace = (folder / name for name in FILES)
    write_overview(schedule, simulated, groups, used, page, title=title)
    plot_overview(schedule, simulated, groups, used, picture, title=title)
    write_sampled_trace(schedule, simulated, groups, used, trace)
    return tuple(
        f"{groups.names[g]}: {used.mean[g]:.0%} ({used.least[g]:.0%} to {used.most[g]:.0%})"
        for g in spread_over(used.mean, 3)
    )


def simulate(priced: pricing.Priced, layout: Layout, options: argparse.Namespace) -> int:
    """Implements `step.step` for `layout` with all replicas of the config."""
    config, spread = priced.config, options.spread or 0.0
    schedule, simulated = drawn_step(priced, layout, spread)
    with writing("--out", options.out):
        some = write(schedule, simulated, options.out, f"{config.run.name}, {config.parallel.schedule}, simulated")
    print(
        f"{config.run.name}: {layout.world:,} ranks, {len(schedule.table.chunks):,} chunks, "
        f"{len(schedule.rows):,} actions, placement {config.parallel.placed}, schedule {config.parallel.schedule}"
    )
    print(f"iteration {1e3 * simulated.makespan:,.1f} ms, bubble {100 * simulated.bubble:.0f} %")
    print(f"busy of the busiest, a middling and the least busy group of ranks: {'; '.join(some)}")
    print(f"{priced.costs.origin}; lengths with sigma {spread:g}")
    print(f"wrote {', '.join(str(options.out / name) for name in FILES)} (open the last in https://ui.perfetto.dev)")
    return 0


def of_any_size(costs: pricing.Costs, loads: Mapping[str, Load]) -> Costs:
    """Costs of chunks of any size from `costs.Costs`: measured or counted, else proportional to rows.

    loads: of the microbatch in `costs.modules`.
    """
    from interlace.costs.step import ScaledCosts

    return costs.step or ScaledCosts(costs.modules, {name: load.tokens for name, load in loads.items()})


def drawn_step(
    priced: pricing.Priced, layout: Layout, spread: float, weights: Sequence[WeightSize] | None = None
) -> tuple[Schedule, Simulated]:
    """A step of drawn samples: `play` of `drawn_samples`. Raises ConfigError for too few samples and unsupported
    lanes."""
    from interlace.costs.links import Links

    config, model, microbatches = priced.config, priced.model, priced.microbatches
    replicas = layout.spec("language_model").dp
    if config.train.batch_size < microbatches * replicas:
        raise ConfigError(
            f"{priced.source}: train.batch_size = {config.train.batch_size} gives less than a sample to each of "
            f"{microbatches} microbatches of {replicas} replicas: raise it"
        )
    known = of_any_size(priced.costs, budget_loads(config, model))
    samples = drawn_samples(config, model, spread)
    with blaming(f"{priced.source}: [parallel]"):
        return play(config, model, layout, samples, known, priced.costs.links or Links(), microbatches, weights)
