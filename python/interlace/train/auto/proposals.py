"""Candidates for many ranks: a list of regular ones, and the results of the two searches of `plan/`.

- `listed` with powers of two and equal encoders: shared, replicated, chain, colocated
- `search_configuration` (Entrain's algorithm 3 with Cornstarch's algorithm 1) once for each number of replicas
- `orchestrate` (DistTrain 5.1, unequal numbers of replicas) once for each largest tp

Only the layouts of the long list with the smallest estimates are kept. Schedules and ways to cut a step are then
enumerated for these.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from interlace.costs.links import Link
from interlace.costs.step import Size
from interlace.layout import ParallelSpec
from interlace.model.naming import LANGUAGE_MODEL
from interlace.plan import ModuleWork, SearchModule, orchestrate, search_configuration
from interlace.train.auto.candidates import Candidate, Openings, layouts, listed
from interlace.train.auto.estimate import Estimator

_KEPT = 200  # maximum layouts of the long list
_LANES = (1, 2, 4, 8)


def proposed(
    modules: Sequence[str], estimator: Estimator, world: int, openings: Openings, schedule: str
) -> Iterator[Candidate]:
    """All candidates that get an estimate, each once."""
    seen: set[Candidate] = set()
    for candidate in (
        *_regular(modules, estimator, world, openings, schedule),
        *_searched(modules, estimator, world, openings, schedule),
        *_orchestrated(modules, estimator, world, openings, schedule),
    ):
        if candidate not in seen:
            seen.add(candidate)
            yield candidate


def _regular(
    modules: Sequence[str], estimator: Estimator, world: int, openings: Openings, schedule: str
) -> Iterator[Candidate]:
    """Regular candidates: the layouts with the smallest estimates, cut in all ways."""
    limit = estimator.machine.memory(world)
    ranked: list[tuple[float, int, tuple[Any, ...]]] = []
    for number, (placement, specs, ranks) in enumerate(_narrow_layouts(modules, world)):
        counts = openings.counts(specs[-1].dp, specs[-1].pp)
        if not counts:
            continue
        named = tuple(zip(modules, specs, strict=True))
        middle = counts[len(counts) // 2]
        one = Candidate(placement, named, openings.batch_size, middle, ranks=ranks)
        seconds = estimator.safe_seconds(one) * (2.0 if estimator.least_bytes(one) > limit else 1.0)
        ranked.append((seconds, number, (placement, specs, ranks)))
    kept = {each[2] for each in heapq.nsmallest(_KEPT, ranked)}
    for candidate in listed(modules, world, openings, schedule=schedule, few=False):
        plain = tuple(ParallelSpec(s.tp, s.cp, s.pp, s.dp) for _, s in candidate.specs)
        if (candidate.placement, plain, candidate.ranks) in kept:
            yield candidate


def _narrow_layouts(modules: Sequence[str], world: int) -> Iterator[tuple[str, tuple[ParallelSpec, ...], Any]]:
    for placement, specs, ranks in layouts(modules, world, few=False):
        if all(spec.tp <= max(_LANES) for spec in specs):
            yield placement, specs, ranks


def _per_layer(estimator: Estimator, name: str, size: Size, tp: int, cp: int, world: int) -> tuple[Any, Any]:
    """float64 [layers] each: forward and backward of a chunk of `size`."""
    cost = estimator.machine.costs_of(world)
    link = estimator.machine.links(world).slowest(range(tp * cp))
    made = cost.of(name, size, tp, cp, link)
    forward = np.bincount(made.layer, weights=made.times.forward, minlength=made.num_layers)
    both = made.per_layer(trainable_before=estimator.trained_before(name))
    return forward, np.maximum(both - forward, 0.0)


def _searched(
    modules: Sequence[str], estimator: Estimator, world: int, openings: Openings, schedule: str
) -> Iterator[Candidate]:
    """The best of each number of replicas, with each allowed number of microbatches."""
    memory, link = _limits(estimator, world)
    for dp in (each for each in range(1, world + 1) if world % each == 0 and openings.batch_size % each == 0):
        for count in openings.counts(dp, max(world // dp // 2, 1)):
            if openings.batch_size % (dp * count):
                continue
            microbatch = openings.batch_size // (dp * count)
            works = {}
            for name in modules:
                size = Size(*(value * microbatch / openings.batch_size for value in estimator.totals[name]))
                works[name] = _search_module(estimator, name, size, world)
            for placement in ("parallel", "colocated") if len(modules) > 2 else ("parallel",):
                try:
                    result = search_configuration(
                        works,
                        world,
                        openings.batch_size,
                        microbatch,
                        gpu_memory=memory,
                        stage_link=link.message,
                        data_link=link.ring,
                        dp=[dp],
                        placements=[placement],  # type: ignore[list-item]
                        recompute=[each == "full" for each in openings.checkpointings],
                    )
                except ValueError:
                    continue
                again = any(result.recompute.values())
                for checkpointing in openings.checkpointings:
                    if again == (checkpointing == "full"):
                        named = tuple((name, result.specs[name]) for name in modules)
                        named_as = placement if len(modules) > 2 else "colocated"
                        made = Candidate(named_as, named, openings.batch_size, count, schedule, checkpointing)
                        if made.world == world:
                            yield made


def _limits(estimator: Estimator, world: int) -> tuple[float, Link]:
    """Memory limit of a rank in bytes, and the slowest link among all ranks."""
    machine = estimator.machine
    return machine.memory(world), machine.links(world).slowest(range(world))


def _search_module(estimator: Estimator, name: str, size: Size, world: int) -> SearchModule:
    forward, backward = {}, {}
    for tp in _LANES:
        for cp in (1, 2, 4):
            if tp * cp <= world:
                try:
                    forward[tp, cp], backward[tp, cp] = _per_layer(estimator, name, size, tp, cp, world)
                except ValueError:
                    continue
    layers = len(forward[1, 1])
    weights, trained = (each / layers for each in estimator.bytes_of(name))
    one = np.ones(layers)
    rows = size.rows * estimator.row_bytes(name)
    return SearchModule(forward, backward, weights * one, trained * one, 2 * trained * one, 16 * rows * one, rows * one)


def _orchestrated(
    modules: Sequence[str], estimator: Estimator, world: int, openings: Openings, schedule: str
) -> Iterator[Candidate]:
    """Results of `orchestrate` with each largest tp."""
    batch, (memory, link) = openings.batch_size, _limits(estimator, world)
    for most in _LANES:
        lanes = [tp for tp in _LANES if tp <= most]
        works = {}
        try:
            for name in modules:
                size = Size(*(value / batch for value in estimator.totals[name]))
                each = [_per_layer(estimator, name, size, tp, 1, world) for tp in lanes]
                seconds = [float(forward.sum() + backward.sum()) for forward, backward in each]
                weights, trained = estimator.bytes_of(name)
                layers, rows = len(estimator.model.layers(name)), size.rows * estimator.row_bytes(name)
                works[name] = ModuleWork(
                    seconds, layers, weights + trained, 2 * trained, 16 * rows * layers, trained, 2 * rows
                )
            result = orchestrate(
                works,
                world,
                batch,
                tp=lanes,
                gpu_memory=memory,
                stage_link=link.message,
                data_link=link.ring,
            )
        except ValueError:
            continue
        named = tuple((name, result.specs[name]) for name in modules)
        spec = result.specs[LANGUAGE_MODEL]
        for count in openings.counts(spec.dp, spec.pp + 1):
            for checkpointing in openings.checkpointings:
                placement = "parallel" if len(modules) > 2 else "colocated"
                made = Candidate(placement, named, batch, count, schedule, checkpointing)
                if made.world == world:
                    yield made
