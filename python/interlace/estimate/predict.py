"""Predicted time of a step: simulates the lists of a schedule with the costs of all their actions.

Included: every forward and backward of every chunk of every replica, by the chunk's own size; collation; traffic
between the ranks of a lane inside a layer; messages, by their bytes and their link; sums of gradients (flat, sharded,
of tied weights; in three parts if a group spans hosts); weights gathered once per step or layer by layer; the exchange
of the next step's items, if given; the optimizer. Work outside the lists is included if measured (`HostOverhead`): the
trainer's own work, the all-gather of loss and norm, and the thread that reads data ahead. This thread delays the rank's
first actions by its own time, as it does on CPUs, where ranks use all cores. Not included: waiting for data that arrive
later than that.

Layer by layer, the gather of a layer overlaps with the computation of the previous one, and the sum of a layer with the
backward of the next, as in `interlace.run.execute.layers`. Only the part that exceeds the computation counts. The
replicas of such a stage run in lock step, which the simulation models: they wait for the replica whose inputs come
last, and all take as long as the slowest of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from interlace.costs.fitted import FREE
from interlace.costs.links import Link, Links
from interlace.costs.step import Costs, Size, sizes_at_once
from interlace.estimate.traced import activations_of, weights_of
from interlace.estimate.travel import message_seconds
from interlace.layout import Layout, Reduction, Shard
from interlace.model.naming import LANGUAGE_MODEL
from interlace.plan import ModuleCosts, trainable_before
from interlace.plan.memory import WeightSize, shards_by_rank, shared_bytes, summed_bytes, trained_bytes
from interlace.schedule import Action, Op, Schedule, StageGraph, StepTable
from interlace.schedule.actions import CHUNK, CODES, COMPUTE, MODULE, OP, OPS, OTHER, STAGE
from interlace.schedule.costs import Durations, seconds_of
from interlace.simulate import Simulated, Timeline, simulate_arrays

if TYPE_CHECKING:
    from interlace.model import MultimodalModel

Floats = NDArray[np.float64]
NORM_BYTES = 32
"""Bytes that each rank sends to the others at the end of a step: loss, squares of gradients, note, random-draw flag."""


@dataclass(frozen=True)
class Traffic:
    """Sizes of messages and weights.

    row_bytes: module -> [layers + 1], bytes of a row that enters each layer, and of one that leaves the last.
    feature_bytes: of a row of features that the language model reads. weights: of the model, as the lanes of the layout
    hold them (`interlace.estimate.traced.weights_of`). rows_of: encoder -> number of rows that one row of the table's
    edges represents, for a table of identical samples (`interlace.run.tables.table.nominal_table`).
    """

    row_bytes: Mapping[str, Sequence[float]]
    feature_bytes: float
    weights: Sequence[WeightSize]
    rows_of: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        mllm: MultimodalModel,
        layout: Layout,
        *,
        sequence_parallel: bool = True,
        autocast: torch.dtype | None = None,
    ) -> Traffic:
        """The traffic of a model under a layout; options as in `parallelize`. Runs the model on shapes alone, which
        takes about a second: for many layouts of one model use `dataclasses.replace` with other weights.

        Raises ValueError for a module that its tp cannot cut.
        """
        kept = activations_of(mllm, layout, sequence_parallel=sequence_parallel, autocast=autocast)
        row_bytes = {name: each.edges for name, each in kept.items()}
        weights = weights_of(mllm, layout, sequence_parallel=sequence_parallel)
        return cls(row_bytes, kept[LANGUAGE_MODEL].feature, weights)


def predict(
    schedule: Schedule,
    costs: Costs,
    sizes: Sequence[Size],
    links: Links,
    traffic: Traffic,
    *,
    recompute: bool = False,
    items: NDArray[np.float64] | None = None,
    optimizer: bool = True,
    seconds: Durations | None = None,
) -> Timeline:
    """Start and finish of each action of a step, in seconds. The optimizer's step of each rank comes last and includes
    the trainer's own work for a step.

    schedule: valid (see `check`), with its layout and table. costs: of layers. sizes: of each chunk of the table (see
    `chunk_sizes`). recompute: whether layers with a backward run their forward twice (checkpointing "full"). optimizer:
    False omits its step, which is in no list. items: bytes that the DISPATCH of a step of streams moves between ranks
    (see `dispatch_seconds`). seconds: of compute actions; replaces those computed from costs and sizes (see
    `duration_array`).

    Raises ValueError if there is not one size per chunk of the table, and for a module without costs.
    """
    outcome = predict_arrays(schedule, costs, sizes, links, traffic, recompute=recompute, items=items, seconds=seconds)
    cuts = schedule.first[1:-1]
    lists = [list(actions) for actions in schedule.actions]
    start, finish = ([part.tolist() for part in np.split(times, cuts)] for times in (outcome.start, outcome.finish))
    if optimizer and schedule.backward:
        norm_seconds, optimizer_times = _after_last_action(schedule, costs, links, traffic)
        end = outcome.makespan + norm_seconds  # all ranks wait for the norm of all gradients
        for rank, seconds_behind in enumerate(optimizer_times):
            if seconds_behind > 0:
                stage = schedule.graph.layout.of_rank(rank)[0]
                lists[rank].append(Action(Op.OPTIMIZER_STEP, stage.module, stage.index))
                start[rank].append(end)
                finish[rank].append(end + seconds_behind)
    return Timeline(lists, start, finish, schedule.name, schedule.table)


def predict_arrays(
    schedule: Schedule,
    costs: Costs,
    sizes: Sequence[Size],
    links: Links,
    traffic: Traffic,
    *,
    recompute: bool = False,
    items: NDArray[np.float64] | None = None,
    optimizer: bool = False,
    seconds: Durations | None = None,
) -> Simulated:
    """Like `predict`, for searches and for large steps: returns arrays as `simulate_arrays`, not an object per action.

    optimizer: whether the makespan includes the optimizer's step of the slowest rank, which is in no list.
    """
    rows = schedule.rows
    step = _Step(schedule, costs, sizes, links, traffic, recompute)
    action_seconds, transfer = np.zeros(len(rows)), np.zeros(len(rows))
    op = rows[:, OP]
    action_seconds[np.isin(op, [CODES[Op.SEND], CODES[Op.RECV]])] = links.overhead
    for kind, cost in ((Op.REDUCE_GRAD, step.sums), (Op.UNSHARD, step.gathers)):
        at = np.flatnonzero(op == CODES[kind])
        action_seconds[at] = np.asarray(cost)[rows[at, OTHER]] if len(at) else 0.0
    if items is not None:
        at = np.flatnonzero(op == CODES[Op.DISPATCH])
        ranks = np.searchsorted(schedule.first, at, side="right") - 1
        action_seconds[at] = np.asarray(dispatch_seconds(items, links))[ranks]
    compute = np.flatnonzero(np.isin(op, [CODES[each] for each in COMPUTE]))
    each = step.durations if seconds is None else seconds
    action_seconds[compute] = seconds_of(each, rows[compute][:, [OP, MODULE, STAGE, CHUNK]], schedule.graph.modules)
    transfer[op == CODES[Op.SEND]] = step.messages
    if costs.host_overhead.read or costs.host_overhead.decode:
        _add_reading(schedule, action_seconds, reading_seconds(schedule.graph.layout, schedule.table, costs))
    outcome = simulate_arrays(schedule, action_seconds, transfer=transfer)
    if optimizer and schedule.backward:
        norm_seconds, optimizer_times = _after_last_action(schedule, costs, links, traffic)
        outcome = replace(outcome, behind=norm_seconds + max(optimizer_times))
    return outcome


_AT_ONCE = 4096  # chunks whose layers are computed at a time: arrays of some MB
_COMPUTE = (Op.FORWARD, Op.BACKWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT)


def duration_array(
    graph: StageGraph, table: StepTable, costs: Costs, sizes: Sequence[Size], links: Links, *, recompute: bool = False
) -> Floats:
    """Seconds of FORWARD, BACKWARD, BACKWARD_INPUT and BACKWARD_WEIGHT of every chunk on every stage, float64 [ops,
    stages, chunks], nan for missing combinations; for generators and the simulator. Arguments and errors as in
    `predict`.

    The two halves of a backward add up to it; recomputation counts to the input half. Time of a stage outside its
    layers counts to its forward, and to its backward or the input half of it.
    """
    if len(sizes) != len(table.chunks):
        raise ValueError(f"{len(sizes)} sizes for {len(table.chunks)} chunks: give one per chunk")
    layout, trained_before = graph.layout, _trained_before(graph)
    stages = max((len(p.stages) for name in layout.modules for p in layout.pipelines(name)), default=0)
    array = np.full((len(OPS), stages, len(table.chunks)), np.nan)
    columns = np.asarray(sizes, np.float64).reshape(len(table.chunks), -1)
    module_of = np.array([chunk.module for chunk in table.chunks])
    replica_of = np.array([chunk.replica for chunk in table.chunks], np.int64)
    joined = {lane: links.slowest(lane.ranks) for lane in layout.lanes()}
    for module in layout.modules:
        spec, alike = layout.spec(module), dict[Link, dict[tuple[int, int, int], list[int]]]()
        for pipeline in layout.pipelines(module):  # group replicas with the same layers in a stage on the same links
            for stage in pipeline.stages:
                cuts = alike.setdefault(joined[stage.lane], {})
                cuts.setdefault((stage.index, stage.start, stage.stop), []).append(pipeline.replica)
        own = np.flatnonzero(module_of == module)
        for link, cuts in alike.items():
            for places in np.split(own, range(_AT_ONCE, len(own), _AT_ONCE)):
                if not len(places):
                    continue
                size = sizes_at_once(columns[places])
                layers = _Layers.of(costs.of(module, size, spec.tp, spec.cp, link), trained_before[module], recompute)
                ahead, behind = costs.beside(module, size, spec.tp, spec.cp, link)
                for (index, start, stop), replicas in cuts.items():
                    there = np.isin(replica_of[places], replicas)
                    forward, backward, weight = (part.sum(axis=0) for part in layers.between(start, stop))
                    backward = np.where(backward > 0, backward + behind, 0.0)
                    times = (
                        forward + ahead, backward, np.maximum(backward - weight, 0.0), np.minimum(weight, backward)
                    )  # fmt: skip
                    for op, seconds in zip(_COMPUTE, times, strict=True):
                        array[CODES[op], index, places[there]] = seconds[there]
    return array


def samples_of(table: StepTable) -> int:
    """Samples of the global batch."""
    return sum(len(chunk.samples) for chunk in table.chunks if chunk.module == LANGUAGE_MODEL)


def reading_seconds(layout: Layout, table: StepTable, costs: Costs) -> list[float]:
    """Per rank, seconds of the thread that reads a step's data ahead: all samples, and the items of chunks whose first
    stage the rank has (see `interlace.run.tables.batch.read_media`)."""
    counts: dict[tuple[str, int], int] = {}
    for chunk in table.chunks:
        counts[chunk.module, chunk.replica] = counts.get((chunk.module, chunk.replica), 0) + len(chunk.samples)
    totals, count = [], samples_of(table)
    for rank in range(layout.world):
        encoded = {}
        for stage in layout.of_rank(rank):
            replica = layout.replica(rank, stage.module)
            if stage.index == 0 and replica is not None:
                encoded[stage.module] = counts.get((stage.module, replica), 0)
        totals.append(costs.host_overhead.read_seconds(count, encoded))
    return totals


def _add_reading(schedule: Schedule, action_seconds: NDArray[np.float64], seconds: Sequence[float]) -> None:
    """Lengthen the first compute actions of each rank by the `seconds` of a thread that uses half of the core until it
    is done; the remainder is added to the last action."""
    compute = np.isin(schedule.rows[:, OP], [CODES[each] for each in COMPUTE])
    for rank, left in enumerate(seconds):
        first = schedule.first[rank]
        at = first + np.flatnonzero(compute[first : schedule.first[rank + 1]])
        if len(at) and left > 0:
            before = np.concatenate([[0.0], np.cumsum(action_seconds[at])])
            more = np.diff(np.minimum(before, left))
            more[-1] += max(left - before[-1], 0.0)
            action_seconds[at] += more


def _after_last_action(schedule: Schedule, costs: Costs, links: Links, traffic: Traffic) -> tuple[float, list[float]]:
    """Time after the lists: seconds in which all ranks exchange loss and norm, then each rank's own seconds of its
    optimizer and of the trainer's own work for a step."""
    layout = schedule.graph.layout
    aside = costs.host_overhead.step_seconds(samples_of(schedule.table))
    norm_seconds = (
        links.all_gather(NORM_BYTES * layout.world, range(layout.world)) if aside > 0 and layout.world > 1 else 0.0
    )
    return norm_seconds, [update + aside for update in optimizer_seconds(layout, costs, traffic)]


def dispatch_seconds(items: NDArray[np.float64], links: Links) -> list[float]:
    """Per rank, seconds of the exchange of a step's items. items: [ranks, ranks], bytes from each rank to each other.

    A rank sends to one rank after the other, and receives in the same way at the same time; the longer time counts.
    """
    out, into = [0.0] * len(items), [0.0] * len(items)
    for a, b in np.argwhere(items).tolist():  # sparse: few pairs of ranks exchange items
        seconds = links.message(float(items[a, b]), a, b)
        out[a] += seconds
        into[b] += seconds
    return list(map(max, out, into))


def optimizer_seconds(layout: Layout, costs: Costs, traffic: Traffic) -> list[float]:
    """Per rank, seconds of the optimizer's step."""
    if costs.optimizer == FREE:
        return [0.0] * layout.world
    shards = shards_by_rank(layout)
    return [
        costs.optimizer.transfer(trained_bytes(layout, traffic.weights, rank, shards[rank]))
        for rank in range(layout.world)
    ]


def _trained_before(graph: StageGraph) -> dict[str, bool]:
    return trainable_before({name: any(graph.trainable[name]) for name in graph.modules}, graph.links)


class _Layers(NamedTuple):
    """Seconds of a module's layers for one chunk, [layers] each, or for n chunks, [layers, n]. weight: the part of the
    backward for weight gradients."""

    forward: Floats
    backward: Floats
    weight: Floats

    @classmethod
    def of(cls, cost: ModuleCosts, before: bool, recompute: bool) -> _Layers:
        forward = cost.summed(cost.times.forward)
        both = cost.per_layer(trainable_before=before, recompute=recompute)
        trained = (cost.times.weight_grad.T * cost.trainable).T
        return cls(forward, np.maximum(both - forward, 0.0), cost.summed(trained))

    def between(self, start: int, stop: int) -> _Layers:
        """The layers of a stage."""
        return _Layers(*(part[start:stop] for part in self))


def layered_forward(forward: Sequence[float] | NDArray[np.float64], gathers: Sequence[float]) -> float:
    """Seconds of a forward whose weights are gathered layer by layer: see `interlace.run.execute.layers`.

    forward: [n], of each layer. gathers: [n + 1], of the weights beside the layers, then of each layer. Gathers run one
    after the other on one link; the gather of the next layer overlaps with the computation of a layer.
    """
    ends = [gathers[0], gathers[0] + sum(gathers[1:2])]
    now = ends[0]
    for layer, seconds in enumerate(forward, 1):
        if layer < len(forward):
            ends.append(max(now, ends[-1]) + gathers[layer + 1])
        now = max(now, ends[layer]) + seconds
    return float(now)


def layered_backward(
    backward: Sequence[float] | NDArray[np.float64],
    gathers: Sequence[float],
    scatters: Sequence[float],
    lowest: int = 1,
) -> float:
    """Seconds of such a backward, including the last sum of gradients. backward: [n], of each layer. gathers: as in
    `layered_forward`. scatters: [n + 1], of each sum of gradients.

    lowest: the first layer, counted from 1, that the backward reaches. A sum starts after its layer and is awaited when
    the next sum starts.
    """
    free = gathers[0]  # time at which the link is free
    ready: dict[int, float] = {}
    if len(backward) >= lowest:
        free += gathers[len(backward)]
        ready[len(backward)] = free
    now, summed = gathers[0], 0.0
    for layer in range(len(backward), lowest - 1, -1):
        if layer > lowest:
            ready[layer - 1] = free = max(now, free) + gathers[layer - 1]
        if layer < len(backward):  # sum of the previous layer
            now = max(now, summed)
            summed = free = max(now, free) + scatters[layer + 1]
        now = max(now, ready[layer]) + float(backward[layer - 1])
    for unit in (lowest, 0) if len(backward) >= lowest else (0,):
        now = max(now, summed)
        summed = free = max(now, free) + scatters[unit]
    return float(max(now, summed))


class _Step:
    """Costs of the rows of one schedule."""

    def __init__(
        self, schedule: Schedule, costs: Costs, sizes: Sequence[Size], links: Links, traffic: Traffic, recompute: bool
    ) -> None:
        self.graph, self.table, self.schedule = schedule.graph, schedule.table, schedule
        self.layout = self.graph.layout
        self.costs, self.sizes, self.links, self.traffic, self.recompute = costs, sizes, links, traffic, recompute

    # -- computing ---------------------------------------------------------------------------------------------

    @cached_property
    def durations(self) -> Floats:
        """Durations of the chunks, including the waits of stages that gather their weights layer by layer."""
        array = duration_array(self.graph, self.table, self.costs, self.sizes, self.links, recompute=self.recompute)
        for (module, stage), shards in self._layered.items():
            for shard in shards:
                self._gather_layers(array, module, stage, shard)
        return array

    @cached_property
    def _layered(self) -> dict[tuple[str, int], list[Shard]]:
        """(module, stage) -> the shards that it gathers layer by layer in this step."""
        rows, shards_of = self.schedule.rows, dict[tuple[str, int], list[Shard]]()
        gathers = rows[rows[:, OP] == CODES[Op.UNSHARD_LAYERS]][:, [MODULE, STAGE, OTHER]]
        for module, stage, number in np.unique(gathers, axis=0).tolist():
            shards_of.setdefault((self.graph.modules[module], stage), []).append(self.graph.shards[number])
        return shards_of

    def _gather_layers(self, array: Floats, module: str, index: int, shard: Shard) -> None:
        """Add the waits for weights to the durations of a stage's chunks, on each of the replicas that share the
        weights. (The simulator models their lock step, in which the slowest counts.)"""
        held = shared_bytes(self.layout, self.traffic.weights, shard)
        gathers = [self.links.all_gather(size, shard.ranks) for size in (held.beside, *held.layers)]
        scatters = [
            self.links.reduce_scatter(size, shard.ranks) for size in (held.trained_beside, *held.trained_layers)
        ]
        spec, owners = self.layout.spec(module), set(shard.owners)
        replicas = {p.replica for p in self.layout.pipelines(module) if owners & set(p.stages[index].lane.ranks)}
        before = _trained_before(self.graph)[module]
        trained = [layer for layer, flag in enumerate(self.graph.trainable[module]) if flag]
        first = shard.start if before else min(trained, default=shard.stop)  # as `interlace.run.execute.ranks` has it
        lowest = min(max(first, shard.start), shard.stop) - shard.start + 1
        for number, chunk in enumerate(self.table.chunks):
            if chunk.module != module or chunk.replica not in replicas:
                continue
            lane = self.layout.pipelines(module)[chunk.replica].stages[index].lane
            link = self.links.slowest(lane.ranks)
            cost = self.costs.of(module, self.sizes[number], spec.tp, spec.cp, link)
            layers = _Layers.of(cost, before, self.recompute).between(shard.start, shard.stop)
            there, back = self.costs.beside(module, self.sizes[number], spec.tp, spec.cp, link)
            halves = layered_backward(layers.backward - layers.weight, gathers, scatters, lowest)
            times = {
                Op.FORWARD: there + layered_forward(layers.forward, gathers),
                Op.BACKWARD: back + layered_backward(layers.backward, gathers, scatters, lowest),
                Op.BACKWARD_INPUT: back + halves,
            }
            for op, seconds in times.items():
                array[CODES[op], index, number] = seconds

    # -- messages ----------------------------------------------------------------------------------------------

    @cached_property
    def messages(self) -> NDArray[np.float64]:
        """Transfer seconds of the message of each SEND, in the order of the rows."""
        rows = [size.rows for size in self.sizes]
        stands_for, each = self.traffic.rows_of, self.traffic.feature_bytes
        read = [each * stands_for.get(chunk.module, 1.0) for chunk in self.table.chunks]
        return message_seconds(self.schedule, rows, self.links, self.traffic.row_bytes, read)

    # -- sums and gathers --------------------------------------------------------------------------------------

    @cached_property
    def sums(self) -> list[float]:
        """Seconds of each reduction of the graph."""
        return [self._sum(reduction) for reduction in self.graph.reductions]

    def _sum(self, reduction: Reduction) -> float:
        size = summed_bytes(self.layout, self.traffic.weights, reduction)
        shard = next((s for s in self.layout.shard_groups() if self._sums_into(s, reduction)), None)
        if shard is None:
            return self.links.all_reduce(size, reduction.ranks)
        sets = shard.replicas(shard.owners[0])
        between = self.links.all_reduce(size / len(shard.owners), sets) if len(sets) > 1 else 0.0
        return self.links.reduce_scatter(size, shard.ranks) + between

    @staticmethod
    def _sums_into(shard: Shard, reduction: Reduction) -> bool:
        """Whether the sums of a reduction go to the owners of `shard`."""
        plain = reduction.tied < 0 and not reduction.in_part
        same = (shard.module, shard.start) == (reduction.module, reduction.start)
        return plain and same and set(shard.owners) <= set(reduction.ranks)

    @cached_property
    def gathers(self) -> list[float]:
        """Seconds to gather each shard of the graph as a whole."""
        weights = self.traffic.weights
        return [
            self.links.all_gather(shared_bytes(self.layout, weights, shard).whole, shard.ranks)
            for shard in self.graph.shards
        ]
