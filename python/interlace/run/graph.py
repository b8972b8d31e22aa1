"""What a plan means for a model: its stage graph for the schedule generators, and who holds which parameter."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from interlace.plan import ModuleCosts, ParallelPlan, layer_costs
from interlace.schedule import Op, Stage, StageGraph


def stage_graph(mllm: Any, plan: ParallelPlan) -> StageGraph:
    """Stages of one replica with their edges, and which of them have a backward.

    A stage needs the gradient of its inputs if anything trainable lies strictly before it on any path, across
    modules, and a backward if it needs that or holds something trainable itself. Raises ValueError for a stage split
    over ranks (`ParallelPlan.check_executable`): several ranks of a stage are copies of it here.
    """
    plan.check_executable()
    ranks: dict[str, list[tuple[int, ...]]] = {name: [] for name in mllm.modules_order()}
    trainable: dict[str, list[bool]] = {name: [] for name in ranks}
    layers = {name: [layer.trainable for layer in mllm.layers(name)] for name in ranks}
    for stage in plan.stages:
        ranks[stage.module].append(stage.ranks)
        trainable[stage.module].append(any(layers[stage.module][stage.start : stage.stop]))
    return StageGraph.build(
        ranks,
        mllm.edges(),
        trainable=trainable,
        num_ranks=plan.num_ranks,
        tied=[tied.stages for tied in tied_weights(mllm, plan)],
        replicas=plan.dp,
    )


def forward_only(graph: StageGraph) -> StageGraph:
    """The same graph with nothing to take backward: evaluation."""
    stages = tuple(Stage(s.module, s.index, s.ranks, backward=False, input_grad=False) for s in graph.stages)
    return StageGraph(stages=stages, edges=graph.edges, num_ranks=graph.num_ranks, replicas=graph.replicas)


def stage_durations(
    mllm: Any, plan: ParallelPlan, costs: Mapping[str, ModuleCosts], *, recompute: bool = False
) -> dict[tuple[Op, str, int], float]:
    """Seconds of FORWARD and BACKWARD of every stage, for `simulate`, from measured (or estimated) layer costs."""
    per_layer = layer_costs(costs, mllm.modules_order(), recompute=recompute)
    durations = {}
    for stage in plan.stages:
        cost = costs[stage.module]
        forward = np.bincount(cost.layer, weights=cost.times.forward, minlength=cost.num_layers)
        seconds = float(forward[stage.start : stage.stop].sum())
        both = float(per_layer[stage.module][stage.start : stage.stop].sum())
        durations[Op.FORWARD, stage.module, stage.index] = seconds
        durations[Op.BACKWARD, stage.module, stage.index] = max(both - seconds, 0.0)
    return durations


@dataclass(frozen=True)
class Tied:
    """One trainable weight that lives under several names in several stages, on several ranks of a replica."""

    names: tuple[str, ...]
    stages: tuple[tuple[str, int], ...]
    ranks: tuple[int, ...]  # local


def tied_weights(mllm: Any, plan: ParallelPlan) -> list[Tied]:
    """The weights whose gradients several ranks of a replica add up, in the order in which they do it."""
    parameters = dict(mllm.named_parameters(remove_duplicate=False))
    found = []
    for names in mllm.tied_parameters():
        if not parameters[names[0]].requires_grad:
            continue
        holders = []
        for stage in plan.stages:
            part = mllm.slice(stage.module, stage.start, stage.stop)
            if any(name in names for name, _ in part.named_parameters(remove_duplicate=False)):
                holders.append(stage)
        ranks = tuple(sorted({rank for stage in holders for rank in stage.ranks}))
        if len(holders) > 1 and len(ranks) > 1:
            found.append(Tied(tuple(names), tuple((s.module, s.index) for s in holders), ranks))
    return found


class ParameterMap:
    """Which ranks hold which parameters, known to every rank without holding them.

    ``owner[name]`` is the one global rank that counts the parameter (norms), ``tied`` the weights whose gradients
    several ranks of a replica add up, ``stage_ranks`` the global ranks that run a stage in any replica.
    """

    def __init__(self, mllm: Any, plan: ParallelPlan):
        self.plan = plan
        groups = [tuple(names) for names in mllm.tied_parameters()]
        weight = {name: names for names in groups for name in names}  # name -> all names of the same weight
        holders: dict[str, list[int]] = {}
        for stage in plan.stages:
            part = mllm.slice(stage.module, stage.start, stage.stop)
            for name, _ in part.named_parameters(remove_duplicate=False):
                for alias in weight.get(name, (name,)):
                    holders.setdefault(alias, []).extend(stage.ranks)
        self.owner = {name: min(ranks) for name, ranks in holders.items()}
        self.tied = tied_weights(mllm, plan)

    def stage_ranks(self, module: str, index: int) -> list[int]:
        """Global ranks that hold this stage, over copies and replicas."""
        ranks = next(s.ranks for s in self.plan.stages if (s.module, s.index) == (module, index))
        return [replica * self.plan.num_ranks + rank for replica in range(self.plan.dp) for rank in ranks]

    def groups(self) -> list[list[int]]:
        """Every set of global ranks that reduces something together."""
        groups = [self.stage_ranks(stage.module, stage.index) for stage in self.plan.stages]
        for tied in self.tied:
            groups += [[replica * self.plan.num_ranks + r for r in tied.ranks] for replica in range(self.plan.dp)]
        return [*groups, list(range(self.plan.world_size))]
