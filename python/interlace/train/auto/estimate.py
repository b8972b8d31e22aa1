"""Quick estimate of a candidate's step time, in about 10 microseconds. It selects the candidates to simulate.

    T = the most loaded stage's work of a step + latency of one microbatch through the others (eq. 4.2 of the
        dissertation) + sums of gradients + gathers of weights + the optimizer + messages

All chunks of a module have one size (that of samples which share a row and its attention blocks). The work is
multiplied by the load imbalance over replicas in the tables of the real batches. Modules that share ranks run one after
the other, so their times add up. A candidate needs at least the memory of its weights and gradients, which rules some
out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from interlace.costs.step import Size
from interlace.estimate.sample_sizes import row_bytes_of
from interlace.layout import Layout, ParallelSpec
from interlace.model.naming import LANGUAGE_MODEL
from interlace.plan import partition, trainable_before
from interlace.run.tables.assign import Method, assigner_of
from interlace.run.tables.batch import GlobalBatch
from interlace.run.tables.dispatch import dispatcher_of
from interlace.run.tables.sizes import size_of
from interlace.run.tables.table import Lengths
from interlace.train.auto.candidates import Candidate
from interlace.train.auto.machine import Machine
from interlace.train.auto.work import Work
from interlace.train.config.sections import Config

if TYPE_CHECKING:
    from interlace.model import MultimodalModel

_SIZED = 64  # minimum number of samples for measuring how much a chunk's samples share


class Estimator:
    """Estimates for one model and batch. Raises ValueError for unmeasured degrees, or degrees that cannot be cut."""

    def __init__(self, config: Config, model: MultimodalModel, work: Work, machine: Machine) -> None:
        self.model, self.machine, self.chunks = model, machine, config.chunks()
        self.row_bytes = row_bytes_of(model, itemsize=4)
        """Module -> bytes of a hidden state."""
        # All methods but "tokens" assign samples to replicas in the same way. Their order within a replica has no
        # effect here.
        self._balance = config.train.balance
        self._assign: Method = "tokens" if config.train.assign == "tokens" else "stratified"
        self.work, self.totals = work, work.totals(model)
        self._uneven: dict[tuple[object, ...], dict[str, float]] = {}
        self.order = model.modules_order()
        self._layers: dict[tuple[object, ...], tuple[NDArray[np.float64], float]] = {}
        self._sizes: dict[tuple[str, int], Size] = {}

    @cached_property
    def trained_before(self) -> dict[str, bool]:
        """Module -> True if anything is trained before its first layer."""
        trained = {name: any(layer.trainable for layer in self.model.layers(name)) for name in self.order}
        return trainable_before(trained, self.model.edges())

    @cached_property
    def bytes_of(self) -> dict[str, tuple[int, int]]:
        """Module -> bytes of its weights, and of the trained ones; weights shared by modules count once."""
        sizes, seen = {}, set()
        for name in self.order:
            prefix = f"{name}." if name == LANGUAGE_MODEL else f"encoders.{name}."
            own = [p for key, p in self.model.named_parameters() if key.startswith(prefix) and id(p) not in seen]
            seen |= set(map(id, own))
            sizes[name] = sum(p.nbytes for p in own), sum(p.nbytes for p in own if p.requires_grad)
        return sizes

    def chunk_size(self, name: str, count: int) -> Size:
        """Mean size of a chunk, if a batch is cut into `count` chunks of a module.

        Attention computes whole blocks, including those shared by short samples, so the size is not the sum over
        samples.
        """
        if (name, count) not in self._sizes:
            samples = GlobalBatch.of(self.work.batches[0]).samples
            each = max(round(len(samples) / count), 1)
            some = samples[: max(_SIZED // each, 1) * each]
            chunks = [some[first : first + each] for first in range(0, len(some), each)]
            joined, alone = (
                np.sum([size_of(self.model, name, chunk) for chunk in cut], axis=0)
                for cut in (chunks, [[sample] for sample in some])
            )
            share = np.divide(joined, alone, out=np.ones(3), where=alone > 0)
            self._sizes[name, count] = Size(*(np.array(self.totals[name]) * share / count).tolist())
        return self._sizes[name, count]

    def least_bytes(self, candidate: Candidate) -> float:
        """Lower bound of the bytes of weights and gradients on the fullest rank."""
        held = [self._held(name, spec) * self._part(candidate, spec) for name, spec in candidate.specs]
        if candidate.ranks is not None or candidate.placement in ("shared", "replicated"):
            return sum(held)
        if candidate.placement == "colocated":
            return max(sum(held[:-1]), held[-1])
        return max(held)

    def _held(self, name: str, spec: ParallelSpec) -> float:
        return sum(self.bytes_of[name]) / (spec.dp * spec.cp if spec.shard == "full" else 1)

    @staticmethod
    def _part(candidate: Candidate, spec: ParallelSpec) -> float:
        """Fraction of a module on one rank."""
        return 1 / (candidate.ranks or spec.tp * spec.pp)

    def unevenness(self, candidate: Candidate, counts: Mapping[str, int]) -> dict[str, float]:
        """Module -> load imbalance: maximum rows of a replica over the mean, in the tables of the batches."""
        replicas = {name: spec.dp for name, spec in candidate.specs}
        key = (*replicas.items(), *counts.items())
        if key not in self._uneven:
            specs = {name: ParallelSpec(dp=dp) for name, dp in replicas.items()}
            layout = Layout.from_specs(self.model, specs, placement="parallel")
            *encoders, language = self.order
            chunks = {name: counts[name] for name in encoders}
            imbalance = dict.fromkeys(self.order, 0.0)
            assigner = assigner_of(self._assign, layout, self.model)
            dispatcher = dispatcher_of(self._balance, layout, self.model)
            for batch in self.work.batches:
                given = GlobalBatch.of(batch, counts[language] if not isinstance(batch[0], list) else None, chunks)
                lengths = Lengths.of(given.samples, encoders)
                rows = {**lengths.rows, language: lengths.tokens}
                loads = {name: np.zeros(dp) for name, dp in replicas.items()}
                for chunk in given.table(layout, assigner, dispatcher).chunks:
                    loads[chunk.module][chunk.replica] += rows[chunk.module][chunk.samples].sum()
                for name, each in loads.items():
                    imbalance[name] += float(each.max() / each.mean()) if each.any() else 1.0
            self._uneven[key] = {name: total / len(self.work.batches) for name, total in imbalance.items()}
        return self._uneven[key]

    def seconds(self, candidate: Candidate) -> float:
        """Estimated seconds of a step; inf if the model cannot be cut so (the simulation gives the reason)."""
        rounds = candidate.microbatches
        recompute = candidate.checkpointing == "full"
        default = 1 if candidate.placement == "shared" else rounds
        counts = {name: self.chunks.get(name, default) for name in self.order[:-1]} | {LANGUAGE_MODEL: rounds}
        own = self._chain if candidate.placement == "chain" else self._modules
        try:
            return own(candidate, counts, recompute) + sum(
                self._beside(candidate, name, spec) for name, spec in candidate.specs
            )
        except ValueError:
            return math.inf

    def _modules(self, candidate: Candidate, counts: dict[str, int], recompute: bool) -> float:
        stages, uneven = {}, self.unevenness(candidate, counts)  # seconds of one chunk on each stage
        for name, spec in candidate.specs:
            each = self._stages(candidate, name, spec, counts[name], recompute)
            stages[name] = [seconds * uneven[name] for seconds in each]
        if candidate.ranks == 1:
            return sum(counts[name] * sum(each) for name, each in stages.items())
        if candidate.placement == "shared":
            return sum((counts[name] - 1) * max(each) + sum(each) for name, each in stages.items())
        language = stages[LANGUAGE_MODEL]
        rounds, encoders = candidate.microbatches, self.order[:-1]
        ways = [counts[name] / rounds * sum(stages[name]) for name in encoders]
        if candidate.placement == "replicated":
            extra = sum(ways)
            return (rounds - 1) * (max(language) + extra) + sum(language) + extra * len(language)
        loads = [counts[name] / rounds * max(stages[name]) for name in encoders]
        merge = sum if candidate.placement == "colocated" else max
        way, load = (merge(ways), merge(loads)) if encoders else (0.0, 0.0)
        return (rounds - 1) * max(*language, load) + sum(language) + way + self._messages(candidate)

    def _chain(self, candidate: Candidate, counts: dict[str, int], recompute: bool) -> float:
        rounds, ranks = candidate.microbatches, candidate.ranks or 1
        chain, uneven = [], self.unevenness(candidate, counts)
        for name, spec in candidate.specs:
            each, beside = self._per_layer(candidate, name, spec, counts[name], recompute)
            each = each * uneven[name] * counts[name] / rounds
            each[0] += beside  # per stage of a module; the cut decides the number of stages
            chain.append(each)
        layers = np.concatenate(chain)
        if ranks > len(layers):
            raise ValueError(f"{ranks} ranges of {len(layers)} layers")
        ranges = np.add.reduceat(layers, partition(layers, ranks)[:-1])
        return (rounds - 1) * float(ranges.max()) + float(ranges.sum()) + self._messages(candidate)

    def _per_layer(
        self, candidate: Candidate, name: str, spec: ParallelSpec, chunks: int, recompute: bool
    ) -> tuple[NDArray[np.float64], float]:
        """Seconds of a chunk, forward and backward: float64 [layers], and the time of each stage outside its layers."""
        world, size = candidate.world, self.chunk_size(name, chunks * spec.dp)
        ranks = world if self.machine.kind == "cpu" else world > 8
        key = (name, spec.tp, spec.cp, size, recompute, ranks, candidate.threads)
        if key not in self._layers:
            link = self.machine.links(world).slowest(range(spec.lane_size))
            cost = self.machine.costs_of(world, candidate.threads)
            made = cost.of(name, size, spec.tp, spec.cp, link)
            layers = made.per_layer(trainable_before=self.trained_before[name], recompute=recompute)
            self._layers[key] = layers, sum(cost.beside(name, size, spec.tp, spec.cp, link))
        return self._layers[key]

    def _stages(self, candidate: Candidate, name: str, spec: ParallelSpec, chunks: int, recompute: bool) -> list[float]:
        """Seconds of one chunk on each stage of a module, forward and backward."""
        layers, beside = self._per_layer(candidate, name, spec, chunks, recompute)
        if spec.pp == 1:
            return [float(layers.sum()) + beside]
        if spec.pp > len(layers):
            raise ValueError(f"{name} has {len(layers)} layers, too few for pp = {spec.pp}")
        seconds: list[float] = (np.add.reduceat(layers, partition(layers, spec.pp)[:-1]) + beside).tolist()
        return seconds

    def _messages(self, candidate: Candidate) -> float:
        """Seconds of one microbatch's messages in transit, and of handling all messages."""
        *encoders, language = (spec.pp for _, spec in candidate.specs)
        hops = (candidate.ranks or language + max(encoders, default=0)) - 1
        links = self.machine.links(candidate.world)
        link = links.slowest(range(candidate.world)).message
        return 2 * hops * (link.latency + candidate.microbatches * 2 * links.overhead)

    def _beside(self, candidate: Candidate, name: str, spec: ParallelSpec) -> float:
        """Seconds of sums, gathers and the optimizer for one module."""
        part, world = self._part(candidate, spec), candidate.world
        weights, trained = (each * part for each in self.bytes_of[name])
        sharers, links = spec.dp * spec.cp, self.machine.links(world)
        update = self.machine.costs_of(world, candidate.threads).optimizer.per_byte * trained
        if sharers == 1:
            return update
        ranks = range(min(world, sharers * spec.tp))
        seconds = links.all_reduce(trained, ranks) if trained else 0.0
        if spec.shard == "none":
            return seconds + update
        gathers = links.all_gather(weights, ranks) if spec.shard == "full" else 0.0
        return seconds + gathers + update / sharers
