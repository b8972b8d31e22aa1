"""Memory of each rank of a config's layout: `plan.memory` for a schedule and the loads of its chunks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from interlace.model.naming import LANGUAGE_MODEL
from interlace.train.config.sections import Config

if TYPE_CHECKING:
    from interlace.costs.step import Size
    from interlace.layout import Layout
    from interlace.model import MultimodalModel
    from interlace.plan.memory import Activations, Load, RankMemory, StateSize, WeightSize
    from interlace.schedule import Schedule, StepTable
    from interlace.schedule.costs import ActivationBytes
    from interlace.schedule.memory import Peak


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
