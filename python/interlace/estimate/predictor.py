"""Predictor: step time of a model under any layout and schedule, from costs measured once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from inspect import signature
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from interlace.costs.links import Links
from interlace.costs.step import Costs
from interlace.estimate.predict import Traffic, duration_array, predict
from interlace.estimate.traced import weights_of
from interlace.layout import Layout
from interlace.run.graph import stage_graph
from interlace.run.lanes import with_lanes
from interlace.run.tables.assign import Method, assigner_of
from interlace.run.tables.batch import GlobalBatch
from interlace.run.tables.dispatch import Balance, dispatcher_of
from interlace.run.tables.sizes import chunk_sizes
from interlace.schedule import Schedule, StageGraph, StepTable
from interlace.simulate import Timeline

if TYPE_CHECKING:
    from interlace.model import MultimodalModel, Sample, SampleOutline

Generator = Callable[..., Schedule]
"""(graph, table, durations=...) -> Schedule, as `interlace.schedule.one_f_one_b`; `durations` is optional."""


@dataclass
class Predictor:
    """A model on ranks connected by `links`. mllm may be on the meta device.

    recompute: whether layers with a backward run their forward twice. sequence_parallel, autocast, assign, balance,
    ranks_per_node: as in `parallelize`; the last three are for `step`, which makes the table.
    """

    mllm: MultimodalModel
    costs: Costs
    links: Links
    recompute: bool = False
    sequence_parallel: bool = True
    autocast: torch.dtype | None = None
    assign: Method = "tokens"
    balance: Balance = "llm"
    ranks_per_node: int | None = None
    _traffic: Traffic | None = field(default=None, init=False, repr=False)

    def graph(self, layout: Layout) -> StageGraph:
        """The stages of a layout. Raises ValueError for one that the model cannot run."""
        graph, _ = with_lanes(stage_graph(self.mllm, layout), self.mllm, sequence_parallel=self.sequence_parallel)
        return graph

    def traffic(self, layout: Layout) -> Traffic:
        """Sizes of messages under a layout; the model is run on shapes only for the first layout."""
        if self._traffic is None:
            self._traffic = Traffic.of(
                self.mllm, layout, sequence_parallel=self.sequence_parallel, autocast=self.autocast
            )
            return self._traffic
        weights = weights_of(self.mllm, layout, sequence_parallel=self.sequence_parallel)
        return replace(self._traffic, weights=weights)

    def schedule(
        self, graph: StageGraph, table: StepTable, samples: Sequence[Sample | SampleOutline], generator: Generator
    ) -> Schedule:
        """The schedule that `generator` makes for a step over `samples`, with predicted durations if it takes them."""
        sizes = chunk_sizes(self.mllm, table, samples)
        seconds = duration_array(graph, table, self.costs, sizes, self.links, recompute=self.recompute)
        known = signature(generator).parameters.values()
        if any(each.name == "durations" or each.kind is each.VAR_KEYWORD for each in known):
            return generator(graph, table, durations=seconds)
        return generator(graph, table)

    def predict(
        self,
        schedule: Schedule,
        samples: Sequence[Sample | SampleOutline],
        *,
        items: NDArray[np.float64] | None = None,
        optimizer: bool = True,
    ) -> Timeline:
        """Start and finish of each action of a schedule for a step over `samples`: see `interlace.estimate.predict`."""
        return predict(
            schedule,
            self.costs,
            chunk_sizes(self.mllm, schedule.table, samples),
            self.links,
            self.traffic(schedule.graph.layout),
            recompute=self.recompute,
            items=items,
            optimizer=optimizer,
        )

    def step(
        self,
        layout: Layout,
        samples: Sequence[Sample | SampleOutline],
        generator: Generator,
        *,
        microbatches: int | None = None,
        chunks: Mapping[str, int] | None = None,
    ) -> Timeline:
        """Predict a step over `samples` for a layout alone: arguments and errors as in `ParallelModel.table`."""
        assigner = assigner_of(self.assign, layout, self.mllm, recompute=self.recompute)
        dispatcher = dispatcher_of(
            self.balance, layout, self.mllm, recompute=self.recompute, ranks_per_node=self.ranks_per_node
        )
        table = GlobalBatch.of(samples, microbatches, chunks).table(layout, assigner, dispatcher)
        return self.predict(self.schedule(self.graph(layout), table, samples, generator), samples)
