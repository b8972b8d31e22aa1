"""Schedule of a config, and memory of each rank: costs and memory of chunks for the generator, with the memory limit.

``interlace plan``, ``interlace simulate`` and the run share this code, so that all three generate the same schedule for
the same table. A run's table follows from the lengths of its samples, assigned as `train.assign` says. A plan without
lengths uses a table of samples of equal length.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from interlace.model.naming import LANGUAGE_MODEL
from interlace.train.config.sections import Config
from interlace.train.models.costs import budget_loads, flop_costs, ranks_per_node

if TYPE_CHECKING:
    from interlace.costs.step import Size
    from interlace.layout import Layout
    from interlace.model import MultimodalModel
    from interlace.plan import ModuleCosts
    from interlace.plan.memory import Activations, Load, RankMemory, StateSize, WeightSize
    from interlace.run.options import StepOptions
    from interlace.run.tables.assign import Assigner
    from interlace.run.tables.dispatch import Dispatcher
    from interlace.schedule import Options, Schedule, StepTable
    from interlace.schedule.costs import ActivationBytes
    from interlace.schedule.memory import Peak


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
    if table is None:
        chunks, replicas = chunk_counts(config, layout, microbatches), layout.data_parallel
        rounds, dp = chunks.pop(LANGUAGE_MODEL), replicas[LANGUAGE_MODEL]
        if all(replicas[name] == dp and count == rounds for name, count in chunks.items()):
            table = StepTable.aligned(graph.links, [frozenset(layout.modules)] * rounds, replicas=dp)
        else:
            table = nominal_table(graph.layout, rounds, chunks)
    options = schedule_options(config, model, layout, microbatches) | (timed or {})
    return generator_of(config.parallel.schedule)(graph, table, **options)


def samples_to_ranks(
    config: Config, layout: Layout, model: MultimodalModel
) -> tuple[Assigner | None, Dispatcher | None]:
    """Assigner and dispatcher of the samples of a step on `layout`, as in a run; None where a run has none."""
    from interlace.run.tables.assign import assigner_of
    from interlace.run.tables.dispatch import dispatcher_of

    recompute, node = config.train.recompute, ranks_per_node(config, [layout.world] * layout.world)
    return (
        assigner_of(config.train.assign, layout, model, recompute=recompute),
        dispatcher_of(config.train.balance, layout, model, recompute=recompute, ranks_per_node=node),
    )


def chunk_sizes(config: Config, layout: Layout, microbatches: int) -> dict[str, float]:
    """Samples per chunk of each module, in microbatches of the language model."""
    chunks, replicas = chunk_counts(config, layout, microbatches), layout.data_parallel
    samples = chunks[LANGUAGE_MODEL] * replicas[LANGUAGE_MODEL]
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

    rounds, own = spread(LANGUAGE_MODEL, microbatches), config.chunks()
    default = 1 if layout.placement == "shared" else rounds
    encoders = config.model.encoders()
    return {name: spread(name, own[name]) if name in own else default for name in encoders} | {LANGUAGE_MODEL: rounds}


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

    activations, loads = _of_full_chunks(config, model, layout, microbatches)
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
    activations, loads = _of_full_chunks(config, model, layout, microbatches if of_step is None else of_step)
    schedule = step_schedule(config, model, layout, microbatches)
    return held_by_ranks(config, model, schedule, weights, activations, loads), weights


def _of_full_chunks(
    config: Config, model: MultimodalModel, layout: Layout, microbatches: int
) -> tuple[dict[str, Activations], dict[str, Load]]:
    """Activation memory of each module, and the load of a chunk that fills its budgets; all text counts as targets."""
    from interlace.plan.memory import Load

    activations, sizes = activations_of_config(config, model, layout), chunk_sizes(config, layout, microbatches)
    tokens = {name: load.tokens for name, load in budget_loads(config, model).items()}
    language = activations[LANGUAGE_MODEL]
    features = sum(tokens[name] * activations[name].edges[-1] for name in tokens if name != LANGUAGE_MODEL)
    features = features / language.feature if language.feature else 0.0
    rows = tokens[LANGUAGE_MODEL]
    loads = {name: Load(tokens[name] * sizes[name]) for name in tokens}
    size = sizes[LANGUAGE_MODEL]
    loads[LANGUAGE_MODEL] = Load(rows * size, max(rows - features, 0.0) * size, features * size)
    return activations, loads


# ---------------------------------------------------------------------- memory of ranks


@dataclass(frozen=True)
class Held:
    """memory: by rank. by_layer: the (rank, module) whose weights the step gathers layer by layer."""

    memory: tuple[RankMemory, ...]
    by_layer: frozenset[tuple[int, str]]

    @property
    def peak(self) -> int:
        """Bytes of the rank with the highest peak, in the planned step."""
        return max(memory.peak_run for memory in self.memory)


def activations_of_config(config: Config, model: MultimodalModel, layout: Layout) -> dict[str, Activations]:
    """Activation memory of forwards under the config's precision and checkpointing.

    Raises ValueError as `activations_of` does.
    """
    from interlace.estimate.traced import activations_of
    from interlace.schedule import splits_backward
    from interlace.train.device import AUTOCAST

    return activations_of(
        model,
        layout,
        checkpointing=config.train.activation_checkpointing,
        sequence_parallel=config.parallel.sequence_parallel,
        autocast=AUTOCAST[config.train.precision],
        items=_items(config, model),
        split=splits_backward(config.parallel.schedule),
    )


def held_by_ranks(
    config: Config,
    model: MultimodalModel,
    schedule: Schedule,
    weights: Sequence[WeightSize],
    activations: Mapping[str, Activations],
    loads: Mapping[Any, Load],
    state: Mapping[str, StateSize] | None = None,
) -> Held:
    """Memory of every rank of the schedule's layout.

    loads: load of a chunk by its place in the table, else by its module; by module the largest.
    state: the result of `optim.state_sizes`, which is the same for all layouts of a model.
    """
    from interlace.plan.memory import activation_bytes, rank_memory
    from interlace.run.execute.gradients import BUCKET_BYTES
    from interlace.train.models.tuning import rates
    from interlace.train.optim import state_sizes

    layout = schedule.graph.layout
    sizes = activation_bytes(layout, activations, schedule.table.chunks, loads)
    later = activation_bytes(layout, activations, schedule.table.chunks, loads, deferred=True)
    peaks = _peaks(schedule, sizes, later)
    by_layer = _by_layer(schedule)
    memory = rank_memory(
        layout,
        weights,
        activations,
        loads,
        [(peak.in_flight, peak.bytes) for peak in peaks],
        bucket_bytes=BUCKET_BYTES,
        offload_optimizer=config.train.offload_optimizer,
        state=state_sizes(config, model, rates(config, model)) if state is None else state,
        by_layer=by_layer,
    )
    return Held(memory, by_layer)


def loads_of(table: StepTable, sizes: Sequence[Size]) -> dict[Any, Load]:
    """Load of each chunk of a table, by its place, and the largest load of each module, by its name."""
    from interlace.plan.memory import Load

    features = [0.0] * len(table.chunks)
    for edge in table.edges:
        for _, _, reader, _, count in edge.pieces.tolist():
            features[reader] += count
    loads: dict[Any, Load] = {}
    for place, (chunk, size) in enumerate(zip(table.chunks, sizes, strict=True)):
        reads = features[place] if chunk.module == LANGUAGE_MODEL else 0.0
        own = Load(size.rows, size.targets, reads)
        largest = loads.get(chunk.module, Load(0))
        loads[place] = own
        loads[chunk.module] = Load(
            max(own.rows, largest.rows), max(own.targets, largest.targets), max(own.features, largest.features)
        )
    return loads


def _peaks(schedule: Schedule, sizes: ActivationBytes, later: ActivationBytes) -> list[Peak]:
    """Peak activation memory of each rank. Ranks with identical compute actions, such as those of a lane, are computed
    once."""
    from interlace.schedule.actions import CODES, COMPUTE, OP, action_of
    from interlace.schedule.memory import peak

    modules = schedule.graph.modules
    known: dict[bytes, Peak] = {}
    computes = np.isin(schedule.rows[:, OP], [CODES[op] for op in COMPUTE])
    peaks = []
    for first, stop in pairwise(schedule.first.tolist()):
        rows = schedule.rows[first:stop][computes[first:stop]]
        key = rows.tobytes()
        if key not in known:
            known[key] = peak([action_of(row, modules) for row in rows.tolist()], sizes, later)
        peaks.append(known[key])
    return peaks


def _by_layer(schedule: Schedule) -> frozenset[tuple[int, str]]:
    """The (rank, module) whose weights a schedule gathers layer by layer, in all of the rank's stages."""
    from interlace.schedule import Op
    from interlace.schedule.actions import CODES, MODULE, OP

    def gathered(op: Op) -> set[tuple[int, int]]:
        at = np.flatnonzero(schedule.rows[:, OP] == CODES[op])
        ranks = np.searchsorted(schedule.first, at, side="right") - 1
        return set(zip(ranks.tolist(), schedule.rows[at, MODULE].tolist(), strict=True))

    layered = gathered(Op.UNSHARD_LAYERS) - gathered(Op.UNSHARD)
    return frozenset((rank, schedule.graph.modules[module]) for rank, module in layered)


def _items(config: Config, model: MultimodalModel) -> dict[str, tuple[int, ...]]:
    """Audio encoder -> shape of a clip that fills its budget. Shorter clips are padded to the encoder's length."""
    from interlace.model.inputs.spectrograms import AudioInputs

    longest = round(config.data.max_audio_seconds * 100)  # frames of 10 ms
    audio = [name for name in model.encoders if isinstance(model.encoders[name].feed, AudioInputs)]
    clips = {name: model.encoders[name].default_shape for name in audio}
    return {name: (shape[0], min(shape[1], longest)) for name, shape in clips.items()}
