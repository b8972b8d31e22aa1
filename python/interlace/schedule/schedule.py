"""A schedule: one ordered list of actions per rank, with the graph and the presence it was made for."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from interlace.schedule.actions import Action, Op
from interlace.schedule.communication import insert_communication
from interlace.schedule.graph import Node, StageGraph
from interlace.schedule.work import works

Compute = tuple[Op, Node, int]
"""FORWARD or BACKWARD of one copy for one microbatch, before it becomes an Action."""


@dataclass
class Schedule:
    """What every rank does in one step.

    actions: one list per rank; the checker, the simulator and the executor all read these lists.
    presence: per microbatch, the modules that run in it.
    reduce_grad: whether the lists end in REDUCE_GRAD actions.
    active: the modules that run in this step in any replica, those of `presence` among them.
    """

    name: str
    graph: StageGraph
    presence: tuple[frozenset[str], ...]
    actions: list[list[Action]]
    reduce_grad: bool = True
    active: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        self.active = frozenset(self.active).union(*self.presence)

    @property
    def num_microbatches(self) -> int:
        return len(self.presence)

    def to_text(self) -> str:
        """One line per rank, actions separated by commas: also a valid CSV."""
        return "".join(",".join(map(str, actions)) + "\n" for actions in self.actions)

    @staticmethod
    def parse_actions(text: str) -> list[list[Action]]:
        """The lists that `to_text` wrote. Raises ValueError with the rank of a cell that is not an action."""
        lists = []
        for rank, line in enumerate(text.splitlines()):
            try:
                lists.append([Action.parse(cell) for cell in line.split(",") if cell.strip()])
            except ValueError as error:
                raise ValueError(f"rank {rank}: {error}") from None
        return lists


@dataclass(frozen=True)
class Reduction:
    """One REDUCE_GRAD: the action that all `ranks` (of every replica) have, and the stages whose gradients it sums."""

    action: Action
    ranks: tuple[int, ...]
    stages: tuple[int, ...]


def assemble(
    name: str,
    graph: StageGraph,
    presence: Sequence[Collection[str]],
    compute: Sequence[Sequence[Compute]],
    *,
    reduce_grad: bool,
    active: Collection[str] = (),
) -> Schedule:
    """The schedule that runs `compute` (per rank, in order), with communication and REDUCE_GRAD added.

    Raises ValueError when `active` names a module that the graph does not have.
    """
    step = works(graph, presence)
    unknown = sorted(set(active) - set(graph.modules))
    if unknown:
        raise ValueError(f"active names {unknown[0]!r}; modules: {', '.join(graph.modules)}")
    names = [(stage.module, stage.index) for stage in graph.stages]
    lists = [[Action(op, *names[node[0]], microbatch) for op, node, microbatch in actions] for actions in compute]
    lists = insert_communication(graph, step, lists)
    made = Schedule(name, graph, tuple(map(frozenset, presence)), lists, reduce_grad, frozenset(active))
    if reduce_grad:
        for reduction in reductions(graph, made.active):
            for rank in reduction.ranks:
                lists[rank].append(reduction.action)
    return made


def reductions(graph: StageGraph, active: Collection[str]) -> list[Reduction]:
    """What is reduced after a step in which the modules `active` run, in the order in which all ranks do it.

    First the stages with something to train, over their copies: consumers come first, as their gradients are ready
    first. Then the tied weights, over the stages that hold them: each of these already has the sum of its copies. A
    module that is absent everywhere is left out: its parameters and optimizer state stay untouched.
    """
    stages = graph.stages
    found = [
        Reduction(Action(Op.REDUCE_GRAD, stages[s].module, stages[s].index), stages[s].ranks, (s,))
        for s in reversed(graph.topological)
        if stages[s].backward and not stages[s].pass_through and stages[s].module in active
    ]
    for number, group in enumerate(graph.tied, 1):
        first = stages[group[0]]
        ranks = tuple(sorted({rank for s in group for rank in stages[s].ranks}))
        if any(stages[s].backward and stages[s].module in active for s in group):
            found.append(Reduction(Action(Op.REDUCE_GRAD, first.module, first.index, part=number), ranks, group))
    return found
