"""Action lists as integer arrays, and the compiled event simulator that plays them.

For searches that time thousands of schedules: a million actions take a fraction of a second. `simulate` uses it for
schedules too; `reference` is the same model in Python, and agrees with it to the last bit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
from numpy.typing import ArrayLike, NDArray

from interlace import _core
from interlace.schedule.actions import Action, Op
from interlace.schedule.check import ScheduleError
from interlace.schedule.schedule import Schedule, reductions

OPS: tuple[Op, ...] = tuple(Op)
"""What the integers of `ActionArrays.op` stand for."""

_CODES = {op: code for code, op in enumerate(OPS)}
_HOLDS, _FREES = _CODES[Op.FORWARD], (_CODES[Op.BACKWARD], _CODES[Op.BACKWARD_WEIGHT])


@dataclass(frozen=True, eq=False)
class ActionArrays:
    """The lists of all ranks, one after the other.

    offsets: int64 [ranks + 1]; the actions of rank r are offsets[r] .. offsets[r + 1].
    op: int8 [n], indices into OPS. stage: int32 [n], indices into `stages`. microbatch, part, peer: int32 [n] and
        grad: bool [n], as in Action.
    stages: the (module, index) of each stage; the reduction of a tied weight has an entry of its own. copies: int32
        [stages], how many ranks take part in a REDUCE_GRAD of it.
    """

    offsets: NDArray[np.int64]
    op: NDArray[np.int8]
    stage: NDArray[np.int32]
    microbatch: NDArray[np.int32]
    part: NDArray[np.int32]
    peer: NDArray[np.int32]
    grad: NDArray[np.bool_]
    stages: tuple[tuple[str, int], ...]
    copies: NDArray[np.int32]

    @classmethod
    def of(cls, lists: Sequence[Sequence[Action]], copies: Mapping[Action, int] | None = None) -> ActionArrays:
        """The arrays of one list per rank.

        copies: REDUCE_GRAD -> ranks that take part in it (1 if absent); by default those that have it in their list.
        """
        counts = [len(actions) for actions in lists]
        offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        op, module, number, microbatch, part, peer, grad, names = _core.action_columns(
            list(chain.from_iterable(lists)), OPS
        )
        reducing = op == _CODES[Op.REDUCE_GRAD]
        tied = np.where(reducing, part, 0).astype(np.int64)  # which tied weight; the stage itself is 0
        keys, stage = np.unique(module << 48 | tied << 32 | number, return_inverse=True)
        stages = tuple((names[key >> 48], key & 0xFFFFFFFF) for key in keys.tolist())
        if copies is None:
            rank = np.repeat(np.arange(len(lists)), counts)
            pairs = np.unique(np.stack([stage[reducing], rank[reducing]], axis=1), axis=0)
            found = np.maximum(np.bincount(pairs[:, 0], minlength=len(stages)), 1)
        else:
            places = [(*name, key >> 32 & 0xFFFF) for name, key in zip(stages, keys.tolist())]
            found = np.array([copies.get(Action(Op.REDUCE_GRAD, m, s, part=p), 1) for m, s, p in places])
        return cls(
            offsets,
            op,
            stage.reshape(-1).astype(np.int32),
            microbatch,
            part,
            peer,
            grad,
            stages,
            found.astype(np.int32),
        )

    @classmethod
    def of_schedule(cls, schedule: Schedule) -> ActionArrays:
        """The arrays of a schedule; who reduces together comes from its graph."""
        found = reductions(schedule.graph, schedule.active)
        return cls.of(schedule.actions, {reduction.action: len(reduction.ranks) for reduction in found})

    @property
    def num_ranks(self) -> int:
        return len(self.offsets) - 1

    def __len__(self) -> int:
        return len(self.op)

    def action(self, i: int) -> Action:
        """The i-th action, as an object."""
        module, stage = self.stages[self.stage[i]]
        return Action(
            OPS[self.op[i]],
            module,
            stage,
            int(self.microbatch[i]),
            int(self.part[i]),
            int(self.peer[i]),
            bool(self.grad[i]),
        )

    def memory(self, activation_bytes: Mapping[tuple[str, int], float]) -> tuple[NDArray[np.float64], ...]:
        """(memory, scratch), float64 [n] each in bytes, for `simulate_arrays`; the rules are those of `check`.

        activation_bytes: (module, stage) -> bytes that one microbatch holds from its FORWARD to the end of its
            BACKWARD or BACKWARD_WEIGHT; a FORWARD without a backward on its rank holds them only while it runs.
        """
        own = np.array([activation_bytes.get(name, 0.0) for name in self.stages], np.float64)
        size = own[self.stage] if len(self) else np.zeros(0)
        rank = np.repeat(np.arange(self.num_ranks), np.diff(self.offsets))
        key = np.stack([rank, self.stage, self.microbatch, self.part], axis=1).astype(np.int64)
        _, number = np.unique(key, axis=0, return_inverse=True)
        number = number.reshape(-1)
        frees, forward = np.isin(self.op, _FREES), self.op == _HOLDS
        held = forward & np.isin(number, number[frees])
        memory = np.where(held, size, 0.0) - np.where(frees, size, 0.0)
        return memory, np.where(forward & ~held, size, 0.0)


@dataclass(frozen=True, eq=False)
class Simulated:
    """What `simulate_arrays` found.

    start, finish: float64 [n], seconds from the step's start. A RECV and a REDUCE_GRAD last from the moment the rank
        reaches them, so they include the waiting.
    rank_busy: float64 [ranks], stage_busy: float64 [stages]: seconds of compute (of a stage: of all its copies).
    peak_memory: float64 [ranks], the most bytes held at any time.
    """

    start: NDArray[np.float64]
    finish: NDArray[np.float64]
    rank_busy: NDArray[np.float64]
    stage_busy: NDArray[np.float64]
    peak_memory: NDArray[np.float64]

    @property
    def makespan(self) -> float:
        """Seconds until the last action finishes."""
        return float(self.finish.max(initial=0.0))

    @property
    def bubble(self) -> float:
        """The share of all ranks' time in which they do not compute, 0 to 1."""
        area = len(self.rank_busy) * self.makespan
        return 1.0 - float(self.rank_busy.sum()) / area if area else 0.0


def simulate_arrays(
    actions: ActionArrays,
    seconds: ArrayLike,
    *,
    transfer: ArrayLike = 0.0,
    memory: ArrayLike | None = None,
    scratch: ArrayLike | None = None,
) -> Simulated:
    """When each action starts and finishes, O(n): the model of `simulate`, which see, on arrays.

    Args:
        seconds: [n], what each action takes; of a SEND or RECV what the rank itself spends on it beside waiting, of a
            REDUCE_GRAD the reduction (where copies differ, the longest counts). Finite and not negative.
        transfer: seconds that messages travel, one number or [n] (read at SENDs).
        memory: [n], bytes by which each action changes what its rank holds. scratch: [n], bytes held only while it
            runs. `ActionArrays.memory` makes both; without them nothing is held.

    Raises:
        ValueError: an array of another length or type, or the named entry is out of range, NaN or negative.
        ScheduleError: a deadlock; the message says which ranks wait for what.
    """
    n = len(actions)
    found = _core.simulate(
        np.asarray(actions.offsets),
        np.asarray(actions.op),
        np.asarray(actions.stage),
        np.asarray(actions.microbatch),
        np.asarray(actions.peer),
        np.asarray(actions.copies),
        np.asarray(seconds),
        np.broadcast_to(np.asarray(transfer), n) if np.ndim(transfer) == 0 else np.asarray(transfer),
        np.zeros(n) if memory is None else np.asarray(memory),
        np.zeros(n) if scratch is None else np.asarray(scratch),
    )
    if not found["complete"]:
        raise _deadlock(actions, found["reached"])
    return Simulated(*(found[name] for name in ("start", "finish", "rank_busy", "stage_busy", "peak_memory")))


def _deadlock(actions: ActionArrays, reached: NDArray[np.int64]) -> ScheduleError:
    """Says what the ranks that did not finish wait for."""
    at = actions.offsets[:-1] + reached
    stuck = [rank for rank in range(actions.num_ranks) if at[rank] < actions.offsets[rank + 1]]
    lines = []
    for rank in stuck:
        action = actions.action(int(at[rank]))
        place = f"  rank {rank}: {action} (action {reached[rank]}) waits"
        if action.op is Op.RECV:
            peer = action.peer
            state = f"is at {actions.action(int(at[peer]))}" if peer in stuck else "has finished its list"
            lines.append(f"{place} for rank {peer}, which {state}")
        else:
            lines.append(f"{place} for the {actions.copies[actions.stage[at[rank]]]} ranks that reduce it")
    message = "deadlock: these ranks wait for ever\n" + "\n".join(lines)
    return ScheduleError(message, stuck[0], actions.action(int(at[stuck[0]])))
