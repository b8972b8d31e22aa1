"""Who sums which gradients, and who keeps which slice of what is sharded: the ranks that hold the same weights.

Layers that the same stages hold form one reduction, so that replicas with different cuts need no rule of their own. The
ranks of a lane at different tensor-parallel places hold different weights and sum apart; those at different context-
parallel places hold the same ones and sum together. Weights that each rank of a lane holds, but uses on its own rows or
heads only (norms, with sequence parallelism), are summed over all ranks of all lanes.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from itertools import chain

from interlace.layout.layout import Layout


@dataclass(frozen=True, slots=True)
class Reduction:
    """The gradients of layers [start, stop) of `module` are summed over `ranks`.

    tied: the place of a group of tied weights in `StageGraph.tied`, where these alone are summed over ranks of several
    stages (-1: the layers' own weights): after the sums over replicas, or, where they are `uneven`, at once.
    in_part: of the weights that the ranks of a lane use in part each, over whole lanes; otherwise of all others.
    """

    module: str
    start: int
    stop: int
    ranks: tuple[int, ...]
    tied: int = -1
    in_part: bool = False


@dataclass(frozen=True, slots=True)
class Shard:
    """The ranks among which the weights of layers [start, stop) of `module` are spread, a slice for each.

    owners: in the order of their slices. sets: the owners of all sets of slices of these weights, this one among them;
    ranks of one place in their sets own the same. full: the ranks keep no more than their slices of the weights, too.
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
        """The ranks of all sets that own what `rank` owns, in ascending order."""
        place = self.owners.index(rank)
        return tuple(sorted(owners[place] for owners in self.sets))


def uneven(layout: Layout, module: str, layers: Collection[int]) -> bool:
    """Whether these layers of `module`, which have a weight in common, are together on other stages or lanes in some
    replicas than in others: a rank has one gradient for all of them that it holds, whichever these are."""
    each, alike = sorted(set(layers)), set()
    if len(each) < 2:
        return False
    for pipeline in layout.pipelines(module):
        homes = [next(s for s in pipeline.stages if s.start <= layer < s.stop) for layer in each]
        lanes = [stage.lane for stage in homes]
        alike.add((tuple(map(homes.index, homes)), tuple(map(lanes.index, lanes))))
    return len(alike) > 1


def shard_groups(layout: Layout) -> tuple[Shard, ...]:
    """What of a layout is sharded, modules and layers in order.

    The ranks of a set follow each other in the order of the replicas, those of one lane together: so that the stages of
    a replica have one place each in theirs, and a weight that is tied across stages has the same slices on all.

    Raises ValueError where the ranks that hold a module do not divide into sets of `shard_ranks`.
    """
    found = []
    for module, (spec, _) in layout.modules.items():
        for start, stop in _ranges(layout, module) if spec.shard != "none" else ():
            for ranks in layout.same_weights(module, start):
                size = spec.shard_ranks or len(ranks)
                if len(ranks) % size:
                    raise ValueError(
                        f"{module} has shard_ranks = {size}, but {len(ranks)} ranks hold the same weights of it: give "
                        "a number that divides theirs, or none for all"
                    )
                sets = tuple(ranks[i : i + size] for i in range(0, len(ranks), size))
                if size > 1:
                    found += [Shard(module, start, stop, owners, sets, spec.shard == "full") for owners in sets]
    return tuple(found)


def _ranges(layout: Layout, module: str) -> list[tuple[int, int]]:
    """The layers of a module, cut wherever one of its pipelines is: each range is held by the same stages."""
    pipelines = layout.pipelines(module)
    cuts = sorted({stage.start for pipeline in pipelines for stage in pipeline.stages})
    return list(zip(cuts, [*cuts[1:], pipelines[0].num_layers], strict=True))


def reduce_groups(layout: Layout, in_part: Collection[str] = ()) -> tuple[Reduction, ...]:
    """The reductions of a layout over more than one rank, modules and layers in order.

    in_part: the modules with weights that the ranks of a lane use in part each.
    """
    found = []
    for module in layout.modules:
        for start, stop in _ranges(layout, module):
            holders = layout.same_weights(module, start)
            found += [Reduction(module, start, stop, tuple(sorted(set(ranks)))) for ranks in holders]
            if module in in_part:
                found.append(Reduction(module, start, stop, tuple(sorted(set(chain(*holders)))), in_part=True))
    return tuple(reduction for reduction in found if len(reduction.ranks) > 1)
