"""Candidates: possible values of [parallel] and parts of [train] for a config.

Up to `FEW` ranks all candidates are listed: every placement with every split of the ranks into modules and every tp,
cp, pp, dp and shard of each. For more ranks the list keeps to degrees that are powers of two and equal for all
encoders; `proposals` adds the results of searches.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from pydantic import ValidationError

from interlace.layout import ParallelSpec
from interlace.model.naming import LANGUAGE_MODEL
from interlace.schedule.generate import KINDS
from interlace.schedule.generators import GENERATORS
from interlace.train.config.sections import Config

FEW = 4
"""Ranks up to which all layouts are listed."""
SHARDS = ("none", "optimizer", "full")
SCHEDULES = tuple(GENERATORS)
VIRTUAL = {name: kind.order for name, kind in KINDS.items() if kind.order}
"""Schedules with virtual stages, and the order of these stages."""
_DEGREES = ("tp", "cp", "pp", "virtual")
_MOST_MICROBATCHES = 4  # times the number of stages of a microbatch; above it the bubble is already small


@dataclass(frozen=True)
class Candidate:
    """A layout, a schedule and the cut of a step.

    specs: (module, its degrees), encoders first. ranks: of one replica, if stages share ranks or the placement is a
    chain; None: one rank per stage. threads: of each rank; None: not chosen.
    """

    placement: str
    specs: tuple[tuple[str, ParallelSpec], ...]
    batch_size: int
    microbatches: int
    schedule: str = "1f1b"
    checkpointing: str = "none"
    ranks: int | None = None
    threads: int | None = None

    @property
    def of(self) -> dict[str, ParallelSpec]:
        """The degrees by module."""
        return dict(self.specs)

    @property
    def world(self) -> int:
        """Ranks of the whole run."""
        ranks = {name: spec.ranks for name, spec in self.specs}
        language, encoders = ranks.pop(LANGUAGE_MODEL), list(ranks.values())
        if self.ranks is not None:
            return self.ranks * self.of[LANGUAGE_MODEL].dp
        if self.placement in ("shared", "replicated") or not encoders:
            return language
        return language + (sum(encoders) if self.placement == "parallel" else max(encoders))

    def parallel(self) -> dict[str, Any]:
        """Keys of [parallel] for this candidate."""
        table: dict[str, Any] = {"placement": self.placement, "schedule": self.schedule}
        if self.ranks is not None:
            table["ranks"] = self.ranks
        if self.threads is not None:
            table["threads"] = self.threads
        if self.placement == "chain" or len({spec.dp for _, spec in self.specs}) == 1:
            table["dp"] = self.specs[0][1].dp
        for name, spec in self.specs:
            keys: dict[str, Any] = {key: getattr(spec, key) for key in _DEGREES if getattr(spec, key) != 1}
            if spec.order != "loop":
                keys["order"] = spec.order
            if self.placement == "chain":
                keys = {}
            if "dp" not in table:
                keys["dp"] = spec.dp
            if spec.shard != "none":
                keys["shard"] = spec.shard
                if spec.shard_ranks is not None:
                    keys["shard_ranks"] = spec.shard_ranks
            if keys:
                table[name] = keys
        return table

    def train(self) -> dict[str, Any]:
        """Keys of [train] for this candidate."""
        return {
            "batch_size": self.batch_size,
            "microbatches": self.microbatches,
            "activation_checkpointing": self.checkpointing,
        }

    def __str__(self) -> str:
        parts = [self.placement if self.world > 1 else "one process"]
        if self.world == 1 and self.threads is not None:
            parts = [f"one process with {self.threads} thread{'s' * (self.threads > 1)}"]
        if self.ranks is not None and self.world > 1:
            dp = self.specs[0][1].dp
            parts.append(f"{self.ranks} rank{'s' * (self.ranks > 1)} a replica" + f", {dp} replicas" * (dp > 1))
        for name, spec in self.specs:
            degrees = [f"{key} {getattr(spec, key)}" for key in (*_DEGREES, "dp") if getattr(spec, key) > 1]
            degrees += ["order v"] * (spec.order == "v")
            degrees = [each for each in degrees if self.ranks is None or not each.startswith(("dp", "pp"))]
            degrees += [f"shard {spec.shard}"] * (spec.shard != "none")
            if degrees:
                parts.append(f"{name} {' '.join(degrees)}")
        if self.world > 1:
            parts.append(self.schedule)
        parts.append(f"{self.microbatches} microbatch{'es' * (self.microbatches > 1)}")
        parts += ["checkpointing"] * (self.checkpointing == "full")
        return ", ".join(parts)


def applied(config: Config, candidate: Candidate) -> Config:
    """The config with a candidate's keys and no open choices. Raises pydantic's ValidationError."""
    return with_tables(config, candidate.parallel(), candidate.train())


def with_tables(config: Config, parallel: dict[str, Any], train: dict[str, Any]) -> Config:
    """The config with these keys of [parallel], added to its own, and of [train]."""
    asked = config.parallel.model_dump(exclude_unset=True, exclude_none=True)
    table = {key: value for key, value in asked.items() if key not in ("layout", "choose", "max_ranks", "memory")}
    for key, value in parallel.items():
        table[key] = {**table.get(key, {}), **value} if isinstance(value, dict) else value
    dump = config.model_dump()
    return Config.model_validate(dump | {"parallel": table, "train": dump["train"] | train})


def refusal(error: ValidationError) -> str:
    """Reason why a config is rejected, in one line."""
    return str(error.errors()[0]["msg"]).removeprefix("Value error, ")


# ---------------------------------------------------------------------- keys fixed in the config


@dataclass(frozen=True)
class Fixed:
    """Keys of [parallel] fixed by the config; every candidate keeps them. modules: name -> keys of its table."""

    placement: str | None
    schedule: str | None
    ranks: int | None
    dp: int | None
    modules: dict[str, dict[str, Any]]

    @classmethod
    def of(cls, config: Config) -> Fixed:
        """Fixed keys in [parallel] of `config`."""
        given = config.parallel.model_dump(exclude_unset=True)
        modules = {name: given.get(name) or {} for name in config.modules()}
        return cls(given.get("placement"), given.get("schedule"), given.get("ranks"), given.get("dp"), modules)

    def with_virtual(self, candidate: Candidate) -> Candidate:
        """The candidate with the fixed virtual stages, which the lists do not have."""
        specs = []
        for name, spec in candidate.specs:
            own = {key: value for key, value in self.modules[name].items() if key in ("virtual", "order")}
            specs.append((name, replace(spec, **own) if own and spec.pp > 1 else spec))
        return replace(candidate, specs=tuple(specs))

    def stages_of_encoders(self) -> bool:
        """True if virtual stages are fixed only for encoders."""
        fixed = {name for name, keys in self.modules.items() if keys.get("virtual", 1) > 1}
        return bool(fixed) and LANGUAGE_MODEL not in fixed

    def allows(self, candidate: Candidate) -> bool:
        """True if the candidate matches the fixed keys."""
        if self.placement is not None and candidate.placement != self.placement:
            return False
        if self.schedule is not None and candidate.schedule != self.schedule:
            return False
        if self.ranks is not None and candidate.ranks != self.ranks:
            return False
        for name, spec in candidate.specs:
            keys = {*_DEGREES, "dp", "order", "shard", "shard_ranks"} & self.modules[name].keys()
            if any(getattr(spec, key) != self.modules[name][key] for key in keys):
                return False
            if self.dp is not None and "dp" not in keys and spec.dp != self.dp:
                return False
        return True


# ---------------------------------------------------------------------- lists


@dataclass(frozen=True)
class Openings:
    """Allowed cuts of a step: batch size, microbatches (None: to suit the stages) and activation checkpointing."""

    batch_size: int
    microbatches: int | None
    checkpointings: tuple[str, ...]
    rows: bool = False
    """True if a batch counts packed rows; each row is a microbatch."""

    def counts(self, dp: int, stages: int) -> list[int]:
        """Numbers of microbatches to try for `dp` replicas of the language model and `stages` stages per microbatch."""
        most = self.batch_size // dp
        if self.rows:
            return [most] if most else []
        if self.microbatches is not None:
            return [self.microbatches]
        numbers, count = [], 1
        while count <= min(most, max(_MOST_MICROBATCHES * stages, 1)):
            numbers.append(count)
            count *= 2
        if stages > 1 and stages <= most and stages not in numbers:
            numbers.append(stages)
        return numbers


def layouts(modules: Sequence[str], world: int, *, few: bool) -> Iterator[tuple[str, tuple[ParallelSpec, ...], Any]]:
    """(placement, degrees of each module, ranks) of all layouts of `world` ranks, each once and without shards.

    few: False restricts the list to powers of two and equal encoders.
    """
    *encoders, _ = modules
    whole = ParallelSpec()
    if world == 1:
        yield "colocated", (whole,) * len(modules), 1
        return
    for ranks in _divisors(world):
        if ranks == 1:  # each replica is one process
            yield "colocated", (ParallelSpec(dp=world),) * len(modules), 1
        else:
            yield "chain", (ParallelSpec(dp=world // ranks),) * len(modules), ranks
    shapes = {n: list(_shapes(n, few)) for n in range(1, world + 1)}
    if not encoders:
        yield from (("parallel", (spec,), None) for spec in shapes[world])
        return
    for spec in shapes[world]:
        if spec.lane_size == 1 and spec.pp > 1:
            yield "replicated", (*(ParallelSpec(dp=spec.dp),) * len(encoders), spec), None
    if few:
        for specs in product(shapes[world], repeat=len(modules)):
            yield "shared", specs, None
    else:
        for own, spec in product(shapes[world], repeat=2):
            yield "shared", (*(own,) * len(encoders), spec), None
    for here in range(1, world):
        for own, spec in product(shapes[here], shapes[world - here]):
            yield "colocated", (*(own,) * len(encoders), spec), None
    if len(encoders) > 1:  # a single encoder has no other to share ranks with
        for split in _splits(world, len(modules)) if few else _even_splits(world, len(modules)):
            for specs in product(*(shapes[count] for count in split)):
                if few or len(set(specs[:-1])) == 1:
                    yield "parallel", specs, None


def listed(
    modules: Sequence[str], world: int, openings: Openings, *, schedule: str = SCHEDULES[0], few: bool = True
) -> Iterator[Candidate]:
    """All candidates of `world` ranks with one schedule; `with_schedules` makes the variants with other schedules."""
    for placement, specs, ranks in layouts(modules, world, few=few):
        options = [[spec] if ranks not in (None, 1) else list(_sharded(spec)) for spec in specs]
        if not few:  # equal shards for all modules
            options = [[each] for each in specs]
            for shard in SHARDS[1:]:
                alike = tuple(_with_shard(spec, shard) for spec in specs)
                if ranks in (None, 1) and alike != specs:
                    yield from _cut(modules, placement, alike, ranks, openings, schedule)
        for each in product(*options):
            yield from _cut(modules, placement, each, ranks, openings, schedule)


def with_schedules(candidate: Candidate) -> Iterator[Candidate]:
    """The candidate with every other schedule that may differ in time.

    Schedules for virtual stages cut each of the language model's stages in two. Config validation rejects impossible
    ones.
    """
    spec = candidate.of[LANGUAGE_MODEL]
    if candidate.world == 1 or candidate.microbatches == 1 or candidate.ranks == 1:
        return
    for schedule in SCHEDULES:
        if schedule == candidate.schedule:
            continue
        if schedule not in VIRTUAL:
            yield replace(candidate, schedule=schedule)
        elif spec.pp > 1 and candidate.ranks is None:
            twice = replace(spec, virtual=2, order=VIRTUAL[schedule])
            specs = tuple((name, twice if name == LANGUAGE_MODEL else each) for name, each in candidate.specs)
            yield replace(candidate, specs=specs, schedule=schedule)


def unsharded(candidate: Candidate) -> Candidate:
    """The candidate without sharding: full state on every rank."""
    specs = tuple((name, replace(spec, shard="none", shard_ranks=None)) for name, spec in candidate.specs)
    return replace(candidate, specs=specs)


def _cut(
    modules: Sequence[str],
    placement: str,
    specs: Sequence[ParallelSpec],
    ranks: int | None,
    openings: Openings,
    schedule: str,
) -> Iterator[Candidate]:
    """Candidates of a layout with each number of microbatches and checkpointing."""
    named = tuple(zip(modules, specs, strict=True))
    stages = specs[-1].pp + max((spec.pp for spec in specs[:-1]), default=0)
    stages = ranks if ranks is not None else specs[-1].pp if placement in ("shared", "replicated") else stages
    for count in openings.counts(specs[-1].dp, stages):
        for checkpointing in openings.checkpointings:
            yield Candidate(placement, named, openings.batch_size, count, schedule, checkpointing, ranks)


def _shapes(ranks: int, few: bool) -> Iterator[ParallelSpec]:
    """All tp * cp * pp * dp = ranks."""
    for tp in _divisors(ranks):
        for cp in _divisors(ranks // tp):
            for pp in _divisors(ranks // tp // cp):
                degrees = (tp, cp, pp, ranks // tp // cp // pp)
                if few or all(each & (each - 1) == 0 for each in degrees[:3]):
                    yield ParallelSpec(*degrees)


def _sharded(spec: ParallelSpec) -> Iterator[ParallelSpec]:
    """The degrees with each kind of shard possible for several ranks."""
    yield spec
    if spec.dp * spec.cp > 1:
        yield from (_with_shard(spec, shard) for shard in SHARDS[1:])


def _with_shard(spec: ParallelSpec, shard: str) -> ParallelSpec:
    return replace(spec, shard=shard if spec.dp * spec.cp > 1 else "none")


def _splits(total: int, parts: int) -> Iterator[tuple[int, ...]]:
    """All ways to write `total` as a sum of `parts` positive numbers."""
    if parts == 1:
        yield (total,)
        return
    for first in range(1, total - parts + 2):
        yield from ((first, *rest) for rest in _splits(total - first, parts - 1))


def _even_splits(total: int, parts: int) -> Iterator[tuple[int, ...]]:
    """Splits in which all parts but the last are equal."""
    for each in range(1, (total - 1) // (parts - 1) + 1):
        yield (*(each,) * (parts - 1), total - each * (parts - 1))


def _divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]
