"""How many bytes each rank of a layout holds: weights, gradients, optimizer state, activations, and the peak.

What a model weighs and what its forwards keep for their backwards is measured elsewhere (`interlace.run.traced`); here
it is shared out over the ranks of a layout, under any degrees and any sharding of state (ZeRO, arXiv 1910.02054).

    shard        weights               gradients             optimizer state
    "none"       whole                 whole                 whole
    "optimizer"  whole                 whole                 1 / n
    "full"       1 / n, and gathered   1 / n, and unreduced  1 / n

"Whole" is what tensor parallelism leaves of it on a rank, n the ranks that share state (`Layout.shard_groups`). With
"full", what is gathered is all of a rank's layers once per step (`interlace.run.sharding`), or layer by layer
(`interlace.run.layers`): then of one stage what lies beside its layers, the layer that computes and the one that is on
its way, and gradients are summed in fp32. Both are given, and which of them applies to each module in the step that is
planned.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from interlace.balance import rows_per_rank
from interlace.layout import Layout, ParallelSpec, Reduction, Shard, Stage
from interlace.layout.reductions import uneven

SUM_BYTES = 4  # the least of an element of gradients that are added up layer by layer, in fp32


class StateSize(NamedTuple):
    """What an optimizer keeps of a weight: so many tensors of its shape and dtype, and bytes besides."""

    moments: int
    bytes: int


ADAMW = StateSize(2, 4)  # two moments, and the count of steps, a float32 for each weight


@dataclass(frozen=True)
class WeightSize:
    """How large a parameter of a model is, as ranks hold it.

    layers: those of `module` that use it; several where it is tied. rows: [tp], of its dimension 0 those that each
    place of a lane holds, fewer than it has where tensor parallelism cuts it there. width: elements of a row, as a rank
    holds it. itemsize: bytes of an element. in_part: whether ranks of a lane hold it whole, but use it on their own
    rows or heads. sharable: whether ranks that hold the same of it can share its state by rows. beside: whether it
    lies beside the repeated layers, or in several of them.
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

    def count(self, place: int) -> int:
        """Elements on the rank at `place` of a lane."""
        return self.rows[place] * self.width


class Load(NamedTuple):
    """What passes through a chunk: rows in the layers of its module, rows with a target, rows of others' features.

    Of all context-parallel ranks together; of one of them, `outside` is the rows that an encoder's rank has before and
    after its layers, where these are more than inside.
    """

    rows: float
    targets: float = 0.0
    features: float = 0.0
    outside: float = 0.0


class Kept(NamedTuple):
    """Bytes that are alive from a chunk's forward to its backward, where a stage has one of `layers`.

    edge: also where a stage begins or ends before layer `edge` (-1: nowhere), since it keeps what it was given and what
    it hands on. fixed: per chunk; per_row and per_target: for each row, and for each with a target. between: also where
    a stage has layer `between` and the one before it (-1: nowhere). outside: for each row before and after the layers.
    """

    layers: tuple[int, ...]
    edge: int
    fixed: float
    per_row: float
    per_target: float
    between: int = -1
    outside: bool = False

    def bytes(self, load: Load) -> float:
        """Of a chunk."""
        rows = max(load.rows, load.outside) if self.outside else load.rows
        return self.fixed + self.per_row * rows + self.per_target * load.targets


@dataclass(frozen=True)
class Activations:
    """What the forwards of one module keep, on one rank of a lane.

    kept: see Kept. edges: [layers + 1], bytes per row of what enters each layer, and of what leaves the last. backward:
    [layers], whether a stage that ends with that layer has a backward; it keeps nothing otherwise. feature: bytes per
    row of features that its first stage is given. inner: [layers], bytes per row that recomputing a layer makes anew
    while its backward runs (empty where nothing is recomputed). words: of the logits on a rank, 0 without.
    logits_bytes: above it logits are made in parts (see `interlace.model.loss`). shared_head: whether the ranks of a
    lane share the head by its words; then logits are made in parts always, and `kept` has none. deferred: what is kept
    in place of all that between the halves of a backward, for gradients of weights; empty where none is split.
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
        """Bytes that the stage of layers [start, stop) keeps of a chunk."""
        if not self.backward[stop - 1]:
            return 0.0
        ends, last = (start, stop), stop == len(self.backward)
        total = load.features * self.feature if start == 0 else 0.0
        for kept in self.kept:
            inside = start < kept.between < stop or any(start <= layer < stop for layer in kept.layers)
            if inside or kept.edge in ends:
                total += kept.bytes(load)
        if last and self._in_parts(load):  # the logits' exponentials are not kept then, but their norm for each row
            total -= load.targets * 4 * (self.words - 1)
        return total

    def deferred_of_stage(self, start: int, stop: int, load: Load) -> float:
        """Bytes that it keeps from BACKWARD_INPUT to BACKWARD_WEIGHT: the operands of gradients of weights."""
        # A head whose logits are made in parts puts nothing off, and only what a head keeps goes by targets.
        load = load._replace(targets=0.0) if self._in_parts(load) else load
        mine = (kept for kept in self.deferred if any(start <= layer < stop for layer in kept.layers))
        return sum(kept.bytes(load) for kept in mine)

    def workspace(self, start: int, stop: int, load: Load) -> float:
        """Bytes that a backward of the stage makes and drops: what is recomputed of one layer, or logits."""
        if not self.backward[stop - 1]:
            return 0.0
        recomputed = load.rows * max(self.inner[start:stop], default=0.0)
        logits = 0.0
        if self.words and stop == len(self.backward):  # themselves and their gradient, or exponentials
            logits = 2 * min(4.0 * load.targets * self.words, max(self.logits_bytes, 4.0 * self.words))
        return max(recomputed, logits)

    def _in_parts(self, load: Load) -> bool:
        few = max(1, self.logits_bytes // (4 * self.words)) if self.words else math.inf
        return not self.shared_head and load.targets > few


@dataclass(frozen=True)
class RankMemory:
    """Bytes on one rank, in the memory of its device. parameters: elements that it holds, what is sharded too as whole.

    in_flight: the most chunks whose activations wait for a backward at once, and activations what they keep. messages:
    the largest that arrives and the largest that leaves. sums: the largest bucket of gradients that travels while the
    gradients are there still. workspace: what one backward makes and drops. weights_once, gradients_once: with what is
    sharded "full" gathered once per step, not layer by layer; equal to weights and gradients where nothing is.
    weights_run, gradients_run: with each module gathered as it is in the step that is planned. host: optimizer state in
    host memory, where it is kept there and not on the device.
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
        """All of it at once, of which sums and workspace come one after the other: an upper bound, layer by layer."""
        return self.weights + self.gradients + self._rest

    @property
    def peak_once(self) -> int:
        """The same where what is sharded "full" is gathered once per step."""
        return self.weights_once + self.gradients_once + self._rest

    @property
    def peak_run(self) -> int:
        """The same in the step that is planned."""
        return self.weights_run + self.gradients_run + self._rest

    @property
    def _rest(self) -> int:
        return self.optimizer + self.activations + self.messages + max(self.sums, self.workspace)


def activation_bytes(
    layout: Layout,
    activations: Mapping[str, Activations],
    chunks: Sequence[Any],
    loads: Mapping[Any, Load],
    *,
    deferred: bool = False,
) -> dict[tuple[str, int, int], float]:
    """(module, stage, chunk) -> bytes kept on each rank of the lane, as `interlace.schedule.memory.peak` takes them.

    chunks: `StepTable.chunks`. loads: of a chunk by its place there, else by its module. deferred: not of the forward,
    but what is kept in its place from BACKWARD_INPUT to BACKWARD_WEIGHT.
    """
    found, kept = {}, Activations.deferred_of_stage if deferred else Activations.of_stage
    known: dict[Any, float] = {}  # of replicas that have the same layers and loads
    for place, chunk in enumerate(chunks):
        load = _share(layout.spec(chunk.module), loads.get(place, loads.get(chunk.module, Load(0))))
        for stage in layout.pipelines(chunk.module)[chunk.replica].stages:
            key = chunk.module, stage.start, stage.stop, load
            if key not in known:
                known[key] = kept(activations[chunk.module], stage.start, stage.stop, load)
            found[chunk.module, stage.index, place] = known[key]
    return found


def rank_memory(
    layout: Layout,
    weights: Sequence[WeightSize],
    activations: Mapping[str, Activations],
    loads: Mapping[str, Load],
    held: Sequence[tuple[int, float]],
    *,
    bucket_bytes: int,
    offload_optimizer: bool = False,
    state: Mapping[str, StateSize] | None = None,
    by_layer: Collection[tuple[int, str]] = (),
) -> tuple[RankMemory, ...]:
    """What every rank of `layout` holds.

    weights: of the model, as ranks of its lanes hold them. loads: module -> its largest chunk. held: per rank, the most
    chunks in flight and bytes kept (`interlace.schedule.memory.peak`). bucket_bytes: of gradients that are summed
    together. offload_optimizer: whether optimizer state is in host memory. state: of each trained weight, by name, what
    is kept of it (default: AdamW's). by_layer: the (rank, module) whose weights the step gathers layer by layer.
    """
    by_module: dict[str, list[WeightSize]] = {name: [] for name in layout.modules}
    for weight in weights:
        by_module[weight.module].append(weight)
    shards: dict[int, list[Shard]] = {}
    for shard in layout.shard_groups():
        for rank in shard.owners:
            shards.setdefault(rank, []).append(shard)
    reductions: dict[int, list[Reduction]] = {}
    in_part = {weight.module for weight in weights if weight.in_part and weight.trainable}
    for reduction in layout.reduce_groups(in_part):
        for rank in reduction.ranks:
            reductions.setdefault(rank, []).append(reduction)
    found = []
    known: dict[Any, RankMemory] = {}  # of ranks that differ in nothing that counts: those of other replicas
    for rank, (in_flight, kept) in enumerate(held):
        stages = layout.of_rank(rank)
        likeness = (
            tuple((s.module, s.index, s.start, s.stop, s.lane_of(rank).ranks.index(rank)) for s in stages),
            tuple((s.module, s.start, s.stop, len(s.owners)) for s in shards.get(rank, ())),
            tuple((r.module, r.start, r.stop, r.in_part) for r in reductions.get(rank, ())),
            tuple((rank, s.module) in by_layer for s in stages),
        )
        if likeness in known:
            found.append(replace(known[likeness], rank=rank, activations=math.ceil(kept), in_flight=in_flight))
            continue
        own: list[_Own] = []
        total = _State(*(0,) * len(_State._fields))
        for name in dict.fromkeys(stage.module for stage in stages):
            mine = list(_owned(layout, rank, name, by_module[name], shards.get(rank, ())))
            layers = [range(stage.start, stage.stop) for stage in stages if stage.module == name]
            more = _state(mine, layers, layout.spec(name).shard, (rank, name) in by_layer, state or {})
            total = _State(*(a + b for a, b in zip(total, more, strict=True)))
            own += mine
        shares = [(stage, activations[stage.module], _share_of(layout, stage, loads)) for stage in stages]
        buckets = (_largest_bucket(_summed(own, reduction), bucket_bytes) for reduction in reductions.get(rank, ()))
        found.append(
            RankMemory(
                rank=rank,
                parameters=total.parameters,
                weights=total.weights,
                gradients=total.gradients,
                optimizer=0 if offload_optimizer else total.optimizer,
                activations=math.ceil(kept),
                in_flight=in_flight,
                messages=math.ceil(sum(_messages(layout, shares))),
                sums=max(buckets, default=0),
                workspace=math.ceil(max(what.workspace(stage.start, stage.stop, load) for stage, what, load in shares)),
                weights_once=total.weights_once,
                gradients_once=total.gradients_once,
                weights_run=total.weights_run,
                gradients_run=total.gradients_run,
                host=total.optimizer if offload_optimizer else 0,
            )
        )
        known[likeness] = found[-1]
    return tuple(found)


class _Own(NamedTuple):
    """What a rank has of a weight. home: the first of its layers there. whole: bytes; part: of what of its state is the
    rank's own, the same where nothing is shared; sharers: how many ranks share it."""

    weight: WeightSize
    home: int
    elements: int
    whole: int
    part: int
    sharers: int


class _State(NamedTuple):
    parameters: int
    weights: int
    gradients: int
    optimizer: int
    weights_once: int
    gradients_once: int
    weights_run: int
    gradients_run: int


def _owned(
    layout: Layout, rank: int, module: str, weights: Iterable[WeightSize], shards: Iterable[Shard]
) -> Iterator[_Own]:
    """What `rank` has of a module. shards: of which it is an owner."""
    tp, places = layout.spec(module).tp, {}
    for stage in layout.of_rank(rank):
        if stage.module == module:
            place, _ = stage.lane_of(rank).places(rank, tp)
            places.update(dict.fromkeys(range(stage.start, stage.stop), place))
    sharing = {i: len(each.owners) for each in shards if each.module == module for i in range(each.start, each.stop)}
    for weight in weights:
        home = next((layer for layer in weight.layers if layer in places), None)
        if home is None:
            continue
        place, size = places[home], weight.width * weight.itemsize
        rows, sharers = weight.rows[place], sharing.get(home, 1) if weight.sharable else 1
        # The owner that has most of it: rows that are over go to different ones, weight by weight.
        yield _Own(weight, home, weight.count(place), rows * size, -(-rows // sharers) * size, sharers)


def _state(
    own: Sequence[_Own], stages: Sequence[range], shard: str, by_layer: bool, state: Mapping[str, StateSize]
) -> _State:
    """stages: the layers of each stage of the rank."""
    trained = [each for each in own if each.weight.trainable]
    count = sum(each.elements for each in own)
    sizes = [(each.part, state.get(each.weight.name, ADAMW)) for each in trained]
    optimizer = sum(size.moments * part + size.bytes for part, size in sizes)
    whole, gradients = (sum(each.whole for each in some) for some in (own, trained))
    if shard != "full":
        return _State(count, whole, gradients, optimizer, whole, gradients, whole, gradients)
    shared, shared_trained = ([each for each in some if each.sharers > 1] for some in (own, trained))
    parts = sum(each.part for each in own)
    # Layer by layer they are added up in fp32, and each bucket of sums is dropped once it is a gradient.
    sums = sum(each.part * max(SUM_BYTES // each.weight.itemsize, 1) for each in shared_trained)
    sums += sum(each.part for each in trained if each.sharers == 1)
    layered = parts + _at_a_time(shared, stages), sums + _at_a_time(shared_trained, stages)
    once = parts + sum(each.whole for each in shared), gradients
    return _State(count, *layered, optimizer, *once, *(layered if by_layer else once))


def _at_a_time(own: Sequence[_Own], stages: Sequence[range]) -> int:
    """The most bytes of what lies beside the layers of a stage and of two of its layers, one after the other."""

    def of(layers: range, beside: bool) -> int:
        some = (each for each in own if each.weight.beside is beside)
        return sum(each.whole for each in some if any(layer in layers for layer in each.weight.layers))

    return max(of(stage, True) + max(of(stage[i : i + 2], False) for i in range(len(stage))) for stage in stages)


def _summed(own: Iterable[_Own], reduction: Reduction) -> list[_Own]:
    """What of a rank's weights a reduction sums."""
    return [
        each
        for each in own
        if each.weight.module == reduction.module and reduction.start <= each.home < reduction.stop
        if each.weight.trainable and each.weight.in_part == reduction.in_part
    ]


def _share(spec: ParallelSpec, load: Load) -> Load:
    """What a context-parallel rank has of a chunk."""
    if spec.cp == 1:
        return load
    targets, features = (math.ceil(each / spec.cp) for each in (load.targets, load.features))
    return Load(rows_per_rank(math.ceil(load.rows), spec.cp), targets, features, load.rows)


def _share_of(layout: Layout, stage: Stage, loads: Mapping[str, Load]) -> Load:
    return _share(layout.spec(stage.module), loads.get(stage.module, Load(0)))


def _messages(layout: Layout, shares: Sequence[tuple[Stage, Activations, Load]]) -> Iterator[float]:
    """The largest message that arrives at a rank, and the largest that leaves it, in bytes."""
    *encoders, last = layout.modules
    arriving, leaving = [0.0], [0.0]
    here = {(stage.module, stage.index) for stage, _, _ in shares}

    def apart(encoder: str) -> bool:
        """Whether what the encoder makes for this rank, or this rank's encoder for others, travels."""
        spec = layout.spec(encoder)
        return spec.dp != layout.spec(last).dp or not {(encoder, spec.stages - 1), (last, 0)} <= here

    for stage, what, load in shares:
        final = stage.index == layout.spec(stage.module).stages - 1
        if stage.index and (stage.module, stage.index - 1) not in here:
            arriving.append(what.edges[stage.start] * load.rows)
        if not stage.index and stage.module == last and any(map(apart, encoders)):
            arriving.append(what.feature * load.features)
        if not final and (stage.module, stage.index + 1) not in here:
            leaving.append(what.edges[stage.stop] * load.rows)
        if final and stage.module != last and apart(stage.module):
            leaving.append(what.edges[stage.stop] * load.rows)
    yield max(arriving)
    yield max(leaving)


def _largest_bucket(own: Sequence[_Own], most: int) -> int:
    """Bytes of the largest of the buckets in which these gradients travel, in their order, of one itemsize each.

    To owners of slices travel as many as the largest has, to each of them.
    """
    largest = 0
    for itemsize in {each.weight.itemsize for each in own}:
        size, travels = most, 0
        for each in (each for each in own if each.weight.itemsize == itemsize):
            if size + each.whole > most:
                size = travels = 0
            size += each.whole
            travels += each.part * each.sharers
            largest = max(largest, travels)
    return largest


# ---------------------------------------------------------------------- what travels of the state


def summed_bytes(layout: Layout, weights: Iterable[WeightSize], reduction: Reduction) -> int:
    """Bytes of the gradients that one rank brings to `reduction`, whole where they are sharded."""
    if reduction.tied >= 0:
        ends = (reduction.start, reduction.stop - 1)
        tied = (w for w in weights if w.module == reduction.module and w.trainable and len(w.layers) > 1)
        return sum(w.count(0) * w.itemsize for w in tied if (min(w.layers), max(w.layers)) == ends)
    mine = (w for w in weights if w.module == reduction.module)
    own = _owned(layout, reduction.ranks[0], reduction.module, mine, ())
    together = (e for e in _summed(own, reduction) if not uneven(layout, reduction.module, e.weight.layers))
    return sum(each.whole for each in together)


class SharedBytes(NamedTuple):
    """What one rank has of the weights of a shard, made whole. beside: of what lies beside the layers; layers: of each
    of them; trained: the same of what is trained."""

    beside: int
    layers: tuple[int, ...]
    trained_beside: int
    trained_layers: tuple[int, ...]

    @property
    def whole(self) -> int:
        """All of it."""
        return self.beside + sum(self.layers)


def shared_bytes(layout: Layout, weights: Iterable[WeightSize], shard: Shard) -> SharedBytes:
    """The weights that the owners of `shard` gather: all that can be shared, or with ZeRO-1 what of them is trained."""
    rank = shard.owners[0]
    mine = (w for w in weights if w.module == shard.module and w.sharable and (shard.full or w.trainable))
    own = [e for e in _owned(layout, rank, shard.module, mine, ()) if shard.start <= e.home < shard.stop]

    def of(some: Sequence[_Own]) -> tuple[int, tuple[int, ...]]:
        layers = [
            sum(e.whole for e in some if e.home == i and not e.weight.beside) for i in range(shard.start, shard.stop)
        ]
        return sum(e.whole for e in some if e.weight.beside), tuple(layers)

    return SharedBytes(*of(own), *of([e for e in own if e.weight.trainable]))


def trained_bytes(layout: Layout, weights: Sequence[WeightSize], rank: int, shards: Sequence[Shard]) -> int:
    """Bytes of the weights that the optimizer of `rank` updates: of what is sharded, its slices."""
    names = dict.fromkeys(stage.module for stage in layout.of_rank(rank))
    own = (e for n in names for e in _owned(layout, rank, n, (w for w in weights if w.module == n), shards))
    return sum(each.part for each in own if each.weight.trainable)
