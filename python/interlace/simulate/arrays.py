"""Compiled event simulator, on the rows of a schedule and arrays of seconds.

For searches over thousands of schedules: a million actions take a fraction of a second. `simulate` uses it, too.
tests/simulate/reference.py is the same model in Python; both agree to the last bit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from interlace import _core
from interlace.schedule.actions import Action, Op, action_of
from interlace.schedule.check import ScheduleError
from interlace.schedule.schedule import Schedule
from interlace.schedule.step import step_arrays


@dataclass(frozen=True, eq=False)
class Simulated:
    """Result of `simulate_arrays` for n rows.

    start, finish: float64 [n], seconds from the step's start. A RECV begins when the rank reaches it, so it includes
        the waiting. A REDUCE_GRAD lasts from there to its end, while the rank continues.
    rank_busy: float64 [ranks], seconds of compute. peak_memory: float64 [ranks], the most bytes held at any time.
    behind: seconds of the step after its lists (those of the optimizer, see `interlace.estimate.predict`).
    """

    start: NDArray[np.float64]
    finish: NDArray[np.float64]
    rank_busy: NDArray[np.float64]
    peak_memory: NDArray[np.float64]
    behind: float = 0.0

    @property
    def makespan(self) -> float:
        """Seconds until the last action has finished, plus `behind`."""
        return float(self.finish.max(initial=0.0)) + self.behind

    @property
    def busy_per_rank(self) -> tuple[float, ...]:
        """Seconds of compute of each rank, as in `Timeline`."""
        return tuple(self.rank_busy.tolist())

    @property
    def bubble(self) -> float:
        """Share of all ranks' time without compute, 0 to 1."""
        area = len(self.rank_busy) * self.makespan
        return 1.0 - float(self.rank_busy.sum()) / area if area else 0.0


def simulate_arrays(
    schedule: Schedule,
    seconds: ArrayLike,
    *,
    transfer: ArrayLike = 0.0,
    memory: ArrayLike | None = None,
    scratch: ArrayLike | None = None,
) -> Simulated:
    """Start and finish of each action, O(n). Same model as `simulate`, on the n rows of `schedule`.

    Args:
        seconds: [n], duration of each action. For a SEND or RECV it is the rank's own time without waiting, for a
            REDUCE_GRAD that of the reduction. If ranks of a reduction, a lane or a meeting differ, the longest counts.
            Finite and not negative.
        transfer: seconds from sender to receiver, one number or [n] (read at SENDs).
        memory: [n], change of the rank's held bytes by each action. scratch: [n], bytes held only while it runs. By
            default nothing is held.

    Raises:
        ValueError: an array of the wrong length or type, a row that does not fit the graph or the table, or an entry
            that is NaN or negative (the message names it).
        ScheduleError: a deadlock; the message lists the waiting ranks.
    """
    n = len(schedule.rows)
    arrays = schedule.graph.arrays
    result = _core.simulate(
        schedule.rows,
        schedule.first,
        step_arrays(schedule.graph, schedule.table).chunk_pipeline,
        arrays.node_pipeline,
        arrays.node_stage,
        arrays.node_lane,
        arrays.pipeline_module,
        arrays.lane_first,
        arrays.lane_rank,
        arrays.reduction_first,
        arrays.reduction_rank,
        arrays.reduction_tied,
        arrays.shard_by_layer,
        arrays.shard_member_first,
        arrays.shard_member,
        np.asarray(seconds),
        np.broadcast_to(np.asarray(transfer), n) if np.ndim(transfer) == 0 else np.asarray(transfer),
        np.zeros(n) if memory is None else np.asarray(memory),
        np.zeros(n) if scratch is None else np.asarray(scratch),
    )
    if not result["complete"]:
        raise _deadlock(schedule, result)
    return Simulated(*(result[name] for name in ("start", "finish", "rank_busy", "peak_memory")))


def _deadlock(schedule: Schedule, result: Mapping[str, Any]) -> ScheduleError:
    """Error with the waits of unfinished ranks, or else of reductions."""
    modules, lanes = schedule.graph.modules, schedule.graph.layout.lanes()
    next_row = schedule.first[:-1] + result["reached"]
    stuck = {
        rank: action_of(schedule.rows[next_row[rank]].tolist(), modules)
        for rank in range(len(next_row))
        if next_row[rank] < schedule.first[rank + 1]
    }

    def waiting(rank: int, peers: tuple[int, ...]) -> str:
        states = [f"rank {r}, which {f'is at {stuck[r]}' if r in stuck else 'has finished its list'}" for r in peers]
        reached = result["reached"][rank]
        return f"  rank {rank}: {stuck[rank]} (action {reached}) waits for {' and for '.join(states)}"

    lines = []
    for rank, action in stuck.items():
        peers = lanes[action.peer if action.op is Op.RECV else result["lane"][next_row[rank]]].ranks
        meeting = result["meeting"][next_row[rank]] if len(result["meeting"]) else -1
        if meeting >= 0:  # includes ranks of other lanes, each at its own action
            members = result["meeting_rank"][slice(*result["meeting_first"][meeting : meeting + 2])].tolist()
            peers = tuple(r for r in members if r not in stuck or result["meeting"][next_row[r]] != meeting)
            peers = peers or tuple(r for r in members if r != rank)  # all have arrived, but at different actions
        elif action.op is not Op.RECV:
            peers = tuple(other for other in peers if other != rank and stuck.get(other) != action)
        lines.append(waiting(rank, peers))
    first_stuck: tuple[int, Action] | None = next(iter(stuck.items()), None)
    if not stuck:
        for row in np.flatnonzero(np.isinf(result["finish"])).tolist():
            rank = int(np.searchsorted(schedule.first, row, side="right")) - 1
            action = action_of(schedule.rows[row].tolist(), modules)
            first_stuck = first_stuck or (rank, action)
            ranks = "+".join(map(str, schedule.graph.reductions[action.other].ranks))
            lines.append(f"  rank {rank}: {action} (action {row - schedule.first[rank]}) waits for ranks {ranks}")
        lines.append("a rank of these reductions does not have them in its list")
    assert first_stuck is not None
    return ScheduleError("deadlock: these ranks wait forever\n" + "\n".join(lines), *first_stuck)
