"""A step of modules with given layer costs, on a layout, under 1F1B: the simulation behind the papers' tables.

One rank represents a lane: its tensor- and context-parallel GPUs compute in lock step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from interlace.layout import Layout, ParallelSpec
from interlace.plan import ModuleCosts
from interlace.run.graph import stage_durations
from interlace.run.tables.table import nominal_table
from interlace.schedule import StageGraph, one_f_one_b
from interlace.simulate import Timeline, simulate

LANGUAGE_MODEL = "language_model"


@dataclass(frozen=True)
class Modules:
    """Replaces a model for layouts and graphs if there are only costs: module names, and which module feeds which."""

    costs: Mapping[str, ModuleCosts]

    def modules_order(self) -> list[str]:
        """Encoders, then the language model, in the order of `costs`."""
        return list(self.costs)

    def edges(self) -> tuple[tuple[str, str], ...]:
        return tuple((name, LANGUAGE_MODEL) for name in self.costs if name != LANGUAGE_MODEL)


def layout_of(
    costs: Mapping[str, ModuleCosts],
    stages: Mapping[str, int],
    placement: str,
    *,
    frozen_aware: bool = True,
    recompute: bool = False,
) -> Layout:
    """Modules cut into the given numbers of stages; costs: the language model last."""
    specs = {name: ParallelSpec(pp=count) for name, count in stages.items()}
    return Layout.from_specs(
        Modules(costs), specs, placement=placement, costs=costs, frozen_aware=frozen_aware, recompute=recompute
    )


def play(costs: Mapping[str, ModuleCosts], layout: Layout, microbatches: int, *, recompute: bool = False) -> Timeline:
    """The step of `layout` under 1F1B with microbatches of equal cost; transfers are free."""
    model = Modules(costs)
    trainable = {}
    for name, cost in costs.items():
        trained = set(cost.layer[cost.trainable].tolist())
        trainable[name] = tuple(layer in trained for layer in range(cost.num_layers))
    graph = StageGraph(layout, model.edges(), trainable)
    table = nominal_table(layout, microbatches)
    durations = stage_durations(model, layout, costs, recompute=recompute)
    return simulate(one_f_one_b(graph, table, durations=durations), durations)
