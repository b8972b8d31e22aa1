"""Chooses: lists candidates, estimates all, simulates the best, and keeps why the others were not taken.

Candidates that are simulated: the twenty whose estimate is least (of each layout the three best ways to cut a step and
to shard it, and the same unsharded), among them the best of each number of ranks; then the five fastest (of more than
16 ranks the fastest alone) and the same unsharded, with all schedules. Of those of one number of ranks that are equally
fast, within `ALIKE`, the plainest is taken. More ranks are taken only if they are faster by `WORTH`, or by as much as
measurements of one thing differ, where that is more: what they tell each other before and behind a step, and how long
they take to start, is in no simulation. When in doubt, one process.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from interlace.plan import stable_batch_size
from interlace.train.auto.candidates import (
    FEW,
    SCHEDULES,
    VIRTUAL,
    Candidate,
    Fixed,
    Openings,
    listed,
    unsharded,
    with_schedules,
)
from interlace.train.auto.estimate import Estimator
from interlace.train.auto.evaluate import MEMORY, Evaluator, Outcome, Refused
from interlace.train.auto.machine import Machine
from interlace.train.auto.proposals import proposed
from interlace.train.auto.work import Work, workloads
from interlace.train.config import ConfigError
from interlace.train.schema import Config

SIMULATED = 20
WITH_ALL_SCHEDULES = 5
ALIKE = 0.01
"""Candidates of as many ranks whose seconds differ by less than this part count as equally fast."""
WORTH = 0.03
"""So much faster, as a part, must more ranks be."""
_FEW_FOR_SCHEDULES = 16  # ranks up to which several candidates get all schedules; beyond it only the fastest
_PER_LAYOUT, _PER_CUT = 3, 2
_MOST_TRIED = 3 * SIMULATED


@dataclass(frozen=True)
class Decision:
    """best, and the simulated candidates, fastest first. considered: how many there were; refused: reason -> how many,
    and examples: reason -> what was wrong with one. notes: what else was decided, in sentences."""

    best: Outcome
    outcomes: tuple[Outcome, ...]
    considered: int
    refused: dict[str, int]
    examples: dict[str, str]
    notes: tuple[str, ...] = ()


def decide(
    config: Config,
    model: Any,
    work: Work,
    machine: Machine,
    worlds: Sequence[int],
    *,
    source: str = "config",
    notes: Sequence[str] = (),
) -> Decision:
    """The fastest layout of any of `worlds` ranks that fits, as simulated.

    config: with parallel.plan = "auto", and the batch size that is to be trained with (see `batch_size_of`). Raises
    ConfigError where nothing fits, saying by how much, and where nothing says what the config fixes.
    """
    openings = openings_of(config)
    fixed = Fixed.of(config)
    estimator, evaluator = Estimator(config, model, work, machine), Evaluator(config, model, work, machine)
    refused, examples = Counter[str](), dict[str, str]()
    short = math.inf

    def refuse(reason: str, text: str) -> None:
        refused[reason] += 1
        examples.setdefault(reason, text)

    found: list[tuple[float, Candidate]] = []
    tight: list[tuple[float, Candidate]] = []
    considered = 0
    for world in worlds:
        listing = _of_world(config, estimator, world, openings, fixed)
        candidates = (replace(each, threads=n) for each in listing for n in machine.threads(world))
        for candidate in filter(fixed.allows, map(fixed.with_virtual, candidates)):
            considered += 1
            over = estimator.least_bytes(candidate) - machine.memory(world)
            if over > 0:
                refuse(MEMORY, f"{candidate}: weights and gradients alone are {over / 2**30:,.2f} GiB too many")
                tight.append((over, candidate))
                continue
            seconds = estimator.safe_seconds(candidate)
            if math.isinf(seconds):
                refuse("the model cannot be cut so", f"{candidate}: too few layers, or heads that cannot be shared out")
                continue
            found.append((seconds, candidate))
    if not considered:
        raise ConfigError(
            f"{source}: [parallel] plan = 'auto': no layout of {_ranks(worlds)} says what the section fixes by hand "
            f"({_fixed_words(config)}); leave some of it out, or change max_ranks"
        )

    def simulate(candidates: Iterable[Candidate], count: int) -> list[Outcome]:
        nonlocal short
        made: list[Outcome] = []
        for tried, candidate in enumerate(candidates):
            if len(made) == count or tried == _MOST_TRIED:
                break
            try:
                made.append(evaluator.simulate(candidate))
            except Refused as error:
                refuse(error.reason, f"{candidate}: {error}")
                if error.reason == MEMORY:
                    short = min(short, error.short)
        return made

    outcomes = simulate(_best(found), SIMULATED)
    if not outcomes:  # the slow and small ones, then
        tight.sort(key=lambda pair: pair[0])
        by_bytes = sorted((c for _, c in found), key=estimator.least_bytes)
        outcomes = simulate((*by_bytes, *(c for _, c in tight[:4])), SIMULATED)
    if not outcomes:
        raise ConfigError(_nothing(source, considered, refused, examples, short, machine, worlds))
    few = max(worlds) <= _FEW_FOR_SCHEDULES
    fastest = sorted(outcomes, key=lambda each: each.seconds)[: WITH_ALL_SCHEDULES if few else 1]
    chosen = dict.fromkeys(each.candidate for each in fastest)
    chosen |= dict.fromkeys(each.candidate for each in outcomes if each.candidate in {unsharded(c) for c in chosen})
    more = [other for each in chosen for other in with_schedules(each)]
    outcomes += simulate(filter(fixed.allows, more), len(more))
    outcomes.sort(key=lambda each: (each.seconds, each.candidate.world, str(each.candidate)))
    if machine.unsure > WORTH and len({each.candidate.world for each in outcomes}) > 1:
        part = 100 * machine.unsure
        notes = [*notes, f"measurements differ by {part:.0f} %: more ranks are taken if they are as much faster"]
    best = _chosen(outcomes, max(WORTH, machine.unsure))
    return Decision(best, tuple(outcomes), considered, dict(refused), examples, tuple(notes))


def _chosen(outcomes: Sequence[Outcome], worth: float = WORTH) -> Outcome:
    """Of candidates, fastest first. worth: by what part more ranks must be faster."""
    best: Outcome | None = None
    for world in sorted({each.candidate.world for each in outcomes}):
        mine = [each for each in outcomes if each.candidate.world == world]
        if best is not None and mine[0].seconds * (1 + worth) > best.seconds:
            continue
        alike = (each for each in mine if each.seconds <= (1 + ALIKE) * mine[0].seconds)
        best = min(alike, key=lambda each: (_settings(each.candidate), each.seconds, str(each.candidate)))
    assert best is not None
    return best


def openings_of(config: Config) -> Openings:
    """How the config lets a step be cut."""
    train, choose = config.train, config.parallel.choose or ()
    return Openings(
        train.batch_size,
        None if "microbatches" in choose else train.microbatches,
        ("none", "full") if "activation_checkpointing" in choose else (train.activation_checkpointing,),
        rows=config.data.pack,
    )


def batch_size_of(config: Config, model: Any, samples: Sequence[Any], machine: Machine, gpus: int) -> tuple[int, str]:
    """The stable batch (dissertation 4.4.2) where train.batch_size is open, and a sentence on it; else what is given.

    samples: from all over the data. A batch is stable when others of its size would share the GPUs out among the
    modules alike; it is raised to a sample for each GPU, and rounded up to a power of two.
    """
    if "batch_size" not in (config.parallel.choose or ()):
        return config.train.batch_size, ""
    seconds = np.asarray(workloads(samples, model, machine.costs_of(gpus)))
    shares = max(gpus, 2 * seconds.shape[1])  # a share for each module that can be more or less
    try:
        size = stable_batch_size(seconds, shares, largest=4096, seed=config.run.seed).size
        why = f"the smallest whose work is shared out alike among the modules, batch by batch ({len(samples)} samples)"
    except ValueError:
        size, why = 64, "no size up to 4,096 shares the work out alike among the modules, so a usual one"
    least = max(size, gpus, config.train.microbatches)
    size = 1 << (least - 1).bit_length()
    return size, f"batch_size {size}: {why}"


def _of_world(
    config: Config, estimator: Estimator, world: int, openings: Openings, fixed: Fixed
) -> Iterator[Candidate]:
    """Candidates with the config's schedule; the others are tried with the fastest."""

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


def _best(found: list[tuple[float, Candidate]]) -> Iterator[Candidate]:
    """The best of each number of ranks, then all by their estimates; of each layout the best few ways to cut and to
    shard it, and what is sharded also unsharded."""
    ranked = sorted(found, key=lambda pair: (pair[0], pair[1].world, str(pair[1])))
    first = {(each.world, each.threads): each for _, each in reversed(ranked)}
    possible, given, taken = {each for _, each in found}, set[Candidate](), Counter[Any]()
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


def _settings(candidate: Candidate) -> int:
    """How many settings a layout has."""
    specs = [spec for _, spec in candidate.specs]
    degrees = sum((spec.tp > 1) + (spec.cp > 1) + (spec.pp > 1) + (spec.virtual > 1) for spec in specs)
    degrees += candidate.schedule != SCHEDULES[0]
    return degrees + sum(spec.shard != "none" for spec in specs) + (candidate.checkpointing == "full")


def _ranks(worlds: Sequence[int]) -> str:
    return f"{', '.join(map(str, worlds))} rank{'s' * (max(worlds) > 1)}"


def _fixed_words(config: Config) -> str:
    given = config.parallel.model_dump(exclude_unset=True, exclude_none=True)
    return ", ".join(f"{k} = {v!r}" for k, v in given.items() if k not in ("plan", "choose", "max_ranks", "memory"))


def _nothing(
    source: str,
    considered: int,
    refused: Counter[str],
    examples: dict[str, str],
    short: float,
    machine: Machine,
    worlds: Sequence[int],
) -> str:
    """The message when no candidate can be."""
    reasons = "; ".join(f"{count} {reason}, such as {examples[reason]}" for reason, count in refused.most_common())
    head = f"{source}: [parallel] plan = 'auto': none of {considered} candidates on {_ranks(worlds)} fits"
    if math.isinf(short):
        return f"{head}: {reasons}"
    limit = machine.memory(max(worlds)) / 2**30
    return (
        f"{head} into {limit:,.2f} GiB per rank: the smallest lacks {short / 2**30:,.2f} GiB. Allow more ranks "
        "(--gpus, parallel.max_ranks) or more memory (--memory, parallel.memory), or make a step smaller: more "
        "train.microbatches, train.activation_checkpointing = 'full', a lower data.max_tokens, frozen modules or "
        f"train.lora. Refused: {reasons}"
    )
