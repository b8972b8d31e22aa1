"""Candidates for many ranks: a list of regular ones, and the results of the two searches of `plan/`.

- `listed` with powers of two and equal encoders: shared, replicated, chain, colocated
- `search_configuration` (Entrain's algorithm 3 with Cornstarch's algorithm 1) once for each number of replicas
- `orchestrate` (DistTrain 5.1, unequal numbers of replicas) once for each largest tp

Only the layouts of the long list with the smallest estimates are kept. Schedules and ways to cut a step are then
enumerated for these.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from interlace.costs.links import Link
from interlace.costs.step import Size
from interlace.layout import ParallelSpec
from interlace.model.naming import LANGUAGE_MODEL
from interlace.plan import ModuleWork, SearchModule, orchestrate, search_configuration
from interlace.train.auto.candidates import Candidate, Openings, Placed, divisors, layouts, listed
from interlace.train.auto.estimate import Estimator

_KEPT = 200  # maximum layouts of the long list
_LANES = (1, 2, 4, 8)


@dataclass(frozen=True)
class _Search:
    """Search for layouts of `world` ranks with one schedule."""

    modules: Sequence[str]
    estimator: Estimator
    world: int
    openings: Openings
    schedule: str

    @property
    def memory(self) -> float:
        """Bytes that each rank may fill."""
        return self.estimator.machine.memory(self.world)

    @property
    def link(self) -> Link:
        """The slowest link among all ranks."""
        return self.estimator.machine.links(self.world).slowest(range(self.world))

    def size(self, name: str, samples: float) -> Size:
        """Size of a chunk of a module with this many samples."""
        return Size(*(value * samples / self.openings.batch_size for value in self.estimator.totals[name]))

    def per_layer(self, name: str, size: Size, tp: int, cp: int) -> tuple[NDArray[Any], NDArray[Any]]:
        """float64 [layers] each: forward and backward of a chunk of `size`."""
        machine = self.estimator.machine
        link = machine.links(self.world).slowest(range(tp * cp))
        made = machine.costs_of(self.world).of(name, size, tp, cp, link)
        forward = np.bincount(made.layer, weights=made.times.forward, minlength=made.num_layers)
        both = made.per_layer(trainable_before=self.estimator.trained_before[name])
        return forward, np.maximum(both - forward, 0.0)

    def candidates(
        self, specs: Mapping[str, ParallelSpec], placement: str, count: int, checkpointings: Sequence[str]
    ) -> Iterator[Candidate]:
        """Candidates with the degrees `specs` and `count` microbatches, if they take all ranks."""
        named = tuple((name, specs[name]) for name in self.modules)
        placement = placement if len(self.modules) > 2 else "colocated"
        for checkpointing in checkpointings:
            made = Candidate(placement, named, self.openings.batch_size, count, self.schedule, checkpointing)
            if made.world == self.world:
                yield made


def proposed(
    modules: Sequence[str], estimator: Estimator, world: int, openings: Openings, schedule: str
) -> Iterator[Candidate]:
    """All candidates that get an estimate, each once."""
    search = _Search(modules, estimator, world, openings, schedule)
    yield from dict.fromkeys((*_regular(search), *_searched(search), *_orchestrated(search)))


def _regular(search: _Search) -> Iterator[Candidate]:
    """Regular candidates: the layouts with the smallest estimates, cut in all ways."""
    modules, estimator, openings = search.modules, search.estimator, search.openings
    seconds: dict[Placed, float] = {}
    for placed in layouts(modules, search.world, few=False):
        specs = placed.specs
        counts = openings.counts(specs[-1].dp, specs[-1].pp)
        if not counts or any(spec.tp > max(_LANES) for spec in specs):
            continue
        named = tuple(zip(modules, specs, strict=True))
        one = Candidate(placed.placement, named, openings.batch_size, counts[len(counts) // 2], ranks=placed.ranks)
        too_large = estimator.least_bytes(one) > search.memory
        seconds[placed] = estimator.seconds(one) * (2.0 if too_large else 1.0)
    kept = set(heapq.nsmallest(_KEPT, seconds, key=seconds.__getitem__))
    for candidate in listed(modules, search.world, openings, schedule=search.schedule, few=False):
        plain = tuple(ParallelSpec(s.tp, s.cp, s.pp, s.dp) for _, s in candidate.specs)
        if Placed(candidate.placement, plain, candidate.ranks) in kept:
            yield candidate


def _searched(search: _Search) -> Iterator[Candidate]:
    """The best of each number of replicas, with each allowed number of microbatches."""
    world, batch, openings = search.world, search.openings.batch_size, search.openings
    for dp in (each for each in divisors(world) if batch % each == 0):
        for count in openings.counts(dp, max(world // dp // 2, 1)):
            if batch % (dp * count):
                continue
            microbatch = batch // (dp * count)
            works = {name: _search_module(search, name, microbatch) for name in search.modules}
            for placement in ("parallel", "colocated") if len(search.modules) > 2 else ("parallel",):
                try:
                    result = search_configuration(
                        works,
                        world,
                        batch,
                        microbatch,
                        gpu_memory=search.memory,
                        stage_link=search.link.message,
                        data_link=search.link.ring,
                        dp=[dp],
                        placements=[placement],  # type: ignore[list-item]
                        recompute=[each == "full" for each in openings.checkpointings],
                    )
                except ValueError:
                    continue
                recompute = any(result.recompute.values())
                checkpointings = [each for each in openings.checkpointings if recompute == (each == "full")]
                yield from search.candidates(result.specs, placement, count, checkpointings)


def _search_module(search: _Search, name: str, microbatch: int) -> SearchModule:
    size = search.size(name, microbatch)
    forward, backward = {}, {}
    for tp in _LANES:
        for cp in (1, 2, 4):
            if tp * cp <= search.world:
                try:
                    forward[tp, cp], backward[tp, cp] = search.per_layer(name, size, tp, cp)
                except ValueError:
                    continue
    layers = len(forward[1, 1])
    weights, trained = (each / layers for each in search.estimator.bytes_of[name])
    one = np.ones(layers)
    rows = size.rows * search.estimator.row_bytes[name]
    return SearchModule(forward, backward, weights * one, trained * one, 2 * trained * one, 16 * rows * one, rows * one)


def _orchestrated(search: _Search) -> Iterator[Candidate]:
    """Results of `orchestrate` with each largest tp."""
    estimator, openings, link = search.estimator, search.openings, search.link
    for most in _LANES:
        lanes = [tp for tp in _LANES if tp <= most]
        works = {}
        try:
            for name in search.modules:
                size = search.size(name, 1)
                each = [search.per_layer(name, size, tp, 1) for tp in lanes]
                seconds = [float(forward.sum() + backward.sum()) for forward, backward in each]
                weights, trained = estimator.bytes_of[name]
                layers, rows = len(estimator.model.layers(name)), size.rows * estimator.row_bytes[name]
                works[name] = ModuleWork(
                    seconds, layers, weights + trained, 2 * trained, 16 * rows * layers, trained, 2 * rows
                )
            result = orchestrate(
                works,
                search.world,
                openings.batch_size,
                tp=lanes,
                gpu_memory=search.memory,
                stage_link=link.message,
                data_link=link.ring,
            )
        except ValueError:
            continue
        spec = result.specs[LANGUAGE_MODEL]
        for count in openings.counts(spec.dp, spec.pp + 1):
            yield from search.candidates(result.specs, "parallel", count, openings.checkpointings)
