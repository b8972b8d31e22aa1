"""Layout: the ranks of every stage of every replica of each module. Other code does no arithmetic on rank numbers.

Layers that the same stages hold form one reduction, so replicas with different cuts need no special case. Ranks of a
lane at different tensor-parallel places hold different weights, which are summed separately. Ranks at different
context-parallel places hold the same weights, which are summed together. Some weights are whole on each rank of a lane,
but each rank uses them only on its own rows or heads (norms, with sequence parallelism). Their gradients are summed
over all ranks of all lanes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from interlace.costs.modules import ModuleCosts, analytic_costs, layer_costs
from interlace.layout import place
from interlace.layout.parts import Lane, Pipeline, Reduction, Shard, Stage
from interlace.layout.spec import ParallelSpec

if TYPE_CHECKING:
    from interlace.model import MultimodalModel


@dataclass(frozen=True)
class Layout:
    """Placement of every stage of every replica of every module.

    modules: name -> (its degrees, its pipelines, replica 0 first), in the order of data flow, the language model last.
    world: total number of ranks. placement: name of the method that made it ("parallel", "colocated", "shared",
        "replicated", "chain", or "custom").

    Raises ValueError, with the module's name, for parts that do not fit together.
    """

    modules: Mapping[str, tuple[ParallelSpec, tuple[Pipeline, ...]]]
    world: int
    placement: str = "custom"
    _lanes: dict[Lane, int] = field(init=False, repr=False, compare=False, default_factory=dict)

    def __post_init__(self) -> None:
        if not self.modules or self.world < 1:
            raise ValueError("a layout needs at least one module and one rank")
        idle = set(range(self.world))
        for name, (spec, pipelines) in self.modules.items():
            if len(pipelines) != spec.dp:
                raise ValueError(f"{name} has dp = {spec.dp}, but {len(pipelines)} pipelines: give one per replica")
            if len({pipeline.num_layers for pipeline in pipelines}) > 1:
                raise ValueError(f"the replicas of {name} have different numbers of layers: give all of them the same")
            replica_of: dict[int, int] = {}
            for replica, pipeline in enumerate(pipelines):
                if (pipeline.module, pipeline.replica) != (name, replica):
                    raise ValueError(
                        f"pipeline {replica} of {name} is labelled {pipeline.module}, replica {pipeline.replica}"
                    )
                for stage in pipeline.stages:
                    if stage.copies and len(pipeline.stages) > 1:
                        raise ValueError(f"{stage} has copies: use one stage for a module with copies")
                    if len(set(stage.ranks)) < len(stage.ranks):
                        raise ValueError(f"{stage} has several copies on one rank: use separate ranks for all copies")
                    for lane in stage.lanes:
                        self._check_lane(stage, lane, spec)
                        self._lanes.setdefault(lane, len(self._lanes))
                        idle.difference_update(lane.ranks)
                        for rank in lane.ranks:
                            if replica_of.setdefault(rank, replica) != replica:
                                raise ValueError(
                                    f"rank {rank} has stages of replicas {replica_of[rank]} and {replica} of {name}: "
                                    "use one replica of a module per rank"
                                )
        if idle:
            raise ValueError(f"rank {min(idle)} of {self.world} has no stage: every rank needs one")
        self.shard_groups()

    def _check_lane(self, stage: Stage, lane: Lane, spec: ParallelSpec) -> None:
        if len(lane.ranks) != spec.lane_size:
            raise ValueError(
                f"{stage} is on ranks {lane}, but tp = {spec.tp} and cp = {spec.cp} need lanes of {spec.lane_size}"
            )
        if max(lane.ranks) >= self.world:
            raise ValueError(f"{stage} is on rank {max(lane.ranks)}, but ranks go from 0 to {self.world - 1}")

    # -- stages and lanes ------------------------------------------------------------------------------------

    def spec(self, module: str) -> ParallelSpec:
        """The degrees of `module`."""
        return self.modules[module][0]

    def pipelines(self, module: str | None = None) -> tuple[Pipeline, ...]:
        """The replicas of `module`; None: of all modules, in their order."""
        if module is not None:
            return self.modules[module][1]
        return tuple(pipeline for _, pipelines in self.modules.values() for pipeline in pipelines)

    def stages(self) -> tuple[Stage, ...]:
        """The stages of all pipelines, in their order."""
        return tuple(stage for pipeline in self.pipelines() for stage in pipeline.stages)

    def of_rank(self, rank: int) -> tuple[Stage, ...]:
        """The stages of `rank`, in the order of data flow."""
        return self._of_rank.get(rank, ())

    @cached_property
    def _of_rank(self) -> dict[int, tuple[Stage, ...]]:
        by_rank: dict[int, list[Stage]] = {}
        for stage in self.stages():
            for rank in stage.ranks:
                by_rank.setdefault(rank, []).append(stage)
        return {rank: tuple(stages) for rank, stages in by_rank.items()}

    def replica(self, rank: int, module: str) -> int | None:
        """The replica of `module` that `rank` belongs to; None if it holds nothing of it."""
        self.spec(module)  # raises KeyError for a module that the layout does not have
        return self._replicas.get((rank, module))

    @cached_property
    def _replicas(self) -> dict[tuple[int, str], int]:
        return {
            (rank, pipeline.module): pipeline.replica
            for pipeline in self.pipelines()
            for stage in pipeline.stages
            for rank in stage.ranks
        }

    def lanes(self) -> tuple[Lane, ...]:
        """All lanes; an index into this tuple is the `peer` of an action."""
        return self._all_lanes

    @cached_property
    def _all_lanes(self) -> tuple[Lane, ...]:
        return tuple(self._lanes)

    def lane_number(self, lane: Lane) -> int:
        """The index of `lane` in `lanes()`."""
        return self._lanes[lane]

    def holders(self, module: str, layer: int) -> tuple[Lane, ...]:
        """The lanes that hold layer `layer` of `module`: for each replica its own lane, then those of its copies."""
        return tuple(lane for pipeline in self.pipelines(module) for lane in pipeline.stage_with(layer).lanes)

    def same_weights(self, module: str, layer: int) -> tuple[tuple[int, ...], ...]:
        """For each tensor-parallel place of `module`: ranks that hold the same weights of `layer`, lane by lane."""
        tp = self.spec(module).tp
        groups = zip(*(lane.cp_groups(tp) for lane in self.holders(module, layer)), strict=True)
        return tuple(tuple(rank for group in same_index for rank in group) for same_index in groups)

    # -- groups of ranks -------------------------------------------------------------------------------------

    def group(self, rank: int, module: str, kind: str) -> tuple[int, ...]:
        """The ranks of the "tp", "cp", "dp" or "shard" group of `rank` for its first stage of `module`.

        "dp": the ranks with the same place in their lane over replicas and copies. "shard": the ranks that share one
        set of slices of its weights; only the rank itself if nothing is sharded. Raises ValueError if the rank holds
        nothing of the module.
        """
        spec = self.spec(module)
        stage = next((stage for stage in self.of_rank(rank) if stage.module == module), None)
        if stage is None:
            raise ValueError(f"rank {rank} has no stage of {module}")
        lane = stage.lane_of(rank)
        tensor, context = lane.indices(rank, spec.tp)
        if kind == "tp":
            return lane.tp_groups(spec.tp)[context]
        if kind == "cp":
            return lane.cp_groups(spec.tp)[tensor]
        if kind == "shard":
            own_shards = (
                g for g in self.shard_groups() if (g.module, g.start) == (module, stage.start) and rank in g.owners
            )
            return next((group.ranks for group in own_shards), (rank,))
        if kind == "dp":
            index = lane.ranks.index(rank)
            return tuple(sorted({holder.ranks[index] for holder in self.holders(module, stage.start)}))
        raise ValueError(f'kind is {kind!r}: use "tp", "cp", "dp" or "shard"')

    def reduce_groups(self, in_part: Collection[str] = ()) -> tuple[Reduction, ...]:
        """The reductions over more than one rank, modules and layers in order.

        in_part: the modules with weights of which each rank of a lane uses only a part.
        """
        reductions = []
        for module in self.modules:
            for start, stop in self._ranges(module):
                holders = self.same_weights(module, start)
                reductions += [Reduction(module, start, stop, tuple(sorted(set(ranks)))) for ranks in holders]
                if module in in_part:
                    reductions.append(Reduction(module, start, stop, tuple(sorted(set(chain(*holders)))), in_part=True))
        return tuple(reduction for reduction in reductions if len(reduction.ranks) > 1)

    def shard_groups(self) -> tuple[Shard, ...]:
        """The sharded weights and the ranks that keep their slices, modules and layers in order.

        Ranks of a set are in the order of the replicas, those of one lane together. So the ranks of a replica have the
        same places in the sets of all its stages, and a weight that is tied across stages has the same slices on all.

        Raises ValueError if the ranks that hold a module do not divide into sets of `shard_ranks`.
        """
        return self._shard_groups

    @cached_property
    def _shard_groups(self) -> tuple[Shard, ...]:
        shards = []
        for module, (spec, _) in self.modules.items():
            for start, stop in self._ranges(module) if spec.shard != "none" else ():
                for ranks in self.same_weights(module, start):
                    size = spec.shard_ranks or len(ranks)
                    if len(ranks) % size:
                        raise ValueError(
                            f"{module} has shard_ranks = {size}, but {len(ranks)} ranks hold the same weights of it: "
                            "use a divisor of that number, or leave shard_ranks out for all"
                        )
                    sets = tuple(ranks[i : i + size] for i in range(0, len(ranks), size))
                    if size > 1:
                        shards += [Shard(module, start, stop, owners, sets, spec.shard == "full") for owners in sets]
        return tuple(shards)

    def _ranges(self, module: str) -> list[tuple[int, int]]:
        """Ranges of a module's layers, cut at every cut of its pipelines: the same stages hold all of a range."""
        pipelines = self.pipelines(module)
        cuts = sorted({stage.start for pipeline in pipelines for stage in pipeline.stages})
        return list(zip(cuts, [*cuts[1:], pipelines[0].num_layers], strict=True))

    def uneven(self, module: str, layers: Collection[int]) -> bool:
        """Whether layers of `module` that share a weight are grouped into stages or lanes differently in some replicas.
        A rank has one gradient for all of these layers that it holds."""
        distinct, arrangements = sorted(set(layers)), set()
        if len(distinct) < 2:
            return False
        for pipeline in self.pipelines(module):
            stages = [pipeline.stage_with(layer) for layer in distinct]
            lanes = [stage.lane for stage in stages]
            arrangements.add((tuple(map(stages.index, stages)), tuple(map(lanes.index, lanes))))
        return len(arrangements) > 1

    @cached_property
    def data_parallel(self) -> dict[str, int]:
        """Module -> number of its replicas."""
        return {name: spec.dp for name, (spec, _) in self.modules.items()}

    # -- construction ----------------------------------------------------------------------------------------

    @classmethod
    def from_specs(
        cls,
        mllm: MultimodalModel,
        specs: Mapping[str, ParallelSpec],
        *,
        placement: str = "parallel",
        costs: Mapping[str, ModuleCosts] | None = None,
        ranks: int | None = None,
        frozen_aware: bool = True,
        recompute: bool = False,
    ) -> Layout:
        """Cut every module into `specs[module].pp` stages and place them: see `interlace.layout.place.from_specs`.

        costs: of the layers (default: counted). frozen_aware, recompute: see `interlace.costs.modules.layer_costs`.
        """
        per_layer = _per_layer(mllm, costs, frozen_aware, recompute)
        return cls(*place.from_specs(per_layer, specs, placement, ranks))

    @classmethod
    def balanced(
        cls,
        mllm: MultimodalModel,
        ranks: int,
        *,
        costs: Mapping[str, ModuleCosts] | None = None,
        frozen_aware: bool = True,
        recompute: bool = False,
        dp: int = 1,
    ) -> Layout:
        """Cut the chain of all layers into `ranks` balanced ranges: see `interlace.layout.place.balanced`.

        frozen_aware=False balances 3 x forward instead, as LLM pipelines do; both give layouts of the same kind, so
        their iteration times are comparable. costs, recompute: as in `from_specs`.
        """
        return cls(*place.balanced(_per_layer(mllm, costs, frozen_aware, recompute), ranks, dp=dp))

    def describe(self) -> str:
        """One line per rank with its layers."""
        held = [[f"{s.module}[{s.start}:{s.stop}]" for s in self.of_rank(rank)] for rank in range(self.world)]
        return "\n".join(f"rank {rank}: {', '.join(names)}" for rank, names in enumerate(held))


def _per_layer(
    mllm: MultimodalModel, costs: Mapping[str, ModuleCosts] | None, frozen_aware: bool, recompute: bool
) -> dict[str, NDArray[np.float64]]:
    """Module -> the costs by which its layers are cut; modules in the order of data flow."""
    costs = analytic_costs(mllm) if costs is None else costs
    return layer_costs(costs, list(mllm.modules_order()), frozen_aware=frozen_aware, recompute=recompute)
