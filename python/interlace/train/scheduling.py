"""Schedule of a config: costs and memory of its chunks for the generator, with the memory limit.

``interlace plan``, ``interlace simulate`` and the run share this code, so that all three generate the same schedule for
the same table. A run's table follows from the lengths of its samples, assigned as `train.assign` says. A plan without
lengths uses a table of samples of equal length.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from interlace.train.config.sections import Config
from interlace.train.models.costs import budget_loads, flop_costs
from interlace.train.rank_memory import Held, activations_of_config, held_by_ranks

if TYPE_CHECKING:
    from interlace.layout import Layout
    from interlace.model import MultimodalModel
    from interlace.plan import ModuleCosts
    from interlace.plan.memory import Activations, Load, WeightSize
    from interlace.run.options import StepOptions
    from interlace.schedule import Options, Schedule, StepTable


def schedule_options(config: Config, model: MultimodalModel, layout: Layout, microbatches: int) -> Options:
    """Options for steps of `microbatches` of each replica of the language model, whose samples fill their budgets."""
    from interlace.run import stage_durations

    parallel = config.parallel
    options: Options = {}
    if parallel.schedule == "auto" or ":" in parallel.schedule:
        counted = chunk_costs(config, layout, flop_costs(config, model), microbatches)
        options["durations"] = stage_durations(model, layout, counted, recompute=config.train.recompute)
    if parallel.activation_memory is not None:
        options["memory_limit"] = parallel.activation_memory * 2**30
        options["activation_bytes"] = kept_bytes(config, model, layout, microbatches)
    return options


def step_options(config: Config) -> StepOptions:
    """Options of a config's steps, except those that follow from the model and the ranks."""
    from interlace.run.options import StepOptions
    from interlace.train.device import AUTOCAST

    return StepOptions(
        schedule=config.parallel.schedule,
        checkpointing=config.train.activation_checkpointing,
        sequence_parallel=config.parallel.sequence_parallel,
        context_order=config.parallel.context_order,
        assign=config.train.assign,
        balance=config.train.balance,
        autocast=AUTOCAST[config.train.precision],
        timeout=config.parallel.timeout,
    )


def step_schedule(
    config: Config,
    model: MultimodalModel,
    layout: Layout,
    microbatches: int,
    table: StepTable | None = None,
    timed: Options | None = None,
) -> Schedule:
    """Schedule of the step of `table`; by default of samples of equal length, which `train.assign` does not change.

    timed: generator options that depend on this table; they override the general ones.
    """
    from interlace.run import stage_graph
    from interlace.run.lanes import with_lanes
    from interlace.run.tables.table import nominal_table
    from interlace.schedule import StepTable, generator_of

    graph, _ = with_lanes(stage_graph(model, layout), model, sequence_parallel=config.parallel.sequence_parallel)
    chunks, replicas = chunk_counts(config, layout, microbatches), layout.data_parallel
    rounds = chunks.pop("language_model")
    if table is not None:
        pass
    elif all(replicas[name] == replicas["language_model"] and count == rounds for name, count in chunks.items()):
        presence = [frozenset(layout.modules)] * rounds
        table = StepTable.aligned(graph.links, presence, replicas=replicas["language_model"])
    else:
        table = nominal_table(graph.layout, rounds, chunks)
    options = schedule_options(config, model, layout, microbatches) | (timed or {})
    return generator_of(config.parallel.schedule)(graph, table, **options)


def chunk_sizes(config: Config, layout: Layout, microbatches: int) -> dict[str, float]:
    """Samples per chunk of each module, in microbatches of the language model."""
    chunks, replicas = chunk_counts(config, layout, microbatches), layout.data_parallel
    samples = chunks["language_model"] * replicas["language_model"]
    return {name: samples / (count * replicas[name]) for name, count in chunks.items()}


def chunk_costs(
    config: Config, layout: Layout, costs: Mapping[str, ModuleCosts], microbatches: int
) -> dict[str, ModuleCosts]:
    """Costs of a chunk of each module, which the ranks of a lane share."""
    sizes = chunk_sizes(config, layout, microbatches)
    return {name: scaled(cost, sizes[name] / layout.spec(name).lane_size) for name, cost in costs.items()}


def chunk_counts(config: Config, layout: Layout, microbatches: int) -> dict[str, int]:
    """Chunks per replica and step of each module of `layout`.

    A layout with a different number of replicas than the config's (a chain for modules of unequal dp) cuts a step into
    the same total number of chunks.
    """

    def spread(name: str, count: int) -> int:
        return count if config.uniform() else max(1, count * config.parallel.replicas(name) // layout.spec(name).dp)

    rounds, own = spread("language_model", microbatches), config.chunks()
    default = 1 if layout.placement == "shared" else rounds
    encoders = config.model.encoders()
    return {name: spread(name, own[name]) if name in own else default for name in encoders} | {"language_model": rounds}


def scaled(cost: ModuleCosts, factor: float) -> ModuleCosts:
    """Costs of a chunk with `factor` times as many samples."""
    from interlace.plan import LayerTimes, ModuleCosts

    given = (cost.times.forward, cost.times.input_grad, cost.times.weight_grad, cost.times.weight_only)
    times = LayerTimes(*(np.asarray(values, dtype=np.float64) * factor for values in given))
    return ModuleCosts(layer=cost.layer, times=times, trainable=cost.trainable)


def kept_bytes(
    config: Config, model: MultimodalModel, layout: Layout, microbatches: int
) -> dict[tuple[str, int], float]:
    """(module, stage) -> activation bytes of a chunk that fills its budgets, on each rank of the stage's lane.

    If a backward may be split, this is the larger of the bytes before and after its first half: generators take one
    value.
    """
    from interlace.plan.memory import activation_bytes
    from interlace.schedule import Chunk

    activations = activations_of_config(config, model, layout)
    loads = chunk_loads(config, model, activations, chunk_sizes(config, layout, microbatches))
    chunks = [Chunk(name, 0, 0, np.zeros(0, np.int32)) for name in layout.modules]
    kept = activation_bytes(layout, activations, chunks, loads)
    later = activation_bytes(layout, activations, chunks, loads, deferred=True)
    return {(module, stage): max(size, later[module, stage, i]) for (module, stage, i), size in kept.items()}


def held_by_layout(
    config: Config, model: MultimodalModel, layout: Layout, microbatches: int, of_step: int | None = None
) -> tuple[Held, list[WeightSize]]:
    """Memory of every rank of `layout` in a step of `microbatches` whose samples fill their budgets, and its weights.

    of_step: microbatches of the whole step, if chunks have the size that they have with these. Raises ValueError for a
    layout that a rank cannot hold.
    """
    from interlace.estimate.traced import weights_of

    weights = weights_of(model, layout, sequence_parallel=config.parallel.sequence_parallel)
    activations = activations_of_config(config, model, layout)
    sizes = chunk_sizes(config, layout, microbatches if of_step is None else of_step)
    loads = chunk_loads(config, model, activations, sizes)
    schedule = step_schedule(config, model, layout, microbatches)
    return held_by_ranks(config, model, schedule, weights, activations, loads), weights


def chunk_loads(
    config: Config, model: MultimodalModel, activations: Mapping[str, Activations], sizes: Mapping[str, float]
) -> dict[str, Load]:
    """Load of a chunk of each module; all text counts as targets."""
    from interlace.plan.memory import Load

    tokens = {name: load.tokens for name, load in budget_loads(config, model).items()}
    language = activations["language_model"]
    features = sum(tokens[name] * activations[name].edges[-1] for name in tokens if name != "language_model")
    features = features / language.feature if language.feature else 0.0
    rows = tokens["language_model"]
    loads = {name: Load(tokens[name] * sizes[name]) for name in tokens}
    size = sizes["language_model"]
    loads["language_model"] = Load(rows * size, max(rows - features, 0.0) * size, features * size)
    return loads
