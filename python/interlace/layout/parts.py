"""Parts of a layout: lanes, stages, pipelines, and the groups of ranks that sum gradients or hold slices of weights.

A module has dp pipelines (its replicas), and a pipeline has stages (consecutive layers). A stage runs on a lane: the
tp * cp ranks that share its work and run in lock step. A stage may have copies: further lanes that repeat the same
computation (placement "replicated"). The ranks of one lane divide the work; copies are other lanes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True, slots=True)
class Lane:
    """The ranks of one stage, which run in lock step; tensor-parallel ranks are innermost."""

    ranks: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.ranks or len(set(self.ranks)) != len(self.ranks) or min(self.ranks) < 0:
            raise ValueError(f"a lane needs distinct ranks >= 0, got {self.ranks}")

    def __str__(self) -> str:
        return "+".join(map(str, self.ranks))

    def tp_groups(self, tp: int) -> tuple[tuple[int, ...], ...]:
        """Groups of ranks with the same rows: `tp` ranks for each context-parallel place."""
        return tuple(self.ranks[i : i + tp] for i in range(0, len(self.ranks), tp))

    def cp_groups(self, tp: int) -> tuple[tuple[int, ...], ...]:
        """Groups of ranks with the same weights: one group for each of the `tp` tensor-parallel places."""
        return tuple(self.ranks[index::tp] for index in range(tp))

    def indices(self, rank: int, tp: int) -> tuple[int, int]:
        """The tensor- and the context-parallel place of `rank`: indices of its groups in `cp_groups(tp)` and in
        `tp_groups(tp)`. Raises ValueError for a rank that is not in the lane."""
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
        """The ranks of all its lanes."""
        return tuple(rank for lane in self.lanes for rank in lane.ranks)

    def lane_of(self, rank: int) -> Lane:
        """Its lane that contains `rank`. Raises ValueError if no lane does."""
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
        label = f"{self.module}, replica {self.replica}"
        if not self.stages:
            raise ValueError(f"{label} has no stages")
        if any(s.module != self.module or s.index != i for i, s in enumerate(self.stages)):
            listed = ", ".join(map(str, self.stages))
            raise ValueError(f"{label} has the stages {listed}: they must be stages of {self.module}, numbered from 0")
        if any(not s.start < s.stop for s in self.stages):
            raise ValueError(f"{label}: a stage needs at least one layer")
        if self.stages[0].start != 0 or any(a.stop != b.start for a, b in pairwise(self.stages)):
            cuts = ", ".join(f"[{s.start}, {s.stop})" for s in self.stages)
            raise ValueError(f"{label}: stages must cover consecutive layers from 0, got {cuts}")

    @classmethod
    def cut(cls, module: str, replica: int, cuts: Sequence[int], lanes: Iterable[Sequence[Lane]]) -> Pipeline:
        """Stages between consecutive `cuts`. lanes: those of each stage; those after its first are copies."""
        places = enumerate(zip(pairwise(cuts), lanes, strict=True))
        stages = (Stage(module, i, start, stop, own[0], tuple(own[1:])) for i, ((start, stop), own) in places)
        return cls(module, replica, tuple(stages))

    @property
    def num_layers(self) -> int:
        """Layers of the module."""
        return self.stages[-1].stop

    def stage_with(self, layer: int) -> Stage:
        """The stage that holds layer `layer`."""
        return next(stage for stage in self.stages if stage.start <= layer < stage.stop)


@dataclass(frozen=True, slots=True)
class Reduction:
    """Sum of the gradients of layers [start, stop) of `module` over `ranks`.

    tied: index of a group of tied weights in `StageGraph.tied` (-1: the layers' own weights). Only these tied weights
    are summed, over ranks of several stages: after the sums over replicas, or at once if they are `uneven`.
    in_part: True: sums the weights of which each rank of a lane uses only a part, over whole lanes; False: all others.
    """

    module: str
    start: int
    stop: int
    ranks: tuple[int, ...]
    tied: int = -1
    in_part: bool = False


@dataclass(frozen=True, slots=True)
class Shard:
    """The ranks over which the weights of layers [start, stop) of `module` are sharded, a slice for each.

    owners: in the order of their slices. sets: the owners of all sets of slices of these weights, including this one;
    ranks at the same place in their sets own the same slice. full: the ranks keep only their slices of the weights,
    too.
    """

    module: str
    start: int
    stop: int
    owners: tuple[int, ...]
    sets: tuple[tuple[int, ...], ...]
    full: bool

    @property
    def ranks(self) -> tuple[int, ...]:
        """The owners in ascending order."""
        return tuple(sorted(self.owners))

    def replicas(self, rank: int) -> tuple[int, ...]:
        """The ranks of all sets that own the slice of `rank`, in ascending order."""
        index = self.owners.index(rank)
        return tuple(sorted(owners[index] for owners in self.sets))
