"""Memory planner: bytes of each rank of a layout (weights, gradients, optimizer state, activations), and the peak.

Sizes of weights and activations are measured in `interlace.estimate.traced`. This module distributes them over the
ranks of a layout, for any parallel degrees and any sharding of state (ZeRO, arXiv 1910.02054).

    shard        weights               gradients             optimizer state
    "none"       whole                 whole                 whole
    "optimizer"  whole                 whole                 1 / n
    "full"       1 / n, and gathered   1 / n, and unreduced  1 / n

"Whole" is the part of a rank after tensor parallelism; n is the number of ranks that share state
(`Layout.shard_groups`). With "full", all of a rank's layers are gathered once per step
(`interlace.run.execute.sharding`), or layer by layer (`interlace.run.execute.layers`). Layer by layer, a stage holds
the weights outside its repeated layers, the computing layer and the layer in flight; gradients are summed in fp32. The
results contain both variants, and the one that applies to each module.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from interlace.balance import rows_per_rank
from interlace.layout import Layout, ParallelSpec, Reduction, Shard, Stage

if TYPE_CHECKING:
    from interlace.schedule.table import Chunk

SUM_BYTES = 4  # minimum bytes per gradient element summed layer by layer (fp32)


class StateSize(NamedTuple):
    """Optimizer state of a weight: number of tensors of its shape and dtype, and additional bytes."""

    moments: int
    bytes: int


ADAMW = StateSize(2, 4)  # two moments, and a float32 step count per weight


@dataclass(frozen=True)
class WeightSize:
    """Size of a parameter on the ranks that hold it.

    layers: layers of `module` that use it; several if it is tied. rows: [tp], size of dimension 0 on each place of a
    lane, reduced if tensor parallelism cuts dimension 0. width: elements per row on a rank. itemsize: bytes per
    element. in_part: whether ranks of a lane hold it whole, but use it on their own rows or heads. sharable: whether
    ranks that hold the same part of it can shard its state by rows. beside: whether it is outside the repeated layers,
    or in several of them.
    """

    name: str
    module: str
    layers: tuple[int, ...]
    rows: tuple[int, ...]
    width: int
    itemsize: int
    trainable: bool
    in_part: bool = False
    sharable: bool = True
    beside: bool = False

    def count(self, tp_index: int) -> int:
        """Elements on the rank with tensor-parallel index `tp_index` of a lane."""
        return self.rows[tp_index] * self.width


class Load(NamedTuple):
    """Size of a chunk: rows in the layers of its module, rows with a target, rows of features from other modules.

    Counts cover all context-parallel ranks, or one of them. In the latter case `outside` is the number of rows that an
    encoder's rank has before and after its layers, if it has more there than inside.
    """

    rows: float
    targets: float = 0.0
    features: float = 0.0
    outside: float = 0.0


class Kept(NamedTuple):
    """Bytes held from a chunk's forward to its backward by stages that have one of `layers`.

    edge: also held if a stage begins or ends before layer `edge` (-1: none), since a stage keeps its input and output.
    fixed: bytes per chunk. per_row, per_target: bytes per row, and per row with a target. between: also held if a stage
    has layer `between` and the layer before it (-1: none). outside: whether rows are counted before and after the
    layers.
    """

    layers: tuple[int, ...]
    edge: int
    fixed: float
    per_row: float
    per_target: float
    between: int = -1
    outside: bool = False

    def bytes(self, load: Load) -> float:
        """Bytes of a chunk."""
        rows = max(load.rows, load.outside) if self.outside else load.rows
        return self.fixed + self.per_row * rows + self.per_target * load.targets


@dataclass(frozen=True)
class Activations:
    """Activations that forwards of one module keep, on one rank of a lane.

    kept: see Kept. edges: [layers + 1], bytes per row of the input of each layer, and of the last layer's output.
    backward: [layers], whether a stage that ends with that layer has a backward; without one it keeps nothing.
    feature: bytes per row of features that the first stage receives. inner: [layers], bytes per row that recomputation
    of a layer allocates during its backward (empty without recomputation). words: vocabulary entries of the logits on a
    rank, 0 without logits. logits_bytes: larger logits are computed in parts (see `interlace.model.loss`).
    shared_head: whether the ranks of a lane split the head by vocabulary; then logits are always computed in parts, and
    `kept` has none. deferred: bytes kept instead between the halves of a backward, for weight gradients; empty if no
    backward is split.
    """

    kept: tuple[Kept, ...]
    edges: tuple[float, ...]
    backward: tuple[bool, ...]
    feature: float = 0.0
    inner: tuple[float, ...] = ()
    words: int = 0
    logits_bytes: float = math.inf
    shared_head: bool = False
    deferred: tuple[Kept, ...] = ()

    def of_stage(self, start: int, stop: int, load: Load) -> float:
        """Bytes that the stage of layers [start, stop) keeps for a chunk."""
        if not self.backward[stop - 1]:
            return 0.0
        ends, is_last = (start, stop), stop == len(self.backward)
        total = load.features * self.feature if start == 0 else 0.0
        for kept in self.kept:
            inside = start < kept.between < stop or any(start <= layer < stop for layer in kept.layers)
            if inside or kept.edge in ends:
                total += kept.bytes(load)
        if is_last and self._in_parts(load):  # keeps a norm per row instead of the logits' exponentials
            total -= load.targets * 4 * (self.words - 1)
        return total

    def deferred_of_stage(self, start: int, stop: int, load: Load) -> float:
        """Bytes that the stage keeps from BACKWARD_INPUT to BACKWARD_WEIGHT: the operands of weight gradients."""
        # A head that computes logits in parts defers nothing. Only bytes of a head depend on targets.
        load = load._replace(targets=0.0) if self._in_parts(load) else load
        mine = (kept for kept in self.deferred if any(start <= layer < stop for layer in kept.layers))
        return sum(kept.bytes(load) for kept in mine)

    def workspace(self, start: int, stop: int, load: Load) -> float:
        """Temporary bytes of a backward of the stage: recomputed activations of one layer, or logits."""
        if not self.backward[stop - 1]:
            return 0.0
        recomputed = load.rows * max(self.inner[start:stop], default=0.0)
        logits = 0.0
        if self.words and stop == len(self.backward):  # logits and their gradient, or exponentials
            logits = 2 * min(4.0 * load.targets * self.words, max(self.logits_bytes, 4.0 * self.words))
        return max(recomputed, logits)

    def _in_parts(self, load: Load) -> bool:
        few = max(1, self.logits_bytes // (4 * self.words)) if self.words else math.inf
        return not self.shared_head and load.targets > few


@dataclass(frozen=True)
class RankMemory:
    """Bytes on one rank, in the memory of its device.

    parameters: number of elements that it holds, sharded ones counted whole.
    in_flight: the most chunks whose activations wait for a backward at once. activations: bytes that they keep.
    messages: the largest incoming plus the largest outgoing message.
    sums: the largest gradient bucket in a reduction, in addition to the gradients.
    workspace: temporary bytes of one backward.
    weights_once, gradients_once: with shard = "full" gathered once per step instead of layer by layer; equal to weights
    and gradients without such shards.
    weights_run, gradients_run: with each module gathered as in the planned step.
    host: optimizer state in host memory, if it is offloaded.
    """

    rank: int
    parameters: int
    weights: int
    gradients: int
    optimizer: int
    activations: int
    in_flight: int
    messages: int
    sums: int
    workspace: int
    weights_once: int
    gradients_once: int
    weights_run: int
    gradients_run: int
    host: int = 0

    @property
    def peak(self) -> int:
        """Upper bound with shard = "full" gathered layer by layer. Sums and workspace are not held at the same time."""
        return self.weights + self.gradients + self._rest

    @property
    def peak_once(self) -> int:
        """Upper bound with shard = "full" gathered once per step."""
        return self.weights_once + self.gradients_once + self._rest

    @property
    def peak_run(self) -> int:
        """Upper bound in the planned step."""
        return self.weights_run + self.gradients_run + self._rest

    @property
    def _rest(self) -> int:
        return self.optimizer + self.activations + self.messages + max(self.sums, self.workspace)


def activation_bytes(
    layout: Layout,
    activations: Mapping[str, Activations],
    chunks: Sequence[Chunk],
    loads: Mapping[Any, Load],
    *,
    deferred: bool = False,
) -> dict[tuple[str, int, int], float]:
    """(module, stage, chunk) -> bytes kept on each rank of the lane, for `interlace.schedule.memory.peak`.

    chunks: `StepTable.chunks`. loads: load of a chunk by its index there, else by its module. deferred: returns the
    bytes that replace a forward's activations from BACKWARD_INPUT to BACKWARD_WEIGHT.
    """
    sizes, bytes_of = {}, Activations.deferred_of_stage if deferred else Activations.of_stage
    cache: dict[object, float] = {}  # shared by replicas with equal layers and loads
    for index, chunk in enumerate(chunks):
        load = _local_load(layout.spec(chunk.module), loads.get(index, loads.get(chunk.module, Load(0))))
        for stage in layout.pipelines(chunk.module)[chunk.replica].stages:
            key = chunk.module, stage.start, stage.stop, load
            if key not in cache:
                cache[key] = bytes_of(activations[chunk.module], stage.start, stage.stop, load)
            sizes[chunk.module, stage.index, index] = cache[key]
    return sizes


def rank_memory(
    layout: Layout,
    weights: Sequence[WeightSize],
    activations: Mapping[str, Activations],
    loads: Mapping[str, Load],
    peaks: Sequence[tuple[int, float]],
    *,
    bucket_bytes: int,
    offload_optimizer: bool = False,
    state: Mapping[str, StateSize] | None = None,
    by_layer: Collection[tuple[int, str]] = (),
) -> tuple[RankMemory, ...]:
    """Memory of every rank of `layout`.

    weights: weights of the model, as ranks of its lanes hold them. loads: module -> its largest chunk. peaks: per rank,
    the most chunks in flight and bytes kept (`interlace.schedule.memory.peak`). bucket_bytes: size of gradient buckets.
    offload_optimizer: whether optimizer state is in host memory. state: optimizer state of each trained weight, by name
    (default: that of AdamW). by_layer: pairs (rank, module) whose weights the step gathers layer by layer.
    """
    by_module = {name: [weight for weight in weights if weight.module == name] for name in layout.modules}
    shards = shards_by_rank(layout)
    reductions: dict[int, list[Reduction]] = {}
    in_part = {weight.module for weight in weights if weight.in_part and weight.trainable}
    for reduction in layout.reduce_groups(in_part):
        for rank in reduction.ranks:
            reductions.setdefault(rank, []).append(reduction)
    memories = []
    cache: dict[object, RankMemory] = {}  # shared by ranks with equal memory: those of other replicas
    for rank, (in_flight, activation_bytes) in enumerate(peaks):
        stages = layout.of_rank(rank)
        key = (
            tuple((s.module, s.index, s.start, s.stop, s.lane_of(rank).ranks.index(rank)) for s in stages),
            tuple((s.module, s.start, s.stop, len(s.owners)) for s in shards[rank]),
            tuple((r.module, r.start, r.stop, r.in_part) for r in reductions.get(rank, ())),
            tuple((rank, s.module) in by_layer for s in stages),
        )
        if key in cache:
            memories.append(
                replace(cache[key], rank=rank, activations=math.ceil(activation_bytes), in_flight=in_flight)
            )
            continue
        parts: list[_OwnedWeight] = []
        sizes = Counter[str]()
        for name in dict.fromkeys(stage.module for stage in stages):
            module_parts = list(_owned_weights(layout, rank, name, by_module[name], shards[rank]))
            layers = [range(stage.start, stage.stop) for stage in stages if stage.module == name]
            shard, layered = layout.spec(name).shard, (rank, name) in by_layer
            sizes.update(_state_bytes(module_parts, layers, shard, layered, state or {}))
            parts += module_parts
        optimizer = sizes.pop("optimizer")
        shares = [(stage, activations[stage.module], _load_of_stage(layout, stage, loads)) for stage in stages]
        buckets = (
            _largest_bucket(_reduced_weights(parts, reduction), bucket_bytes) for reduction in reductions.get(rank, ())
        )
        memories.append(
            RankMemory(
                rank=rank,
                **sizes,
                optimizer=0 if offload_optimizer else optimizer,
                activations=math.ceil(activation_bytes),
                in_flight=in_flight,
                messages=math.ceil(_messages(layout, shares)),
                sums=max(buckets, default=0),
                workspace=math.ceil(max(kept.workspace(stage.start, stage.stop, load) for stage, kept, load in shares)),
                host=optimizer if offload_optimizer else 0,
            )
        )
        cache[key] = memories[-1]
    return tuple(memories)


def shards_by_rank(layout: Layout) -> list[list[Shard]]:
    """For each rank, the shards that it owns."""
    shards: list[list[Shard]] = [[] for _ in range(layout.world)]
    for shard in layout.shard_groups():
        for rank in shard.owners:
            shards[rank].append(shard)
    return shards


class _OwnedWeight(NamedTuple):
    """A rank's part of a weight.

    home: first of the weight's layers on the rank. whole: bytes without sharding. part: bytes of the rank's own shard,
    equal to whole without sharding. sharers: number of ranks that share it.
    """

    weight: WeightSize
    home: int
    elements: int
    whole: int
    part: int
    sharers: int


def _owned_weights(
    layout: Layout, rank: int, module: str, weights: Iterable[WeightSize], shards: Iterable[Shard]
) -> Iterator[_OwnedWeight]:
    """Weights of a module on `rank`. shards: shards that it owns."""
    tp, tp_index_of = layout.spec(module).tp, {}
    for stage in layout.of_rank(rank):
        if stage.module == module:
            tp_index, _ = stage.lane_of(rank).indices(rank, tp)
            tp_index_of.update(dict.fromkeys(range(stage.start, stage.stop), tp_index))
    sharing = {
        i: len(shard.owners) for shard in shards if shard.module == module for i in range(shard.start, shard.stop)
    }
    for weight in weights:
        first_layer = next((layer for layer in weight.layers if layer in tp_index_of), None)
        if first_layer is None:
            continue
        tp_index, size = tp_index_of[first_layer], weight.width * weight.itemsize
        rows, sharers = weight.rows[tp_index], sharing.get(first_layer, 1) if weight.sharable else 1
        # Size on the owner with the most rows: surplus rows go to different owners, weight by weight.
        yield _OwnedWeight(
            weight, first_layer, weight.count(tp_index), rows * size, -(-rows // sharers) * size, sharers
        )


def _state_bytes(
    owned: Sequence[_OwnedWeight], stages: Sequence[range], shard: str, by_layer: bool, state: Mapping[str, StateSize]
) -> dict[str, int]:
    """Bytes of weights, gradients and optimizer state, as fields of RankMemory. stages: the layers of each stage of the
    rank."""
    trained = [entry for entry in owned if entry.weight.trainable]
    count = sum(entry.elements for entry in owned)
    sizes = [(entry.part, state.get(entry.weight.name, ADAMW)) for entry in trained]
    optimizer = sum(size.moments * shard_size + size.bytes for shard_size, size in sizes)
    whole, gradients = (sum(entry.whole for entry in selected) for selected in (owned, trained))
    layered = once = whole, gradients
    if shard == "full":
        shared, shared_trained = ([entry for entry in selected if entry.sharers > 1] for selected in (owned, trained))
        shard_bytes = sum(entry.part for entry in owned)
        # Layer by layer, gradients are summed in fp32, and each bucket of sums is freed once it is a gradient.
        sums = sum(entry.part * max(SUM_BYTES // entry.weight.itemsize, 1) for entry in shared_trained)
        sums += sum(entry.part for entry in trained if entry.sharers == 1)
        sums += _largest_stage_bytes(shared_trained, stages)
        layered = shard_bytes + _largest_stage_bytes(shared, stages), sums
        once = shard_bytes + sum(entry.whole for entry in shared), gradients
    sizes_of = {"": layered, "_once": once, "_run": layered if by_layer else once}
    by_name = {"parameters": count, "optimizer": optimizer}
    for suffix, (weights, summed) in sizes_of.items():
        by_name |= {f"weights{suffix}": weights, f"gradients{suffix}": summed}
    return by_name


def _largest_stage_bytes(parts: Sequence[_OwnedWeight], stages: Sequence[range]) -> int:
    """The most bytes of any stage for its weights outside repeated layers and for two consecutive layers."""

    def of(layers: range, beside: bool) -> int:
        selected = (part for part in parts if part.weight.beside is beside)
        return sum(part.whole for part in selected if any(layer in layers for layer in part.weight.layers))

    return max(of(stage, True) + max(of(stage[i : i + 2], False) for i in range(len(stage))) for stage in stages)


def _reduced_weights(parts: Iterable[_OwnedWeight], reduction: Reduction) -> list[_OwnedWeight]:
    """Weights of a rank whose gradients are part of a reduction."""
    return [
        part
        for part in parts
        if part.weight.module == reduction.module and reduction.start <= part.home < reduction.stop
        if part.weight.trainable and part.weight.in_part == reduction.in_part
    ]


def _local_load(spec: ParallelSpec, load: Load) -> Load:
    """Load of a chunk on one context-parallel rank."""
    if spec.cp == 1:
        return load
    targets, features = (math.ceil(each / spec.cp) for each in (load.targets, load.features))
    return Load(rows_per_rank(math.ceil(load.rows), spec.cp), targets, features, load.rows)


def _load_of_stage(layout: Layout, stage: Stage, loads: Mapping[str, Load]) -> Load:
    return _local_load(layout.spec(stage.module), loads.get(stage.module, Load(0)))


def _messages(layout: Layout, shares: Sequence[tuple[Stage, Activations, Load]]) -> float:
    """Bytes of the largest incoming and the largest outgoing message of a rank, together."""
    *encoders, language_model = layout.modules
    arriving, leaving = [0.0], [0.0]
    local_stages = {(stage.module, stage.index) for stage, _, _ in shares}

    def sends_between_ranks(encoder: str) -> bool:
        """True if output of the encoder is sent between ranks, to this rank or from it."""
        spec = layout.spec(encoder)
        return (
            spec.dp != layout.spec(language_model).dp
            or not {(encoder, spec.stages - 1), (language_model, 0)} <= local_stages
        )

    for stage, module_activations, load in shares:
        is_last = stage.index == layout.spec(stage.module).stages - 1
        if stage.index and (stage.module, stage.index - 1) not in local_stages:
            arriving.append(module_activations.edges[stage.start] * load.rows)
        if not stage.index and stage.module == language_model and any(map(sends_between_ranks, encoders)):
            arriving.append(module_activations.feature * load.features)
        if not is_last and (stage.module, stage.index + 1) not in local_stages:
            leaving.append(module_activations.edges[stage.stop] * load.rows)
        if is_last and stage.module != language_model and sends_between_ranks(stage.module):
            leaving.append(module_activations.edges[stage.stop] * load.rows)
    return max(arriving) + max(leaving)


def _largest_bucket(parts: Sequence[_OwnedWeight], bucket_bytes: int) -> int:
    """Bytes of the largest gradient bucket. Buckets are in order of the gradients and have one itemsize each.

    Each owner of slices is sent as many bytes as the owner with the largest slice.
    """
    largest = 0
    for itemsize in {part.weight.itemsize for part in parts}:
        size, sent = bucket_bytes, 0
        for part in (part for part in parts if part.weight.itemsize == itemsize):
            if size + part.whole > bucket_bytes:
                size = sent = 0
            size += part.whole
            sent += part.part * part.sharers
            largest = max(largest, sent)
    return largest


# ---------------------------------------------------------------------- communication volume of the state


def summed_bytes(layout: Layout, weights: Iterable[WeightSize], reduction: Reduction) -> int:
    """Bytes of gradients that one rank contributes to `reduction`; sharded ones are counted whole."""
    if reduction.tied >= 0:
        ends = (reduction.start, reduction.stop - 1)
        tied = (w for w in weights if w.module == reduction.module and w.trainable and len(w.layers) > 1)
        return sum(w.count(0) * w.itemsize for w in tied if (min(w.layers), max(w.layers)) == ends)
    of_module = (w for w in weights if w.module == reduction.module)
    parts = _owned_weights(layout, reduction.ranks[0], reduction.module, of_module, ())
    summed = (e for e in _reduced_weights(parts, reduction) if not layout.uneven(reduction.module, e.weight.layers))
    return sum(part.whole for part in summed)


class SharedBytes(NamedTuple):
    """Bytes of a shard's weights on one rank, gathered.

    beside: weights outside the repeated layers. layers: weights of each layer. trained_beside, trained_layers: the
    trained part of both.
    """

    beside: int
    layers: tuple[int, ...]
    trained_beside: int
    trained_layers: tuple[int, ...]

    @property
    def whole(self) -> int:
        """Bytes of all weights."""
        return self.beside + sum(self.layers)


def shared_bytes(layout: Layout, weights: Iterable[WeightSize], shard: Shard) -> SharedBytes:
    """Weights that the owners of `shard` gather: all sharable weights, or with ZeRO-1 the trained ones."""
    rank = shard.owners[0]
    of_module = (w for w in weights if w.module == shard.module and w.sharable and (shard.full or w.trainable))
    parts = [e for e in _owned_weights(layout, rank, shard.module, of_module, ()) if shard.start <= e.home < shard.stop]

    def of(selected: Sequence[_OwnedWeight]) -> tuple[int, tuple[int, ...]]:
        layers = [
            sum(e.whole for e in selected if e.home == i and not e.weight.beside)
            for i in range(shard.start, shard.stop)
        ]
        return sum(e.whole for e in selected if e.weight.beside), tuple(layers)

    return SharedBytes(*of(parts), *of([e for e in parts if e.weight.trainable]))


def trained_bytes(layout: Layout, weights: Sequence[WeightSize], rank: int, shards: Sequence[Shard]) -> int:
    """Bytes of the weights that the optimizer of `rank` updates; of sharded weights only its slices."""
    names = dict.fromkeys(stage.module for stage in layout.of_rank(rank))
    parts = (e for n in names for e in _owned_weights(layout, rank, n, (w for w in weights if w.module == n), shards))
    return sum(part.part for part in parts if part.weight.trainable)
