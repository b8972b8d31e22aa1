"""A schedule: one ordered list of actions per rank, with the graph and the table it was made for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from interlace.schedule.actions import Action, action_of, rows_of
from interlace.schedule.graph import StageGraph
from interlace.schedule.table import StepTable


@dataclass(frozen=True, eq=False)
class Schedule:
    """Actions of every rank in one step. The checker, the simulator and the executor all read these rows.

    rows: int32 [n, 7], concatenated lists of all ranks (columns: `interlace.schedule.actions`).
    first: int64 [ranks + 1], first row of each rank. backward: False for evaluation. reduce_grad: whether gradients
    are summed over the ranks that share weights. dispatch: whether every rank starts the exchange of the next step's
    items.
    """

    name: str
    graph: StageGraph
    table: StepTable
    rows: NDArray[np.int32]
    first: NDArray[np.int64]
    backward: bool = True
    reduce_grad: bool = True
    dispatch: bool = False

    def of_rank(self, rank: int) -> NDArray[np.int32]:
        """The rows of one rank, int32 [n, 7]."""
        return self.rows[self.first[rank] : self.first[rank + 1]]

    @cached_property
    def actions(self) -> list[list[Action]]:
        """All lists as objects."""
        modules = self.graph.modules
        return [
            [action_of(row, modules) for row in self.of_rank(rank).tolist()] for rank in range(self.graph.layout.world)
        ]

    def to_text(self) -> str:
        """One line per rank, actions separated by commas; valid CSV."""
        return "".join(",".join(map(str, actions)) + "\n" for actions in self.actions)

    @staticmethod
    def parse_actions(text: str) -> list[list[Action]]:
        """Parses the output of `to_text`. Raises ValueError with the rank of a cell that is not an action."""
        lists = []
        for rank, line in enumerate(text.splitlines()):
            try:
                lists.append([Action.parse(cell) for cell in line.split(",") if cell.strip()])
            except ValueError as error:
                raise ValueError(f"rank {rank}: {error}") from None
        return lists

    @classmethod
    def of_actions(
        cls,
        name: str,
        graph: StageGraph,
        table: StepTable,
        lists: Sequence[Sequence[Action]],
        *,
        backward: bool = True,
        reduce_grad: bool = True,
        dispatch: bool = False,
    ) -> Schedule:
        """Schedule from lists of objects, one list per rank."""
        rows = [rows_of(actions, graph.modules) for actions in lists]
        first = np.concatenate([[0], np.cumsum([len(part) for part in rows])]).astype(np.int64)
        return cls(name, graph, table, np.concatenate(rows), first, backward, reduce_grad, dispatch)
