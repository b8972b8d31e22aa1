"""Lane, Stage, Pipeline and Layout: where everything is. Nobody computes with rank numbers; they ask the layout.

A module has dp pipelines (its replicas), a pipeline has stages (consecutive layers), a stage runs on a lane: the
tp * cp ranks that share its work and go in lock step. A stage may have copies: further lanes that compute the same once
more (placement "replicated"). Shards are the ranks of one lane, copies are other lanes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from interlace.layout.spec import ParallelSpec

if TYPE_CHECKING:
    from interlace.layout.reductions import Reduction, Shard


@dataclass(frozen=True, slots=True)
class Lane:
    """The ranks of one stage, in lock step; tensor-parallel ranks are innermost."""

    ranks: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.ranks or len(set(self.ranks)) != len(self.ranks) or min(self.ranks) < 0:
            raise ValueError(f"a lane names each of its ranks once, from 0 upwards; got {self.ranks}")

    def __str__(self) -> str:
        return "+".join(map(str, self.ranks))

    def tp_groups(self, tp: int) -> tuple[tuple[int, ...], ...]:
        """The ranks that have the same rows: a group of `tp` for each context-parallel place."""
        return tuple(self.ranks[i : i + tp] for i in range(0, len(self.ranks), tp))

    def cp_groups(self, tp: int) -> tuple[tuple[int, ...], ...]:
        """The ranks that have the same weights: a group for each of the `tp` tensor-parallel places."""
        return tuple(self.ranks[place::tp] for place in range(tp))

    def places(self, rank: int, tp: int) -> tuple[int, int]:
        """The tensor- and the context-parallel place of `rank`: its groups are `cp_groups(tp)` of the first and
        `tp_groups(tp)` of the second. Raises ValueError for a rank that is not in the lane."""
        context, tensor = divmod(self.ranks.index(rank), tp)
        return tensor, context


@dataclass(frozen=True, slots=True)
class Stage:
    """Layers [start, stop) of `module` as stage `index` of one of its pipelines, on `lane`; `copies`: see above."""

    module: str
    index: int
    start: int
    stop: int
    lane: Lane
    copies: tuple[Lane, ...] = ()

    @property
    def lanes(self) -> tuple[Lane, ...]:
        """The lane, then those of the copies."""
        return (self.lane, *self.copies)

    @property
    def ranks(self) -> tuple[int, ...]:
        """Those of all its lanes."""
        return tuple(rank for lane in self.lanes for rank in lane.ranks)

    def lane_of(self, rank: int) -> Lane:
        """The one of its lanes that `rank` is in. Raises ValueError where that is none."""
        for lane in self.lanes:
            if rank in lane.ranks:
                return lane
        raise ValueError(f"{self} is on ranks {', '.join(map(str, self.ranks))}, not on rank {rank}")

    def __str__(self) -> str:
        return f"{self.module}/{self.index}"


@dataclass(frozen=True, slots=True)
class Pipeline:
    """One replica of a module, cut into stages. Cuts may differ from replica to replica."""

    module: str
    replica: int
    stages: tuple[Stage, ...]

    def __post_init__(self) -> None:
        where = f"{self.module}, replica {self.replica}"
        if not self.stages:
            raise ValueError(f"{where} has no stages")
        if any(s.module != self.module or s.index != i for i, s in enumerate(self.stages)):
            found = ", ".join(map(str, self.stages))
            raise ValueError(f"{where} has the stages {found}; number its own from 0 in the order of layers")
        if any(not s.start < s.stop for s in self.stages):
            raise ValueError(f"{where}: a stage needs at least one layer")
        if self.stages[0].start != 0 or any(a.stop != b.start for a, b in pairwise(self.stages)):
            cuts = ", ".join(f"[{s.start}, {s.stop})" for s in self.stages)
            raise ValueError(f"{where}: stages must follow each other from layer 0 on, got {cuts}")

    @property
    def num_layers(self) -> int:
        """Layers of the module."""
        return self.stages[-1].stop


@dataclass(frozen=True)
class Layout:
    """Where every stage of every replica of every module runs.

    modules: name -> (its degrees, its pipelines, replica 0 first), in the order in which data takes them, the language
        model last. world: ranks in all. placement: how it was made ("parallel", "colocated", "shared", "replicated",
        "chain", or "custom").

    Raises ValueError, naming the module, for parts that do not fit together.
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
                raise ValueError(f"{name} has dp = {spec.dp} but {len(pipelines)} pipelines: give one per replica")
            if len({pipeline.num_layers for pipeline in pipelines}) > 1:
                raise ValueError(f"the replicas of {name} have different numbers of layers")
            home: dict[int, int] = {}
            for replica, pipeline in enumerate(pipelines):
                if (pipeline.module, pipeline.replica) != (name, replica):
                    raise ValueError(f"pipeline {replica} of {name} says {pipeline.module}, {pipeline.replica}")
                for stage in pipeline.stages:
                    if stage.copies and len(pipeline.stages) > 1:
                        raise ValueError(f"{stage} has copies: a module with copies is one stage")
                    if len(set(stage.ranks)) < len(stage.ranks):
                        raise ValueError(
                            f"{stage} has copies on ranks that it shares: give every copy ranks of its own"
                        )
                    for lane in stage.lanes:
                        self._check_lane(stage, lane, spec)
                        self._lanes.setdefault(lane, len(self._lanes))
                        idle.difference_update(lane.ranks)
                        for rank in lane.ranks:
                            if home.setdefault(rank, replica) != replica:
                                raise ValueError(
                                    f"rank {rank} has parts of replicas {home[rank]} and {replica} of {name}: a rank "
                                    "works for one replica of a module"
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

    # -- what is where ---------------------------------------------------------------------------------------

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
        """The stages that `rank` takes part in, in the order in which data takes them."""
        return self._of_rank.get(rank, ())

    @cached_property
    def _of_rank(self) -> dict[int, tuple[Stage, ...]]:
        found: dict[int, list[Stage]] = {}
        for stage in self.stages():
            for rank in stage.ranks:
                found.setdefault(rank, []).append(stage)
        return {rank: tuple(stages) for rank, stages in found.items()}

    def replica(self, rank: int, module: str) -> int | None:
        """The replica of `module` that `rank` works for; None if it holds nothing of it."""
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
        """All lanes; their places here are the numbers that actions name as `peer`."""
        return self._all_lanes

    @cached_property
    def _all_lanes(self) -> tuple[Lane, ...]:
        return tuple(self._lanes)

    def lane_number(self, lane: Lane) -> int:
        """The place of `lane` in `lanes()`."""
        return self._lanes[lane]

    def holders(self, module: str, layer: int) -> tuple[Lane, ...]:
        """The lanes that hold layer `layer` of `module`: of each replica its own, then its copies."""
        return tuple(
            lane
            for pipeline in self.pipelines(module)
            for stage in pipeline.stages
            if stage.start <= layer < stage.stop
            for lane in stage.lanes
        )

    def same_weights(self, module: str, layer: int) -> tuple[tuple[int, ...], ...]:
        """For each tensor-parallel place of `module` the ranks that hold the same of layer `layer`, lane by lane."""
        tp = self.spec(module).tp
        groups = zip(*(lane.cp_groups(tp) for lane in self.holders(module, layer)), strict=True)
        return tuple(tuple(rank for group in each for rank in group) for each in groups)

    # -- who talks to whom -----------------------------------------------------------------------------------

    def group(self, rank: int, module: str, kind: str) -> tuple[int, ...]:
        """The ranks of the "tp", "cp", "dp" or "shard" group of `rank` for its first stage of `module`.

        "dp": the ranks with the same place in their lane over replicas and copies. "shard": those that share one set of
        slices of what it holds; itself alone where nothing is sharded. Raises ValueError where the rank holds nothing
        of the module.
        """
        spec = self.spec(module)
        stage = next((stage for stage in self.of_rank(rank) if stage.module == module), None)
        if stage is None:
            raise ValueError(f"rank {rank} holds nothing of {module}")
        lane = stage.lane_of(rank)
        tensor, context = lane.places(rank, spec.tp)
        if kind == "tp":
            return lane.tp_groups(spec.tp)[context]
        if kind == "cp":
            return lane.cp_groups(spec.tp)[tensor]
        if kind == "shard":
            mine = (g for g in self.shard_groups() if (g.module, g.start) == (module, stage.start) and rank in g.owners)
            return next((group.ranks for group in mine), (rank,))
        if kind == "dp":
            place = lane.ranks.index(rank)
            return tuple(sorted({other.ranks[place] for other in self.holders(module, stage.start)}))
        raise ValueError(f'kind is {kind!r}: one of "tp", "cp", "dp", "shard"')

    def reduce_groups(self, in_part: Collection[str] = ()) -> tuple[Reduction, ...]:
        """Which ranks sum the gradients of which layers: see `interlace.layout.reductions`."""
        from interlace.layout.reductions import reduce_groups

        return reduce_groups(self, in_part)

    def shard_groups(self) -> tuple[Shard, ...]:
        """Which ranks keep slices of which layers: see `interlace.layout.reductions`."""
        return self._shard_groups

    @cached_property
    def _shard_groups(self) -> tuple[Shard, ...]:
        from interlace.layout.reductions import shard_groups

        return shard_groups(self)

    @cached_property
    def data_parallel(self) -> dict[str, int]:
        """Module -> number of its replicas."""
        return {name: spec.dp for name, (spec, _) in self.modules.items()}

    # -- how it is made --------------------------------------------------------------------------------------

    @classmethod
    def from_specs(
        cls,
        mllm: Any,
        specs: Mapping[str, ParallelSpec],
        *,
        placement: str = "parallel",
        costs: Mapping[str, Any] | None = None,
        ranks: int | None = None,
        frozen_aware: bool = True,
        recompute: bool = False,
    ) -> Layout:
        """Cut every module into `specs[module].pp` stages and place them: see `interlace.plan.place.from_specs`."""
        from interlace.plan import place  # costs and cuts are plan's; a layout is only what comes of them

        return place.from_specs(
            mllm, specs, placement=placement, costs=costs, ranks=ranks, frozen_aware=frozen_aware, recompute=recompute
        )

    @classmethod
    def balanced(
        cls,
        mllm: Any,
        ranks: int,
        *,
        costs: Mapping[str, Any] | None = None,
        frozen_aware: bool = True,
        recompute: bool = False,
        dp: int = 1,
    ) -> Layout:
        """Cut the chain of all layers into `ranks` balanced ranges: see `interlace.plan.place.balanced`."""
        from interlace.plan import place

        return place.balanced(mllm, ranks, costs=costs, frozen_aware=frozen_aware, recompute=recompute, dp=dp)

    def describe(self) -> str:
        """One line per rank: what it holds."""
        return "\n".join(f"rank {rank}: {_names(self.of_rank(rank))}" for rank in range(self.world))


def _names(stages: Sequence[Stage]) -> str:
    return ", ".join(f"{stage.module}[{stage.start}:{stage.stop}]" for stage in stages)
