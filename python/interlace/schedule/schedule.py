"""A schedule: one ordered list of actions per rank, with the graph and the presence it was made for."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from interlace.schedule.actions import Action, Op
from interlace.schedule.communication import insert_communication
from interlace.schedule.graph import Node, StageGraph
from interlace.schedule.work import Work, works

Compute = tuple[Op, Node, int]
"""FORWARD or BACKWARD of one copy for one microbatch, before it becomes an Action."""


@dataclass
class Schedule:
    """What every rank does in one step.

    actions: one list per rank; the checker, the simulator and the executor all read these lists.
    presence: per microbatch, the modules that run in it.
    reduce_grad: whether the lists end in REDUCE_GRAD actions.
    """

    name: str
    graph: StageGraph
    presence: tuple[frozenset[str], ...]
    actions: list[list[Action]]
    reduce_grad: bool = True

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


def assemble(
    name: str,
    graph: StageGraph,
    presence: Sequence[Collection[str]],
    compute: Sequence[Sequence[Compute]],
    *,
    reduce_grad: bool,
) -> Schedule:
    """The schedule that runs `compute` (per rank, in order), with communication and REDUCE_GRAD added."""
    step = works(graph, presence)
    names = [(stage.module, stage.index) for stage in graph.stages]
    lists = [[Action(op, *names[node[0]], microbatch) for op, node, microbatch in actions] for actions in compute]
    lists = insert_communication(graph, step, lists)
    if reduce_grad:
        for s in reduced_stages(graph, step):
            for rank in graph.stages[s].ranks:
                lists[rank].append(Action(Op.REDUCE_GRAD, *names[s]))
    return Schedule(name, graph, tuple(frozenset(names) for names in presence), lists, reduce_grad)


def reduced_stages(graph: StageGraph, step: Sequence[Work]) -> list[int]:
    """Stages that have parameter gradients after this step, in the order in which all ranks reduce them.

    A stage that is absent from every microbatch is left out: its parameters and optimizer state stay untouched.
    Consumers come first, as their gradients are ready first.
    """
    with_gradient = {node[0] for work in {id(work): work for work in step}.values() for node in work.backward}
    return [s for s in reversed(graph.topological) if s in with_gradient and not graph.stages[s].pass_through]
