"""Choice of a candidate: lists candidates, estimates all, simulates the best, and keeps the reasons against the others.

Simulated candidates: the twenty with the smallest estimates (per layout the three best ways to cut a step and to shard
it, plus the unsharded variants), including the best of each number of ranks. Then the five fastest (above 16 ranks only
the fastest) and their unsharded variants, with all schedules.

Among candidates with the same number of ranks and equal speed (within `ALIKE`), the one with fewest settings wins. More
ranks are chosen only if they are faster by `WORTH`, or by the measurement noise if that is larger: the simulation
leaves out communication before and after a step, and startup time. When in doubt, one process is chosen.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from interlace.plan import stable_batch_size
from interlace.train.auto.candidates import (
    FEW,
    SCHEDULES,
    VIRTUAL,
    Candidate,
    Fixed,
    Openings,
    fixed_keys,
    listed,
    unsharded,
    with_schedules,
)
from interlace.train.auto.estimate import Estimator
from interlace.train.auto.evaluate import MEMORY, Evaluator, Outcome, Refused
from interlace.train.auto.machine import Machine
from interlace.train.auto.proposals import proposed
from interlace.train.auto.work import Work, workloads
from interlace.train.config.load import ConfigError
from interlace.train.config.sections import Config

if TYPE_CHECKING:
    from interlace.model import MultimodalModel, Sample

SIMULATED = 20
WITH_ALL_SCHEDULES = 5
ALIKE = 0.01
"""Relative difference of seconds below which candidates with the same number of ranks count as equally fast."""
WORTH = 0.03
"""Minimum relative speedup for choosing more ranks."""
_FEW_FOR_SCHEDULES = 16  # ranks up to which several candidates get all schedules; above it only the fastest
_PER_LAYOUT, _PER_CUT = 3, 2
_MOST_TRIED = 3 * SIMULATED


@dataclass(frozen=True)
class Decision:
    """Result of a choice.

    best: the chosen candidate. outcomes: the simulated candidates, fastest first. considered: number of candidates.
    refused: reason -> count. examples: reason -> message of one candidate. notes: further decisions, in sentences.
    """

    best: Outcome
    outcomes: tuple[Outcome, ...]
    considered: int
    refused: dict[str, int]
    examples: dict[str, str]
    notes: tuple[str, ...] = ()


def decide(
    config: Config,
    model: MultimodalModel,
    work: Work,
    machine: Machine,
    worlds: Sequence[int],
    *,
    source: str = "config",
    notes: Sequence[str] = (),
) -> Decision:
    """The fastest layout that fits, by simulation, over any of `worlds` ranks.

    config: with parallel.layout = "auto" and the final batch size (see `batch_size_of`). Raises ConfigError if nothing
    fits, with the missing amount, or if no candidate matches the keys fixed by the config.
    """
    openings = openings_of(config)
    fixed = Fixed.of(config)
    estimator, evaluator = Estimator(config, model, work, machine), Evaluator(config, model, work, machine)
    refused, examples = Counter[str](), dict[str, str]()
    short = math.inf

    def refuse(reason: str, text: str) -> None:
        refused[reason] += 1
        examples.setdefault(reason, text)

    estimates: list[tuple[float, Candidate]] = []
    tight: list[tuple[float, Candidate]] = []
    considered = 0
    for world in worlds:
        listing = _of_world(config, estimator, world, openings, fixed)
        candidates = (replace(each, threads=n) for each in listing for n in machine.threads(world))
        for candidate in filter(fixed.allows, map(fixed.with_virtual, candidates)):
            considered += 1
            over = estimator.least_bytes(candidate) - machine.memory(world)
            if over > 0:
                refuse(MEMORY, f"{candidate}: weights and gradients alone exceed it by {over / 2**30:,.2f} GiB")
                tight.append((over, candidate))
                continue
            seconds = estimator.seconds(candidate)
            if math.isinf(seconds):
                refuse("the model cannot be cut so", f"{candidate}: too few layers, or heads are not divisible")
                continue
            estimates.append((seconds, candidate))
    if not considered:
        keys = ", ".join(f"{key} = {value!r}" for key, value in fixed_keys(config).items())
        raise ConfigError(
            f"{source}: [parallel] layout = 'auto': no layout of {_ranks(worlds)} has the degrees that the section "
            f"sets ({keys}); omit some of them, or change max_ranks"
        )

    def simulate(candidates: Iterable[Candidate], count: int) -> list[Outcome]:
        nonlocal short
        results: list[Outcome] = []
        for tried, candidate in enumerate(candidates):
            if len(results) == count or tried == _MOST_TRIED:
                break
            try:
                results.append(evaluator.simulate(candidate))
            except Refused as error:
                refuse(error.reason, f"{candidate}: {error}")
                if error.reason == MEMORY:
                    short = min(short, error.short)
        return results

    outcomes = simulate(_best(estimates), SIMULATED)
    if not outcomes:  # second attempt: candidates with least memory
        tight.sort(key=lambda pair: pair[0])
        by_bytes = sorted((c for _, c in estimates), key=estimator.least_bytes)
        outcomes = simulate((*by_bytes, *(c for _, c in tight[:4])), SIMULATED)
    if not outcomes:
        raise ConfigError(_no_layout_message(source, considered, refused, examples, short, machine, worlds))
    few = max(worlds) <= _FEW_FOR_SCHEDULES
    fastest = sorted(outcomes, key=lambda each: each.seconds)[: WITH_ALL_SCHEDULES if few else 1]
    chosen = dict.fromkeys(each.candidate for each in fastest)
    chosen |= dict.fromkeys(each.candidate for each in outcomes if each.candidate in {unsharded(c) for c in chosen})
    more = [other for each in chosen for other in with_schedules(each)]
    outcomes += simulate(filter(fixed.allows, more), len(more))
    outcomes.sort(key=lambda each: (each.seconds, each.candidate.world, str(each.candidate)))
    if machine.unsure > WORTH and len({each.candidate.world for each in outcomes}) > 1:
        vary = f"measurements vary by {100 * machine.unsure:.0f} %"
        notes = [*notes, f"{vary}: more ranks are used only if they are faster by more than that"]
    best = _best_of(outcomes, max(WORTH, machine.unsure))
    return Decision(best, tuple(outcomes), considered, dict(refused), examples, tuple(notes))


def _best_of(outcomes: Sequence[Outcome], worth: float = WORTH) -> Outcome:
    """The best of candidates sorted by speed. worth: minimum relative speedup for more ranks."""
    best: Outcome | None = None
    for world in sorted({each.candidate.world for each in outcomes}):
        mine = [each for each in outcomes if each.candidate.world == world]
        if best is not None and mine[0].seconds * (1 + worth) > best.seconds:
            continue
        alike = (each for each in mine if each.seconds <= (1 + ALIKE) * mine[0].seconds)
        best = min(alike, key=lambda each: (settings_of(each.candidate), each.seconds, str(each.candidate)))
    assert best is not None
    return best


def openings_of(config: Config) -> Openings:
    """Ways to cut a step that the config allows."""
    train, choose = config.train, config.parallel.choose or ()
    return Openings(
        train.batch_size,
        None if "microbatches" in choose else train.microbatches,
        ("none", "full") if "activation_checkpointing" in choose else (train.activation_checkpointing,),
        rows=config.data.pack,
    )


def batch_size_of(
    config: Config, model: MultimodalModel, samples: Sequence[Sample], machine: Machine, gpus: int
) -> tuple[int, str]:
    """The stable batch size (dissertation 4.4.2) and a sentence on it if train.batch_size is open; else the given size.

    samples: spread over the data. A batch size is stable if different batches of it distribute the GPUs over the
    modules equally. It is raised to one sample per GPU, and rounded up to a power of two.
    """
    if "batch_size" not in (config.parallel.choose or ()):
        return config.train.batch_size, ""
    seconds = np.asarray(workloads(samples, model, machine.costs_of(gpus)))
    shares = max(gpus, 2 * seconds.shape[1])  # at least two shares per module, so that shares can differ
    try:
        size = stable_batch_size(seconds, shares, largest=4096, seed=config.run.seed).size
        why = f"the smallest with balanced work among the modules in each batch ({len(samples)} samples)"
    except ValueError:
        size, why = 64, "the default: no size up to 4,096 balances the work among the modules"
    least = max(size, gpus, config.train.microbatches)
    size = 1 << (least - 1).bit_length()
    return size, f"batch_size {size}: {why}"


def _of_world(
    config: Config, estimator: Estimator, world: int, openings: Openings, fixed: Fixed
) -> Iterator[Candidate]:
    """Candidates with the config's schedule. `decide` tries other schedules on the fastest."""

    def of(schedule: str) -> Iterator[Candidate]:
        modules = config.modules()
        if world <= FEW:
            return listed(modules, world, openings, schedule=schedule)
        return proposed(modules, estimator, world, openings, schedule)

    schedule = config.parallel.schedule
    if schedule in VIRTUAL:  # no list has virtual stages
        for plain in of(SCHEDULES[0]):
            yield from (each for each in with_schedules(plain) if each.schedule == schedule)
    if schedule not in VIRTUAL or fixed.stages_of_encoders():
        yield from of(schedule)


def _best(estimates: list[tuple[float, Candidate]]) -> Iterator[Candidate]:
    """The best of each number of ranks, then all by estimate. Per layout only the best few ways to cut and to shard it;
    each sharded candidate also unsharded."""
    ranked = sorted(estimates, key=lambda pair: (pair[0], pair[1].world, str(pair[1])))
    first = {(each.world, each.threads): each for _, each in reversed(ranked)}
    possible, given, taken = {each for _, each in estimates}, set[Candidate](), Counter[object]()
    for candidate in (*first.values(), *(each for _, each in ranked)):
        plain = unsharded(candidate)
        layout = (plain.placement, plain.specs, plain.ranks, plain.threads)
        if candidate in given or taken[layout] == _PER_LAYOUT or taken[plain] == _PER_CUT:
            continue
        taken.update((layout, plain))
        for each in (candidate, plain):
            if each in possible and each not in given:
                given.add(each)
                yield each


def settings_of(candidate: Candidate) -> int:
    """Number of non-default settings of a layout."""
    specs = [spec for _, spec in candidate.specs]
    degrees = sum((spec.tp > 1) + (spec.cp > 1) + (spec.pp > 1) + (spec.virtual > 1) for spec in specs)
    degrees += candidate.schedule != SCHEDULES[0]
    return degrees + sum(spec.shard != "none" for spec in specs) + (candidate.checkpointing == "full")


def _ranks(worlds: Sequence[int]) -> str:
    return f"{', '.join(map(str, worlds))} rank{'s' * (max(worlds) > 1)}"


def _no_layout_message(
    source: str,
    considered: int,
    refused: Counter[str],
    examples: dict[str, str],
    short: float,
    machine: Machine,
    worlds: Sequence[int],
) -> str:
    """Error message if no candidate is possible."""
    reasons = "; ".join(f"{count} {reason}, such as {examples[reason]}" for reason, count in refused.most_common())
    head = f"{source}: [parallel] layout = 'auto': none of {considered} candidates on {_ranks(worlds)} fits"
    if math.isinf(short):
        return f"{head}: {reasons}"
    limit = machine.memory(max(worlds)) / 2**30
    return (
        f"{head} into {limit:,.2f} GiB per rank: the smallest lacks {short / 2**30:,.2f} GiB. Allow more ranks "
        "(--gpus, parallel.max_ranks) or more memory (--memory, parallel.memory), or make a step smaller: more "
        "train.microbatches, train.activation_checkpointing = 'full', a lower data.max_tokens, frozen modules or "
        f"train.lora. Refused: {reasons}"
    )
