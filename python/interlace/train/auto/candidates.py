"""Candidates: possible values of [parallel] and parts of [train] for a config.

Up to `FEW` ranks all candidates are listed: every placement with every split of the ranks into modules and every tp,
cp, pp, dp and shard of each. For more ranks the list keeps to degrees that are powers of two and equal for all
encoders; `proposals` adds the results of searches.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, NamedTuple

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
_SHARDING = ("shard", "shard_ranks")
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

    def parallel(self) -> dict[str, object]:
        """Keys of [parallel] for this candidate."""
        table: dict[str, object] = {"placement": self.placement, "schedule": self.schedule}
        table |= {key: getattr(self, key) for key in ("ranks", "threads") if getattr(self, key) is not None}
        if self.placement == "chain" or len({spec.dp for _, spec in self.specs}) == 1:
            table["dp"] = self.specs[0][1].dp
        plain = ParallelSpec()
        degrees = () if self.placement == "chain" else (*_DEGREES, "order")
        for name, spec in self.specs:
            keys = {key: getattr(spec, key) for key in degrees if getattr(spec, key) != getattr(plain, key)}
            if "dp" not in table:
                keys["dp"] = spec.dp
            keys |= {key: getattr(spec, key) for key in _SHARDING if getattr(spec, key) != getattr(plain, key)}
            if keys:
                table[name] = keys
        return table

    def train(self) -> dict[str, object]:
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


def fixed_keys(config: Config) -> dict[str, Any]:
    """Keys of [parallel] that the config fixes."""
    search = {"layout", "choose", "max_ranks", "memory"}
    return config.parallel.model_dump(exclude_unset=True, exclude_none=True, exclude=search)


def with_tables(config: Config, parallel: Mapping[str, object], train: Mapping[str, object]) -> Config:
    """The config with these keys of [parallel], added to its own, and of [train]."""
    table = fixed_keys(config)
    for key, value in parallel.items():
        table[key] = {**table.get(key, {}), **value} if isinstance(value, dict) else value
    dump = config.model_dump()
    return Config.model_validate(dump | {"parallel": table, "train": {**dump["train"], **train}})


def refusal(error: ValidationError) -> str:
    """Reason why a config is rejected, in one line."""
    return str(error.errors()[0]["msg"]).removeprefix("Value error, ")


# ---------------------------------------------------------------------- keys fixed in the config


@dataclass(frozen=True)
class Fixed:
    """Keys of [parallel] fixed by the config, with tables of modules; every candidate keeps them."""

    keys: dict[str, Any]

    @classmethod
    def of(cls, config: Config) -> Fixed:
        """Fixed keys in [parallel] of `config`."""
        return cls(fixed_keys(config))

    def with_virtual(self, candidate: Candidate) -> Candidate:
        """The candidate with the fixed virtual stages, which the lists do not have."""
        specs = []
        for name, spec in candidate.specs:
            own = {key: value for key, value in self.keys.get(name, {}).items() if key in ("virtual", "order")}
            specs.append((name, replace(spec, **own) if own and spec.pp > 1 else spec))
        return replace(candidate, specs=tuple(specs))

    def stages_of_encoders(self) -> bool:
        """True if virtual stages are fixed only for encoders."""
        fixed = {name for name, own in self.keys.items() if isinstance(own, dict) and own.get("virtual", 1) > 1}
        return bool(fixed) and LANGUAGE_MODEL not in fixed

    def allows(self, candidate: Candidate) -> bool:
        """True if the candidate matches the fixed keys."""
        keys = self.keys.keys() & {"placement", "schedule", "ranks"}
        if any(self.keys[key] != getattr(candidate, key) for key in keys):
            return False
        dp = {"dp": self.keys["dp"]} if "dp" in self.keys else {}
        for name, spec in candidate.specs:
            own = dp | self.keys.get(name, {})
            keys = own.keys() & {*_DEGREES, "dp", "order", *_SHARDING}
            if any(own[key] != getattr(spec, key) for key in keys):
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
        largest = min(most, max(_MOST_MICROBATCHES * stages, 1))
        numbers = [1 << power for power in range(largest.bit_length())]
        if stages > 1 and stages <= most and stages not in numbers:
            numbers.append(stages)
        return numbers


class Placed(NamedTuple):
    """A placement, the degrees of each module, and the ranks of a replica; see `Candidate`."""

    placement: str
    specs: tuple[ParallelSpec, ...]
    ranks: int | None


def layouts(modules: Sequence[str], world: int, *, few: bool) -> Iterator[Placed]:
    """All layouts of `world` ranks, each once and without shards.

    few: False restricts the list to powers of two and equal encoders.
    """
    *encoders, _ = modules
    for ranks in divisors(world):  # if 1: each replica is one process
        specs = (ParallelSpec(dp=world // ranks),) * len(modules)
        yield Placed("colocated" if ranks == 1 else "chain", specs, ranks)
    if world == 1:
        return
    shapes = {n: list(_shapes(n, few)) for n in range(1, world + 1)}
    if not encoders:
        yield from (Placed("parallel", (spec,), None) for spec in shapes[world])
        return
    for spec in shapes[world]:
        if spec.lane_size == 1 and spec.pp > 1:
            yield Placed("replicated", (*(ParallelSpec(dp=spec.dp),) * len(encoders), spec), None)
    if few:
        yield from (Placed("shared", specs, None) for specs in product(shapes[world], repeat=len(modules)))
    else:
        for own, spec in product(shapes[world], repeat=2):
            yield Placed("shared", (*(own,) * len(encoders), spec), None)
    for here in range(1, world):
        for own, spec in product(shapes[here], shapes[world - here]):
            yield Placed("colocated", (*(own,) * len(encoders), spec), None)
    if len(encoders) == 1:  # a single encoder has no other to share ranks with
        return
    if few:
        splits = [split for split in product(range(1, world), repeat=len(modules)) if sum(split) == world]
    else:
        most = (world - 1) // len(encoders)
        splits = [(*(each,) * len(encoders), world - each * len(encoders)) for each in range(1, most + 1)]
    for split in splits:
        for specs in product(*(shapes[count] for count in split)):
            if few or len(set(specs[:-1])) == 1:
                yield Placed("parallel", specs, None)


def listed(
    modules: Sequence[str], world: int, openings: Openings, *, schedule: str = SCHEDULES[0], few: bool = True
) -> Iterator[Candidate]:
    """All candidates of `world` ranks with one schedule; `with_schedules` makes the variants with other schedules."""
    for placed in layouts(modules, world, few=few):
        sharded: Iterable[tuple[ParallelSpec, ...]]
        if placed.ranks not in (None, 1):
            sharded = [placed.specs]
        elif few:
            sharded = product(*(_sharded(spec, SHARDS) for spec in placed.specs))
        else:  # equal shards for all modules
            sharded = zip(*(_sharded(spec, (*SHARDS[1:], "none")) for spec in placed.specs), strict=True)
        for specs in dict.fromkeys(sharded):
            yield from _cut(modules, placed._replace(specs=specs), openings, schedule)


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


def _cut(modules: Sequence[str], placed: Placed, openings: Openings, schedule: str) -> Iterator[Candidate]:
    """Candidates of a layout with each number of microbatches and checkpointing."""
    placement, specs, ranks = placed
    named = tuple(zip(modules, specs, strict=True))
    stages = specs[-1].pp + max((spec.pp for spec in specs[:-1]), default=0)
    stages = ranks if ranks is not None else specs[-1].pp if placement in ("shared", "replicated") else stages
    for count in openings.counts(specs[-1].dp, stages):
        for checkpointing in openings.checkpointings:
            yield Candidate(placement, named, openings.batch_size, count, schedule, checkpointing, ranks)


def _shapes(ranks: int, few: bool) -> Iterator[ParallelSpec]:
    """All tp * cp * pp * dp = ranks."""
    for tp in divisors(ranks):
        for cp in divisors(ranks // tp):
            for pp in divisors(ranks // tp // cp):
                degrees = (tp, cp, pp, ranks // tp // cp // pp)
                if few or all(each & (each - 1) == 0 for each in degrees[:3]):
                    yield ParallelSpec(*degrees)


def _sharded(spec: ParallelSpec, shards: Sequence[str]) -> list[ParallelSpec]:
    """The degrees with each kind of shard; unsharded for each of them if no rank has the same weights."""
    return [replace(spec, shard=shard if spec.dp * spec.cp > 1 else "none") for shard in shards]


def divisors(number: int) -> list[int]:
    """Divisors of a number, in order."""
    return [each for each in range(1, number + 1) if number % each == 0]
