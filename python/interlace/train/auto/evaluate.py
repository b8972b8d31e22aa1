"""Simulation of a candidate: its real layout, tables of real batches, lists, memory per rank and seconds of a step."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from pydantic import ValidationError

from interlace.costs.links import Links
from interlace.estimate.predict import Traffic, predict
from interlace.estimate.traced import weights_of
from interlace.layout import Layout
from interlace.model.naming import LANGUAGE_MODEL
from interlace.plan.memory import Activations, StateSize
from interlace.run.graph import check_read, stage_graph
from interlace.run.lanes import check_stages, with_lanes
from interlace.run.tables.batch import GlobalBatch
from interlace.run.tables.sizes import chunk_sizes
from interlace.schedule import Op, Schedule, generator_of, splits_backward
from interlace.schedule.actions import COMPUTE
from interlace.train.auto.candidates import Candidate, applied, refusal
from interlace.train.auto.machine import Machine
from interlace.train.auto.work import Work
from interlace.train.config.load import ConfigError
from interlace.train.config.sections import Config
from interlace.train.models.build import build_layout
from interlace.train.models.tuning import check_degrees, rates
from interlace.train.optim import state_sizes
from interlace.train.scheduling import (
    activations_of_config,
    held_by_ranks,
    loads_of,
    samples_to_ranks,
    schedule_options,
)

if TYPE_CHECKING:
    from interlace.estimate.traced import WeightSize
    from interlace.model import MultimodalModel
    from interlace.simulate import Timeline

MEMORY = "memory"


class Refused(Exception):
    """An impossible candidate. reason: category for counting. text: details. short: bytes that a rank lacks."""

    def __init__(self, reason: str, text: str, short: float = 0.0) -> None:
        super().__init__(text)
        self.reason, self.short = reason, short


@dataclass(frozen=True)
class Outcome:
    """A simulated candidate.

    compute, communication, bubble: parts of the seconds of a step, averaged over ranks. compute includes the
    optimizer's step. communication: extra time compared with free links. peak: bytes on the fullest rank; limit: bytes
    that it may hold.
    """

    candidate: Candidate
    seconds: float
    compute: float
    communication: float
    bubble: float
    peak: int
    limit: float


class Evaluator:
    """Simulates candidates of one config and model (which may be on the meta device)."""

    def __init__(self, config: Config, model: MultimodalModel, work: Work, machine: Machine) -> None:
        self.config, self.model, self.work, self.machine = config, model, work, machine
        self._weights: dict[tuple[object, ...], list[WeightSize]] = {}
        self._activations: dict[tuple[object, ...], Activations] = {}

    @cached_property
    def _state(self) -> dict[str, StateSize]:
        return state_sizes(self.config, self.model, rates(self.config, self.model))

    def simulate(self, candidate: Candidate) -> Outcome:
        """Simulates a candidate. Raises Refused."""
        config = self._applied(candidate)
        rows, recompute = config.parallel.sequence_parallel, config.train.recompute
        try:
            layout = build_layout(config, self.model, source="auto")
            check_stages(self.model, layout)
            traffic, activations = self._traffic(config, layout)
            graph, _ = with_lanes(stage_graph(self.model, layout), self.model, sequence_parallel=rows)
            assigner, dispatcher = samples_to_ranks(config, layout, self.model)
        except (ValueError, ConfigError) as error:
            raise Refused("the model cannot be cut so", _message(error)) from None
        seconds, free, compute, peak, limit = 0.0, 0.0, 0.0, 0, self.machine.memory(candidate.world)
        costs = self.machine.costs_of(candidate.world, candidate.threads)
        links = self.machine.links(candidate.world)
        free_links = Links(ranks_per_process=links.ranks_per_process, ranks_per_host=links.ranks_per_host)
        for batch in self.work.batches:
            given = GlobalBatch.of(batch, None if config.data.pack else candidate.microbatches, config.chunks())
            try:
                table = given.table(layout, assigner, dispatcher)
                check_read(graph, table)
                sizes = chunk_sizes(self.model, table, given.samples)
                options = schedule_options(config, self.model, layout, candidate.microbatches)  # as in a run
                if assigner is not None:
                    options |= assigner.options(table)
                schedule: Schedule = generator_of(candidate.schedule)(graph, table, **options)
                loads = loads_of(table, sizes)
                held = held_by_ranks(config, self.model, schedule, traffic.weights, activations, loads, self._state)
                if held.peak > limit:
                    short, fullest = held.peak - limit, max(held.memory, key=lambda each: each.peak_run)
                    raise Refused(MEMORY, f"rank {fullest.rank} lacks {short / 2**30:,.2f} GiB", short)
                timeline = predict(schedule, costs, sizes, links, traffic, recompute=recompute)
                ideal = predict(schedule, costs, sizes, free_links, traffic, recompute=recompute)
            except ValueError as error:
                raise Refused("a step cannot be made so", _message(error)) from None
            peak = max(peak, held.peak)
            seconds, free, compute = seconds + timeline.makespan, free + ideal.makespan, compute + _computing(ideal)
        count = len(self.work.batches)
        seconds, free, compute = seconds / count, min(free, seconds) / count, compute / count
        return Outcome(candidate, seconds, compute, seconds - free, max(free - compute, 0.0), peak, limit)

    def _applied(self, candidate: Candidate) -> Config:
        try:
            config = applied(self.config, candidate)
        except ValidationError as error:
            raise Refused("degrees, placement and batch do not fit", refusal(error)) from None
        try:
            check_degrees(config, self.model, source="auto")
        except ConfigError as error:
            raise Refused("[train] cannot train it so", _message(error)) from None
        return config

    def _traffic(self, config: Config, layout: Layout) -> tuple[Traffic, dict[str, Activations]]:
        lanes = tuple((layout.spec(name).tp, layout.spec(name).cp > 1) for name in layout.modules)
        rows = config.parallel.sequence_parallel
        if lanes not in self._weights:
            self._weights[lanes] = weights_of(self.model, layout, sequence_parallel=rows)
        checkpointing = config.train.activation_checkpointing
        split = splits_backward(config.parallel.schedule)
        keys = {name: (name, lane, checkpointing, split) for name, lane in zip(layout.modules, lanes, strict=True)}
        if not self._activations.keys() >= set(keys.values()):
            made = activations_of_config(config, self.model, layout)  # slow
            self._activations.update({keys[name]: each for name, each in made.items()})
        kept = {name: self._activations[key] for name, key in keys.items()}
        edges = {name: each.edges for name, each in kept.items()}
        return Traffic(edges, kept[LANGUAGE_MODEL].feature, self._weights[lanes]), kept


def _message(error: Exception) -> str:
    return str(error).removeprefix("auto: ").removeprefix("[parallel]: ")


def _computing(timeline: Timeline) -> float:
    """Seconds of compute and optimizer, averaged over ranks."""
    kinds = {*COMPUTE, Op.OPTIMIZER_STEP}
    total = sum(each.finish - each.start for each in timeline.records() if each.action.op in kinds)
    return float(total / timeline.num_ranks)
