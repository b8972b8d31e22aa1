"""How many bytes each rank of a layout holds: weights, gradients, optimizer state, activations, and the peak.

What a model weighs and what its forwards keep for their backwards is measured elsewhere (`interlace.run.traced`); here
it is shared out over the ranks of a layout, under any degrees and any sharding of state (ZeRO, arXiv 1910.02054).

    shard        weights               gradients             optimizer state
    "none"       whole                 whole                 whole
    "optimizer"  whole                 whole                 1 / n
    "full"       1 / n, and gathered   1 / n, and unreduced  1 / n

"Whole" is what tensor parallelism leaves of it on a rank, n the ranks that share state. With "full", what is gathered
is one layer at a time, or all of a rank's layers once per step; both are given.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from interlace.layout import Layout, ParallelSpec, Stage

MOMENTS = 2  # of AdamW, each of the weight's shape and dtype
STEP_BYTES = 4  # of AdamW's count of steps, a float32 for each weight


@dataclass(frozen=True)
class Weight:
    """A parameter of a model, as a rank holds it.

    layers: those of `module` that use it; several where it is tied. count: its elements. held: those on a rank of a
    lane that has one of the layers, fewer than `count` where tensor parallelism cuts it. itemsize: bytes of an element.
    """

    name: str
    module: str
    layers: tuple[int, ...]
    count: int
    held: int
    itemsize: int
    trainable: bool

    @property
    def nbytes(self) -> int:
        """Bytes of what a rank holds of it."""
        return self.held * self.itemsize


class Load(NamedTuple):
    """What passes through a chunk: rows in the layers of its module, rows with a target, rows of others' features.

    Of all context-parallel ranks together.
    """

    rows: float
    targets: float = 0.0
    features: float = 0.0


class Kept(NamedTuple):
    """Bytes that are alive from a chunk's forward to its backward, where a stage has one of `layers`.

    edge: also where a stage begins or ends before layer `edge` (-1: nowhere), since it keeps what it was given and what
    it hands on. fixed: per chunk; per_row and per_target: for each row, and for each with a target.
    """

    layers: tuple[int, ...]
    edge: int
    fixed: float
    per_row: float
    per_target: float


@dataclass(frozen=True)
class Activations:
    """What the forwards of one module keep, on one rank of a lane.

    kept: see Kept. edges: [layers + 1], bytes per row of what enters each layer, and of what leaves the last. backward:
    [layers], whether a stage that ends with that layer has a backward; it keeps nothing otherwise. feature: bytes per
    row of features that its first stage is given. inner: [layers], bytes per row that recomputing a layer makes anew
    while its backward runs (empty where nothing is recomputed). words: of the logits on a rank, 0 without.
    logits_bytes: above it logits are made in parts (see `interlace.model.loss`).
    """

    kept: tuple[Kept, ...]
    edges: tuple[float, ...]
    backward: tuple[bool, ...]
    feature: float = 0.0
    inner: tuple[float, ...] = ()
    words: int = 0
    logits_bytes: float = math.inf

    def of_stage(self, start: int, stop: int, load: Load) -> float:
        """Bytes that the stage of layers [start, stop) keeps of a chunk."""
        if not self.backward[stop - 1]:
            return 0.0
        ends, last = (start, stop), stop == len(self.backward)
        total = load.features * self.feature if start == 0 else 0.0
        for kept in self.kept:
            if kept.edge in ends or any(start <= layer < stop for layer in kept.layers):
                total += kept.fixed + kept.per_row * load.rows + kept.per_target * load.targets
        if last and self._in_parts(load):  # the logits' exponentials are not kept then, but their norm for each row
            total -= load.targets * 4 * (self.words - 1)
        return total

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
        return bool(self.words) and load.targets > max(1, self.logits_bytes // (4 * self.words))


@dataclass(frozen=True)
class RankMemory:
    """Bytes on one rank. parameters: elements that it holds, whole weights counted whole.

    in_flight: the most chunks whose activations wait for a backward at once, and activations what they keep. messages:
    the largest that arrives and the largest that leaves. sums: the largest bucket of gradients that travels while the
    gradients are there still. workspace: what one backward makes and drops. weights_once, gradients_once: with what is
    sharded "full" gathered once per step, not layer by layer; equal to weights and gradients where nothing is.
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

    @property
    def peak(self) -> int:
        """All of it at once, of which sums and workspace come one after the other: an upper bound, layer by layer."""
        return self.weights + self.gradients + self._rest

    @property
    def peak_once(self) -> int:
        """The same where what is sharded "full" is gathered once per step."""
        return self.weights_once + self.gradients_once + self._rest

    @property
    def _rest(self) -> int:
        return self.optimizer + self.activations + self.messages + max(self.sums, self.workspace)


def sharers(module: str, spec: ParallelSpec) -> int:
    """The ranks that share the state of what they all hold. Raises ValueError where dp makes no such groups."""
    if spec.shard == "none":
        return 1
    count = spec.dp if spec.shard_ranks is None else spec.shard_ranks
    if count < 1 or spec.dp % count:
        raise ValueError(
            f"{module} has shard_ranks = {count}, which does not divide its dp = {spec.dp}: groups of so many of its "
            f"replicas share state; use {', '.join(str(n) for n in range(1, spec.dp + 1) if spec.dp % n == 0)}"
        )
    return count


def activation_bytes(
    layout: Layout, activations: Mapping[str, Activations], chunks: Sequence[Any], loads: Mapping[Any, Load]
) -> dict[tuple[str, int, int], float]:
    """(module, stage, chunk) -> bytes kept on each rank of the lane, as `interlace.schedule.memory.peak` takes them.

    chunks: `StepTable.chunks`. loads: of a chunk by its place there, else by its module.
    """
    found = {}
    for place, chunk in enumerate(chunks):
        load = _share(layout.spec(chunk.module), loads.get(place, loads.get(chunk.module, Load(0))))
        for stage in layout.pipelines(chunk.module)[chunk.replica].stages:
            kept = activations[chunk.module].of_stage(stage.start, stage.stop, load)
            found[chunk.module, stage.index, place] = kept
    return found


def rank_memory(
    layout: Layout,
    weights: Iterable[Weight],
    activations: Mapping[str, Activations],
    loads: Mapping[str, Load],
    held: Sequence[tuple[int, float]],
    *,
    bucket_bytes: int,
) -> tuple[RankMemory, ...]:
    """What every rank of `layout` holds.

    weights: of the model, as ranks of its lanes hold them. loads: module -> its largest chunk. held: per rank, the most
    chunks in flight and bytes kept (`interlace.schedule.memory.peak`). bucket_bytes: of gradients that are summed
    together.

    Raises ValueError for shard_ranks that do not divide dp.
    """
    counts = {name: sharers(name, spec) for name, (spec, _) in layout.modules.items()}
    by_module: dict[str, list[Weight]] = {name: [] for name in layout.modules}
    for weight in weights:
        by_module[weight.module].append(weight)
    reductions: dict[int, list[tuple[str, int, int]]] = {}
    for group in layout.reduce_groups():
        for rank in group.ranks:
            reductions.setdefault(rank, []).append((group.module, group.start, group.stop))
    found = []
    for rank, (in_flight, kept) in enumerate(held):
        stages = layout.of_rank(rank)
        total = _State(0, 0, 0, 0, 0, 0)
        for name in dict.fromkeys(stage.module for stage in stages):
            layers = {i for stage in stages if stage.module == name for i in range(stage.start, stage.stop)}
            own = [weight for weight in by_module[name] if layers.intersection(weight.layers)]
            more = _state(own, layers, layout.spec(name).shard, counts[name])
            total = _State(*(a + b for a, b in zip(total, more, strict=True)))
        shares = [(stage, activations[stage.module], _share_of(layout, stage, loads)) for stage in stages]
        buckets = (
            _largest_bucket([w for w in by_module[name] if w.trainable and start <= w.layers[0] < stop], bucket_bytes)
            for name, start, stop in reductions.get(rank, ())
        )
        found.append(
            RankMemory(
                rank=rank,
                parameters=total.parameters,
                weights=total.weights,
                gradients=total.gradients,
                optimizer=total.optimizer,
                activations=math.ceil(kept),
                in_flight=in_flight,
                messages=math.ceil(sum(_messages(layout, shares))),
                sums=max(buckets, default=0),
                workspace=math.ceil(max(what.workspace(stage.start, stage.stop, load) for stage, what, load in shares)),
                weights_once=total.weights_once,
                gradients_once=total.gradients_once,
            )
        )
    return tuple(found)


class _State(NamedTuple):
    parameters: int
    weights: int
    gradients: int
    optimizer: int
    weights_once: int
    gradients_once: int


def _state(own: Sequence[Weight], layers: Iterable[int], shard: str, sharers: int) -> _State:
    trained = [weight for weight in own if weight.trainable]
    count = sum(weight.held for weight in own)
    optimizer = sum(
        MOMENTS * (weight.nbytes if shard == "none" else _part(weight, sharers)) + STEP_BYTES for weight in trained
    )
    whole, gradients = (sum(weight.nbytes for weight in some) for some in (own, trained))
    if shard != "full" or sharers == 1:
        return _State(count, whole, gradients, optimizer, whole, gradients)
    parts, gradient_parts = (sum(_part(weight, sharers) for weight in some) for some in (own, trained))
    gathered, unreduced = (
        max((sum(weight.nbytes for weight in some if layer in weight.layers) for layer in layers), default=0)
        for some in (own, trained)
    )
    return _State(count, parts + gathered, gradient_parts + unreduced, optimizer, parts + whole, gradients)


def _part(weight: Weight, sharers: int) -> int:
    """Bytes of a weight's part, of equal ones."""
    return -(-weight.held // sharers) * weight.itemsize


def _share(spec: ParallelSpec, load: Load) -> Load:
    """What a context-parallel rank has of a chunk."""
    return load if spec.cp == 1 else Load(*(math.ceil(value / spec.cp) for value in load))


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
        return spec.dp != layout.spec(last).dp or not {(encoder, spec.pp - 1), (last, 0)} <= here

    for stage, what, load in shares:
        final = stage.index == layout.spec(stage.module).pp - 1
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


def _largest_bucket(weights: Sequence[Weight], most: int) -> int:
    """Bytes of the largest of the buckets that hold these gradients, in their order, of one itemsize each."""
    largest = 0
    for itemsize in {weight.itemsize for weight in weights}:
        size = 0
        for weight in (w for w in weights if w.itemsize == itemsize):
            size = weight.nbytes if size + weight.nbytes > most else size + weight.nbytes
            largest = max(largest, size)
    return largest
