"""The module graph cut into pipeline stages, and where each stage runs.

A `Stage` is a contiguous run of one module's layers on one rank, or on several ranks as replicated copies. The
`StageGraph` connects them: stage i of a module feeds stage i + 1, and the last stage of an encoder feeds the
language model. Ranks may host any number of stages (encoders merged on one rank, consecutive stages folded,
an encoder beside the first LLM layers, everything on one rank), in any order.

Copies. A stage with several ranks is computed on each of them. A consumer reads the copy on its own rank, or
else the copy on `ranks[0]`. Only copies that are read run BACKWARD (`ranks[0]` where nothing reads any of
them); REDUCE_GRAD then gives the gradient to all.

Depth. Cornstarch lets stage i of an encoder of n stages run n + llm_stages - i - 1 forwards before its first
backward, and LLM stage i run llm_stages - i - 1 (section 4.1; Cornstarch's multimodal 1F1B). Both are the longest path
from the stage to the sink, counted in hops between different ranks, which also holds when several stages
share a rank and for any other acyclic graph of modules.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from interlace.schedule.actions import valid_module_name

Node = tuple[int, int]
"""One copy of one stage: (position in StageGraph.stages, rank)."""


@dataclass(frozen=True, slots=True)
class Stage:
    """A contiguous run of one module's layers.

    module: its name, and index: its number within the module, from 0.
    ranks: where it runs; more than one means replicated copies.
    backward: it has a BACKWARD action, because it or something before it is trainable.
    input_grad: the gradient of its inputs is wanted: something strictly before it is trainable.
    pass_through: it has a BACKWARD only to hand gradients on and nothing of its own to train. Then microbatches
        in which all trainable stages before it are absent need no BACKWARD of it, and it has nothing to reduce.
    """

    module: str
    index: int
    ranks: tuple[int, ...]
    backward: bool
    input_grad: bool
    pass_through: bool = False

    def __str__(self) -> str:
        return f"{self.module}/{self.index}"


@dataclass(frozen=True)
class StageGraph:
    """Stages, the edges between them (positions in `stages`, producer -> consumer) and the number of ranks.

    tied: groups of positions of stages that hold one trainable weight (input embedding and output head), whose
        gradients are added up over the ranks of the group.
    replicas: how many copies of the whole graph run side by side and reduce gradients together (data parallelism);
        ranks and lists are those of one of them.
    Raises ValueError when the parts do not fit together: the message names the stage and what to change.
    """

    stages: tuple[Stage, ...]
    edges: tuple[tuple[int, int], ...]
    num_ranks: int
    tied: tuple[tuple[int, ...], ...] = ()
    replicas: int = 1

    def __post_init__(self) -> None:
        self._check_stages()
        self._check_edges()

    def _check_stages(self) -> None:
        if not self.stages:
            raise ValueError("a StageGraph needs at least one stage")
        for name, count in (("num_ranks", self.num_ranks), ("replicas", self.replicas)):
            if count < 1:
                raise ValueError(f"{name} is {count}; a StageGraph needs at least one")
        for group in self.tied:
            if len(set(group)) < 2 or not all(0 <= s < len(self.stages) for s in group):
                raise ValueError(f"tied names the stages {group}; a group is two or more of 0..{len(self.stages) - 1}")
        indices: dict[str, list[int]] = {}
        for stage in self.stages:
            if not valid_module_name(stage.module):
                raise ValueError(f'module name {stage.module!r} must not hold white space or any of , ; / @ + < > = "')
            indices.setdefault(stage.module, []).append(stage.index)
            if not stage.ranks or len(set(stage.ranks)) != len(stage.ranks):
                raise ValueError(f"stage {stage} has ranks {stage.ranks}; name each of its ranks once")
            outside = [rank for rank in stage.ranks if not 0 <= rank < self.num_ranks]
            if outside:
                raise ValueError(f"stage {stage} is on rank {outside[0]}, but ranks go from 0 to {self.num_ranks - 1}")
            if stage.input_grad and not stage.backward:
                raise ValueError(f"stage {stage} wants the gradient of its inputs (input_grad) but has backward=False")
            if stage.pass_through and not stage.input_grad:
                raise ValueError(f"stage {stage} is pass_through, which needs input_grad=True: it passes gradients on")
        for module, found in indices.items():
            if sorted(found) != list(range(len(found))):
                raise ValueError(f"module {module!r} has stages {sorted(found)}; number them 0 to {len(found) - 1}")

    def _check_edges(self) -> None:
        if len(set(self.edges)) != len(self.edges):
            raise ValueError("an edge is given twice")
        for producer, consumer in self.edges:
            if not (0 <= producer < len(self.stages) and 0 <= consumer < len(self.stages)):
                raise ValueError(f"edge {(producer, consumer)} names a stage outside 0..{len(self.stages) - 1}")
            if self.stages[producer].backward and not self.stages[consumer].input_grad:
                raise ValueError(
                    f"stage {self.stages[producer]} has a backward, so its consumer {self.stages[consumer]} must have "
                    "backward=True and input_grad=True"
                )
        for module in self.modules:
            members = self.module_stages(module)
            for before, after in pairwise(members):
                if (before, after) not in self.edges:
                    raise ValueError(f"no edge from {self.stages[before]} to {self.stages[after]}: add it")
        if len(self.topological) != len(self.stages):
            stuck = sorted(set(range(len(self.stages))) - set(self.topological))
            raise ValueError(f"the stages form a cycle: {', '.join(str(self.stages[s]) for s in stuck)}")

    @classmethod
    def build(
        cls,
        modules: Mapping[str, Sequence[int | Sequence[int]]],
        links: Iterable[tuple[str, str]] = (),
        *,
        trainable: Mapping[str, bool | Sequence[bool]] | None = None,
        num_ranks: int | None = None,
        tied: Iterable[Sequence[tuple[str, int]]] = (),
        replicas: int = 1,
    ) -> StageGraph:
        """The graph for modules given as one rank (or ranks of the copies) per stage.

        links: (producer module, consumer module); the last stage of one feeds the first of the other.
        trainable: per module, or per stage of it, whether anything in it is trainable (default: all);
            `backward`, `input_grad` and `pass_through` of every stage follow from it.
        tied: groups of (module, stage index) that hold one trainable weight. replicas: see the class.

            StageGraph.build({"vision": [0], "audio": [1], "language_model": [2, 3]},
                             [("vision", "language_model"), ("audio", "language_model")])
        """
        first: dict[str, int] = {}
        ranks: list[tuple[int, ...]] = []
        names: list[tuple[str, int]] = []
        own: list[bool] = []
        edges: list[tuple[int, int]] = []
        for module, places in modules.items():
            if not places:
                raise ValueError(f"module {module!r} has no stages")
            first[module] = len(names)
            given = True if trainable is None else trainable.get(module, True)
            flags = [given] * len(places) if isinstance(given, bool) else list(given)
            if len(flags) != len(places):
                raise ValueError(f"trainable[{module!r}] has {len(flags)} entries for {len(places)} stages")
            for index, place in enumerate(places):
                if index:
                    edges.append((len(names) - 1, len(names)))
                names.append((module, index))
                ranks.append((place,) if isinstance(place, int) else tuple(place))
                own.append(bool(flags[index]))
        for producer, consumer in links:
            for module in (producer, consumer):
                if module not in first:
                    raise ValueError(f"link {(producer, consumer)} names {module!r}; modules: {', '.join(modules)}")
            edges.append((first[producer] + len(modules[producer]) - 1, first[consumer]))
        before = [False] * len(names)
        for _ in names:  # the longest path has fewer edges than there are stages
            for start, stop in edges:
                before[stop] = before[stop] or before[start] or own[start]
        stages = tuple(
            Stage(module, index, place, mine or earlier, earlier, earlier and not mine)
            for (module, index), place, mine, earlier in zip(names, ranks, own, before, strict=True)
        )
        highest = max(rank for place in ranks for rank in place)
        groups = tuple(tuple(names.index(key) for key in group) for group in tied)
        return cls(stages, tuple(edges), highest + 1 if num_ranks is None else num_ranks, groups, replicas)

    @cached_property
    def modules(self) -> tuple[str, ...]:
        """Module names in the order of their first stage in `stages`."""
        return tuple(dict.fromkeys(stage.module for stage in self.stages))

    @cached_property
    def position(self) -> dict[tuple[str, int], int]:
        """(module, stage index) -> position in `stages`."""
        return {(stage.module, stage.index): i for i, stage in enumerate(self.stages)}

    def module_stages(self, module: str) -> list[int]:
        """Positions of a module's stages, first to last."""
        found = [i for i, stage in enumerate(self.stages) if stage.module == module]
        return sorted(found, key=lambda i: self.stages[i].index)

    @cached_property
    def topological(self) -> tuple[int, ...]:
        """Positions in an order in which producers precede consumers; ties by position in `stages`."""
        return tuple(_topological(len(self.stages), self.edges))

    @cached_property
    def nodes(self) -> tuple[Node, ...]:
        """Every copy of every stage, producers before consumers."""
        return tuple((s, rank) for s in self.topological for rank in self.stages[s].ranks)

    @cached_property
    def copy_edges(self) -> tuple[tuple[Node, Node], ...]:
        """(copy that produces, copy that reads it) for every copy of every consumer."""
        found = []
        for producer, consumer in self.edges:
            available = self.stages[producer].ranks
            for rank in self.stages[consumer].ranks:
                found.append(((producer, rank if rank in available else available[0]), (consumer, rank)))
        return tuple(found)

    def hosted(self, rank: int) -> list[int]:
        """Positions of the stages on `rank`, producers before consumers."""
        return [s for s, where in self.nodes if where == rank]

    @cached_property
    def depths(self) -> dict[Node, int]:
        """Longest path from each copy to a sink, in hops between different ranks."""
        depth = dict.fromkeys(self.nodes, 0)
        consumers: dict[Node, list[Node]] = {}
        for producer, consumer in self.copy_edges:
            consumers.setdefault(producer, []).append(consumer)
        for node in reversed(self.nodes):
            for consumer in consumers.get(node, ()):
                depth[node] = max(depth[node], depth[consumer] + (consumer[1] != node[1]))
        return depth

    @cached_property
    def rank_depths(self) -> tuple[int, ...] | None:
        """Longest path from each rank to a rank that sends to no other, or None if ranks feed each other in a cycle.

        Where it is not None every rank is one pipeline unit: it runs all its stages for a microbatch in one go.
        """
        hops = {(a[1], b[1]) for a, b in self.copy_edges if a[1] != b[1]}
        order = _topological(self.num_ranks, tuple(sorted(hops)))
        if len(order) != self.num_ranks:
            return None
        depth = [0] * self.num_ranks
        after: dict[int, list[int]] = {}
        for rank, consumer in hops:
            after.setdefault(rank, []).append(consumer)
        for rank in reversed(order):
            depth[rank] = max((depth[consumer] + 1 for consumer in after.get(rank, ())), default=0)
        return tuple(depth)

    @cached_property
    def in_flight_caps(self) -> dict[Node, int]:
        """How many microbatches each copy may hold between forward and backward under 1F1B: warm-up depth + 1."""
        if self.rank_depths is not None:
            return {node: self.rank_depths[node[1]] + 1 for node in self.nodes}
        return {node: depth + 1 for node, depth in self.depths.items()}

    def everything(self, microbatches: int) -> tuple[frozenset[str], ...]:
        """The presence of a step in which every module runs in every microbatch."""
        return (frozenset(self.modules),) * microbatches


def _topological(count: int, edges: Sequence[tuple[int, int]]) -> list[int]:
    """Kahn's order, lowest number first among the free; shorter than `count` if there is a cycle."""
    waiting = [0] * count
    after: list[list[int]] = [[] for _ in range(count)]
    for producer, consumer in edges:
        waiting[consumer] += 1
        after[producer].append(consumer)
    free = [i for i in range(count) if not waiting[i]]
    heapq.heapify(free)
    order: list[int] = []
    while free:
        item = heapq.heappop(free)
        order.append(item)
        for consumer in after[item]:
            waiting[consumer] -= 1
            if not waiting[consumer]:
                heapq.heappush(free, consumer)
    return order
