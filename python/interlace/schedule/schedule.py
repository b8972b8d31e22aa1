"""A schedule: one ordered list of actions per rank, with the graph and the table it was made for."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from interlace import _core
from interlace.schedule.actions import CODES, COMPUTE, OPS, Action, Op, action_of, rows_of
from interlace.schedule.graph import StageGraph
from interlace.schedule.step import jobs_of, step_arrays
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

    @cached_property
    def digest(self) -> int:
        """48-bit hash of all lists, equal in every process."""
        parts = hashlib.blake2b(self.first.tobytes(), digest_size=6)
        parts.update(self.rows.tobytes())
        return int.from_bytes(parts.digest(), "little")

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

    @classmethod
    def of_actions(
        cls,
        name: str,
        graph: StageGraph,
        table: StepTable,
        lists: Sequence[Sequence[Action]],
        **flags: bool,
    ) -> Schedule:
        """Schedule from lists of objects, one list per rank. flags: backward, reduce_grad, dispatch."""
        rows = [rows_of(actions, graph.modules) for actions in lists]
        first = np.concatenate([[0], np.cumsum([len(part) for part in rows])]).astype(np.int64)
        return cls(name, graph, table, np.concatenate(rows), first, **flags)

    @classmethod
    def of_order(
        cls,
        name: str,
        graph: StageGraph,
        table: StepTable,
        order: Iterable[Action],
        *,
        backward: bool = True,
        reduce_grad: bool = True,
        dispatch: bool = False,
    ) -> Schedule:
        """Schedule from one sequence of the compute actions of all ranks; messages and reductions are added.

        order: every FORWARD, and with `backward` every BACKWARD (or BACKWARD_INPUT and BACKWARD_WEIGHT), each after the
        actions that it needs. Each rank runs its part of the sequence, so the lists cannot deadlock.

        Raises ValueError for an action that is missing, comes twice or comes before one that it needs.
        """
        arrays = step_arrays(graph, table)
        work = jobs_of(arrays, backward).work
        jobs = {key: job for job, key in enumerate(map(tuple, work.tolist()))}
        numbers, steps = {module: number for number, module in enumerate(graph.modules)}, []
        for action in order:
            job = jobs.get((numbers.get(action.module, -1), action.stage, action.chunk))
            if job is None or action.op not in COMPUTE:
                raise ValueError(f"schedule {name!r}: {action} is not a compute action of this step")
            steps.append(len(COMPUTE) * job + CODES[action.op])
        made = _core.schedule_of_order(*arrays, np.array(steps, np.int32), backward, backward and reduce_grad, dispatch)
        if len(made) == 3:
            at, step, needed = made
            first, other = (_action(each, work, graph.modules) for each in (step, needed))
            if at == len(steps):
                raise ValueError(f"schedule {name!r} lacks {first}")
            why = "is not in this step, or comes twice" if step == needed else f"comes before {other}, which it needs"
            raise ValueError(f"schedule {name!r}: action {at}, {first}, {why}")
        return cls(name, graph, table, *made, backward, backward and reduce_grad, dispatch)


def compute_actions(graph: StageGraph, table: StepTable, *, backward: bool = True) -> list[Action]:
    """All forwards of a step, producers first, then, with `backward`, all backwards in reverse.

    A valid order for `Schedule.of_order`; generators sort it.
    """
    jobs = jobs_of(step_arrays(graph, table), backward)
    order = np.lexsort((jobs.work[:, 1], jobs.work[:, 2], jobs.work[:, 0])).tolist()  # by module, chunk and stage
    steps = [(Op.FORWARD, job) for job in order] + [(Op.BACKWARD, job) for job in reversed(order) if jobs.backward[job]]
    return [_action(len(COMPUTE) * job + CODES[op], jobs.work, graph.modules) for op, job in steps]


def _action(step: int, work: NDArray[np.int32], modules: Sequence[str]) -> Action:
    job, op = divmod(step, len(COMPUTE))
    module, stage, chunk = work[job].tolist()
    return Action(OPS[op], modules[module], stage, chunk)
